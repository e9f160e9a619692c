"""What every script needs and no paper describes: progress on stderr, errors without tracebacks,
whole files or none, one run a folder, work spread over several processes. It has no command line:
`python compcos.py` is where to begin.
"""

import atexit
import datetime
import errno
import functools
import glob
import io
import math
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path

BATCH_SECONDS = 60   # between two lines of progress where stderr is no terminal
STALE_SECONDS = 3600  # after which a `.part` file is taken for one that a dead process left
HOLDING_SECONDS = 2  # in which a process holds a `.part` that it has made
SAVING_SECONDS = 10  # after a signal, in which further ones do not interrupt the saving
GRACE_SECONDS = 3    # which other processes leave to the first one to say what is wrong
WAITING_SECONDS = 0.2  # between two looks at how far other processes are
PATIENCE = datetime.timedelta(days=30)  # of processes that wait for one another's training


def wait_gently():
    """Let idle threads of OpenMP sleep soon instead of spinning; to be called before torch is
    imported.

    Beside other busy processes a thread that spins takes the time that the others need; one that
    sleeps too soon is late for the next part of a step. On two cores a step of 16 members takes 99
    ms at 3,000 turns, 127 at 1,000 and 86 at the library's own 300,000; beside two busy processes
    one of 4 members takes 60, 72 and over 500 ms. Only scripts call this, at their first lines; who
    imports a module is left alone.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")


class Progress:
    """A line on stderr that says what, how far and how long still.

    On a terminal it is redrawn; in a batch job's log it is a line a minute. With `together` it
    counts what all processes do, which must all make it at the same place.

    >>> with Progress("decoding", total=2, unit="images") as progress:
    ...     progress.update(1)
    ...     progress.update(1, note="0 broken")
    """

    def __init__(self, what, total=None, unit="", together=False):
        self.add = tally(together)
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
        self.advance(count)
        now = time.monotonic()
        pause = 0.1 if self.on_terminal else BATCH_SECONDS
        is_last = self.on_terminal and self.done == self.total
        if now - self.shown < pause and not is_last:
            return
        self.shown = now
        line = self.line(now, note)
        if self.on_terminal:
            self.drawn = True
            write_quietly(sys.stderr, f"\r\x1b[K{line}")
        else:
            write_quietly(sys.stderr, f"{line}\n")

    def advance(self, count):
        """Count, and draw nothing."""
        self.done = self.add(count)

    def line(self, now, note=""):
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
            self.drawn = False


def is_terminal(stream):
    """Whether a stream is a terminal; a closed or missing one is none."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def write_quietly(stream, text):
    """Write as it is and flush; a stream that is closed, or whose reader is gone, must not end the
    work. Returns what the system said, an OSError, or None."""
    if isinstance(stream, Forgiving):
        stream = stream.stream
    try:
        stream.write(text)
        stream.flush()
    except (AttributeError, ValueError):
        pass  # closed
    except OSError as error:
        return error
    return None


