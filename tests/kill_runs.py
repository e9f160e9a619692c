"""Kill real runs at random moments, let each go on with --resume, and compare what it leaves with
an uninterrupted run.

    python tests/kill_runs.py --kills 100

A script of some minutes, which pytest does not collect: progress on stderr, a table at the end, and
status 1 and the name of a kept folder if a kill left a corrupt file, a traceback or stray `.part`
files, or a resumed run other bytes or numbers.
"""

import argparse
import collections
import csv
import json
import math
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

import numpy as np
import torch

import common
import compcos
import drawings
import evaluate
import train

STATUSES = {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129}
KINDS = ("corrupt files", "files that differ", "tracebacks", "stray .part files", "other statuses")
PLACES = ("before the data were there", "before the first epoch was kept", "in seed 0", "in seed 1",
          "after the end")


class Killable:
    """A run of two seeds on the built-in data, both below `folder`, in a process of its own.

    The process is a copy of this one, which has imported torch already: that takes longer than the
    run, and the kills are to fall into the run. It saves after every epoch, so that many fall into
    a save.
    """

    def __init__(self, folder, epochs, *more):
        self.status = None
        self.number = os.fork()
        if self.number == 0:
            arguments = ["--data-root", "data", "--out", "out", "--epochs", str(epochs), "--seed",
                         "0", "1", "--save-scores", *more]
            os._exit(run_here(folder, arguments))

    def wait(self, seconds):
        """Wait at most so long for the end; whether it has come. `status` is as of subprocess."""
        end = time.monotonic() + seconds
        while self.status is None and time.monotonic() < end:
            ended, status = os.waitpid(self.number, os.WNOHANG)
            if ended:
                self.status = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.002)
        return self.status is not None


