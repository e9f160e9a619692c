"""Tests of common.py: what people see of progress, that files are whole or not there, exit
statuses."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path

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
        assert last.startswith("decoding 2,000/2,000, ") and last.endswith(
            " images/s, 0 s left, 3 broken\n"
        )


def test_progress_without_total_or_updates(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with common.Progress("waiting"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(common.time, "monotonic", iter(range(9)).__next__)
    with common.Progress("reading") as progress:
        progress.update(7)
    assert capsys.readouterr().err == "\r\x1b[Kreading 7\n"


@pytest.mark.parametrize(
    "seconds, shown",
    [(0, "0 s"), (59.6, "1 min 00 s"), (3599, "59 min 59 s"), (3600, "1 h 00 min")],
)
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
        raise error
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    "error, status, shown",
    [
        (ValueError("no such mix"), 2, "error: no such mix\n"),
        (
            FileNotFoundError(errno.ENOENT, "No such file", "a.txt"),
            2,
            "error: [Errno 2] No such file: 'a.txt'\n",
        ),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (KeyboardInterrupt("saved"), 130, "\nsaved\n"),
    ],
)
def test_commands_end_in_one_line_and_a_status(error, status, shown, capsys):
    @common.command
    def main(argv=None):
        """What it does."""
        raise error

    with pytest.raises(SystemExit) as end:
        main(["x"])
    assert (
        end.value.code == status
        and capsys.readouterr() == ("", shown)
        and main.__doc__ == "What it does."
    )


def test_commands_show_warnings_as_a_line(capsys):
    before = warnings.showwarning
    common.command(lambda argv=None: warnings.warn("half is missing"))()
    assert (
        capsys.readouterr() == ("", "warning: half is missing\n") and warnings.showwarning is before
    )


def test_commands_pass_on_results_and_mistakes_of_the_program():
    assert common.command(lambda argv=None: argv)(["x"]) == ["x"]
    with pytest.raises(KeyError):
        common.command(lambda argv=None: {}["x"])()


# ---- what befalls files and processes ----


HERE = Path(__file__).parent


def script(text, *arguments, **keywords):
    """A Python process with common imported, from the project's folder."""
    program = "import sys\nsys.path.insert(0, '.')\nimport common, os, time\n" + textwrap.dedent(
        text
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=HERE.parent,
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **keywords},
    )


