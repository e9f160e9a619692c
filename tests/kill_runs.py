"""Kill real runs at random moments, resume each, and compare its files with an uninterrupted run.

    python tests/kill_runs.py --kills 100

The script takes some minutes; pytest does not collect it. Resumed runs are killed, too, half of
them in their first epoch after --resume. Progress goes to stderr. The status is 1, and a folder is
kept and named, if a kill left a corrupt file or a traceback, or if a resumed run has other bytes or
numbers, or leaves a temporary file.
"""

import argparse
import csv
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; so no run has threads to fork

import torch

import compcos
from lab import drawings, run, shell

STATUSES = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}


class Killable:
    """A run of two seeds on the built-in data, both below `folder`, in a process of its own.

    The process is a copy of this one, which has imported torch already, since that takes longer
    than the run and the kills should fall into the run. It saves after every epoch, so that many
    kills fall into a save.
    """

    def __init__(self, folder, *more, step=None, number=None):
        self.status = None
        self.number = os.fork()
        if self.number == 0:
            if step is not None:
                signal_at_step(step, number)
            os._exit(run_here(folder, ["--data-root", "data", "--out", "out", "--epochs", "8",
                                       "--seed", "0", "1", "--save-scores", *more]))

    def wait(self, seconds):
        """Wait at most so long for the end, and tell if it has come; set `status` as subprocess."""
        end = time.monotonic() + seconds
        while self.status is None and time.monotonic() < end:
            ended, status = os.waitpid(self.number, os.WNOHANG)
            if ended:
                self.status = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.002)
        return self.status is not None


def signal_at_step(step, number):
    """Let this process send itself a signal at a step of its training."""
    steps = itertools.count(1)
    update = compcos.EMA.update

    def counted(ema):
        update(ema)
        if next(steps) == step:
            os.kill(os.getpid(), number)

    compcos.EMA.update = counted


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
    status = 0
    try:
        compcos.main(arguments)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    return status


def contents(path):
    """Return a file's contents that do not depend on the clock; raise if it is corrupt."""
    if path.suffix == ".csv":
        with open(path, newline="", encoding="utf-8") as file:
            return plain(list(csv.DictReader(file)))
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    if path.suffix == ".pt":
        return plain(torch.load(path, weights_only=True))
    return path.read_bytes()


def plain(value):
    """Return tensors as bytes with shape and type, without the seconds of epochs and the folder."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in ("seconds", "folder")}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes(), value.shape, value.dtype
    return value


def files_below(folder):
    """Return all files but the lock, path below `folder` -> path."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path for path in files}


def check_kill(folder, number, status):
    """Return what a killed run did wrong, a list."""
    wrong = []
    printed = (folder / "printed").read_text(errors="replace")
    # Before `main` handles signals they end Python as they do by default.
    if status not in (0, STATUSES[number], -number) or "Traceback" in printed:
        wrong.append(f"status {status} after signal {number}: {printed[-300:]!r}")
    for name, path in files_below(folder).items():
        try:
            if path.suffix != ".part":
                contents(path)
        except Exception as error:  # whatever a reader says of a corrupt file
            wrong.append(f"corrupt: {name} ({error})")
    return wrong


def one_trial(folder, latest, chance, whole):
    """Kill one run once or several times within `latest` seconds, then let it end.

    Returns:
        The signals, and what was wrong, lists.
    """
    if chance.random() < 0.75:  # else the run makes the built-in data, too
        shutil.copytree(whole / "data", folder / "data", copy_function=os.link)
    kills = []
    wrong = []
    while not kills or chance.random() < 0.7:
        number = chance.choice(list(STATUSES))
        if kills and chance.random() < 0.5:  # in the first epoch, which has five steps
            process = Killable(folder, "--resume", step=chance.randint(1, 5), number=number)
            if process.wait(120) and process.status == 0:  # nothing was left to train
                break
        else:
            process = Killable(folder, *(["--resume"] if kills else []))
            if process.wait(chance.uniform(0, latest)):  # the signal comes too late
                break
            os.kill(process.number, number)
        if not process.wait(120):
            os.kill(process.number, signal.SIGKILL)
            process.wait(60)
        kills.append(number)
        wrong += check_kill(folder, number, process.status)
    process = Killable(folder, "--resume")
    process.wait(600)
    if process.status != 0:
        wrong.append(f"status {process.status} of the resumed run")
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
    process = Killable(whole)
    process.wait(600)
    if process.status != 0:
        raise SystemExit((whole / "printed").read_text())
    latest = time.monotonic() - began
    expected = {name: contents(path) for name, path in files_below(whole / "out").items()}
    killed = 0
    runs = 0
    bad = []
    while killed < most:
        folder = top / f"trial{runs}"
        folder.mkdir()
        kills, wrong = one_trial(folder, latest, chance, whole)
        latest *= 1.1 if kills else 0.7  # others may use the machine more or less than before
        left = files_below(folder / "out")
        for name in sorted(expected.keys() | left.keys()):
            if name not in left or contents(left[name]) != expected.get(name):
                wrong.append(f"{name} differs")
        runs += 1
        killed += len(kills)
        if wrong:
            bad.append(folder)
            shell.print_status(f"{folder}: {kills}: {wrong}")
        else:
            shutil.rmtree(folder)
        shell.print_status(f"{killed} kills of {runs} runs, {len(bad)} of them bad")
    print(f"{killed} kills of {runs} runs, {runs - len(bad)} of which ended equal, bit for bit")
    if bad:
        raise SystemExit(f"see {shell.shorten(bad)}")
    shutil.rmtree(top)


if __name__ == "__main__":
    main()