def run_here(folder, arguments):
    """Let this process be `python compcos.py` in a folder, printing to its file `printed`; returns
    its status."""
    for name in ("SIGINT", "SIGHUP"):  # until `main` handles them, and where nohup ignores one
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.chdir(folder)
    printed = os.open("printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    train.SAVE_SECONDS = 0
    evaluate.RESAMPLES = 20
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
    run = Killable(folder, epochs, *(["--resume"] if resume else []))
    if not run.wait(moment):
        os.kill(run.number, getattr(signal, name))
        if not run.wait(120):
            os.kill(run.number, signal.SIGKILL)
            run.wait(math.inf)
            return f"still running 120 s after {name}", stage(folder)
    return run.status, stage(folder)


def stage(folder):
    """How far a run had come, of PLACES."""
    out = folder / "out"
    if not (folder / "data" / "shapes" / "images.csv").exists():
        return "before the data were there"
    if (out / "metrics.json").exists():
        return "after the end"
    if (out / "seed0" / "metrics.json").exists():
        return "in seed 1"
    if (out / "seed0" / "last.pt").exists():
        return "in seed 0"
    return "before the first epoch was kept"


def check_kill(folder, name, status, parts):
    """What a killed run did wrong, kind -> a list; `parts` were there before."""
    wrong = collections.defaultdict(list)
    printed = (folder / "printed").read_text(errors="replace")
    number = getattr(signal, name)
    # Before `main` handles signals they end Python as they do by default.
    if status not in (0, STATUSES[name], -number):
        wrong["other statuses"].append(f"{status} after {name}: {printed[-300:]!r}")
    if "Traceback" in printed:
        wrong["tracebacks"].append(f"after {name}: {printed[-300:]!r}")
    wrong["corrupt files"] += corrupt_files(folder)
    if name != "SIGKILL" and status == STATUSES[name]:
        wrong["stray .part files"] += sorted({*parts_below(folder)} - {*parts})
    return wrong


def one_trial(folder, epochs, latest, chance, whole):
    """Kill one run once or several times within `latest` seconds, then let it end.

    Returns the kills, a list of (signal, of PLACES how far the run had come), and what was wrong,
    kind -> list.
    """
    if chance.random() < 0.75:  # else the run makes the built-in data, too
        shutil.copytree(whole / "data", folder / "data", copy_function=os.link)
    kills = []
    wrong = collections.defaultdict(list)
    is_again = True
    while is_again:
        name = chance.choice(list(STATUSES))
        moment = chance.uniform(0, latest)
        parts = parts_below(folder)
        status, where = kill_once(folder, epochs, name, moment, bool(kills))
        if status == 0:  # the signal came too late
            break
        kills.append((name, where))
        for kind, found in check_kill(folder, name, status, parts).items():
            wrong[kind] += found
        is_again = chance.random() < 0.5
    run = Killable(folder, epochs, "--resume")
    run.wait(600)
    printed = (folder / "printed").read_text(errors="replace")
    if run.status != 0:
        wrong["other statuses"].append(f"{run.status} of the resumed run: {printed[-300:]!r}")
    return kills, wrong


def uninterrupted(folder, epochs):
    """Run twice, for the data to be there the second time; its contents and the seconds of that."""
    folder.mkdir()
    for _ in range(2):
        began = time.monotonic()
        run = Killable(folder, epochs)
        run.wait(math.inf)
        seconds = time.monotonic() - began
        if run.status != 0:
            raise SystemExit((folder / "printed").read_text())
    files = files_below(folder / "out")
    return {name: contents(path) for name, path in files.items()}, seconds


def show(counts, runs, wrong, seconds):
    """The closing table, on stdout. counts: (how far the run had come, signal) -> kills; runs: of
    "all" and of "equal" how many; wrong: kind -> list."""
    print(f"{'kills':<34}" + "".join(f"{name:>9}" for name in [*STATUSES, "all"]))
    for place in PLACES:
        row = [counts[place, name] for name in STATUSES]
        print(f"{place:<34}" + "".join(f"{count:>9}" for count in [*row, sum(row)]))
    totals = [sum(counts[place, name] for place in PLACES) for name in STATUSES]
    print(f"{'all':<34}" + "".join(f"{count:>9}" for count in [*totals, sum(totals)]))
    print(f"\n{'runs killed and resumed':<34}{runs['all']:>9}")
    print(f"{'  ended equal, bit for bit':<34}{runs['equal']:>9}")
    for kind in KINDS:
        print(f"{kind:<34}{len(wrong[kind]):>9}")
    print(f"an uninterrupted run took {seconds:.1f} s")


def kill_many(top, options):
    """Kill and resume runs below `top` until there were as many kills as wished; what `show`
    takes."""
    chance = random.Random(options.seed)
    expected, seconds = uninterrupted(top / "whole", options.epochs)
    latest = seconds
    counts = collections.Counter()
    runs = collections.Counter()
    wrong = {kind: [] for kind in KINDS}
    with common.Progress("killing", options.kills, "kills") as progress:
        while counts.total() < options.kills:
            folder = top / f"trial{runs['all']}"
            folder.mkdir()
            kills, found = one_trial(folder, options.epochs, latest, chance, top / "whole")
            latest *= 1.1 if kills else 0.7  # others may use the machine more or less than before
            found["files that differ"] += differences(folder / "out", expected)
            found["stray .part files"] += parts_below(folder)
            counts.update((place, name) for name, place in kills)
            runs["all"] += 1
            if any(found.values()):
                common.say(f"{folder}: {kills}: {dict(found)}")
            else:
                runs["equal"] += 1
                shutil.rmtree(folder)
            for kind in KINDS:
                wrong[kind] += found[kind]
            progress.update(len(kills), note=f"{runs['all'] - runs['equal']} runs bad")
    return counts, runs, wrong, seconds


def main():
    """Kill, resume, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--epochs", type=int, default=8, help="of each run (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    options = parser.parse_args()
    train.adam(torch.nn.Linear(1, 1), 1e-3, 0, torch.device("cpu"))  # imports much, the first time
    top = Path(tempfile.mkdtemp(prefix="kill_runs_"))
    counts, runs, wrong, seconds = kill_many(top, options)
    show(counts, runs, wrong, seconds)
    if any(wrong.values()):
        raise SystemExit(f"see {top}")
    shutil.rmtree(top)


if __name__ == "__main__":
    main()
