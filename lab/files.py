"""Whole files or none, safe loading, tables and JSON, and the lock of a folder."""

import csv
import json
import os
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from compcos import check_archive
from lab import shell

TORCH_BEFORE_1_6 = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # a pickled number
# The first bytes of files that people give by mistake, and the words for such a file.
FIRST_BYTES = {
    b"\x93NUMPY": "a single array (.npy)",
    TORCH_BEFORE_1_6: "a file of torch.save before torch 1.6",
    b"\x80": "a pickle",
    b"PK": "a zip archive that is cut or damaged",
    b"\x89HDF": "an HDF5 file",
    b"MATLAB": "a MATLAB file",
    b"\x1f\x8b": "a gzip archive that is still packed",
    b"version https://git-lfs": "a Git LFS pointer, for which `git lfs pull` fetches the file",
    b"<": "a web page or XML",
    b"{": "JSON",
    b"[": "JSON",
}


@contextmanager
def reading(path, remedy):
    """Turn any error in the block, which reads the file `path`, into a ValueError of one line.

    The line names the file, the problem, and the `remedy`. Two kinds of errors pass unchanged: an
    OSError because the file is missing or cannot be opened, and a lack of memory.
    """
    path = Path(path)
    try:
        yield path
    except Exception as error:  # zip, pickle, CSV and JSON raise many kinds
        # An OSError without a file's name comes from reading beyond the file's end.
        is_unread = isinstance(error, OSError) and error.filename is not None
        if is_unread or shell.is_out_of_memory(error):
            raise
        problem = " ".join(str(error).split())
        if str(path) not in problem:
            problem = f"{path} cannot be used ({shell.reason(error)})"
        raise ValueError(f"{problem}; {remedy}") from None


@contextmanager
def writing(path, mode="w", shared=False):
    """Open a temporary file for text or bytes, which becomes `path` only if the block ends well.

    The temporary file lies beside `path`, so that a kill or a full disk leaves the old `path` as it
    was. Its name is always the same, so that the next run overwrites what a killed one left; with
    `shared`, for files that several commands may write at once, each process has its own name. An
    OSError names `path`.
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
    except OSError as error:
        raise type(error)(error.errno, f"cannot write {path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def write_rows(path, header, rows):
    """Write a .csv file, whole or not at all, from a header and rows of as many cells."""
    with writing(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def check_writable(folder, option="--out"):
    """Raise an OSError unless files can be written into `folder`, which may not exist yet.

    The message asks for another value of `option`.
    """
    place = Path(folder)
    while not os.path.lexists(place):  # true of a link that leads nowhere, too
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise OSError(f"cannot write into {folder}, since {place} is no folder or read-only: give "
                      f"another {option}")


@contextmanager
def lock(folder):
    """Hold a folder for one run; raise a ValueError if another process holds it.

    The operating system locks the file `.lock` and releases it when the process ends, however it
    ends. Where there are no locks, a warning says so.
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
        except (ImportError, OSError):  # Windows, or a file system without locks
            shell.print_status(f"warning: {folder} cannot be locked: make sure that no other run "
                               "writes there")
        yield


def load_tensors(path, expected="plain data that torch.save wrote"):
    """Load tensors, NumPy arrays and plain values by torch.load, running no code of the file.

    OSError: the file is missing. ValueError: it is damaged or holds something else than `expected`.
    """
    names = check_archive(path)
    # The pickles of NumPy name the classes of its dtypes, and the functions that make an array and
    # a scalar.
    dtypes = {type(np.dtype(kind)) for kind in np.typecodes["All"]}
    allowed = [np.ndarray, np.dtype, *dtypes]
    for value in (np.zeros(0), np.float32(0)):
        make = value.__reduce__()[0]
        for module in ("numpy.core", "numpy._core"):  # in NumPy 1 and 2
            allowed.append((make, f"{module}.multiarray.{make.__name__}"))
    with reading(path, f"expected {expected}"), torch.serialization.safe_globals(allowed):
        kind = describe_file(path)
        is_saved = kind == FIRST_BYTES[TORCH_BEFORE_1_6]
        if not is_saved and not any(name.endswith("/data.pkl") for name in names):
            raise ValueError(f"{path} is {kind}")
        return torch.load(path, map_location="cpu", weights_only=True)


def describe_file(path):
    """Return what a file is, such as "a web page or XML", from its first bytes."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return f"a zip archive of {shell.shorten(archive.namelist(), 3)}"
    with open(path, "rb") as file:
        start = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")  # also a mark of UTF-8
    for first, words in FIRST_BYTES.items():
        if start.startswith(first):
            return words
    if not start:
        return "empty"
    if start.isascii() and b"\0" not in start:
        return "text"
    return "data of an unknown kind"


def write_json(path, value):
    """Write JSON, whole or not at all, with null for numbers that are not finite."""
    value = json.loads(json.dumps(value), parse_constant=lambda name: None)
    with writing(path) as file:
        json.dump(value, file, indent=1)


def read_json(path):
    """Return the content of a JSON file; a ValueError names a file that holds something else."""
    with reading(path, "remove the file, and its run is made anew"):
        return json.loads(path.read_text(encoding="utf-8"))


def read_rows(path):
    """Return the rows of a .csv file as dictionaries."""
    with (reading(path, "expected a .csv in UTF-8; make it anew, or restore it"),
          open(path, newline="", encoding="utf-8-sig") as file):
        return list(csv.DictReader(file))
