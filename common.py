"""What every script needs and no paper describes: progress on stderr, errors without tracebacks,
whole files or none, one run a folder. It has no command line: `python compcos.py` is where to
begin.
"""

import datetime
import functools
import glob
import io
import os
import re
import secrets
import signal
import sys
import threading
import time
import warnings
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path

BATCH_SECONDS = 60   # between two lines of progress where stderr is no terminal
STALE_SECONDS = 600  # without a byte, after which a `.part` file is one that a dead process left
PART = re.compile(r"\..+\.\d+\.[0-9a-f]{8}\.part")  # the names that `part_of` gives
GRACE_SECONDS = 3    # which other processes leave to the first one to say what is wrong
PATIENCE = datetime.timedelta(days=30)  # of processes that wait for one another's training


def wait_gently():
    """Let idle threads of OpenMP sleep soon instead of spinning; to be called before torch is
    imported.

    Beside other busy processes a thread that spins takes the time that the others need. Only
    scripts call this, at their first lines; who imports a module is left alone.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


class Progress:
    """A line on stderr that says what, how far and how long still.

    On a terminal it is redrawn; in a batch job's log it is a line a minute.

    >>> with Progress("decoding", total=2, unit="images") as progress:
    ...     progress.update(1)
    ...     progress.update(1, note="0 broken")
    """

    def __init__(self, what, total=None, unit=""):
        self.what = what
        self.total = total
        self.unit = unit
        self.done = 0
        self.start = time.monotonic()
        self.on_terminal = is_terminal(sys.stderr)
        self.drawn = False
        self.shown = self.start - BATCH_SECONDS if self.on_terminal else self.start

    def update(self, count=1, note=""):
        """Advance by `count` (in the unit of `total`); redraw at most ten times a second."""
        self.done += count
        now = time.monotonic()
        pause = 0.1 if self.on_terminal else BATCH_SECONDS
        is_last = self.on_terminal and self.done == self.total
        if now - self.shown < pause and not is_last:
            return
        self.shown = now
        line = self.line(now, note)
        if self.on_terminal:
            self.drawn = True
            # these commands to the terminal are its own
            own = getattr(sys.stderr, "stream", sys.stderr)
            write_quietly(own, f"\r\x1b[K{line}")
        else:
            write_quietly(sys.stderr, f"{line}\n")

    def line(self, now, note):
        """What is shown at a time."""
        rate = self.done / max(now - self.start, 1e-9)
        line = f"{printable(self.what)} {self.done:,}"
        if self.total:
            line += f"/{self.total:,}"
        if self.unit:
            line += f", {rate:,.3g} {self.unit}/s"
        if self.total and rate:
            line += f", {duration((self.total - self.done) / rate)} left"
        if note:
            line += f", {printable(note)}"
        return line

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.drawn:
            write_quietly(sys.stderr, "\n")


def is_terminal(stream):
    """Whether a stream is a terminal; a closed or missing one is none."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def write_quietly(stream, text):
    """Write and flush; a stream that is closed, or whose reader is gone, must not end the work."""
    try:
        stream.write(text)
        stream.flush()
    except (AttributeError, ValueError, OSError):
        pass


