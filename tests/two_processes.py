"""What each of two processes does for test_processes.py: all of it in one start of torchrun.

python two_processes.py COMMANDS, in JSON {name: [script, arguments...]}; in the working folder
NAME-RANK.txt then holds what the process said, and NAME-RANK.ended is there if all went well.
At the end comes the command `endless`, a training that test_processes.py interrupts.
"""

import contextlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

import baselines
import benchmark
import common
import compcos
import evaluate
import experiment
import features
import reproduce
import test_features
import train

MAIN = {"compcos.py": compcos.main, "baselines.py": baselines.main, "reproduce.py": reproduce.main,
        "features.py": features.main}
RANK = common.rank()


def do(name, function, *arguments):
    """Call a function; what it says goes to NAME-RANK.txt. A command may end in an exit status."""
    with open(f"{name}-{RANK}.txt", "w") as said:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                function(*arguments)
            except SystemExit as end:
                print(f"exit status {end.code}", file=said)
    Path(f"{name}-{RANK}.ended").touch()


# ---- one model, trained by both and by each alone ----


class Task:
    """A small task in float64, without dropout."""

    random = np.random.default_rng(0)
    seen = np.zeros((4, 5), bool)
    seen.flat[random.permutation(20)[:12]] = True
    seen[range(4), range(4)] = True
    # 7 batches of 19 in two passes, and one image
    targets = random.choice(np.flatnonzero(seen), 67)
    features = random.normal(size=(67, 8))
    shown = random.integers(0, 20, 31)
    validation = torch.as_tensor(random.normal(size=(31, 8)))
    vectors = random.normal(size=(9, 6))


def fresh():
    """The untrained model."""
    torch.manual_seed(0)
    model = compcos.CompCos(Task.vectors[:4], Task.vectors[4:], 8, hidden=16, dropout=0.0)
    return model.double().set_training(Task.seen, warmup=2)


def fit(folder, epochs, job=None):
    """(model, history) of a training."""
    model = fresh()
    folder.mkdir(parents=True, exist_ok=True)

    def validate():
        masks = dict(open=np.ones(20, bool))
        swept, _ = train.sweep(model, Task.validation, Task.shown, Task.seen, masks)["open"]
        return swept.report()["auc"]

    history = train.fit(model, torch.as_tensor(Task.features), torch.as_tensor(Task.targets),
                        validate, epochs=epochs, batch_size=19, lr=1e-3, weight_decay=1e-3, seed=5,
                        average=0.9, passes=2, out=folder, settings={}, job=job)
    return model, history


def difference(ours, theirs):
    """The largest one between the tensors of two models."""
    largest = 0.0
    for mine, other in zip(ours.state_dict().values(), theirs.state_dict().values()):
        largest = max(largest, float((mine - other).abs().max()))
    return largest


def one_model():
    """Both processes train one model to the numbers of one: one epoch of two passes, then two, with
    margins from the second one on."""
    for epochs in 1, 2:
        together, history = fit(Path(f"together{epochs}"), epochs)
        with common.alone():
            alone, expected = fit(Path(f"alone{epochs}-{RANK}"), epochs)
            assert difference(alone, fresh()) > 1e-3
        assert difference(together, alone) < 1e-10, difference(together, alone)
        for mine, other in zip(history, expected):
            assert abs(mine["loss"] - other["loss"]) < 1e-10
            assert abs(mine["validation"] - other["validation"]) < 1e-10
    common.gather("the first one has written all")
    assert sorted(path.name for path in Path("together2").iterdir()) == ["last.pt", "log.csv"]
    every_number(alone)


def every_number(model):
    """What is measured is every number, in the order of the images; also of fewer images than
    processes."""
    rho = model.feasibility(Task.seen)
    masks = dict(open=np.ones(20, bool), half=Task.seen.ravel() | (np.arange(20) % 2 == 0))
    for count in 31, 1:
        case = (model, Task.validation[:count], Task.shown[:count], Task.seen)
        shared = train.sweep(*case, masks)
        shared_curve = experiment.best_threshold(*case, rho)[1]
        with common.alone():
            expected = train.sweep(*case, masks)
            curve = experiment.best_threshold(*case, rho)[1]
        for name in masks:
            for mine, other in zip(shared[name][1], expected[name][1]):
                np.testing.assert_allclose(mine, other, rtol=0, atol=1e-12)
        for name in curve:
            np.testing.assert_allclose(shared_curve[name], curve[name], rtol=0, atol=1e-12)


# ---- what is spread ----


def turns():
    """Seeds and turns are each done once, in order, alone; sums are of all."""
    done = list(common.spread(range(5), lambda item: (item, RANK, common.processes())))
    assert done == [(item, (item, item % 2, 1)) for item in range(5)], done
    for _ in range(2):
        numbers = common.gather(list(common.take_turns(7)))
        assert sorted(numbers[0] + numbers[1]) == list(range(7)), numbers
    add = common.tally()
    with common.alone():
        add(10 + RANK)
    common.gather("both have added")
    assert add(0) == 21


