"""Small data and short runs that several test files share."""

import json

import numpy as np
import pytest

import compcos
from lab.files import write_rows

SHORT = ["--epochs", 4, "--members", 1, "--hidden", 64, "--lr", 1e-2, "--batch-size", 32,
         "--min-epoch-steps", 5]


def make_toy(folder):
    """Write 5 states, 6 objects, 20 compositions, and noisy features that tell state and object."""
    random = np.random.default_rng(0)
    folder.mkdir()
    pairs = [(s, o) for s, o in np.ndindex(5, 6) if s % 2 == o % 2 or s == o - 1]
    by_state = random.normal(size=(5, 16))
    by_object = random.normal(size=(6, 16))
    rows = []
    features = []
    for number, (s, o) in enumerate(pairs):
        counts = {1: dict(val=4), 3: dict(test=4)}.get(number % 5, dict(train=12, val=4, test=4))
        for phase, count in counts.items():
            for _ in range(count):
                rows.append([f"{len(rows)}.png", f"s{s}", f"o{o}", phase])
                features.append(by_state[s] + by_object[o] + random.normal(size=16))
    write_rows(folder / "images.csv", ["image", "state", "object", "split"], rows)
    np.savez(folder / "features.npz", files=[row[0] for row in rows],
             features=np.array(features, np.float32))
    with open(folder / "vectors.txt", "w") as file:
        for name in ("s0", "s1", "s2", "s3", "s4", "o0", "o1", "o2", "o3", "o4", "o5"):
            print(name, *random.normal(size=20).round(3), file=file)
    return folder


def command(*arguments):
    """Call compcos.py's main."""
    compcos.main([str(argument) for argument in arguments])


def run(dataset, out, *options):
    """Train shortly by compcos.py's main; return --out."""
    command("--dataset", dataset, "--device", "cpu", *SHORT, "--out", out, *options)
    return out


def refusal(capsys, *arguments):
    """Return the one error line in which `command` ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        command(*arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("error: ") == 1, error
    return error.splitlines()[-1]


def refused_run(capsys, dataset, out, *options):
    """Return the one error line in which `run` ends."""
    return refusal(capsys, "--dataset", dataset, "--device", "cpu", *SHORT, "--out", out, *options)


def metrics_of(folder):
    """Return metrics.json."""
    return json.loads((folder / "metrics.json").read_text())


def numbers(folder):
    """Return metrics.json without what may differ between two runs of the same seed."""
    metrics = metrics_of(folder)
    del metrics["settings"]
    return metrics


def contents(folder):
    """Return every file below a folder but locks, path -> bytes."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