def printable(text):
    r"""Text whose control characters, but for line ends and tabs, are written out: a file's name
    cannot send commands to a terminal.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    characters = []
    for character in str(text):
        if character.isprintable() or character in "\n\t":
            characters.append(character)
        else:
            characters.append(character.encode("unicode_escape").decode())
    return "".join(characters)


def duration(seconds):
    """Seconds as people read them.

    >>> duration(7.2), duration(312), duration(7500)
    ('7 s', '5 min 12 s', '2 h 05 min')
    """
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


# ---- files ----


@contextmanager
def writing(path, mode="w", **options):
    """A file in memory that is written to `path`, whole, only if the block ends well.

    The bytes go to a `.part` file beside `path`, which then takes its name: a kill or a full disk
    leaves what was there before. An OSError names `path`.
    """
    path = Path(path)
    if not os.access(path.parent, os.W_OK):
        raise OSError(f"cannot write {path}: its folder is not there or cannot be written")
    if "b" in mode:
        file = io.BytesIO()
        yield file
        contents = file.getvalue()
    else:
        file = io.StringIO(newline=options.get("newline", ""))
        yield file
        contents = file.getvalue().encode(options.get("encoding", "utf-8"))
    write_whole(path, contents)


def write_whole(path, contents):
    """Write bytes to a `.part` file and give it its name. OSError names the file that was meant."""
    path = Path(path)
    clear_parts(path.parent, path.name, STALE_SECONDS)
    part = part_of(path)
    try:
        with open(part, "wb") as file:
            file.write(contents)
        os.replace(part, path)
    except OSError as error:
        raise type(error)(error.errno, f"cannot write {path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def part_of(path):
    """A new name beside `path` for what is not whole yet; no two processes get the same."""
    path = Path(path)
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")


def clear_parts(folder, name=None, age=0):
    """Remove the `.part` files of a folder, or those of one file's `name`, which dead processes
    left `age` seconds ago or earlier. Who holds the folder's lock knows that all of them are dead.
    """
    pattern = ".*.part" if name is None else f".{glob.escape(name)}.*.part"
    for part in Path(folder).glob(pattern):
        try:
            if PART.fullmatch(part.name) and time.time() - part.stat().st_mtime >= age:
                part.unlink()
        except OSError:
            pass  # another process was faster


def check_writable(folder):
    """OSError unless files can be written into a folder, which need not be there yet; nothing is
    made."""
    nearest = Path(folder).absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise NotADirectoryError(f"cannot write into {folder}: {nearest} is a file, and no folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write into {folder}: {nearest} cannot be written by this "
                              "user; give a folder that can")


def reserve(path, size):
    """Give a new or sparse file `path` the room of `size` bytes. OSError names it, and leaves
    nothing."""
    path = Path(path)
    try:
        with open(path, "r+b" if path.exists() else "wb") as file:
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise type(error)(error.errno, f"no room for {path}, {size / 2**20:,.0f} MB: "
                          f"{error.strerror}") from None


@contextmanager
def lock(folder):
    """Hold a folder for one run. ValueError if another process holds it; a dead one cannot.

    The lock is the operating system's, on the file `.lock`, and ends with the process. Where the
    file system has no locks, that is a warning.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / ".lock", "a+b")
    try:
        take_lock(file)
    except (BlockingIOError, PermissionError):
        file.close()
        raise ValueError(f"another run writes into {folder}: wait for it, or give another "
                         "--out") from None
    except OSError as error:
        warnings.warn(f"{folder} cannot be locked ({error.strerror}): let no two runs write into "
                      "it at once", stacklevel=3)
    try:
        yield
    finally:
        file.close()


def take_lock(file):
    """Lock an open file, or OSError at once."""
    if os.name == "nt":
        import msvcrt
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        return
    import fcntl
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# ---- several processes ----
#
# `torchrun` starts them and tells each its number and theirs in the environment. Without it there
# is one process, all of this does nothing, and torch.distributed is not imported.


def rank():
    """This process's number among `processes()`, from 0: the one that prints."""
    return int(os.environ["RANK"]) if processes() > 1 else 0


def processes():
    """How many processes work together."""
    if "RANK" not in os.environ:
        return 1
    return int(os.environ.get("WORLD_SIZE", 1))


@contextmanager
def alone():
    """Inside, this process works for itself, as if it were the only one."""
    hidden = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextmanager
def group():
    """torch.distributed with all processes in one group: nccl between GPUs, gloo for all else.

    ConnectionError: one of the others has ended.
    """
    from torch import cuda, distributed
    try:
        if not distributed.is_initialized():
            has_nccl = cuda.is_available() and distributed.is_nccl_available()
            backend = "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
            distributed.init_process_group(backend, timeout=PATIENCE)
        yield distributed
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = re.sub(r"^\[.*?\] ", "", str(error).strip())  # without the place in gloo's source
        reason = re.split(r"\. |\n", reason)[0][:160]
        raise ConnectionError(f"another process has ended ({reason})") from None


def gather(value):
    """What each process gave, a list in order of rank. All wait for the last one."""
    values = [value] * processes()
    if len(values) > 1:
        with group() as distributed:
            distributed.all_gather_object(values, value)
    return values


