"""What every command needs: progress, errors without tracebacks, signals, several processes."""

import atexit
import datetime
import functools
import os
import re
import signal
import sys
import threading
import time
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

BATCH_SECONDS = 60  # between two lines of progress where stderr is no terminal
GRACE_SECONDS = 3   # that other processes leave to the first one to report an error
WAIT_SECONDS = 10   # after which a process says that it waits for others
JOIN_TIMEOUT = datetime.timedelta(minutes=10)  # for all processes to start
GROUP_TIMEOUT = datetime.timedelta(days=30)    # for a process to wait for the training of others
CLOSED_PIPE = 141   # the status of a program that SIGPIPE ended, as shells know it


def wait_gently():
    """Let idle threads of OpenMP sleep soon instead of spinning. Call before torch is imported.

    Beside other busy processes a spinning thread takes the time that the others need; one that
    sleeps too soon is late for the next part of a step. On two cores a step at MIT-States' size
    takes 31 ms at 3,000 turns, and 28 ms at 10,000 and at the library's own 300,000. Only commands
    call this; importing a module changes nothing.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


# ---- words ----


def shorten(names, most=5):
    """Return the first few of many names, and how many more there are.

    >>> shorten("abcdefg", most=3)
    'a, b, c and 4 more'
    """
    names = list(map(str, names))
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most:,} more"
    return text


def reason(error):
    """Return an exception's message in one line, without advice to load unsafely."""
    text = " ".join(str(error).split())
    if "Object arrays" in text:
        return ("it holds arrays of Python objects; save them as plain arrays, names by "
                ".astype(str)")
    if "allow_pickle" in text or "weights_only" in text:
        return "it holds Python objects, and only plain data are loaded"
    return f"{type(error).__name__}: {text[:100]}"


# ---- progress ----


class Progress:
    """A line on stderr that says what is done, how far it is and how long it still takes.

    On a terminal the line is redrawn; in the log of a batch job there is one a minute.

    >>> with Progress("decoding", total=2, unit="images") as progress:
    ...     progress.update(1)
    ...     progress.update(1, note="0 broken")
    """

    def __init__(self, what, total, unit):
        self.what = what
        self.total = total
        self.unit = unit
        self.done = 0
        self.start = time.monotonic()
        self.shown = self.start  # when a line was drawn last
        self.on_terminal = sys.stderr is not None and sys.stderr.isatty()

    def update(self, count=1, note=""):
        """Advance by `count`, in the unit of `total`; redraw at most ten times a second."""
        self.done += count
        now = time.monotonic()
        if now - self.shown < (0.1 if self.on_terminal else BATCH_SECONDS):
            return
        self.shown = now
        rate = self.done / (now - self.start)
        left = datetime.timedelta(seconds=round((self.total - self.done) / rate))
        line = f"{self.what} {self.done:,}/{self.total}, {rate:,.3g} {self.unit}/s, {left} left"
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


def print_status(text, end="\n", file=None):
    """Print a line on stderr. Where that is closed, or its reader is gone, the work goes on."""
    try:
        print(text, file=file or sys.stderr, end=end, flush=True)
    except (OSError, ValueError):
        pass


# ---- several processes ----
#
# `torchrun` starts the same script several times and tells each process its rank and their number
# in the environment. All run the same lines and choose their part by `rank()`; inside
# `single_process()` a process works as if it were the only one. They meet at `gather`: whoever
# reaches it waits for all others, so all must reach it. Without torchrun there is one process, and
# torch.distributed is not imported.


def rank():
    """Return the number of this process, from 0, which is the one that prints."""
    return int(os.environ["RANK"]) if processes() > 1 else 0


def processes():
    """Return how many processes work together."""
    if "RANK" not in os.environ:
        return 1
    return int(os.environ.get("WORLD_SIZE", 1))


@contextmanager
def single_process():
    """Let this process work as if it were the only one."""
    together = os.environ.pop("WORLD_SIZE", "1")
    try:
        yield
    finally:
        os.environ["WORLD_SIZE"] = together