def printable(text):
    r"""Text whose control characters are written out, but for the ends of lines: a file's name
    cannot send commands to a terminal.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    characters = []
    for character in str(text):
        if character.isprintable() or character == "\n":
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
    clear_parts(path.parent, path.name)
    part = part_of(path)
    try:
        part.touch()
        with held(part):
            part.write_bytes(contents)
            os.replace(part, path)
    except OSError as error:
        raise type(error)(error.errno, f"cannot write {path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def part_of(path):
    """A new name beside `path` for what is to become `path`; no other process has it."""
    return Path(path).with_name(f".{Path(path).name}.{secrets.token_hex(8)}.part")


def clear_parts(folder, name=None):
    """Remove the `.part` files and folders that dead processes left in a folder (of one name)."""
    start = "*" if name is None else glob.escape(name)
    for part in Path(folder).glob(f".{start}.*.part"):
        is_own = re.search(r"\.[0-9a-f]{16}\.part$", part.name)  # and not, say, of a download
        try:
            if is_own and is_abandoned(part):
                remove(part)
        except OSError:
            pass  # another process was faster


def remove(part):
    """Remove a file, or a folder with all that is in it."""
    if part.is_dir():
        shutil.rmtree(part)
    else:
        part.unlink()


def is_abandoned(part):
    """Whether nobody holds a `.part`; where that cannot be seen, whether it is an hour old.

    One without content may have been made just now by a process that is about to hold it: it is
    given the time to.
    """
    has_content = any(part.iterdir()) if part.is_dir() else part.stat().st_size > 0
    if not has_content and time.time() - part.stat().st_mtime < HOLDING_SECONDS:
        time.sleep(HOLDING_SECONDS)
    try:
        with held(part) as can_be_seen:
            if can_be_seen:
                return True
    except BlockingIOError:
        return False
    return time.time() - part.stat().st_mtime > STALE_SECONDS


@contextmanager
def held(part):
    """Hold a `.part` file or folder while it is filled, so that others see that this process lives.

    Yields whether they can see it: some systems have no such locks. BlockingIOError: it is held.
    """
    if os.name == "nt":  # where what is held could be neither written nor renamed
        yield False
        return
    handle = os.open(part, os.O_RDONLY)
    try:
        yield take_lock(handle)
    finally:
        os.close(handle)


def check_writable(folder, option="--out"):
    """OSError unless files can be written into the folder of an option; it need not be there
    yet."""
    place = Path(folder)
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise OSError(f"cannot write into {folder}: {error.strerror or error} ({place}); give "
                      f"another {option}") from None


def reserve(path, size, meant=None):
    """Give a new or sparse file `path` the room of `size` bytes. OSError names it, or what it is
    `meant` to become, and leaves nothing."""
    path = Path(path)
    try:
        with open(path, "r+b" if path.exists() else "wb") as file:
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise type(error)(error.errno, f"no room for {meant or path}, {size / 2**20:,.0f} MB: "
                          f"{error.strerror}") from None


@contextmanager
def lock(folder):
    """Hold a folder for one run. ValueError if another process holds it; a dead one cannot.

    The lock is the operating system's, on the file `.lock`, and ends with the process. Where the
    file system has no locks, a warning says so.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+b") as file:
        file.seek(0)
        try:
            is_locked = take_lock(file.fileno())
        except BlockingIOError:
            raise ValueError(f"another run writes into {folder}: wait for it, or give another "
                             "--out") from None
        if not is_locked:
            warnings.warn(f"the file system of {folder} has no locks: see yourself that no other "
                          "run writes there", stacklevel=3)
        yield


def take_lock(handle):
    """Lock an open file, of which a number tells; whether there are such locks. BlockingIOError:
    another process has it."""
    try:
        if os.name == "nt":
            import msvcrt
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except PermissionError as error:  # as Windows says that another process has it
        raise BlockingIOError(error.errno, error.strerror) from None
    except OSError:  # no locks, or not for this kind of file
        return False
    return True


# ---- several processes ----
#
# `torchrun` starts the same script several times and tells each process its number and theirs in
# the environment. All run the same lines and choose their part by `rank()`: `share` divides rows,
# `spread` and `take_turns` divide trainings, inside `alone()` a process works as if it were the
# only one. They meet at `gather`: whoever reaches it waits for all others, so all must reach it.
# Without torchrun there is one process, all of this does nothing, and torch.distributed is not
# imported.


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
            atexit.register(distributed.destroy_process_group)
        yield distributed
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = re.sub(r"^\[.*?\] ", "", str(error).strip())  # without the place in gloo's source
        reason = re.split(r"\. |\n", reason)[0][:160]
        raise ConnectionError("the processes have lost one another, as when one has ended "
                              f"({reason})") from None


def gather(value):
    """What each process gave, a list in order of rank. All wait for the last one, and often that is
    what it is called for."""
    if processes() == 1:
        return [value]
    values = [None for _ in range(processes())]
    with group() as distributed:
        distributed.all_gather_object(values, value)
    return values


