"""Tests of common.py: what people see of progress, that files are whole or not there, exit
statuses."""

import contextlib
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
    """Whatever their age; those of a living process, and those of a download, stay."""
    path = tmp_path / "log.csv"
    dead = common.part_of(path)
    dead.write_text("half")
    living = common.part_of(path)
    living.write_text("half")
    download = tmp_path / ".log.csv.0123abcd.part"
    download.write_text("half")
    writer = script(
        """
        with common.held(sys.argv[1]):
            print("held", flush=True)
            time.sleep(60)""",
        living,
    )
    try:
        assert writer.stdout.readline() == "held\n"
        common.write_whole(path, b"whole")
        assert path.read_text() == "whole" and not dead.exists()
        assert living.exists() and download.exists()
    finally:
        writer.kill()
        writer.communicate()
    common.clear_parts(tmp_path)
    assert not living.exists() and download.exists()


def test_parts_where_nobody_can_be_seen_are_cleared_after_an_hour(tmp_path, monkeypatch):
    """An empty one, too."""
    monkeypatch.setattr(common, "take_lock", lambda handle: False)
    monkeypatch.setattr(common, "HOLDING_SECONDS", 0)
    for content in (b"half", b""):
        old = common.part_of(tmp_path / "log.csv")
        fresh = common.part_of(tmp_path / "log.csv")
        for part in (old, fresh):
            part.write_bytes(content)
        os.utime(old, (0, 0))
        common.clear_parts(tmp_path)
        assert not old.exists() and fresh.exists()


def test_empty_parts_are_cleared_unless_somebody_comes_to_hold_them(tmp_path, monkeypatch):
    """Killed before the first byte, or about to write it."""
    for make in (Path.touch, Path.mkdir):
        dead = common.part_of(tmp_path / "dead")
        born = common.part_of(tmp_path / "born")
        make(dead)
        make(born)
        with contextlib.ExitStack() as stack:
            monkeypatch.setattr(common.time, "sleep",
                                lambda seconds: stack.enter_context(common.held(born)))
            common.clear_parts(tmp_path, "born")
            monkeypatch.setattr(common.time, "sleep", lambda seconds: None)
            common.clear_parts(tmp_path)
            assert born.exists() and not dead.exists()
        common.remove(born)


