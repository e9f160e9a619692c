"""What every script needs and no paper describes: progress on stderr, errors without tracebacks, whole files or none."""

import functools
import os
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path


class Progress:
    """A line on stderr that says what, how far and how long still; silent when stderr is not a terminal.

    >>> with Progress("decoding", total=2, unit="images") as progress:
    ...     progress.update(1)
    ...     progress.update(1, note="0 broken")
    """

    def __init__(self, what, total=None, unit=""):
        self.what, self.total, self.unit = what, total, unit
        self.done, self.start, self.shown, self.on = 0, time.monotonic(), 0.0, sys.stderr.isatty()

    def update(self, count=1, note=""):
        """Advance by `count` (in the unit of `total`) and redraw, at most ten times a second."""
        self.done += count
        now = time.monotonic()
        if not self.on or (now - self.shown < 0.1 and self.done != self.total):
            return
        self.shown, rate = now, self.done / max(now - self.start, 1e-9)
        of = f"/{self.total:,}" if self.total else ""
        left = f", {duration((self.total - self.done) / rate)} left" if self.total and rate else ""
        speed = f", {rate:,.3g} {self.unit}/s" if self.unit else ""
        sys.stderr.write(f"\r\x1b[K{self.what} {self.done:,}{of}{speed}{left}{', ' + note if note else ''}")
        sys.stderr.flush()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.on and self.shown:
            sys.stderr.write("\n")


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


@contextmanager
def writing(path, mode="w", **options):
    """Open a temporary file beside `path` that takes its name only if the block ends well."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    if "b" not in mode:
        options = {"encoding": "utf-8", "newline": "", **options}
    try:
        with open(part, mode, **options) as file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def command(main):
    """Decorate a `main(argv=None)`: bad input (ValueError, OSError) ends in an `error:` line and status 2, Ctrl-C in 130."""

    @functools.wraps(main)
    def guarded(argv=None):
        def show(message, *_):
            print(f"warning: {message}", file=sys.stderr)

        try:
            with warnings.catch_warnings():
                warnings.showwarning = show
                return main(argv)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        except KeyboardInterrupt as interrupt:
            print(f"\n{str(interrupt) or 'interrupted'}", file=sys.stderr)
            raise SystemExit(130) from None

    return guarded
