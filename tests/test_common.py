"""Tests of common.py: what people see of progress, that files are whole or not there, exit statuses."""

import errno
import sys
import warnings

import pytest

import common


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_one_line_on_a_terminal_and_silent_elsewhere(terminal, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with common.Progress("decoding", total=2000, unit="images") as progress:
        progress.update(500)
        progress.update(1500, note="3 broken")
    out, error = capsys.readouterr()
    assert not out and (error.count("\n"), error.endswith("\n")) == (terminal, terminal)
    if terminal:  # the last drawing covers those before
        last = error.rpartition("\r\x1b[K")[2]
        assert last.startswith("decoding 2,000/2,000, ") and last.endswith(" images/s, 0 s left, 3 broken\n")


def test_progress_without_total_or_updates(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with common.Progress("waiting"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(common.time, "monotonic", iter(range(9)).__next__)
    with common.Progress("reading") as progress:
        progress.update(7)
    assert capsys.readouterr().err == "\r\x1b[Kreading 7\n"


@pytest.mark.parametrize("seconds, shown", [
    (0, "0 s"), (59.6, "1 min 00 s"), (3599, "59 min 59 s"), (3600, "1 h 00 min")])
def test_durations_at_the_borders(seconds, shown):
    assert common.duration(seconds) == shown


def test_a_file_appears_whole_and_replaces_the_old(tmp_path):
    path = tmp_path / "file.txt"
    for content in "old", "ρ\r\nnew\n":
        with common.writing(path) as file:
            file.write(content)
            assert not path.exists() or path.read_bytes() == b"old"
        assert path.read_bytes() == content.encode() and [*tmp_path.iterdir()] == [path]
    with common.writing(str(path), "wb") as file:
        file.write(b"\0")
    assert path.read_bytes() == b"\0"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_interrupted_file_leaves_no_trace(tmp_path, error):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(error), common.writing(path) as file:
        file.write("half of")
        file.flush()
        assert len([*tmp_path.iterdir()]) == 2
        raise error
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("error, status, shown", [
    (ValueError("no such mix"), 2, "error: no such mix\n"),
    (FileNotFoundError(errno.ENOENT, "No such file", "a.txt"), 2, "error: [Errno 2] No such file: 'a.txt'\n"),
    (KeyboardInterrupt(), 130, "\ninterrupted\n"), (KeyboardInterrupt("saved"), 130, "\nsaved\n")])
def test_commands_end_in_one_line_and_a_status(error, status, shown, capsys):
    @common.command
    def main(argv=None):
        """What it does."""
        raise error

    with pytest.raises(SystemExit) as end:
        main(["x"])
    assert end.value.code == status and capsys.readouterr() == ("", shown) and main.__doc__ == "What it does."


def test_commands_show_warnings_as_a_line(capsys):
    before = warnings.showwarning
    common.command(lambda argv=None: warnings.warn("half is missing"))()
    assert capsys.readouterr() == ("", "warning: half is missing\n") and warnings.showwarning is before


def test_commands_pass_on_results_and_mistakes_of_the_program():
    assert common.command(lambda argv=None: argv)(["x"]) == ["x"]
    with pytest.raises(KeyError):
        common.command(lambda argv=None: {}["x"])()