def progress():
    """What is shown is of the whole job: of three trainings on two processes."""
    job = common.Progress("all 3 seeds", 6, "epochs", together=True)
    list(common.spread(range(3), lambda seed: fit(Path(f"seed{seed}"), 2, job)[1]))
    common.gather("both are done")
    job.update(0)
    assert job.line(job.start + 3) == "all 3 seeds 6/6, 2 epochs/s, 0 s left"


def waiting():
    """The first process shows how far all are while the other one still works."""
    job = common.Progress("all 2 seeds", 4, "epochs", together=True)

    def work(seed):
        for _ in range(2):
            time.sleep(0.4 * seed)
            job.advance(1)

    with patch.object(common, "BATCH_SECONDS", 0), common.first_alone_prints():
        list(common.spread([0, 1], work, job))


def waiting_for_runs():
    """As `waiting`, of runs: the first process does what is there for it, and the other one is
    slow."""
    jobs = [reproduce.Job("full", seed, Path("nowhere"), None, [], {}) for seed in range(2)]

    def attempt(job):
        time.sleep(RANK + 0.1)
        return "trained"

    with (patch.object(common, "BATCH_SECONDS", 0), common.first_alone_prints(),
          patch.object(reproduce, "attempt", attempt), patch.object(reproduce, "load", str)):
        reproduce.train_missing(jobs)


def broken_photos(folder):
    """What cannot be read is counted of both, also while the first one waits."""
    dataset = test_features.make_dataset(folder, 12)
    for number in range(2):  # one of each share
        (folder / f"images/red_shoe/{number}.png").write_bytes(b"")

    def network(batch):
        time.sleep(RANK / 8)
        return test_features.mean_colour(batch)

    with (patch.object(common, "BATCH_SECONDS", 0), common.first_alone_prints(),
          patch.object(features, "load_backbone", lambda weights: network)):
        features.load_features(dataset, weights=folder / "cheap.pth", device="cpu", batch_size=1,
                               skip_broken=True)


def unshared_folder():
    """A folder that only the first process sees is named: of results, and of cached features."""
    dataset = test_features.make_dataset(Path("photos").resolve(), 12)
    common.check_shared("shared")
    before = os.getcwd()
    os.chdir(f"alone1-{RANK}")
    for folder, ask in (("results", common.check_shared),
                        ("cache", lambda cache: features.load_features(dataset, cache=cache))):
        try:
            ask(folder)
        except OSError as error:
            assert str(error).startswith(f"{folder}: process 1 of 2 does not see what process 0")
        else:
            raise AssertionError(folder)
    assert not os.listdir("cache")
    os.chdir(before)


def extraction(folder):
    """Each decodes half of the photos and gets the features of all."""
    calls = []

    def network(batch):
        calls.append(0)
        return 2 * test_features.mean_colour(batch)

    features.load_backbone = lambda weights: network
    dataset = test_features.make_dataset(folder, 12)
    _, made, _ = features.load_features(dataset, weights=folder / "cheap.pth", device="cpu",
                                        batch_size=1)
    np.savez(f"made-{RANK}", calls=len(calls), **made)


def killed_extraction(folder):
    """Both end after some photos: the first one as by torchrun's signal, the second one at once."""
    calls = []

    def network(batch):
        calls.append(0)
        if len(calls) < 4:
            return 2 * test_features.mean_colour(batch)
        if RANK == 1:
            features._write_cache = lambda *_: None  # who is killed writes nothing any more
        raise KeyboardInterrupt

    dataset = test_features.make_dataset(folder, 12)
    written = features._write_cache
    with patch.multiple(features, SAVE_EVERY=0, load_backbone=lambda weights: network,
                             _write_cache=written):
        try:
            features.load_features(dataset, weights=folder / "cheap.pth", device="cpu",
                                   batch_size=1)
        except KeyboardInterrupt:
            pass


# ---- what is wrong ----


def wrong(script, *arguments):
    """Both find it, and the first one fails; here a signal comes to the second one meanwhile, as
    torchrun's does."""
    def ended(seconds):
        signal.raise_signal(signal.SIGTERM)

    with patch("time.sleep", ended):
        MAIN[script](arguments)


if __name__ == "__main__":
    evaluate.RESAMPLES = 20
    common.WAITING_SECONDS = 0.05
    torch.set_num_threads(1)
    do("one_model", one_model)
    do("turns", turns)
    do("progress", progress)
    do("waiting", waiting)
    do("waiting_for_runs", waiting_for_runs)
    do("unshared", unshared_folder)
    commands = json.loads(sys.argv[1])
    endless, *endless_arguments = commands.pop("endless")
    do("wrong", wrong, *commands.pop("wrong"))
    for name, (script, *arguments) in commands.items():
        do(name, MAIN[script], arguments)
    warnings.simplefilter("ignore")  # so small a benchmark has no image of some compositions
    benchmark.ON_CPU = benchmark.Sizes(4, 400, 1, 20, 30, 8, 2)
    do("benchmark", benchmark.time_processes, 1)
    do("broken_photos", broken_photos, Path("broken"))
    do("killed_extraction", killed_extraction, Path("killed"))
    do("extraction", extraction, Path("photos"))
    train.SAVE_SECONDS = 0.2
    MAIN[endless](endless_arguments)
