"""What every script needs and no paper describes: words and numbers of messages, progress on
stderr, whole files or none, one run a folder, work spread over several processes, errors without
tracebacks. It has no command line: `python compcos.py` is where to begin.
"""

import argparse
import atexit
import csv
import datetime
import functools
import math
import os
import signal
import sys
import threading
import time
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

BATCH_SECONDS = 60   # between two lines of progress where stderr is no terminal
GRACE_SECONDS = 3    # which other processes leave to the first one to say what is wrong
PATIENCE = datetime.timedelta(days=30)  # of processes that wait for one another's training
CLOSED_PIPE = 141    # the status of a program that SIGPIPE ended, as shells know it


def wait_gently():
    """Let idle threads of OpenMP sleep soon instead of spinning; to be called before torch is
    imported.

    Beside other busy processes a thread that spins takes the time that the others need; one that
    sleeps too soon is late for the next part of a step. On two cores a step at MIT-States' size
    takes 31 ms at 3,000 turns, 28 at 10,000 and at the library's own 300,000; beside four busy
    processes a short training takes 3.5 and 4.1 times as long as alone at 3,000 and 10,000. Only
    scripts call this, at their first lines; who imports a module is left alone.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


# ---- words and numbers ----


def some(names, most=5):
    """The first few of many names, and how many more.

    >>> some("abcdefg", most=3)
    'a, b, c and 4 more'
    """
    names = list(map(str, names))
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most:,} more"
    return text


def reason(error):
    """What an exception says, in a line, without the advice of NumPy and torch to load unsafely."""
    text = " ".join(str(error).split())
    if "allow_pickle" in text or "weights_only" in text:
        return "it holds Python objects, and only plain data are loaded"
    return f"{type(error).__name__}: {text[:100]}"


def duration(seconds):
    """Seconds as people read them.

    >>> duration(7.2), duration(7500)
    ('0:00:07', '2:05:00')
    """
    return str(datetime.timedelta(seconds=round(seconds)))


def check_number(name, value, *, least=-math.inf, above=-math.inf, below=math.inf):
    """The value, or a ValueError with its name: not finite, or out of this range."""
    if least <= value < below and value > above:
        return value
    expected = f"a number of {least} or more"
    if least == -math.inf:
        expected = f"a number above {above}"
    raise ValueError(f"{name} is {value}: expected {expected}, below {below}")


def number(kind=float, **limits):
    """A type for argparse: a number of this kind within the limits of `check_number`.

    >>> number(int, least=1)("3")
    3
    """
    def parse(text):
        try:
            return check_number("it", kind(text), **limits)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return parse


# ---- progress ----


class Progress:
    """A line on stderr that says what, how far and how long still.

    On a terminal it is redrawn; in a batch job's log it is a line a minute.

    >>> with Progress("decoding", total=2, unit="images") as progress:
    ...     progress.update(1)
    ...     progress.update(1, note="0 broken")
    """

    def __init__(self, what, total, unit):
        self.what = what
        self.total = total  # 0: unknown
        self.unit = unit
        self.done = 0
        self.start = time.monotonic()
        self.shown = self.start  # when a line was drawn last
        self.on_terminal = sys.stderr is not None and sys.stderr.isatty()

    def update(self, count=1, note=""):
        """Advance by `count` (in the unit of `total`); redraw at most ten times a second."""
        self.done += count
        now = time.monotonic()
        if now - self.shown < (0.1 if self.on_terminal else BATCH_SECONDS):
            return
        self.shown = now
        rate = self.done / (now - self.start)
        line = f"{self.what} {self.done:,}/{self.total or '?'}, {rate:,.3g} {self.unit}/s"
        if self.total and rate:
            line += f", {duration((self.total - self.done) / rate)} left"
        if note:
            line += f", {note}"
        if self.on_terminal:
            say(f"\r\x1b[K{line}", end="")
        else:
            say(line)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.on_terminal and self.shown > self.start:
            say("")


def say(text, end="\n"):
    """A line on stderr. Where that is closed, or its reader is gone, the work goes on."""
    try:
        print(text, file=sys.stderr, end=end, flush=True)
    except (OSError, ValueError):
        pass


# ---- files ----


@contextmanager
def reading(path, remedy):
    """Inside, the file `path` is read and what it holds is used: whatever is wrong with it is one
    ValueError.

    Its one line names the file, what is wrong, and the `remedy`. A file that is not there or cannot
    be opened (OSError) and a lack of memory pass.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for for ever
            raise ValueError(f"{path} is no plain file")
        yield path
    except Exception as error:  # of zip, pickle, CSV and JSON, and of what is not in them
        # An OSError without a file's name is of a place beyond the file's end.
        is_unread = isinstance(error, OSError) and error.filename is not None
        if is_unread or is_out_of_memory(error):
            raise
        problem = " ".join(str(error).split())
        if str(path) not in problem:
            problem = f"{path} cannot be used ({reason(error)})"
        raise ValueError(f"{problem}; {remedy}") from None