def test_a_full_disk_names_the_file_and_keeps_the_old(tmp_path, monkeypatch):
    path = tmp_path / "best.pt"
    path.write_text("old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(common.os, "replace", full)
    with pytest.raises(OSError, match="cannot write .*best.pt: No space"):
        with common.writing(path, "wb") as file:
            file.write(b"new")
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_parts_of_dead_processes_are_cleared(tmp_path):
    """An old one by whoever writes the file again, a fresh one by who holds the folder's lock."""
    old = common.part_of(tmp_path / "log.csv")
    fresh = common.part_of(tmp_path / "log.csv")
    download = tmp_path / ".images.zip.0123abcd.part"  # goes on from where it ended
    for part in (old, fresh, download):
        part.write_text("half")
    os.utime(old, (0, 0))
    common.write_whole(tmp_path / "log.csv", b"whole")
    assert not old.exists()
    assert fresh.exists()
    assert (tmp_path / "log.csv").read_text() == "whole"
    common.clear_parts(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"log.csv", download.name}


def test_room_is_reserved_or_nothing_is_left(tmp_path, monkeypatch):
    common.reserve(tmp_path / "scores", 5000)
    assert (tmp_path / "scores").stat().st_size == 5000

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(common.os, "posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match="no room for .*more"):
        common.reserve(tmp_path / "more", 5000)
    assert not (tmp_path / "more").exists()


def test_a_second_run_in_one_folder_is_refused_until_the_first_dies(tmp_path):
    first = script(
        """
        with common.lock(sys.argv[1]):
            print("held", flush=True)
            time.sleep(60)""",
        tmp_path,
    )
    try:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another run"):
            with common.lock(tmp_path):
                pass
    finally:
        first.kill()
        first.wait()
    with common.lock(tmp_path):
        pass


@pytest.mark.parametrize("name, status", [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_signals_save_as_ctrl_c_does(name, status):
    process = script("""
        @common.command
        def main(argv=None):
            try:
                print("ready", flush=True)
                time.sleep(60)
            finally:
                print("saved", flush=True)
        main()""")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, name))
    out, error = process.communicate(timeout=30)
    assert out == "saved\n" and process.returncode == status and "Traceback" not in error


def test_odd_terminals_end_nothing():
    """Output in ASCII, and a reader that goes away, as `head -1` does."""
    text = """
        @common.command
        def main(argv=None):
            for i in range(20000):
                print("τ α", i)
            print("done", file=open(sys.argv[1], "w"))
        main()"""
    environment = dict(os.environ, PYTHONIOENCODING="ascii")
    with tempfile.TemporaryDirectory() as folder:
        done = Path(folder, "done")
        process = script(text, done, env=environment)
        assert process.stdout.readline() == "\\u03c4 \\u03b1 0\n"
        process.stdout.close()
        process.wait(timeout=30)
        assert done.read_text() == "done\n" and process.returncode == 0, process.stderr.read()
        process.stderr.close()


def test_names_cannot_command_a_terminal(capsys):
    common.say("broken: a\x1b[2J.png")
    assert capsys.readouterr().err == "broken: a\\x1b[2J.png\n"


def test_a_batch_log_gets_a_line_a_minute(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(common.time, "monotonic", lambda: now[0])
    progress = common.Progress("extracting", total=300, unit="images")
    for now[0] in range(0, 150, 10):
        progress.update(20)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("extracting ") for line in lines)


def test_a_lack_of_memory_reads_as_one(capsys):
    for error in (
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ):

        @common.command
        def main(argv=None):
            raise error

        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2 and "out of memory" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_found_before_the_work(tmp_path):
    with pytest.raises(OSError, match="cannot write .*x.csv"):
        with common.writing(tmp_path / "nowhere/x.csv"):
            pytest.fail("the work began")


def test_a_place_that_cannot_be_written_is_found_and_nothing_is_made(tmp_path, monkeypatch):
    common.check_writable(tmp_path / "new/deeper")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("text")
    with pytest.raises(OSError, match="file is a file"):
        common.check_writable(tmp_path / "file/run")
    monkeypatch.setattr(common.os, "access", lambda path, mode: False)
    with pytest.raises(OSError, match="cannot be written by this user"):
        common.check_writable(tmp_path / "new")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, number):
    def refuse(file):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(common, "take_lock", refuse)
    with pytest.warns(UserWarning, match="cannot be locked"):
        with common.lock(tmp_path):
            pass


@pytest.mark.parametrize("again", ["SIGTERM", "SIGINT"])
def test_a_second_signal_does_not_stop_the_save(again):
    process = script("""
        @common.command
        def main(argv=None):
            try:
                print("ready", flush=True)
                time.sleep(60)
            except KeyboardInterrupt:
                raise KeyboardInterrupt("epoch 3 is kept") from None
            finally:
                with common.signals_held():
                    print("saving", flush=True)
                    time.sleep(0.5)
                    print("saved", flush=True)
        main()""")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "saving\n"
    process.send_signal(getattr(signal, again))
    out, error = process.communicate(timeout=30)
    assert out == "saved\n"
    assert process.returncode == 143
    assert "epoch 3 is kept" in error
    assert "Traceback" not in error


def test_handlers_that_are_not_pythons_are_left_alone(monkeypatch):
    """signal.getsignal gives None for them, which signal.signal would not take back."""
    changed = []
    monkeypatch.setattr(common.signal, "getsignal", lambda number: None)
    monkeypatch.setattr(common.signal, "signal", lambda *given: changed.append(given))
    with common.signals_as_interrupts([]), common.signals_held():
        pass
    assert changed == []


def test_no_print_commands_a_terminal():
    """Prints, warnings, errors and argparse's own, whichever script: they all end in one place."""
    process = script("""
        import argparse, warnings
        @common.command
        def main(argv=None):
            print("image a\\x1b[2Jb\\x9b.png", "two\\tthree")
            warnings.warn("c\\x1b[2Jd")
            print("e\\x1b[2Jf", file=sys.stderr)
            argparse.ArgumentParser(prog="p").parse_args(["--\\x1b[2Jg"])
        main()""")
    out, error = process.communicate(timeout=30)
    assert out == "image a\\x1b[2Jb\\x9b.png two\tthree\n"
    assert "\x1b" not in error
    assert error.count("\\x1b[2J") == 3
    assert process.returncode == 2