def gather(value):
    """Return what each process gave, a list in order of rank. All wait for the last one.

    Raises:
        ConnectionError: another process has ended.
    """
    if processes() == 1:
        return [value]
    values = [None for _ in range(processes())]
    errors = []

    def exchange():
        try:
            join_group().all_gather_object(values, value, group=group_of_all())
        except Exception as error:
            errors.append(error)

    # A thread waits, so that this one can be stopped by signals and say what it waits for.
    waiting = threading.Thread(target=exchange, daemon=True)
    waiting.start()
    waiting.join(WAIT_SECONDS)
    if waiting.is_alive():
        print_status(f"process {rank()} waits for the other {processes() - 1} to get here",
                     file=sys.__stderr__)  # where also those print that are silent otherwise
        waiting.join()
    if errors:
        raise ConnectionError("the processes have lost one another, as when one has ended "
                              f"({reason(errors[0])})")
    return values


@functools.cache
def join_group():
    """Return torch.distributed, once all processes have started."""
    from torch import distributed
    distributed.init_process_group("gloo", timeout=JOIN_TIMEOUT)
    atexit.register(distributed.destroy_process_group)
    return distributed


@functools.cache
def group_of_all():
    """Return the group of all processes, which wait for one another as long as a training takes."""
    return join_group().new_group(timeout=GROUP_TIMEOUT)


def distribute(items, work):
    """Yield (item, work(item)) in order. Each process handles every n-th item.

    With several processes, the results are yielded once all have ended.
    """
    if processes() == 1:
        for item in items:
            yield item, work(item)
        return
    mine = items[rank()::processes()]
    with single_process():
        results = [work(item) for item in mine]
    shares = gather(results)
    for index, item in enumerate(items):
        round_number, owner = divmod(index, processes())
        yield item, shares[owner][round_number]


def check_shared(folder):
    """Raise OSError unless every process sees in `folder` what the first one makes there."""
    made = Path(folder, f".shared-{gather(time.time_ns())[0]}")
    if rank() == 0:
        made.mkdir(parents=True)
    gather(None)  # all wait until it is there
    sees = gather(made.is_dir())
    if rank() == 0:
        made.rmdir()
    if not all(sees):
        raise OSError(f"{folder}: process {sees.index(False)} of {processes()} does not see what "
                      "process 0 made there: pass a folder that all machines share")


# ---- commands ----


def command(main):
    """Decorate a `main(argv=None)` so that it ends as a command should.

    Bad input (ValueError, OSError) and a lack of memory end in an `error:` line and status 2,
    Ctrl-C in 130, SIGTERM in 143, SIGHUP in 129. A closed pipe ends the work without a word. With
    several processes the first one prints.
    """

    @functools.wraps(main)
    def guarded(argv=None):
        with interrupting_signals() as received, warnings.catch_warnings():
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
                                        "use a larger machine; a training continues with --resume")
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
    """Let stdout and stderr take any character, and show those of the first process alone.

    At the end all is printed, so that a closed pipe or a full disk is noticed inside.
    """
    if rank() > 0:
        with (open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere),
              redirect_stderr(nowhere)):
            yield
        return
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's streams are of another kind
            stream.reconfigure(errors="backslashreplace")
    yield
    print(end="", flush=True)


def is_out_of_memory(error):
    """Tell if an error says that memory ran out: Python's, or torch's on a processor or a GPU."""
    if isinstance(error, RuntimeError):  # whose words are all that tells torch's kinds apart
        return bool(re.search("allocate memory|tried to allocate|out of memory", str(error)))
    return isinstance(error, MemoryError)


def print_status_once(text):
    """Print an error once, though all processes may find it.

    The first process prints it. Another one prints only if nothing ends it meanwhile, as torchrun
    does once the first one has failed.
    """
    if rank() > 0:
        try:
            time.sleep(GRACE_SECONDS)
        except KeyboardInterrupt:  # torchrun ends this process
            return
        text = f"process {rank()}: {text}"
    print_status(text)


@contextmanager
def interrupting_signals():
    """Let Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt, so that work is saved.

    Yield the list of their numbers, as they come. Further signals are ignored, since work is being
    saved. What is ignored already, as by nohup, stays ignored.
    """
    received = []

    def stop(number, frame):
        received.append(number)
        if len(received) == 1:
            raise KeyboardInterrupt

    before = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, stop)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