def share(count):
    """The slice of `count` rows that is this process's; together they are all, in order of rank."""
    return slice(count * rank() // processes(), count * (rank() + 1) // processes())


def spread(items, work):
    """Yield (item, work(item)) in order, as many at a time as there are processes, each alone."""
    for start in range(0, len(items), processes()):
        begun = items[start:start + processes()]
        result = None
        if rank() < len(begun):
            item = begun[rank()]
            with alone():
                result = work(item)
        yield from zip(begun, gather(result))


def take_turns(count, what):
    """Yield numbers below `count`, ascending; of several processes each number goes to the first
    that is free. `what`, the same in all of them, tells one such list from others."""
    if processes() == 1:
        yield from range(count)
        return
    with group() as distributed:
        store = distributed.distributed_c10d._get_default_store()
    number = store.add(what, 1) - 1
    while number < count:
        yield number
        number = store.add(what, 1) - 1


def check_shared(folder):
    """OSError unless every process sees in `folder` what the first one writes there."""
    if processes() == 1:
        return
    note = Path(folder, ".shared")
    if rank() == 0:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(secrets.token_hex(8))
    written = gather(note.read_text() if rank() == 0 else "")[0]
    sees = gather(note.exists() and note.read_text() == written)
    if rank() == 0:
        note.unlink()
    if not all(sees):
        blind = [str(number) for number, is_there in enumerate(sees) if not is_there]
        raise OSError(f"{folder}: process {', '.join(blind)} of {processes()} does not see what "
                      "process 0 wrote there: --out needs a folder that all machines share")


@contextmanager
def signals_together():
    """A function that tells whether any process was asked to stop, for all to stop at one place.

    Inside, Ctrl-C, SIGTERM and SIGHUP wait for that, or for the end: who stopped in the midst of a
    step would leave the others waiting for its gradients. With one process they interrupt at once.
    """
    with signals_held() if processes() > 1 else nullcontext([]) as received:
        yield lambda: any(gather(bool(received)))


def leave_group():
    """End the group, if there is one."""
    if processes() > 1:
        from torch import distributed
        if distributed.is_initialized():
            distributed.destroy_process_group()


@contextmanager
def first_alone_prints():
    """Inside, what processes other than the first print goes nowhere."""
    if rank() == 0:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        with redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield


def say_for_all(text):
    """`say` what is wrong, once.

    What all processes find, the first one says. Another speaks only if nothing ends it meanwhile,
    as torchrun does once the first one has failed.
    """
    if rank() > 0:
        text = f"process {rank()}: {text}"
        try:
            time.sleep(GRACE_SECONDS)
        except KeyboardInterrupt:
            return
    elif processes() > 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, where another one failed
    say(text)


# ---- scripts ----


class Stopped(KeyboardInterrupt):
    """What a signal of the system raises, so that work is saved as on Ctrl-C."""


def command(main):
    """Decorate a `main(argv=None)`: how every script ends.

    Bad input (ValueError, OSError) and a lack of memory end in an `error:` line and status 2,
    Ctrl-C in 130, SIGTERM in 143, SIGHUP in 129. A closed stdout or stderr does not end the work.
    Of several processes the first one prints.
    """

    @functools.wraps(main)
    def guarded(argv=None):
        status = 0
        received = []
        with signals_as_interrupts(received), warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: say(f"warning: {message}")
            survive_odd_streams()
            try:
                with first_alone_prints():
                    result = main(argv)
                leave_group()
                return result
            except (ValueError, OSError) as error:
                say_for_all(f"error: {error}")
                status = 2
            except KeyboardInterrupt as interrupt:
                if rank() == 0:
                    # one that came while an earlier one was dealt with has no words of its own
                    words = str(interrupt) or str(interrupt.__context__ or "") or "interrupted"
                    say(f"\n{words}")
                status = 128 + received[0] if received else 130
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                say_for_all(
                    "error: out of memory "
                    f"({str(error).splitlines()[0][:160] if str(error) else ''}): "
                    "lower --batch-size, or use a larger machine")
                status = 2
        raise SystemExit(status)

    return guarded


def is_out_of_memory(error):
    """Whether an error says that memory ran out: Python's, or torch's on a processor or a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return "allocate memory" in str(error)


def say(text):
    """A line on stderr, whatever became of it."""
    write_quietly(sys.stderr, f"{printable(text)}\n")


@contextmanager
def signals_as_interrupts(received):
    """SIGTERM and SIGHUP raise `Stopped` in the main thread; their number is put into `received`.

    Only the first of them: who is stopping already is not stopped from saving.
    """
    def stop(number, frame):
        received.append(number)
        if len(received) == 1:
            raise Stopped

    with handled(("SIGTERM", "SIGHUP"), stop):
        yield


@contextmanager
def signals_held():
    """Inside, Ctrl-C, SIGTERM and SIGHUP wait for the end; yields the list of those received."""
    received = []
    with handled(("SIGINT", "SIGTERM", "SIGHUP"), lambda number, _: received.append(number)):
        yield received
    for number in received[:1]:
        signal.raise_signal(number)


@contextmanager
def handled(names, handler):
    """Inside, `handler` takes the signals of these names, except those that are ignored, as nohup
    wants it, and those that something else than Python handles. Only in the main thread."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in names:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class Forgiving:
    """A text stream that goes on when its reader has gone, and in which control characters are
    written out, whatever prints them; all else is the stream's own."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        """Write what can be written."""
        write_quietly(self.stream, printable(text))
        return len(text)

    def flush(self):
        """Flush what can be flushed."""
        write_quietly(self.stream, "")

    def __getattr__(self, name):
        return getattr(self.stream, name)


def survive_odd_streams():
    """Let stdout and stderr take any character, and not end the work when they are closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
            continue
        try:
            stream.reconfigure(errors="backslashreplace")
        except (AttributeError, ValueError, OSError):
            pass  # a test's or a notebook's own stream
        is_own = isinstance(stream, Forgiving) or type(stream).__module__ != "_io"
        if not is_own and stream in (sys.__stdout__, sys.__stderr__):
            setattr(sys, name, Forgiving(stream))
