"""Kill real runs at random moments, let each go on with --resume, and compare what it leaves with
an uninterrupted run.

    python tests/kill_runs.py --kills 100

A script of some minutes, which pytest does not collect. It ends with status 1 and the kept folder's
name if a kill left a corrupt file, or a resumed run other bytes or numbers, or stray `.part` files.
"""

import argparse
import collections
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
STATUSES = {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130}
# A run that saves after every epoch, so that many kills fall into a save; the moments of the kills
# count from its file `begun`, since most of its time goes into imports.
PROGRAM = """
import common
common.wait_gently()
import compcos
import train
train.SAVE_SECONDS = 0
open("begun", "w").close()
compcos.main()
"""


def start(folder, epochs, *more):
    """A run of two seeds on the built-in data, both below `folder`; it has made its imports."""
    begun = folder / "begun"
    begun.unlink(missing_ok=True)
    command = [sys.executable, "-c", PROGRAM, "--data-root", "data", "--out", "out",
               "--epochs", str(epochs), "--seed", "0", "1", "--save-scores", *more]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    with open(folder / "printed", "w") as printed:
        run = subprocess.Popen(command, cwd=folder, env=environment, stdout=printed,
                               stderr=subprocess.STDOUT)
    while not begun.exists() and run.poll() is None:
        time.sleep(0.01)
    return run


def contents(path):
    """What of a file does not depend on the clock, comparable by ==. An exception if the file is
    corrupt."""
    if path.suffix == ".csv":
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return [{key: cell for key, cell in row.items() if key != "seconds"} for row in rows]
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    if path.suffix == ".pt":
        return plain(torch.load(path, weights_only=True))
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {name: plain(array) for name, array in arrays.items()}
    if path.suffix == ".npy":
        return plain(np.load(path))
    return path.read_bytes()


def plain(value):
    """Tensors and arrays as bytes, with their shape and type; without the seconds of epochs."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key != "seconds"}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return value.tobytes(), value.shape, str(value.dtype)
    return value


def files_below(folder):
    """Path below `folder` -> path, of all files but the lock and `.part` files."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".part" and path.name != ".lock":
            found[str(path.relative_to(folder))] = path
    return found


def parts_below(folder):
    """The `.part` files and folders below `folder`."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.part"))


def corrupt_files(folder):
    """The files below `folder` that cannot be read whole."""
    found = []
    for name, path in files_below(folder).items():
        try:
            contents(path)
        except Exception as error:  # whatever a reader says of a corrupt file
            found.append(f"{name} ({type(error).__name__}: {error})")
    return found


def differences(folder, expected):
    """What below `folder` differs from `expected`, name -> contents."""
    files = files_below(folder)
    found = []
    for name in sorted(expected.keys() | files.keys()):
        if name not in files or name not in expected:
            found.append(f"{name} is only in one of both")
        elif contents(files[name]) != expected[name]:
            found.append(f"{name} differs")
    return found


def kill_once(folder, epochs, name, moment, resume):
    """Start a run and send it the signal `name` after `moment` seconds. Returns its status and how
    far it had come."""
    run = start(folder, epochs, *(["--resume"] if resume else []))
    try:
        run.wait(moment)
    except subprocess.TimeoutExpired:
        run.send_signal(getattr(signal, name))
    status = run.wait(120)
    return status, stage(folder)


def stage(folder):
    """How far a run had come."""
    if not (folder / "data" / "shapes" / "images.csv").exists():
        return "before the data were there"
    done = [seed for seed in (0, 1) if (folder / "out" / f"seed{seed}" / "metrics.json").exists()]
    if (folder / "out" / "metrics.json").exists():
        return "after the end"
    begun = [seed for seed in (0, 1) if (folder / "out" / f"seed{seed}" / "last.pt").exists()]
    if not begun:
        return "before the first epoch was kept"
    return f"in seed {min(len(done), 1)}"


def check_kill(folder, name, status):
    """What a killed run did wrong, a list."""
    wrong = [f"corrupt: {file}" for file in corrupt_files(folder)]
    printed = (folder / "printed").read_text(errors="replace")
    number = getattr(signal, name)
    # Before `main` handles signals they end Python as they do by default.
    if status not in (0, STATUSES[name], -number):
        wrong.append(f"status {status} after {name}: {printed[-300:]!r}")
    if status == STATUSES[name] and "Traceback" in printed:
        wrong.append(f"a traceback after {name}: {printed[-300:]!r}")
    if name != "SIGKILL" and status == STATUSES[name] and parts_below(folder / "out"):
        wrong.append(f"{name} left {parts_below(folder / 'out')}")
    return wrong


def one_trial(folder, epochs, latest, chance, whole):
    """Kill one run once or several times within `latest` seconds, then let it end; (kills, what was
    wrong).

    kills: a list of (signal, how far the run had come).
    """
    if chance.random() < 0.75:  # else the run makes the built-in data, too
        shutil.copytree(whole / "data", folder / "data", copy_function=os.link)
    kills = []
    wrong = []
    is_again = True
    while is_again:
        name = chance.choice(list(STATUSES))
        moment = chance.uniform(0, latest)
        status, where = kill_once(folder, epochs, name, moment, bool(kills))
        if status == 0:  # the signal came too late
            break
        kills.append((name, where))
        wrong += check_kill(folder, name, status)
        is_again = chance.random() < 0.5
    run = start(folder, epochs, "--resume")
    if run.wait(600) != 0:
        wrong.append(f"the resumed run failed: {(folder / 'printed').read_text()[-300:]!r}")
    return kills, wrong


def main():
    """Kill, resume, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--epochs", type=int, default=4, help="of each run (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    top = Path(tempfile.mkdtemp(prefix="kill_runs_"))
    whole = top / "whole"
    whole.mkdir()
    for _ in range(2):  # the first makes the data, the second is timed
        run = start(whole, options.epochs)
        began = time.monotonic()
        if run.wait() != 0:
            raise SystemExit((whole / "printed").read_text())
        seconds = time.monotonic() - began
    expected = {name: contents(path) for name, path in files_below(whole / "out").items()}
    latest = seconds
    counts = collections.Counter()
    bad = 0
    trials = 0
    while sum(counts.values()) < options.kills:
        folder = top / f"trial{trials}"
        folder.mkdir()
        trials += 1
        kills, wrong = one_trial(folder, options.epochs, latest, chance, whole)
        counts.update(kills)
        latest *= 1.1 if kills else 0.7  # others may use the machine more or less than before
        wrong += differences(folder / "out", expected)
        wrong += [f"left: {part}" for part in parts_below(folder)]
        print(f"{sum(counts.values())} kills: {kills}: {'; '.join(wrong) or 'equal'}", flush=True)
        if wrong:
            bad += 1
        else:
            shutil.rmtree(folder)
    for (name, where), count in sorted(counts.items()):
        print(f"{name:8} {where:32} {count:4}")
    print(f"{sum(counts.values())} kills of {trials} runs: {trials - bad} runs ended as if they "
          f"had not been killed, {bad} did not; an uninterrupted run takes {seconds:.1f} s "
          "after its imports")
    if bad:
        raise SystemExit(f"see {top}")
    shutil.rmtree(top)


if __name__ == "__main__":
    main()
