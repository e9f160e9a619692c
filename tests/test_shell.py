"""Tests of shell.py: what people see of progress, how scripts end."""

import importlib
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from lab import shell

HERE = Path(__file__).parent


def script(text, *arguments, **keywords):
    """A Python process with lab.shell imported, from the project's folder."""
    program = "import sys\nsys.path.insert(0, '.')\nfrom lab import files, shell\nimport os, time\n"
    program += textwrap.dedent(text)
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="replace")
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, cwd=HERE.parent, text=True, **(streams | keywords))


# ---- progress ----


def test_progress_is_one_line_on_a_terminal_and_a_line_a_minute_in_a_log(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(shell.time, "monotonic", lambda: now[0])
    progress = shell.Progress("extracting", total=300, unit="images")
    for now[0] in range(0, 150, 10):
        progress.update(20)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0] == "extracting 140/300, 2.33 images/s, 0:01:09 left"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with shell.Progress("decoding", total=2000, unit="images") as progress:
        progress.update(500)  # at once: not shown
        now[0] += 10
        progress.update(500, note="3 broken")
    shown = "\r\x1b[Kdecoding 1,000/2000, 100 images/s, 0:00:10 left, 3 broken\n"
    assert capsys.readouterr() == ("", shown)


# ---- scripts ----


@pytest.mark.parametrize("error, status, shown", [
    (ValueError("no such mix"), 2, "error: no such mix\n"),
    (FileNotFoundError("no a.txt"), 2, "error: no a.txt\n"),
    (KeyboardInterrupt("saved"), 130, "\nsaved\n"),
    (MemoryError(), 2, "error: out of memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "error: out of memory"),
    (ValueError("allocated/photos: no image"), 2, "error: allocated/photos: no image\n")])
def test_commands_end_in_one_line_and_a_status(error, status, shown, capsys):
    @shell.command
    def main(argv=None):
        raise error

    with pytest.raises(SystemExit) as end:
        main(["x"])
    out, said = capsys.readouterr()
    assert end.value.code == status
    assert not out and said.startswith(shown) and said.endswith("\n")
    assert "\n" not in said.strip()


def test_commands_pass_on_results_warnings_and_mistakes_of_the_program(capsys):
    before = warnings.showwarning

    @shell.command
    def main(argv=None):
        warnings.warn("half is missing")
        return argv["x"]

    assert main({"x": 1}) == 1
    assert capsys.readouterr() == ("", "warning: half is missing\n")
    assert warnings.showwarning is before
    with pytest.raises(KeyError):
        main({})


@pytest.mark.parametrize("name, status, ignored", [
    ("SIGTERM", 143, "SIGHUP"), ("SIGHUP", 129, "SIGTERM"), ("SIGINT", 130, "SIGHUP")])
def test_signals_save_as_ctrl_c_does(name, status, ignored):
    """A second one does not cut the saving. One that is ignored, as under nohup, stays so."""
    program = """
        import signal
        ignored = getattr(signal, sys.argv[1])
        signal.signal(ignored, signal.SIG_IGN)
        @shell.command
        def main(argv=None):
            os.kill(os.getpid(), ignored)
            try:
                print("ready", flush=True)
                time.sleep(60)
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                print("saved", flush=True)
        main()"""
    process = script(program, ignored)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, name))
    out, error = process.communicate(timeout=30)
    assert out == "saved\n" and process.returncode == status and "Traceback" not in error


def test_a_reader_that_goes_away_ends_the_work_quietly():
    """As `head -1` does; in ASCII, too."""
    program = """
        @shell.command
        def main(argv=None):
            for i in range(20000):
                print("τ α", i)
        main()"""
    process = script(program, env=dict(os.environ, PYTHONIOENCODING="ascii"))
    assert process.stdout.readline() == "\\u03c4 \\u03b1 0\n"
    process.stdout.close()
    process.wait(timeout=30)
    assert process.returncode == shell.CLOSED_PIPE and process.stderr.read() == ""
    process.stderr.close()


def test_closed_streams_end_nothing():
    """Python gives None for them."""
    program = """
        @shell.command
        def main(argv=None):
            print("τ", flush=True)
            with shell.Progress("x", 1, "") as progress:
                progress.update(1)
            raise ValueError("at the end")
        main()"""

    def close():
        os.close(1)
        os.close(2)

    process = script(program, stdout=None, stderr=None, preexec_fn=close)
    assert process.wait(timeout=30) == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_told_at_the_end():
    """What was to be printed is lost, but not the work."""
    program = """
        @shell.command
        def main(argv=None):
            print("a table")
            print("worked", file=sys.stderr)
        main()"""
    with open("/dev/full", "w") as full:
        process = script(program, stdout=full, env=dict(os.environ, PYTHONUNBUFFERED=""))
        error = process.communicate(timeout=30)[1]
    assert process.returncode == 2
    assert error == "worked\nerror: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("name", [
    "compcos", "data", "evaluate", "feasibility", "lab.baselines", "lab.benchmark", "lab.download",
    "lab.reproduce"])
def test_every_script_helps(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(name).main(["--help"])
    assert capsys.readouterr().out.startswith("usage: ")
