"""Progress on stderr, errors without tracebacks, signals, and work spread over several processes."""

import argparse
import atexit
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
GROUP_TIMEOUT = datetime.timedelta(days=30)  # of processes that wait for one another's training
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


def shorten(names, most=5):
    """The first few of many names, and how many more.

    >>> shorten("abcdefg", most=3)
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
            print_status(f"\r\x1b[K{line}", end="")
        else:
            print_status(line)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.on_terminal and self.shown > self.start:
            print_status("")


def print_status(text, end="\n"):
    """A line on stderr. Where that is closed, or its reader is gone, the work goes on."""
    try:
        print(text, file=sys.stderr, end=end, flush=True)
    except (OSError, ValueError):
        pass


# ---- several processes ----
#
# `torchrun` starts the same script several times and tells each process its number and theirs in
# the environment. All run the same lines and choose their part by `rank()`; inside `single_process()` a
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
def single_process():
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
            distributed.init_process_group("gloo", timeout=GROUP_TIMEOUT)
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


def distribute(items, work):
    """Yield (item, work(item)) in order. Of several processes each works on every so-manyth item,
    alone, and what they found is yielded once all have ended."""
    if processes() == 1:
        for item in items:
            yield item, work(item)
        return
    mine = items[rank()::processes()]
    with single_process():
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
            warnings.showwarning = lambda message, *_: print_status(f"warning: {message}")
            try:
                with printing():
                    return main(argv)
            except BrokenPipeError:
                status = CLOSED_PIPE
            except KeyboardInterrupt as interrupt:
                if rank() == 0:
                    print_status(f"\n{str(interrupt) or 'interrupted'}")
                status = 128 + received[0] if received else 130
            except Exception as error:
                if is_out_of_memory(error):
                    error = MemoryError(f"out of memory ({reason(error)}): lower --batch-size, or "
                                        "use a larger machine; a training goes on with --resume")
                elif not isinstance(error, (ValueError, OSError)):
                    raise
                print_status_once(f"error: {error}")
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


def print_status_once(text):
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
    print_status(text)


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