@contextmanager
def writing(path, mode="w", shared=False):
    """A file open for text or bytes, which becomes `path` only if the block ends well.

    It is a temporary file beside `path`: a kill or a full disk leaves what was there before. Under
    a run's lock it has one name, which the next run uses again; `shared`, where several commands
    may write at once, each has its own. OSError names `path`.
    """
    path = Path(path)
    number = f".{os.getpid()}" if shared else ""
    part = path.with_name(f".{path.name}{number}.part")
    text = {} if "b" in mode else dict(encoding="utf-8", newline="")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, mode, **text) as file:
            yield file
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        # torch.save hides by a RuntimeError that it was interrupted, or could not write
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
        if not isinstance(cause, OSError):
            raise
        raise type(cause)(cause.errno, f"cannot write {path}: {cause.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def write_rows(path, header, rows):
    """A .csv file, whole or not at all: the header, and rows of as many cells."""
    with writing(path) as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def check_writable(folder, option="--out"):
    """OSError unless files can be written into the folder of an option; it need not be there
    yet."""
    place = Path(folder)
    while not place.exists():
        if place.is_symlink():
            raise OSError(f"{place} is a link to {os.readlink(place)}, which is not there: give "
                          f"another {option}, or make that folder")
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise OSError(f"cannot write into {folder}, since {place} is no folder or read-only: give "
                      f"another {option}")


@contextmanager
def lock(folder):
    """Hold a folder for one run. ValueError if another process holds it; a dead one cannot.

    The lock is the operating system's, on the file `.lock`, and ends with the process: systems
    differ, which is why it stands here. Where there are no locks, a warning says so.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+b") as file:
        try:
            import fcntl
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run writes into {folder}: wait for it, or give another "
                             "--out") from None
        except (ImportError, OSError):  # Windows, or a file system that has no locks
            say(f"warning: no lock can be had on {folder}: see that no other run writes there")
        yield


# ---- several processes ----
#
# `torchrun` starts the same script several times and tells each process its number and theirs in
# the environment. All run the same lines and choose their part by `rank()`; inside `alone()` a
# process works as if it were the only one. They meet at `gather`: whoever reaches it waits for all
# others, so all must reach it. Without torchrun there is one process, all of this does nothing, and
# torch.distributed is not imported.


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
    """torch.distributed with all processes in one group. ConnectionError: another one has ended."""
    from torch import distributed
    try:
        if not distributed.is_initialized():
            distributed.init_process_group("gloo", timeout=PATIENCE)
            atexit.register(distributed.destroy_process_group)
        yield distributed
    except RuntimeError as error:
        raise ConnectionError("the processes have lost one another, as when one has ended "
                              f"({reason(error)})") from None


def gather(value):
    """What each process gave, a list in order of rank. All wait for the last one, and often that is
    what it is called for."""
    if processes() == 1:
        return [value]
    values = [None for _ in range(processes())]
    with group() as distributed:
        distributed.all_gather_object(values, value)
    return values


def spread(items, work):
    """Yield (item, work(item)) in order. Of several processes each works on every so-manyth item,
    alone, and what they found is yielded once all have ended."""
    if processes() == 1:
        for item in items:
            yield item, work(item)
        return
    mine = items[rank()::processes()]
    with alone():
        results = [work(item) for item in mine]
    shares = gather(results)
    for place, item in enumerate(items):
        turn, owner = divmod(place, processes())
        yield item, shares[owner][turn]


def check_shared(folder):
    """OSError unless every process sees in `folder` what the first one makes there."""
    made = Path(folder, f".shared-{gather(time.time_ns())[0]}")
    if rank() == 0:
        made.mkdir(parents=True)
    gather(None)  # all wait until it is there
    sees = gather(made.is_dir())
    if rank() == 0:
        made.rmdir()
    if not all(sees):
        raise OSError(f"{folder}: process {sees.index(False)} of {processes()} does not see what "
                      "process 0 made there: give a folder that all machines share")


# ---- scripts ----
#
# `command` is what they use; what follows it are its parts.


def command(main):
    """Decorate a `main(argv=None)`: how every script ends.

    Bad input (ValueError, OSError) and a lack of memory end in an `error:` line and status 2,
    Ctrl-C in 130, SIGTERM in 143, SIGHUP in 129; who closes the pipe that is printed to ends the
    work without a word. Of several processes the first one prints.
    """

    @functools.wraps(main)
    def guarded(argv=None):
        received = []
        with interrupting_signals(received), warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: say(f"warning: {message}")
            try:
                with printing():
                    return main(argv)
            except BrokenPipeError:
                status = CLOSED_PIPE
            except KeyboardInterrupt as interrupt:
                if rank() == 0:
                    say(f"\n{str(interrupt) or 'interrupted'}")
                status = 128 + received[0] if received else 130
            except Exception as error:
                if is_out_of_memory(error):
                    error = MemoryError(f"out of memory ({reason(error)}): lower --batch-size, or "
                                        "use a larger machine; a training goes on with --resume")
                elif not isinstance(error, (ValueError, OSError)):
                    raise
                say_once(f"error: {error}")
                status = 2
        try:
            print(end="", flush=True)
        except OSError:  # what Python would still write at its end goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(status)

    return guarded


@contextmanager
def printing():
    """Inside, stdout and stderr take any character, and only those of the first process are seen.

    At the end all is printed, so that a closed pipe or a full disk is noticed inside.
    """
    if rank() > 0:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield
        return
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's streams are of another kind
            stream.reconfigure(errors="backslashreplace")
    yield
    print(end="", flush=True)


def is_out_of_memory(error):
    """Whether an error says that memory ran out: Python's, or torch's on a processor or a GPU."""
    return isinstance(error, MemoryError) or "allocate" in str(error)


def say_once(text):
    """`say` what is wrong, once.

    What all processes find, the first one says. Another speaks only if nothing ends it meanwhile,
    as torchrun does once the first one has failed.
    """
    if rank() > 0:
        try:
            time.sleep(GRACE_SECONDS)
        except KeyboardInterrupt:  # torchrun ends this process
            return
        text = f"process {rank()}: {text}"
    say(text)


@contextmanager
def interrupting_signals(received):
    """Inside, Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt, so that work is saved; their
    number is put into `received`.

    Further ones are ignored, since work is being saved. What is ignored already, as by nohup, stays
    so. Only the main thread may do this: others leave signals to whoever runs them.
    """
    def stop(number, frame):
        received.append(number)
        if len(received) == 1:
            raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
