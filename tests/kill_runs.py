"""Kill real runs at random moments, resume each, and compare its files with an uninterrupted run.

    python tests/kill_runs.py --kills 100

The script takes some minutes; pytest does not collect it. Resumed runs are killed, too. Progress
goes to stderr. The script ends at the first run where a kill left a corrupt file or a traceback, or
which has other numbers once it is resumed, or leaves a temporary file. It names the folder.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; so no run has threads to fork

import torch

import compcos
from lab import drawings, run, shell
from lab.files import load_tensors, read_json, read_rows

SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
READERS = {".csv": read_rows, ".json": read_json, ".pt": load_tensors}
COMMAND = ["--data-root", "data", "--out", "out", "--epochs", "8", "--seed", "0", "1",
           "--save-scores"]


def start(folder, *more):
    """Start a run of two seeds in a folder, in a copy of this process; return its number.

    The copy has imported torch already, since that takes longer than the run and the kills should
    fall into the run. It saves after every epoch, so that many kills fall into a save.
    """
    number = os.fork()
    if number == 0:
        os._exit(run_here(folder, [*COMMAND, *more]))
    return number


def run_here(folder, arguments):
    """Run `python compcos.py` in a folder, printing to its file `printed`; return the status."""
    for number in (signal.SIGINT, signal.SIGHUP):  # until `main` handles them, and under nohup
        signal.signal(number, signal.SIG_DFL)
    os.chdir(folder)
    printed = os.open("printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    run.SAVE_SECONDS = 0
    drawings.IMAGES.update(train=4, seen=1, unseen=3)  # few, so that a run takes a second
    try:
        compcos.main(arguments)
    except SystemExit as end:
        return end.code
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def wait(number, seconds):
    """Wait at most so long for a process; return its status as subprocess does, None if it runs."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(number, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)


def contents(folder):
    """Return what the files below a folder hold, path -> content; raise if one is corrupt."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != ".lock":
            read = READERS.get(path.suffix, Path.read_bytes)
            found[str(path.relative_to(folder))] = plain(read(path))
    return found


def plain(value):
    """Return tensors as bytes with shape and type, without the seconds of epochs."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key != "seconds"}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes(), value.shape, value.dtype
    return value


def check_kill(folder, number, status):
    """Return what a killed run did wrong, a list."""
    wrong = []
    printed = (folder / "printed").read_text(errors="replace")
    # Before `main` handles signals they end Python as they do by default.
    if status not in (0, 128 + number, -number) or "Traceback" in printed:
        wrong.append(f"status {status} after signal {number}: {printed[-300:]!r}")
    try:
        contents(folder)
    except Exception as error:  # whatever a reader says of a corrupt file
        wrong.append(f"corrupt: {error}")
    return wrong


def one_trial(folder, latest, chance):
    """Kill one run once or several times within `latest` seconds, then let it end.

    Returns:
        The signals, and what was wrong, lists.
    """
    kills = []
    wrong = []
    more = []
    while not kills or chance.random() < 0.7:
        number = chance.choice(SIGNALS)
        process = start(folder, *more)
        more = ["--resume"]
        if wait(process, chance.uniform(0, latest)) is not None:  # the signal comes too late
            break
        os.kill(process, number)
        kills.append(number)
        wrong += check_kill(folder, number, wait(process, 120))
    status = wait(start(folder, "--resume"), 600)
    if status != 0:
        wrong.append(f"status {status} of the resumed run")
    return kills, wrong


def main():
    """Kill, resume, compare, report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    most = parser.parse_args().kills
    chance = random.Random(0)
    torch.optim.Adam(torch.nn.Linear(1, 1).parameters())  # imports much, the first time
    top = Path(tempfile.mkdtemp(prefix="kill_runs_"))
    whole = top / "whole"
    whole.mkdir()
    began = time.monotonic()
    if wait(start(whole), 600) != 0:
        raise SystemExit((whole / "printed").read_text())
    latest = time.monotonic() - began
    expected = contents(whole / "out")
    killed = 0
    while killed < most:
        folder = Path(tempfile.mkdtemp(dir=top))
        kills, wrong = one_trial(folder, latest, chance)
        left = contents(folder / "out")
        for name in sorted(expected.keys() | left.keys()):
            if left.get(name) != expected.get(name):
                wrong.append(f"{name} differs")
        killed += len(kills)
        if wrong:
            raise SystemExit(f"{folder}: {kills}: {wrong}")
        shutil.rmtree(folder)
        shell.print_status(f"{killed} kills")
    shutil.rmtree(top)
    print(f"{killed} kills, after which all runs ended equal, bit for bit")


if __name__ == "__main__":
    main()
