"""Whole files or none, safe loading, tables and JSON, and the lock of a folder."""

import csv
import json
import os
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from lab import shell


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
        if is_unread or shell.is_out_of_memory(error):
            raise
        problem = " ".join(str(error).split())
        if str(path) not in problem:
            problem = f"{path} cannot be used ({shell.reason(error)})"
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
            shell.print_status(f"warning: no lock can be had on {folder}: see that no other run writes there")
        yield


def load_tensors(path):
    """`torch.load` of plain data only: tensors, and NumPy arrays and scalars of numbers and texts.

    Runs no code in the file. OSError: it is not there; ValueError: it holds something else, or is
    damaged.
    """
    check_archive(path)
    # What a pickle of NumPy's names: the classes of its dtypes, and the functions that make an
    # array and a scalar.
    dtypes = {type(np.dtype(kind)) for kind in np.typecodes["All"]}
    allowed = [np.ndarray, np.dtype, *dtypes]
    for value in (np.zeros(0), np.float32(0)):
        make = value.__reduce__()[0]
        for module in ("numpy.core", "numpy._core"):  # as NumPy 1 and 2 call it
            allowed.append((make, f"{module}.multiarray.{make.__name__}"))
    with (reading(path, "make or fetch it again"),
          torch.serialization.safe_globals(allowed)):
        return torch.load(path, map_location="cpu", weights_only=True)


def check_archive(path):
    """The names in a zip archive (.npz, torch.save) that agrees with its own check sums; else [].

    torch.load does not compare them: a flipped bit would be other numbers without a word.
    ValueError: the archive is damaged.
    """
    with reading(path, "it is damaged: make or fetch it again"):
        if not zipfile.is_zipfile(path):
            return []
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"wrong sum of {damaged}")
            return archive.namelist()


def write_json(path, value):
    """JSON with null for what is nan or infinite."""
    value = json.loads(json.dumps(value), parse_constant=lambda name: None)
    with writing(path) as file:
        json.dump(value, file, indent=1)


def read_json(path):
    """What a JSON file holds. ValueError names a file that is none."""
    with reading(path, "remove it, and its run is made anew"):
        return json.loads(path.read_text(encoding="utf-8"))


def read_rows(path):
    """The rows of a .csv file, dictionaries."""
    with (reading(path, "expected a .csv in UTF-8; make it anew, or restore it"),
          open(path, newline="", encoding="utf-8-sig") as file):
        return list(csv.DictReader(file))