def share(count):
    """The slice of `count` rows that is this process's; together they are all, in order of rank."""
    return slice(count * rank() // processes(), count * (rank() + 1) // processes())


def spread(items, work, progress=None):
    """Yield (item, work(item)) in order, as many at a time as there are processes, each alone.

    progress: of all processes, shown while this one waits for the others.
    """
    count_ended = tally()
    for start in range(0, len(items), processes()):
        begun = items[start:start + processes()]
        result = None
        if rank() < len(begun):  # in the last round there may be fewer items than processes
            item = begun[rank()]
            with alone():
                result = work(item)
        count_ended(1)
        if progress is not None:
            show_until(progress, count_ended, start + processes())
        yield from zip(begun, gather(result))


def tally(together=True):
    """A function `add(count)` that adds to one sum of all processes and returns it; if not
    `together`, to one of this process.

    All must call `tally` at the same place. To add, none waits for another, and the function adds
    to the same sum inside `alone()`.
    """
    if not together or processes() == 1:
        total = 0

        def add(count):
            nonlocal total
            total += count
            return total

        return add
    name = gather(secrets.token_hex(8))[0]
    with group() as distributed:
        # Numbers by name, which torchrun keeps for all; torch has no public way to it.
        store = distributed.distributed_c10d._get_default_store()

    def add_for_all(count):
        with group():
            return store.add(name, count)

    return add_for_all


def show_until(progress, add, count, note=lambda: ""):
    """Show what all processes do until their sum, to which `add` of `tally` adds, is `count`: who
    waits in `gather` shows nothing. note: gives what is shown beside."""
    with progress:
        while add(0) < count:
            time.sleep(WAITING_SECONDS)
            progress.update(0, note())


def take_turns(count):
    """Yield numbers below `count`, ascending; of several processes each number goes to the first
    that is free. All must begin at the same place."""
    take = tally()
    number = take(1) - 1
    while number < count:
        yield number
        number = take(1) - 1


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
                      "process 0 wrote there: give a folder that all machines share")


@contextmanager
def signals_together():
    """A function that tells whether any process was asked to stop, for all to stop at one place.

    Inside, Ctrl-C, SIGTERM and SIGHUP wait for that, or for the end: who stopped in the midst of a
    step would leave the others waiting for its gradients. With one process they interrupt at once.
    """
    with signals_held() if processes() > 1 else nullcontext([]) as received:
        yield lambda: any(gather(bool(received)))


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
                full = getattr(sys.stdout, "full", None)
                if full is not None:
                    raise OSError(f"not all that was printed could be written: {full.strerror}")
                return result
            except (ValueError, OSError) as error:
                say_for_all(f"error: {error}")
                status = 2
            except KeyboardInterrupt as interrupt:
                text = str(interrupt) or "interrupted"
                if processes() > 1 and received == [signal.SIGTERM]:
                    text = f"torchrun has ended all, as it does when one process fails; {text}"
                if rank() == 0:
                    say(f"\n{text}")
                status = 128 + received[0] if received else 130
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                why = " ".join(str(error).split())[:160] or "no more is said"
                say_for_all(f"error: out of memory ({why}): lower --batch-size, or use a larger "
                            "machine; a training goes on with --resume")
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
def handling_signals(handler):
    """Inside, `handler(number, frame)` handles Ctrl-C, SIGTERM and SIGHUP.

    What is ignored, as by nohup, or handled by other than Python stays as it is. Only the main
    thread may do this: others leave signals to whoever runs them.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


@contextmanager
def signals_as_interrupts(received):
    """Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt in the main thread, so that work is saved;
    their number is put into `received`.

    Others that follow soon are ignored, since work is being saved; later ones interrupt that, too.
    """
    at = -math.inf

    def stop(number, frame):
        nonlocal at
        now = time.monotonic()
        if now - at > SAVING_SECONDS:
            at = now
            received.append(number)
            raise KeyboardInterrupt

    with handling_signals(stop):
        yield


@contextmanager
def signals_held():
    """Inside, Ctrl-C, SIGTERM and SIGHUP wait for the end. Yields the list of those that came."""
    received = []
    with handling_signals(lambda number, frame: received.append(number)):
        yield received
    for number in received[:1]:
        signal.raise_signal(number)


class Forgiving:
    """A text stream that goes on when its reader has gone, and takes no commands to the terminal.

    So no name of a file, a state or an object has to be looked at where it is printed. All else is
    the stream's own.
    """

    def __init__(self, stream):
        self.stream = stream
        self.full = None  # what the system said where there was no room for what was printed

    def write(self, text):
        """Write what can be written, printable."""
        error = write_quietly(self.stream, printable(text))
        if error is not None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            self.full = error
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
        try:
            stream.reconfigure(errors="backslashreplace")
        except (AttributeError, ValueError, OSError):
            pass  # closed, or a test's or a notebook's own stream
        if stream in (sys.__stdout__, sys.__stderr__):
            setattr(sys, name, Forgiving(stream))


if __name__ == "__main__":
    print("common.py holds what the scripts share: progress, errors, whole files, several "
          "processes; run `python compcos.py`.")