def test_names_of_parts_do_not_rest_on_the_process(tmp_path):
    """In containers every process has the number 1."""
    first = common.part_of(tmp_path / "log.csv")
    assert first != common.part_of(tmp_path / "log.csv") and str(os.getpid()) not in (
        first.name.split(".")
    )


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_costs_a_warning(number, tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def no_locks(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match="has no locks"), common.lock(tmp_path):
        common.write_whole(tmp_path / "log.csv", b"whole")
    assert (tmp_path / "log.csv").read_text() == "whole"


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


def test_a_second_signal_does_not_cut_the_saving():
    """Nor a Ctrl-C in its midst; after a while one does, if the saving hangs."""
    program = """
        import signal
        common.SAVING_SECONDS = 1
        @common.command
        def main(argv=None):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                for name in ("SIGTERM", "SIGINT", "SIGHUP"):
                    os.kill(os.getpid(), getattr(signal, name))
                print("saved", flush=True)
                time.sleep(1.2)
                os.kill(os.getpid(), signal.SIGINT)
                print("not interrupted")
        main()"""
    process = script(program)
    out, error = process.communicate(timeout=30)
    assert out == "saved\n" and process.returncode == 143 and "Traceback" not in error


def test_signals_wait_for_the_end_of_a_block_that_holds_them():
    with pytest.raises(KeyboardInterrupt):
        with common.signals_held() as received:
            signal.raise_signal(signal.SIGINT)
            done = list(received)
    assert done == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_that_are_not_pythons_stay(monkeypatch):
    """Of them signal.getsignal says None, which cannot be given back."""
    number = signal.SIGTERM
    getsignal = signal.getsignal
    monkeypatch.setattr(
        common.signal, "getsignal", lambda other: None if other == number else getsignal(other)
    )
    installed = []
    monkeypatch.setattr(
        common.signal, "signal", lambda number, handler: installed.append((number, handler))
    )
    with common.signals_as_interrupts([]):
        pass
    assert installed and number not in [other for other, _ in installed]


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


def test_closed_streams_end_nothing(tmp_path):
    """Python gives None for them."""
    program = """
        @common.command
        def main(argv=None):
            print("τ", flush=True)
            print("τ", file=sys.stderr)
            with common.Progress("x") as progress:
                progress.update(1)
            open(sys.argv[1], "w").write("done")
            raise ValueError("x")
        main()"""
    close = lambda: (os.close(1), os.close(2))
    process = script(program, tmp_path / "done", stdout=None, stderr=None, preexec_fn=close)
    assert process.wait(timeout=30) == 2 and (tmp_path / "done").read_text() == "done"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_told_at_the_end(tmp_path):
    """What was to be printed is lost, but not the work."""
    program = """
        @common.command
        def main(argv=None):
            print("a table")
            open(sys.argv[1], "w").write("done")
        main()"""
    with open("/dev/full", "w") as full:
        process = script(program, tmp_path / "done", stdout=full)
        error = process.communicate(timeout=30)[1]
    assert process.returncode == 2 and (tmp_path / "done").read_text() == "done"
    assert error == ("error: not all that was printed could be written: No space left on "
                     "device\n")


def test_names_cannot_command_a_terminal(capsys):
    common.say("broken: a\x1b[2J.png\nand others")
    assert capsys.readouterr().err == "broken: a\\x1b[2J.png\nand others\n"


def test_no_print_or_error_of_a_script_commands_a_terminal():
    """Wherever a name gets in: a print, a warning, argparse's and a script's errors."""
    program = r"""
        import argparse, warnings
        @common.command
        def main(argv=None):
            name = "a\x1b[2J\r\u202e.png"
            parser = argparse.ArgumentParser()
            print(name, 1, flush=True)
            warnings.warn(name)
            with common.Progress(name) as progress:
                progress.shown -= 100
                progress.update(1, note=name)
            if argv:
                parser.parse_args([name])
            raise ValueError(name)
        main(sys.argv[1:])"""
    for arguments in ([], ["argparse"]):
        process = script(program, *arguments)
        out, error = process.communicate(timeout=30)
        shown = "a\\x1b[2J\\r\\u202e.png"
        assert process.returncode == 2
        assert out == f"{shown} 1\n"
        assert error.count(shown) == 4 and (out + error).replace("\n", "").isprintable()


def test_every_script_helps_in_any_encoding():
    program = """
        encodings = ("ascii", "cp1252")
        for name in sys.argv[1:]:
            module = __import__(name)
            main = module.main
            if name in ("evaluate", "feasibility"):
                main = common.command(main)
            for encoding in encodings:
                sys.stdout.reconfigure(encoding=encoding, errors="strict")
                try:
                    main(["--help"])
                except SystemExit as end:
                    assert end.code == 0, (name, encoding)"""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in HERE.parent.glob("*.py")}
    names = [name for name, text in texts.items() if "def main(argv=None)" in text]
    assert len(names) >= 9
    process = script(program, *names)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0 and not error
    assert out.count("usage: ") == 2 * len(names)


@pytest.mark.parametrize("name", ["evaluate", "feasibility"])
def test_scripts_that_stand_alone_do_so(name, tmp_path):
    """Beside common.py they take its care of terminals; a copy works without it."""
    text = (HERE.parent / f"{name}.py").read_text(encoding="utf-8")
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    missing = "none\x1b[2J.npz"
    arguments = [missing] if name == "evaluate" else ["--pairs", missing, "--vectors", "x"]
    for folder in (tmp_path, HERE.parent):
        process = subprocess.run(
            [sys.executable, folder / f"{name}.py", *arguments], capture_output=True, text=True
        )
        assert process.returncode == 2 and process.stderr.startswith("error: ")
    assert "\x1b" not in process.stderr and "none\\x1b[2J.npz" in process.stderr


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


def test_a_place_that_cannot_be_written_is_found_by_trying(tmp_path, monkeypatch):
    common.check_writable(tmp_path / "not/yet/there")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write into .*file: .*another --out"):
        common.check_writable(tmp_path / "file")
    with pytest.raises(OSError, match="cannot write into .*run"):
        common.check_writable(tmp_path / "file" / "run")

    def read_only(dir):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(common.tempfile, "TemporaryFile", read_only)
    with pytest.raises(OSError, match="cannot write into .*there: Read-only file system"):
        common.check_writable(tmp_path / "not/yet/there")
