"""Tests of lab/files.py: files are whole or not there, and damaged or foreign ones are named."""

import errno
import os
import pickle
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from lab import files
from test_shell import script

# ---- writing ----


def test_a_file_appears_whole_and_replaces_the_old(tmp_path):
    path = tmp_path / "file.txt"
    for content in ("old", "ρ\r\nnew\n"):
        with files.writing(path) as file:
            file.write(content)
            assert (tmp_path / ".file.txt.part").exists()  # which the next run overwrites
            assert not path.exists() or path.read_bytes() == b"old"
        assert path.read_bytes() == content.encode() and [*tmp_path.iterdir()] == [path]
    # Commands that may write at once have temporary files of their own.
    with files.writing(path, "wb", shared=True):
        assert (tmp_path / f".file.txt.{os.getpid()}.part").exists()
    files.write_rows(path, ["a", "b"], [[1, "x, y"]])
    with pytest.raises(KeyboardInterrupt), files.writing(path) as file:
        file.write("half of")
        raise KeyboardInterrupt
    assert path.read_bytes() == b'a,b\n1,"x, y"\n' and [*tmp_path.iterdir()] == [path]


def test_whatever_is_wrong_with_a_file_is_one_line(tmp_path):
    path = tmp_path / "best.pt"
    path.write_text("x")
    for error in (RuntimeError("size mismatch\n\tfor states"), EOFError()):
        with pytest.raises(ValueError, match="best.pt cannot be used .*; train anew$"):
            with files.reading(path, "train anew"):
                raise error
    for error in (FileNotFoundError(2, "none", "none"), MemoryError()):
        with pytest.raises(type(error)), files.reading(path, "train anew"):
            raise error


def test_a_place_that_cannot_be_written_is_found(tmp_path, monkeypatch):
    files.check_writable(tmp_path / "not/yet/there")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for place in ("file", "link"):
        with pytest.raises(OSError, match=f"into .*{place} is no folder.*another --out"):
            files.check_writable(tmp_path / place / "run")
    monkeypatch.setattr(os, "access", lambda place, mode: False)  # tests may run as root
    with pytest.raises(OSError, match="cannot write into .*read-only: give another --csv"):
        files.check_writable(tmp_path / "not/yet/there", "--csv")


def test_a_second_run_in_one_folder_is_refused_until_the_first_dies(tmp_path):
    program = """
        with files.lock(sys.argv[1]):
            print("held", flush=True)
            time.sleep(60)"""
    first = script(program, tmp_path)
    try:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another run"), files.lock(tmp_path):
            pass
    finally:
        first.kill()
        first.wait()
    with files.lock(tmp_path):
        pass


def test_a_disk_without_locks_costs_a_warning(tmp_path, monkeypatch, capsys):
    fcntl = pytest.importorskip("fcntl")

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with files.lock(tmp_path):
        assert "cannot be locked" in capsys.readouterr().err


# ---- reading ----


def test_no_code_in_a_file_is_run(tmp_path):
    torch.save({"files": Path("x"), "features": Counter}, tmp_path / "f.t7")
    with pytest.raises(ValueError, match="f.t7 .*Python objects"):
        files.load_tensors(tmp_path / "f.t7")
    torch.save(Path("x"), tmp_path / "f.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="f.pt cannot be used .*; expected plain data that torch"):
        files.load_tensors(tmp_path / "f.pt")
    (tmp_path / "f.pkl").write_bytes(pickle.dumps([1.0]))
    with pytest.raises(ValueError, match="f.pkl is a pickle; expected plain data that torch"):
        files.load_tensors(tmp_path / "f.pkl")


@pytest.mark.parametrize("content, kind", [
    (b"", "empty"), (b"\n <!DOCTYPE html>", "a web page or XML"), (b'{"files": []}', "JSON"),
    (b"version https://git-lfs.github.com", "a Git LFS pointer, .* fetches the file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"), (b"MATLAB 5.0 MAT-file", "a MATLAB file"),
    (b"\x1f\x8b\x08", "a gzip archive .*"), (b"wet dog\n", "text"), (b"\xff\xd8", "data of .*"),
    (b"\x93NUMPY\1\0v", r"a single array \(.npy\)")])
def test_foreign_files_are_named(tmp_path, content, kind):
    path = tmp_path / "f.npz"
    path.write_bytes(content)
    said = r"expected `files`, N names.*, as np.savez\(FILE, files=names, features=array\) writes"
    with pytest.raises(ValueError, match=f"f.npz is {kind}; {said}"):
        data.read_features(path)


def test_archives_of_other_things_are_named(tmp_path):
    np.savez(tmp_path / "f.npz", states=[1], objects=[2])
    with pytest.raises(ValueError, match="f.npz is a zip archive of states.npy, objects.npy; exp"):
        files.load_tensors(tmp_path / "f.npz")


def test_a_flipped_bit_is_noticed_or_changes_nothing(tmp_path):
    """Some bits of an archive, and in each byte of its directory the one that marks a folder."""
    numbers = np.full((3, 64), 1.5, np.float32)
    np.savez(tmp_path / "f.npz", files=["a", "b", "c"], features=numbers)
    torch.save({"files": ["a", "b", "c"], "features": torch.tensor(numbers)}, tmp_path / "f.t7")
    for path in tmp_path.iterdir():
        body = bytearray(path.read_bytes())
        directory = 8 * body.index(b"PK\1\2")
        refused = 0
        for bit in (*range(0, directory, 41), *range(directory + 4, 8 * len(body), 8)):
            body[bit // 8] ^= 1 << bit % 8
            path.write_bytes(body)
            body[bit // 8] ^= 1 << bit % 8
            try:
                stored = data.read_features(path)
                assert stored["files"] == ["a", "b", "c"], bit
                np.testing.assert_array_equal(stored["features"], numbers, err_msg=str(bit))
            except ValueError:
                refused += 1
        assert refused > 8 * numbers.nbytes // 41


def test_a_name_twice_in_an_archive_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "f.npz", "w") as archive, pytest.warns(UserWarning):
        archive.writestr("files.npy", "1")
        archive.writestr("files.npy", "2")
    with pytest.raises(ValueError, match="is damaged .*wrong entry of files.npy"):
        files.check_archive(tmp_path / "f.npz")
