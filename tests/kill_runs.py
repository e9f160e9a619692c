"""Kill real runs at random moments, let them go on, and compare what they leave with a run that
nobody disturbed. Not collected by pytest: it takes minutes.

    python tests/kill_runs.py --kills 100

Runs train on the built-in data and save after every epoch, so that many kills come inside a save.
Each one is killed three times (SIGKILL, SIGTERM and SIGINT in turn), goes on with --resume each
time, and then ends. After a kill no file may be broken; at the end every file must equal that of
the undisturbed run, bit for bit (in log.csv and last.pt apart from seconds), and nothing else may
be there. Exits with 1 if anything differs.
"""

import argparse
import csv
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import common
import data
import train

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
KILLS_A_RUN = 3
FORMS = (["--seed", "0", "--save-scores"], ["--seed", "0", "1"])  # a folder, and one a seed
PROGRAM = """
import sys
import compcos
import train
train.SAVE_SECONDS = 0
compcos.main(sys.argv[1:])
"""


def start(folder, out, options):
    """A run as a process."""
    command = [sys.executable, "-c", PROGRAM, "--data-root", folder / "data", "--out", out,
               "--epochs", "12", "--device", "cpu", *options]
    return subprocess.Popen([str(word) for word in command], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(folder, out, options):
    """Run to the end; the seconds it took. RuntimeError if it fails."""
    started = time.monotonic()
    process = start(folder, out, options)
    _, error = process.communicate()
    if process.returncode:
        raise RuntimeError(f"status {process.returncode}: {error[-2000:]}")
    return time.monotonic() - started


def kill(folder, out, options, number, moment):
    """Start a run and send a signal after `moment` seconds; its exit status and stderr."""
    process = start(folder, out, options)
    try:
        process.wait(moment)
    except subprocess.TimeoutExpired:
        process.send_signal(number)
    _, error = process.communicate()
    return process.returncode, error


def broken_files(out):
    """What is in a run's folder and cannot be read, apart from `.part` files: name and reason."""
    broken = []
    for path in sorted(out.rglob("*")):
        if path.is_dir() or path.suffix == ".part":
            continue
        try:
            read(path)
        except Exception as error:  # whatever a broken file raises is what is looked for
            broken.append(f"{path.name} ({error})")
    return broken


def read(path):
    """Read a file of a run, however it is made; an exception if it is not whole."""
    if path.suffix == ".pt":
        train.load_file(path, ())
    elif path.suffix == ".npz":
        data.check_archive(path)
    elif path.suffix == ".json":
        json.loads(path.read_text())
    elif path.suffix == ".csv":
        with open(path, newline="") as file:
            rows = list(csv.reader(file))
        if len({len(row) for row in rows}) != 1:
            raise ValueError("rows of different lengths")


def contents(out):
    """Every file below a folder: relative name -> what is to be equal in two runs."""
    files = {}
    for path in sorted(out.rglob("*")):
        if path.is_dir():
            continue
        name = str(path.relative_to(out))
        if path.name == "log.csv":
            with open(path, newline="") as file:
                files[name] = [row[:3] for row in csv.reader(file)]  # the fourth is seconds
        elif path.name == "last.pt":
            state = train.load_file(path, ("history",))
            history = [{**row, "seconds": 0.0} for row in state["history"]]
            files[name] = repr({**state, "history": history, "model": "", "optimizer": "",
                                "best": "", "average": ""})
            for part in ("model", "optimizer", "best", "average"):
                files[f"{name}, {part}"] = bytes_of(state[part])
        else:
            files[name] = path.read_bytes()
    return files


def bytes_of(state):
    """Nested dictionaries and lists with their tensors' bytes in the place of the tensors."""
    if isinstance(state, dict):
        return {key: bytes_of(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [bytes_of(value) for value in state]
    if hasattr(state, "numpy"):
        return state.numpy().tobytes()
    return state


def differences(out, expected):
    """The names of files that are not as in the undisturbed run."""
    found = contents(out)
    names = sorted(found.keys() | expected.keys())
    return [name for name in names if found.get(name) != expected.get(name)]


def kill_one_run(folder, number, choose, expected, seconds, faults):
    """Kill a run three times and let it end. Faults are appended; returns (signal, status) pairs.
    """
    form = number % len(FORMS)
    out = folder / f"run{number}"
    ends = []
    for turn in range(KILLS_A_RUN):
        options = [*FORMS[form], "--resume"] if turn else FORMS[form]
        sent = SIGNALS[(number + turn) % len(SIGNALS)]
        moment = choose.uniform(0.1, 1.0) * seconds[form]
        status, error = kill(folder, out, options, sent, moment)
        ends.append((sent.name, status))
        if error.startswith("error: "):
            faults.append(f"run {number}, {sent.name} at {moment:.2f} s: {error.strip()}")
        for broken in broken_files(out):
            faults.append(f"run {number}, {sent.name} at {moment:.2f} s: {broken}")
    try:
        finish(folder, out, [*FORMS[form], "--resume"])
    except RuntimeError as error:
        faults.append(f"run {number} does not go on: {error}")
    for name in differences(out, expected[form]):
        faults.append(f"run {number}: {name} differs from the undisturbed run")
    return ends


def main():
    """Kill, compare, report."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--kills", type=int, default=100, help="at least so many (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    options = parser.parse_args()
    choose = random.Random(options.seed)
    ends = Counter()
    faults = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = []
        seconds = []
        finish(folder, folder / "warm", FORMS[0])  # which draws the data
        for form, arguments in enumerate(FORMS):
            out = folder / f"whole{form}"
            seconds.append(finish(folder, out, arguments))
            expected.append(contents(out))
        runs = -(-options.kills // KILLS_A_RUN)
        with common.Progress("killing", runs, "runs") as progress:
            for number in range(runs):
                ends.update(kill_one_run(folder, number, choose, expected, seconds, faults))
                progress.update()
    for (sent, status), count in sorted(ends.items()):
        print(f"{sent}: {count} ended with status {status}")
    print(f"{runs * KILLS_A_RUN} kills of {runs} runs: {len(faults)} faults")
    for fault in faults:
        print(f"  {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
