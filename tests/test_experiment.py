"""From a folder to the table: the loop, resuming, the command line's outputs and errors, the
built-in dataset."""

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import compcos
import data
import evaluate
import experiment
import features as image_features
import drawings
import train
from compcos import CompCos
from feasibility import feasibility_scores, hard_mask

HERE = Path(__file__).parent
ROOT = HERE.parent


@pytest.fixture
def toy(tmp_path):
    """Own data with features: 5 states x 6 objects, 17 compositions, features that tell state and
    object with noise."""
    random, folder = np.random.default_rng(0), tmp_path / "toy"
    folder.mkdir()
    states, objects = [f"s{i}" for i in range(5)], [f"o{i}" for i in range(6)]
    split = {
        (s, o): ("val" if i % 5 == 1 else "test" if i % 5 == 3 else "train")
        for i, (s, o) in enumerate(
            (s, o) for s in range(5) for o in range(6) if s % 2 == o % 2 or s == o - 1
        )
    }
    looks, rows, features = (random.normal(size=(n, 16)) for n in (5, 6)), [], []
    by_state, by_object = looks
    for (s, o), own in split.items():
        for phase, count in dict(train=12, val=4, test=4).items():
            for _ in range(count if own in ("train", phase) else 0):
                rows.append([f"{len(rows)}.png", states[s], objects[o], phase])
                features.append(by_state[s] + by_object[o] + random.normal(size=16))
    with open(folder / "images.csv", "w", newline="") as file:
        csv.writer(file).writerows([["image", "state", "object", "split"], *rows])
    np.savez(
        folder / "features.npz",
        files=[row[0] for row in rows],
        features=np.array(features, np.float32),
    )
    (folder / "vectors.txt").write_text(
        "".join(
            f"{name} {' '.join(map(str, random.normal(size=20).round(3)))}\n"
            for name in states + objects
        )
    )
    return folder


def run(*options):
    """compcos.py's main on short training; returns --out."""
    out = Path(options[options.index("--out") + 1])
    compcos.main(
        [
            "--epochs",
            "4",
            "--members",
            "1",
            "--hidden",
            "64",
            "--lr",
            "1e-2",
            "--batch-size",
            "32",
            "--device",
            "cpu",
            *map(str, options),
        ]
    )
    return out


def numbers(folder):
    """metrics.json without what may differ between two runs of the same seed."""
    held = json.loads((folder / "metrics.json").read_text())
    return {key: value for key, value in held.items() if key != "settings"}


def test_files_of_a_run(toy, tmp_path, capsys):
    out = run(
        "--dataset",
        toy,
        "--out",
        tmp_path / "run",
        "--save-scores",
        "--mask",
        "published",
        "--members",
        "1",
    )
    printed = capsys.readouterr().out
    assert all(
        word in printed
        for word in ("closed", "open_masked", "exact", "published", "fixed bias", "AUROC")
    )
    held = json.loads((out / "metrics.json").read_text())
    dataset = data.load(str(toy))
    model = CompCos.load(out / "best.pt")
    rho = feasibility_scores(
        model.states.detach().numpy(), model.objects.detach().numpy(), dataset.seen
    )
    # every report is what evaluate.py says of the saved scores with the candidates that are stated
    scores, target = np.load(out / "scores.npy"), dataset.targets["test"]
    candidates = dict(
        closed=dataset.candidates("test"),
        open=np.ones(30, bool),
        open_masked=hard_mask(rho, dataset.seen, held["threshold"]).ravel(),
    )
    _, features, _ = image_features.load_features(dataset)
    np.testing.assert_allclose(
        scores, model(torch.as_tensor(features["test"])).detach().flatten(1), atol=1e-6
    )
    for name, mask in candidates.items():
        sweep = evaluate.BiasSweep(
            dataset.seen.ravel(), candidates=mask, pairs=np.argwhere(np.ones((5, 6)))
        )
        sweep.update(scores, target)
        for protocol in ("exact", "published"):
            assert held["test"][name][protocol] == pytest.approx(sweep.report(protocol), abs=1e-12)
        assert held["test"][name]["fixed_bias"] == pytest.approx(
            evaluate.accuracy_at(sweep, held["bias"][name]), abs=1e-12
        )
        assert held["candidates"]["test"][name] == mask.sum()
        # predictions.csv holds the answers at that bias
        biased = np.where(mask, scores + held["bias"][name] * ~dataset.seen.ravel(), -np.inf)
        rows = list(csv.DictReader(open(out / "predictions.csv")))
        names = [f"{s} {o}" for s in dataset.states for o in dataset.objects]
        assert [row[name] for row in rows] == [names[c] for c in biased.argmax(1)]
        right = np.mean([row[name] == row["truth"] for row in rows])
        counts = list(csv.DictReader(open(out / "compositions.csv")))
        assert sum(int(row["images"]) * float(row[name]) for row in counts) / len(
            rows
        ) == pytest.approx(right, abs=1e-3)
    # τ is the best of 50 by validation AUC alone
    unseen, swept = rho[~dataset.seen], {}
    for tau in np.linspace(unseen.min(), unseen.max(), 50):
        swept[tau] = train.sweep(
            model,
            torch.as_tensor(features["val"]),
            dataset.targets["val"],
            dataset.seen,
            dict(one=hard_mask(rho, dataset.seen, tau).ravel()),
        )["one"][0].report()["auc"]
    assert held["threshold"] == pytest.approx(max(swept, key=swept.get))
    log = list(csv.DictReader(open(out / "log.csv")))
    assert [row["epoch"] for row in log] == list("1234")
    assert max(log, key=lambda row: float(row["validation"]))["epoch"] == str(held["best_epoch"])
    assert held["settings"]["seed"] == 0 and held["versions"]["torch"] == torch.__version__
    checkpoint = torch.load(out / "best.pt", weights_only=True)
    assert checkpoint["threshold"] == held["threshold"] and checkpoint["states"] == dataset.states
    np.testing.assert_allclose(checkpoint["feasibility"], rho)
    table = {
        (row["state"], row["object"]): float(row["feasibility"])
        for row in csv.DictReader(open(out / "feasibility.csv"))
    }
    assert table["s1", "o2"] == pytest.approx(rho[1, 2], abs=1e-6) and len(table) == 30
    result = subprocess.run(
        [
            sys.executable,
            ROOT / "evaluate.py",
            out / "scores.npy",
            out / "scores_open.npz",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout)["exact"]["auc"] == pytest.approx(
        held["test"]["open"]["exact"]["auc"], abs=1e-12
    )


def test_same_seed_same_numbers_and_several_seeds(toy, tmp_path, capsys):
    first, second = (run("--dataset", toy, "--out", tmp_path / name) for name in "ab")
    several = run("--dataset", toy, "--out", tmp_path / "c", "--seed", "0", "1")
    assert (
        numbers(first)
        == numbers(second)
        == numbers(several / "seed0")
        != numbers(several / "seed1")
    )
    held, aucs = json.loads((several / "metrics.json").read_text()), []
    for seed in "01":
        aucs.append(
            json.loads((several / f"seed{seed}/metrics.json").read_text())["test"]["open"]["exact"][
                "auc"
            ]
        )
    assert held["mean"]["test"]["open"]["exact"]["auc"] == pytest.approx(np.mean(aucs))
    assert held["std"]["test"]["open"]["exact"]["auc"] == pytest.approx(np.std(aucs))


@pytest.mark.parametrize("world", ["open", "closed"])
def test_interrupted_and_resumed_equals_uninterrupted(toy, tmp_path, monkeypatch, capsys, world):
    whole = run("--dataset", toy, "--out", tmp_path / "whole", "--world", world)
    with monkeypatch.context() as patch:
        calls = iter(range(3))

        def interrupt(report):
            if next(calls, None) == 2:
                raise KeyboardInterrupt
            return report["auc"]

        patch.setattr(experiment, "selection", interrupt)
        with pytest.raises(SystemExit) as stop:
            run("--dataset", toy, "--out", tmp_path / "part", "--world", world)
    assert stop.value.code == 130 and "--resume" in capsys.readouterr().err
    assert not (tmp_path / "part/best.pt").exists()
    assert torch.load(tmp_path / "part/last.pt", weights_only=True)["epoch"] == 2
    assert numbers(
        run("--dataset", toy, "--out", tmp_path / "part", "--world", world, "--resume")
    ) == numbers(whole)
    logs = [
        [row[:3] for row in csv.reader(open(folder / "log.csv"))]
        for folder in (whole, tmp_path / "part")
    ]
    assert logs[0] == logs[1]


def test_resume_refuses_another_run(toy, tmp_path, capsys):
    out = run("--dataset", toy, "--out", tmp_path / "run")
    with pytest.raises(SystemExit) as stop:
        run("--dataset", toy, "--out", out, "--resume", "--margin", "0.1")
    assert (
        stop.value.code == 2
        and "margin: 2.769230769230769 there, 0.1 here" in capsys.readouterr().err
    )


def test_resume_with_nothing_there_begins(toy, tmp_path, capsys):
    """As after Ctrl-C in the first of several seeds, when the same command is given again with
    --resume."""
    run("--dataset", toy, "--out", tmp_path / "run/seed0")
    several = run("--dataset", toy, "--out", tmp_path / "run", "--seed", "0", "1", "--resume")
    assert numbers(several / "seed1") == numbers(
        run("--dataset", toy, "--out", tmp_path / "one", "--seed", "1")
    )


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda toy, out: np.savez(
                toy / "features.npz",
                **dict(np.load(toy / "features.npz"), features=np.ones((272, 16), np.float32)),
            ),
            "data_crc32",
        ),
        (
            lambda toy, out: (toy / "vectors.txt").write_text(
                (toy / "vectors.txt").read_text().replace("-", "")
            ),
            "data_crc32",
        ),
        (
            lambda toy, out: (out / "last.pt").write_bytes((out / "last.pt").read_bytes()[:1000]),
            "last.pt: no tensors by torch.save",
        ),
        (
            lambda toy, out: shutil.copy(out / "best.pt", out / "last.pt"),
            "its model is a str",
        ),
    ],
)
def test_resume_refuses_what_changed(toy, tmp_path, capsys, change, message):
    out = run("--dataset", toy, "--out", tmp_path / "run")
    change(toy, out)
    with pytest.raises(SystemExit) as stop:
        run("--dataset", toy, "--out", out, "--resume")
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_resume_refuses_fewer_epochs_and_seeds_must_differ(toy, tmp_path, capsys):
    out = run("--dataset", toy, "--out", tmp_path / "run")
    for options, message in (
        (["--resume", "--epochs", "2"], "past epoch 2"),
        (["--seed", "3", "3"], "different"),
        (["--seed", "-1"], "seeds"),
    ):
        with pytest.raises(SystemExit) as stop:
            run("--dataset", toy, "--out", out, *options)
        assert stop.value.code == 2 and message in capsys.readouterr().err


def test_memory_that_runs_out_is_explained(toy, tmp_path, capsys, monkeypatch):
    calls = []

    def exhausted(*_):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return 0.5

    monkeypatch.setattr(experiment, "selection", exhausted)
    with pytest.raises(SystemExit) as stop:
        run("--dataset", toy, "--out", tmp_path / "run")
    assert stop.value.code == 2 and "lower --batch-size" in capsys.readouterr().err
    assert torch.load(tmp_path / "run/last.pt", weights_only=True)["epoch"] == 2


def test_data_without_unseen_compositions(toy, tmp_path, capsys):
    """Trains, evaluates its seen half and predicts; what does not exist is null."""
    with open(toy / "images.csv") as file:
        header, *rows = csv.reader(file)
    known = {tuple(row[1:3]) for row in rows if row[3] == "train"}
    with open(toy / "images.csv", "w", newline="") as file:
        csv.writer(file).writerows([header, *(row for row in rows if tuple(row[1:3]) in known)])
    held = json.loads(
        (run("--dataset", toy, "--out", tmp_path / "run") / "metrics.json").read_text()
    )
    assert (
        held["test"]["open"]["exact"]["best_seen"] > 0.3
        and held["test"]["open"]["exact"]["auc"] is None
    )
    assert CompCos.load(tmp_path / "run/best.pt")(torch.zeros(1, 16)).isfinite().all()


def test_a_new_run_leaves_nothing_of_an_earlier_one(toy, tmp_path, monkeypatch, capsys):
    out = run("--dataset", toy, "--out", tmp_path / "run", "--save-scores")
    scores = ["scores.npy", *(f"scores_{name}.npz" for name in experiment.CANDIDATE_SETS)]
    assert {path.name for path in out.iterdir()} == {
        ".lock",
        "last.pt",
        "log.csv",
        *scores,
        *experiment.RESULTS,
    }
    monkeypatch.setattr(experiment, "selection", lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit):
        run("--dataset", toy, "--out", out, "--margin", "0.1")
    assert "no epoch was finished" in capsys.readouterr().err
    assert {path.name for path in out.iterdir()} <= {".lock", "last.pt", "log.csv"}


def test_small_batches_and_small_data(toy, tmp_path, capsys):
    one = run("--dataset", toy, "--out", tmp_path / "one", "--batch-size", "1", "--epochs", "1")
    large = run(
        "--dataset", toy, "--out", tmp_path / "large", "--batch-size", "100000", "--epochs", "1"
    )
    assert numbers(one)["best_epoch"] == numbers(large)["best_epoch"] == 1


@pytest.mark.parametrize(
    "options, message",
    [
        (["--dataset", "nowhere"], "no dataset 'nowhere'"),
        (["--vectors", "nowhere.txt"], "nowhere.txt"),
        (["--scale", "0"], "scale"),
        (["--margin", "-1"], "margin"),
        (["--epochs", "0"], "--epochs is 0"),
        (["--batch-size", "-3"], "--batch-size"),
        (["--lr", "nan"], "--lr"),
        (["--device", "cuda:9"], "device"),
        (["--features", "nowhere.npz"], "nowhere.npz"),
        (["--checkpoint", "nowhere.pt", "--predict", "a.png"], "nowhere.pt"),
        (["--predict", "a.png"], "--checkpoint"),
    ],
)
def test_bad_options(toy, tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as stop:
        run("--dataset", toy, "--out", tmp_path / "run", *options)
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.err.startswith("error: ") and message in captured.err
    assert not (tmp_path / "run/metrics.json").exists() and not list(tmp_path.glob("**/*.part"))


def test_bad_features_and_vectors(toy, tmp_path, capsys):
    held = dict(np.load(toy / "features.npz"))
    broken = held["features"].copy()
    broken[7, 3] = np.nan
    for name, files, features, message in (
        ("wide", held["files"], held["features"][:, :, None], "(N, F)"),
        ("few", held["files"][:-2], held["features"][:-2], "2 of"),
        ("nan", held["files"], broken, "not finite"),
    ):
        np.savez(tmp_path / f"{name}.npz", files=files, features=features)
        with pytest.raises(SystemExit) as stop:
            run("--dataset", toy, "--out", tmp_path / "run", "--features", tmp_path / f"{name}.npz")
        assert stop.value.code == 2 and message in capsys.readouterr().err
    lines = (toy / "vectors.txt").read_text().splitlines()
    (toy / "vectors.txt").write_text(
        "\n".join(line for line in lines if line.split()[0] not in ("s3", "o1"))
    )
    with pytest.raises(SystemExit):
        run("--dataset", toy, "--out", tmp_path / "run")
    error = capsys.readouterr().err
    assert "s3" in error and "o1" in error and "--missing" in error
    run("--dataset", toy, "--out", tmp_path / "run", "--missing", "mean")


def test_wrong_checkpoints(toy, tmp_path, capsys):
    (tmp_path / "text.pt").write_text("no checkpoint")
    torch.save({"weights": 1}, tmp_path / "other.pt")
    messages = (("text", "text.pt: no tensors by torch.save"), ("other", "it has no model"))
    for name, message in messages:
        with pytest.raises(ValueError, match=message):
            CompCos.load(tmp_path / f"{name}.pt")
    out = run("--dataset", toy, "--out", tmp_path / "run")
    model = CompCos.load(out / "best.pt")
    with pytest.raises(ValueError, match="hand predict"):  # trained on features of unknown make
        compcos.predict(model, ["a.png"])
    with pytest.raises(ValueError, match="trained on"):
        compcos.predict(model, np.zeros((2, 5)))


def test_truth_outside_its_closed_world(toy, tmp_path, capsys):
    """A test image of a composition in no list: the run goes on, and the closed world has a
    ceiling."""
    dataset = data.load(str(toy))
    outside = np.flatnonzero(~dataset.candidates("test"))[0]
    dataset.targets["test"][0] = outside
    assert any("ceiling" in note for note in data.oddities(dataset))
    masks = experiment.candidate_sets(dataset, "test", np.zeros((5, 6)), 0.0)
    assert not masks["closed"][outside] and masks["open"][outside]


def trained(root, out, *options):
    """The metrics of a run on shapes."""
    small = ["--device", "cpu", "--epochs", "20", "--hidden", "256"]
    compcos.main(["--data-root", str(root), "--out", str(out), *small, *options])
    return json.loads((out / "metrics.json").read_text())


def test_shapes_are_what_the_docstring_says(drawn):
    dataset = data.load("shapes", drawn)
    assert len(dataset.states) + len(dataset.objects) == 30 and dataset.feasible.sum() == 105
    split = drawings.compositions(np.random.default_rng(0))
    counts = [drawings.images_of(own, phase) for own in split.values() for phase in data.PHASES]
    assert sum(counts) >= 4000  # of the whole dataset
    assert len(dataset.images["train"]) == 20 * list(split.values()).count("train")
    assert (
        (~dataset.feasible).mean() > 1 / 3
        and dataset.feasible[dataset.seen].all()
        and experiment.occurring(dataset)[~dataset.feasible].sum() == 0
    )
    assert dataset.seen.any(0).all() and dataset.seen.any(1).all()
    unseen = {
        phase: {tuple(pair) for pair in dataset.pairs[phase]}
        - {tuple(pair) for pair in dataset.pairs["train"]}
        for phase in ("val", "test")
    }
    assert len(unseen["val"]) == len(unseen["test"]) == 21 and not unseen["val"] & unseen["test"]
    _, features, about = image_features.load_features(dataset)
    image = dataset.path(dataset.images["test"][5])
    assert Image.open(image).size == (64, 64) and about == f"{drawings.FEATURE}, frozen"
    np.testing.assert_allclose(
        features["test"][5], image_features.pixels(Image.open(image)), atol=1e-5
    )


def test_shapes_are_drawn_alike_from_a_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(drawings, "IMAGES", dict(train=1, seen=0, unseen=1))
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        drawings.make(tmp_path / name, seed)
    files = {
        name: {path.name: path.read_bytes() for path in sorted((tmp_path / name).glob("**/*.*"))}
        for name in "abc"
    }
    assert files["a"] == files["b"] != files["c"]
    with pytest.raises(ValueError, match="there already"):
        drawings.make(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(drawings, "draw", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drawings.make(tmp_path / "d")
    assert {path.name for path in tmp_path.iterdir()} == set("abc")


def test_no_vector_tells_what_is_feasible():
    """States and objects of one family are no more alike than those of two: over drawings, no AUROC
    away from 1/2."""
    found = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        table = drawings.vectors(random)
        alike = [
            (
                table[s] @ table[o] / np.linalg.norm(table[s]) / np.linalg.norm(table[o]),
                family == other,
            )
            for family, states in drawings.STATES.items()
            for s in states
            for other, objects in drawings.OBJECTS.items()
            for o in objects
        ]
        same, different = (
            [value for value, own in alike if own is which] for which in (True, False)
        )
        found.append(np.mean(same) - np.mean(different))
    assert abs(np.mean(found)) < 3 * np.std(found) / 20**0.5


def test_learning_is_earned(drawn, tmp_path, capsys):
    """Untrained models and shuffled labels are far below; the open model beats the closed one in
    the open world."""
    held = {
        world: trained(drawn, tmp_path / world, "--world", world)
        for world in ("open", "closed")
    }
    auc = {world: held[world]["test"]["open"]["exact"]["auc"] for world in held}
    assert 0.15 < auc["closed"] < auc["open"] < 0.75
    assert 0.3 < held["closed"]["test"]["closed"]["exact"]["auc"] < 0.9
    assert held["open"]["feasibility_auroc"] > 0.8
    untrained = trained(drawn, tmp_path / "untrained", "--epochs", "1", "--lr", "1e-30")
    assert untrained["test"]["open"]["exact"]["auc"] < auc["open"] / 20
    with open(drawn / "shapes/images.csv") as file:
        header, *rows = csv.reader(file)
    shuffled = tmp_path / "shuffled"
    shutil.copytree(
        drawn / "shapes", shuffled, ignore=shutil.ignore_patterns("*.png", "images.csv")
    )
    inside = [i for i, row in enumerate(rows) if row[3] == "train"]
    labels = np.random.default_rng(0).permutation([rows[i][1:3] for i in inside])
    for i, (state, name) in zip(inside, labels):
        rows[i] = [rows[i][0], state, name, "train"]
    with open(shuffled / "images.csv", "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    published = ["--recipe", "published", "--lr", "1e-3"]
    blind = trained(drawn, tmp_path / "blind", "--dataset", str(shuffled), *published)
    assert blind["test"]["open"]["exact"]["auc"] < auc["open"] / 20


def test_predicting_images(drawn, tmp_path, capsys):
    trained(drawn, tmp_path / "run", "--epochs", "2")
    capsys.readouterr()
    images = [str(path) for path in sorted((drawn / "shapes/images").glob("*.png"))[:2]]
    for candidates in experiment.CANDIDATE_SETS:
        compcos.main(
            [
                "--checkpoint",
                str(tmp_path / "run/best.pt"),
                "--predict",
                *images,
                "--candidates",
                candidates,
                "--top",
                "3",
            ]
        )
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1 + 2 * 4 and lines[1] == images[0] and candidates in lines[0]
        assert all("seen" in line for line in lines[2:5])
    model = CompCos.load(tmp_path / "run/best.pt")
    assert compcos.predict(model, images)[0].shape == (2, 5)
    (tmp_path / "broken.png").write_bytes(Path(images[0]).read_bytes()[:300])
    with pytest.raises(SystemExit) as stop:
        compcos.main(
            [
                "--checkpoint",
                str(tmp_path / "run/best.pt"),
                "--predict",
                images[0],
                str(tmp_path / "broken.png"),
                str(tmp_path / "none.png"),
            ]
        )
    error = capsys.readouterr().err
    assert (
        stop.value.code == 2 and "broken.png" in error and "none.png" in error and "2 of 3" in error
    )


@pytest.fixture
def checkpoint(toy, tmp_path):
    """A checkpoint that was trained on features, with a file of ten further ones, one not finite.
    """
    run("--dataset", toy, "--out", tmp_path / "run", "--epochs", "1")
    width = CompCos.load(tmp_path / "run/best.pt").config["feature_dim"]
    names = [f"{'new' if i < 5 else 'old'}/{i}.jpg" for i in range(10)]
    features = np.random.default_rng(0).normal(size=(10, width))
    features[3, 0] = np.nan
    np.savez(tmp_path / "run/further.npz", files=names, features=features)
    return tmp_path / "run/best.pt"


def predicted(capsys, checkpoint, *options):
    """(status, images predicted, all lines) of `--predict`."""
    status = 0
    try:
        compcos.main(["--checkpoint", str(checkpoint), "--top", "1", *map(str, options)])
    except SystemExit as stop:
        status = stop.code
    output = capsys.readouterr()
    lines = (output.out + output.err).splitlines()
    return status, [line for line in lines if line.endswith(".jpg") and ": " not in line], lines


def test_names_folders_and_patterns_of_a_table_of_features(checkpoint, capsys):
    options = ["--features", checkpoint.with_name("further.npz"), "--predict"]
    for named, images in [
        (["old/5.jpg"], ["old/5.jpg"]),
        (["old/"], [f"old/{i}.jpg" for i in range(5, 10)]),
        (["*/[67].jpg", "old/7.jpg"], ["old/6.jpg", "old/7.jpg"]),
        (["/home/me/old/8.jpg", "/home/me/new/1.jpg"], ["old/8.jpg", "new/1.jpg"]),
    ]:
        status, found, _ = predicted(capsys, checkpoint, *options, *named)
        assert status == 0 and found == images


def test_features_that_are_not_finite_are_named_or_left_out(checkpoint, capsys):
    options = ["--features", checkpoint.with_name("further.npz")]
    status, _, lines = predicted(capsys, checkpoint, *options)
    assert status == 2 and "1 image are not finite: new/3.jpg" in lines[-1]
    status, found, lines = predicted(capsys, checkpoint, *options, "--skip-broken")
    assert status == 0 and len(found) == 9 and "left out: new/3.jpg" in lines[0]
    status, _, lines = predicted(capsys, checkpoint, *options, "--predict", "none.jpg", "new/*")
    assert status == 2 and "no features of none.jpg; it names new/0.jpg" in lines[-1]


def test_a_table_that_cannot_be_written_is_found_before_the_work(checkpoint, tmp_path, capsys):
    for place in (tmp_path, tmp_path / "none/answers.csv"):
        status, _, lines = predicted(capsys, checkpoint, "--predict", "x.jpg", "--csv", place)
        assert status == 2 and "expected a file in a folder that is there" in lines[-1]
    with pytest.raises(ValueError, match="no images to predict"):
        compcos.predict_images(CompCos.load(checkpoint), [])


def test_folders_say_what_of_them_is_no_photo(tmp_path, capsys):
    (tmp_path / "new/deep").mkdir(parents=True)
    for name in ("a.jpg", "b [1].PNG", "deep/c.webp", "notes.txt", ".DS_Store"):
        (tmp_path / "new" / name).write_bytes(b"")
    photos = [str(tmp_path / "new" / name) for name in ("a.jpg", "b [1].PNG", "deep/c.webp")]
    assert compcos.find_images([str(tmp_path / "new")]) == photos
    assert "1 file left out" in capsys.readouterr().out
    assert compcos.find_images([str(tmp_path / "n*")]) == photos
    assert compcos.find_images([photos[1], *photos, str(tmp_path / "none.jpg")]) == [
        photos[1], photos[0], photos[2], str(tmp_path / "none.jpg")]
    (tmp_path / "empty").mkdir()
    for nothing in ("*.xyz", "empty"):
        with pytest.raises(ValueError, match="no image in"):
            compcos.find_images([str(tmp_path / nothing)])


# ---- what befalls a run ----


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path):
    """Of the archive's directory, which no check sum covers, two bits of each byte: the same, or
    one line."""
    path = tmp_path / "small.pt"
    torch.save({"weights": torch.arange(40.0), "seen": torch.ones(9, dtype=torch.bool)}, path)
    whole = path.read_bytes()
    good = str(train.load_file(path, {}))
    refused = 0
    for place in range(whole.index(b"PK\x01\x02"), len(whole)):
        for bit in (4, 7):
            broken = bytearray(whole)
            broken[place] ^= 1 << bit
            path.write_bytes(broken)
            try:
                assert str(train.load_file(path, {})) == good, (place, bit)
            except ValueError as error:
                refused += 1
                assert "small.pt" in str(error) and "weights_only" not in str(error)
    assert refused > 300


def test_the_log_is_mended_from_the_history(toy, tmp_path):
    out = run("--dataset", toy, "--out", tmp_path / "run")
    whole = (out / "log.csv").read_bytes()
    (out / "log.csv").write_bytes(whole[: len(whole) // 2])
    run("--dataset", toy, "--out", out, "--resume")
    assert (out / "log.csv").read_bytes() == whole


def test_old_and_new_are_never_mixed(toy, tmp_path):
    out = run("--dataset", toy, "--out", tmp_path / "run")
    run("--dataset", toy, "--out", out, "--seed", "0", "1")
    assert {path.name for path in out.iterdir()} == {".lock", "metrics.json", "seed0", "seed1"}
    run("--dataset", toy, "--out", out)
    left = [path.name for folder in ("seed0", "seed1") for path in (out / folder).iterdir()]
    assert left == [] and (out / "best.pt").exists()


def test_runs_of_other_seeds_are_gone_or_refused(toy, tmp_path, capsys):
    out = run("--dataset", toy, "--out", tmp_path / "run", "--seed", "0", "1", "2")
    with pytest.raises(SystemExit) as stop:
        run("--dataset", toy, "--out", out, "--seed", "0", "1", "--resume")
    assert stop.value.code == 2 and "seed2" in capsys.readouterr().err
    assert (out / "seed2/best.pt").exists()  # nothing is lost by a slip
    run("--dataset", toy, "--out", out, "--seed", "0", "1")
    assert not list((out / "seed2").iterdir())
    with pytest.raises(SystemExit):
        run("--dataset", toy, "--out", out, "--resume")
    assert "another --out" in capsys.readouterr().err


def test_no_room_for_scores_leaves_nothing(toy, tmp_path, monkeypatch, capsys):
    def full(handle, start, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(experiment.common.os, "posix_fallocate", full, raising=False)
    with pytest.raises(SystemExit) as stop:
        run("--dataset", toy, "--out", tmp_path / "run", "--save-scores")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and f"no room for {tmp_path / 'run' / 'scores.npy'}," in error
    assert not list((tmp_path / "run").glob("*scores*"))
    assert list((tmp_path / "run").glob("last.pt"))  # the training is not lost
    monkeypatch.undo()
    run("--dataset", toy, "--out", tmp_path / "run", "--resume")


def test_a_diverging_loss_says_so(toy, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run("--dataset", toy, "--out", tmp_path / "run", "--lr", "1e30")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "--lr" in error and "seen row" not in error


def test_other_threads_are_named(toy, tmp_path, capsys, monkeypatch):
    out = run("--dataset", toy, "--out", tmp_path / "run")
    monkeypatch.setattr(train.torch, "get_num_threads", lambda: 77)
    run("--dataset", toy, "--out", out, "--resume")
    assert "77" in capsys.readouterr().err


@pytest.mark.parametrize("contents", [b"", b"text", {"a": 1}, [1, 2]])
def test_files_of_wrong_content(toy, tmp_path, capsys, contents):
    out = run("--dataset", toy, "--out", tmp_path / "run")
    for name in ("last.pt", "best.pt"):
        if isinstance(contents, bytes):
            (out / name).write_bytes(contents)
        else:
            torch.save(contents, out / name)
    for options in (
        ["--dataset", toy, "--out", out, "--resume"],
        ["--checkpoint", out / "best.pt", "--predict", "a.png"],
    ):
        with pytest.raises(SystemExit) as stop:
            compcos.main([*map(str, options), "--device", "cpu"])
        error = capsys.readouterr().err
        assert (
            stop.value.code == 2
            and error.startswith("error: ")
            and ".pt" in error
            and "weights_only" not in error
        )


def test_checkpoints_whose_parts_are_of_other_types(toy, tmp_path, capsys):
    """Each part in turn something else; one error, which names the file."""
    options = ("--dataset", toy, "--out", tmp_path / "run", "--epochs", "2")
    out = run(*options)
    best = torch.load(out / "best.pt", weights_only=True)
    last = torch.load(out / "last.pt", weights_only=True)
    for part in train.LAST:
        torch.save(last | {part: None}, out / "last.pt")
        with pytest.raises(ValueError, match=f"last.pt .* its {part} is a NoneType"):
            train.load_last(out, last["settings"], 3)
    for change in (dict(best=last["best"] | dict(value=None)), dict(average=[1]),
                   dict(history=[dict(epoch=1, loss="x")]),
                   dict(settings=last["settings"] | dict(lr=torch.ones(2)))):
        torch.save(last | change, out / "last.pt")
        with pytest.raises(SystemExit):
            run(*options, "--epochs", "3", "--resume")
        assert re.fullmatch("error: .*last.pt .*\n", capsys.readouterr().err)
    changes = [{part: None} for part in experiment.BEST]
    changes += [dict(config=best["config"] | dict(dropout=math.nan)),
                dict(settings=best["settings"] | dict(scale=math.inf)),
                dict(states=best["states"][:-1]), dict(bias={}), dict(weights=dict(states=1)),
                dict(seen=torch.ones(3, 3)), dict(settings={}),
                dict(states=[[], *best["states"][1:]]), dict(seen=best["seen"].long()),
                dict(feasibility=best["feasibility"].flatten()), dict(closed=best["closed"] / 1),
                dict(feasibility=best["feasibility"].long()), dict(threshold=math.nan),
                dict(bias=best["bias"] | dict(open=math.nan))]
    for name in best["config"]:  # one that is left out would be the constructor's own default
        changes.append(dict(config={key: best["config"][key] for key in best["config"].keys()
                                    - {name}}))
    for name, weight in best["weights"].items():
        changes.append(dict(weights=best["weights"] | {name: weight * math.nan}))
    for change in changes:
        torch.save(best | change, out / "best.pt")
        with pytest.raises(ValueError, match="best.pt") as error:
            CompCos.load(out / "best.pt")
        assert "\n" not in str(error.value)


def test_metrics_that_are_none(tmp_path):
    """A named pipe would be waited for; too many brackets are Python's own error."""
    for contents in (b"", b"[]", b"\xff", b"[" * 100_000):
        (tmp_path / "metrics.json").write_bytes(contents)
        assert experiment.earlier_best_epoch(tmp_path) is None
        with pytest.raises(ValueError, match="metrics.json"):
            experiment.read_json(tmp_path / "metrics.json")
    if hasattr(os, "mkfifo"):
        (tmp_path / "metrics.json").unlink()
        os.mkfifo(tmp_path / "metrics.json")
        assert experiment.earlier_best_epoch(tmp_path) is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("content", [
    b"", b"\xff\xfe", b"<!DOCTYPE html>\n", b"state,object,feasibility\nold,cat\n", b"state\n",
    b"state,object,feasibility\nold,cat,0.5", b"state,object,feasibility\nold,cat,high\n",
    b"state,object,feasibility\nold,cat,nan\n", None])
def test_a_feasibility_that_is_none(tmp_path, content):
    path = tmp_path / "feasibility.csv"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="feasibility.csv"):
        experiment.read_feasibility(path, ["old"], ["cat"])


def test_a_feasibility_without_its_last_line_end_is_refused(tmp_path):
    """It may be cut off; who knows that it is whole ends the line."""
    path = tmp_path / "feasibility.csv"
    whole = "state,object,seen,feasibility\nold,cat,0,0.250000\nold,dog,1,1.000000\n"
    path.write_text(whole)
    scores = experiment.read_feasibility(path, ["old"], ["cat", "dog"])
    assert scores.tolist() == [[0.25, 1.0]]
    for cut in range(1, 9):
        path.write_text(whole[:-cut])
        with pytest.raises(ValueError, match="end the line if all is there"):
            experiment.read_feasibility(path, ["old"], ["cat", "dog"])


def test_an_unwritable_out_is_found_before_the_features(toy, tmp_path, capsys, monkeypatch):
    def too_early(*_, **__):
        pytest.fail("features were asked for first")

    monkeypatch.setattr(image_features, "load_features", too_early)
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as end:
        run("--dataset", toy, "--out", tmp_path / "file" / "run")
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: cannot write into ")


def test_a_flipped_bit_anywhere_is_found_or_changes_nothing(toy, tmp_path, capsys):
    """Headers and directory of the archives too, and the table of curves."""
    out = run("--dataset", toy, "--out", tmp_path / "run", "--members", "1")

    def read(path):
        if path.suffix == ".npz":
            with train.reading(path, "make it anew"), np.load(path) as archive:
                data.check_archive(path)
                return {name: archive[name].tobytes() for name in archive}
        held = train.load_file(path, {})
        weights = {name: value.numpy().tobytes() for name, value in held["weights"].items()}
        return {**held, "weights": weights, "feasibility": held["feasibility"].tolist(),
                "seen": held["seen"].tolist(), "named": held["named"].tolist(),
                "closed": held["closed"].tolist()}

    for name in ("best.pt", "curves.npz"):
        path = out / name
        whole = path.read_bytes()
        before = read(path)
        places = [*range(0, len(whole), len(whole) // 30), *range(len(whole) - 900, len(whole), 31)]
        for place in places:
            broken = bytearray(whole)
            broken[place] ^= 4
            path.write_bytes(broken)
            try:
                after = read(path)
            except (ValueError, OSError) as error:
                assert name in str(error)
            else:
                assert after == before, place


def test_parts_of_a_killed_run_are_gone_with_the_next(toy, tmp_path):
    out = run("--dataset", toy, "--out", tmp_path / "run")
    for name in ("best.pt", "scores.npy"):
        experiment.common.part_of(out / name).write_bytes(b"half")
    run("--dataset", toy, "--out", out, "--resume")
    assert not list(out.glob(".*.part"))


@pytest.mark.parametrize("terminal, lines", [(False, 1), (True, 4)])
def test_a_batch_log_gets_an_epoch_a_minute(capsys, monkeypatch, terminal, lines):
    """Epochs of 20 s each, of which four make one line in a log."""
    row = dict(epoch=1, loss=0.5, validation=0.25, seconds=20.0)
    standing = SimpleNamespace(history=[row], best_value=0.25, best_epoch=1, announced=0.0)
    now = [0.0]
    monkeypatch.setattr(train.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(train.common, "is_terminal", lambda stream: terminal)
    for now[0] in (20.0, 40.0, 60.0, 80.0):
        train.announce(standing, 10)
    assert capsys.readouterr().err.count("epoch 1/10  loss 0.5000  ") == lines


def test_scores_and_means_of_an_earlier_state_are_gone(toy, tmp_path, monkeypatch):
    """Scores stay as long as they are of the same best epoch; means go before the first seed."""
    options = ("--dataset", toy, "--out", tmp_path / "run")
    out = run(*options, "--save-scores")
    run(*options, "--resume")
    assert (out / "scores.npy").exists()
    metrics = json.loads((out / "metrics.json").read_text())
    (out / "metrics.json").write_text(json.dumps(metrics | dict(best_epoch=9)))
    run(*options, "--resume")
    assert not list(out.glob("scores*"))
    run(*options, "--seed", "0", "1")
    monkeypatch.setattr(experiment, "train_model", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(*options, "--seed", "0", "1")
    assert not (out / "metrics.json").exists()


def test_a_flipped_bit_of_scores_is_found(toy, tmp_path):
    out = run("--dataset", toy, "--out", tmp_path / "run", "--save-scores")
    evaluate.load([out / "scores_open.npz"])
    path = out / "scores.npy"
    whole = path.read_bytes()
    for place in (200, len(whole) - 1):
        broken = bytearray(whole)
        broken[place] ^= 1
        path.write_bytes(broken)
        for named in ([], [path]):
            with pytest.raises(ValueError, match="scores.npy is damaged"):
                evaluate.load([out / "scores_open.npz", *named])
    path.rename(tmp_path / "scores.npy")  # scores of another folder may be any
    evaluate.load([out / "scores_open.npz", tmp_path / "scores.npy"])


@pytest.mark.parametrize("name", ["last.pt", "predictions.csv", "compositions.csv", "curves.npz",
                                  "feasibility.csv", "best.pt", "metrics.json"])
def test_a_disk_that_fills_up_loses_no_epoch(toy, tmp_path, monkeypatch, capsys, name):
    """Half a file fits: the error names it, nothing of it is left, and --resume makes the rest."""
    whole = run("--dataset", toy, "--out", tmp_path / "whole")
    out = tmp_path / "out"
    write_bytes = Path.write_bytes

    def fill_up(path, contents):
        if path.name.startswith(f".{name}."):
            write_bytes(path, contents[: len(contents) // 2])
            raise OSError(28, "No space left on device")
        return write_bytes(path, contents)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(Path, "write_bytes", fill_up)
        run("--dataset", toy, "--out", out)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1
    assert f"cannot write {out / name}: No space left on device" in error
    assert name == "last.pt" or f"the training is kept in {out / 'last.pt'}: --resume" in error
    assert not (out / "metrics.json").exists()
    assert not (out / name).exists() and not list(out.glob("*.part")) + list(out.glob(".*.part"))
    run("--dataset", toy, "--out", out, "--resume")
    for file in ("predictions.csv", "feasibility.csv", "metrics.json"):
        assert (out / file).read_bytes() == (whole / file).read_bytes()


def test_a_log_that_another_program_holds_costs_a_warning(toy, tmp_path, monkeypatch, capsys):
    """As a spreadsheet on Windows does; the next run makes it from the history."""
    out = tmp_path / "run"
    replace = train.common.os.replace

    def held(source, target):
        if Path(target).name == "log.csv":
            raise PermissionError(13, "The process cannot access the file")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(train.common.os, "replace", held)
        run("--dataset", toy, "--out", out)
    assert "warning: " in capsys.readouterr().err
    assert (out / "metrics.json").exists() and not (out / "log.csv").exists()
    run("--dataset", toy, "--out", out, "--resume")
    assert len((out / "log.csv").read_text().splitlines()) == 5


def test_a_signal_into_the_last_save_waits_for_it(toy, tmp_path, monkeypatch, capsys):
    whole = run("--dataset", toy, "--out", tmp_path / "whole")
    out = tmp_path / "out"
    save = train.Run.save

    def signalled(*arguments):
        signal.raise_signal(signal.SIGTERM)
        save(*arguments)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(train.Run, "save", signalled)
        run("--dataset", toy, "--out", out)
    assert end.value.code == 143
    assert f"epoch 4 is kept in {out / 'last.pt'}" in capsys.readouterr().err
    run("--dataset", toy, "--out", out, "--resume")
    assert (out / "metrics.json").read_bytes() == (whole / "metrics.json").read_bytes()


# ---- what is printed ----


def printed_table(threshold, unseen_val, deviations=None, mask="justified", unseen_test=30):
    """The table of made-up metrics with this τ."""
    report = dict.fromkeys([*experiment.COLUMNS.values(), *experiment.FIXED.values()], 0.5)
    phases = dict(exact=report, published=report, fixed_bias=report)
    metrics = dict(
        candidates=dict(test=dict(closed=5, open=9, open_masked=8)),
        test=dict.fromkeys(experiment.CANDIDATE_SETS, phases),
        threshold=threshold,
        mask_basis=dict(unseen_val=unseen_val, unseen_test=unseen_test, hidden_test=1),
        open_auc_interval=[0.1, 0.2],
        certainty=dict(open_masked=dict(probability=0.4, right=0.25)),
        feasibility_auroc=float("nan"),
        settings=dict(mask=mask),
    )
    if deviations:
        deviations = dict(test=metrics["test"])
    return experiment.table(metrics, "title", deviations)


def test_the_table_says_once_what_a_missing_mask_leaves_alone():
    none = printed_table(-1.0, 7)
    assert "open_masked (8)       as open: no mask\n" in none and none.count("exact  ") == 2
    assert "note: few unseen compositions: 7 for best epoch and bias" in none
    assert "for the test" not in none and "τ" not in none
    assert "note:" not in printed_table(-1.0, 20)
    assert "7 of the 19 unseen compositions needed (--mask published" in none
    assert "--mask" not in printed_table(-1.0, 7, mask="published")
    assert "95 % interval" not in printed_table(-1.0, 7, unseen_test=1)
    assert "(open, exact): 10.0 to 20.0" in printed_table(-1.0, 7, unseen_test=2)
    assert "40 % in the mean over the test, where 25 % of the answers are right" in none
    masked = printed_table(0.25, 20)
    assert masked.count("exact  ") == 3 and "τ = 0.250" in masked
    # of two seeds, one without a mask (-1), the mean is no τ
    assert "τ" not in printed_table(-0.375, 20, deviations=True)


@pytest.mark.parametrize("option, values", [
    ("--epochs", "0 -1"), ("--batch-size", "0"), ("--lr", "0 nan inf"), ("--members", "0 -2"),
    ("--scale", "0 nan inf"), ("--hidden", "0 -4"), ("--dim", "0 -1"), ("--word-rate", "0 nan"),
    ("--weight-decay", "-1 nan"), ("--margin", "-1 inf"), ("--warmup", "-1"), ("--counts", "-1"),
    ("--patience", "-3"), ("--dropout", "1 1.5 -1 nan"), ("--average", "1 2 -1 nan"),
    ("--mix-images", "2 -1 nan"), ("--seed", "-1")])
def test_numbers_that_no_training_can_use(toy, tmp_path, capsys, monkeypatch, option, values):
    """One line that names the option, before the features are asked for."""
    monkeypatch.setattr(image_features, "load_features", lambda *_, **__: pytest.fail("too late"))
    for value in values.split():
        with pytest.raises(SystemExit) as end:
            run("--dataset", toy, "--out", tmp_path / "out", option, value)
        error = capsys.readouterr().err
        named = "seeds" if option == "--seed" else f"{option} is"
        assert end.value.code == 2 and error.startswith(f"error: {named} ")
        assert value in error and ": expected " in error and error.count("\n") == 1


def test_what_changes_nothing_where_the_seen_compete_alone_is_said(toy, tmp_path, capsys):
    options = ["--dataset", toy, "--epochs", 1, "--margin", 1, "--mix", "max"]
    for number, (choice, count) in enumerate([
            (["--rivals", "all"], 0), (["--rivals", "seen"], 1), (["--world", "closed"], 1)]):
        run(*options, *choice, "--out", tmp_path / str(number))
        assert capsys.readouterr().out.count("no margins, and --margin, --mix changes") == count


def test_no_patience_is_never_to_stop(toy, tmp_path):
    for patience, epochs in ("0", 6), ("1", 2):
        out = run("--dataset", toy, "--out", tmp_path / "out", "--epochs", 6, "--lr", 1e-12,
                  "--patience", patience, "--recipe", "published")
        assert (out / "log.csv").read_text().count("\n") == 1 + epochs


def test_temperature_of_two_answers():
    """Two answers, scores (g, 0), the first right in 14 of 19 images: with the image that is
    counted more it is right in 14.5 of 20, and 1 / T is the log of its odds over g."""
    gap = 0.3
    scores = torch.tensor([[gap, 0.0]] * 19)
    target = torch.tensor([0] * 14 + [1] * 5)
    odds = 14.5 / 5.5
    assert experiment.fit_temperature(scores, target) == pytest.approx(gap / math.log(odds), 1e-4)


def test_temperature_is_the_likeliest():
    """Against the likelihood itself, on a fine grid of temperatures; scores of any size."""
    random = torch.Generator().manual_seed(0)
    for size in (1e-3, 1.0, 300.0):
        scores = size * torch.randn(400, 7, generator=random)
        truth_of_model = (scores / (0.7 * size)).softmax(1).multinomial(1, generator=random)[:, 0]
        found = experiment.fit_temperature(scores, truth_of_model)
        grid = size * torch.linspace(0.4, 1.2, 801)
        losses = []
        for temperature in grid:
            logs = (scores / temperature).log_softmax(1)
            more = logs.mean()  # the image to which every answer is equally right
            losses.append(logs.gather(1, truth_of_model[:, None]).sum() + more)
        assert found == pytest.approx(float(grid[torch.stack(losses).argmax()]), abs=2e-3 * size)


def test_temperature_at_its_limits():
    """Always right: sure, but not without end. Worse than chance: no answer is likelier. Nothing to
    tell it from: 1."""
    scores = torch.eye(5)
    right = experiment.fit_temperature(scores, torch.arange(5))
    # of six images one is equally right for all: (5 + 1/5) / 6 is the share of the truth
    share = (5 + 1 / 5) / 6
    assert float((scores / right).softmax(1)[0, 0]) == pytest.approx(share, abs=1e-4)
    wrong = experiment.fit_temperature(scores, (torch.arange(5) + 1) % 5)
    assert wrong > 1e6
    assert experiment.fit_temperature(torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)) == 1.0
    nobody = torch.zeros(0, dtype=torch.int64)
    assert experiment.fit_temperature(torch.zeros(0, 4), nobody) == 1.0
    assert experiment.fit_temperature(torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64)) == 1.0


class Given(torch.nn.Module):
    """A model whose scores are the features."""

    states = torch.zeros(5, 1)
    objects = torch.zeros(6, 1)

    def compositions(self):
        return None

    def score(self, features, compositions):
        return features.reshape(-1, 5, 6)


def test_certainty_from_the_definition(toy):
    """Image by image: the answer with the bias, its probability, and whether it is right; a truth
    that is no candidate is wrong."""
    seen = data.load(str(toy)).seen
    random = np.random.default_rng(1)
    features = random.normal(size=(40, 30)).astype(np.float32)
    target = features.argmax(1)
    masks = dict(open=np.ones(30, bool), some=random.random(30) < 0.6)
    bias = dict(open=0.4, some=-1.0)
    temperature = dict(open=0.5, some=2.0)
    found = experiment.certainty(Given(), torch.as_tensor(features), target, seen, masks, bias,
                                 temperature)
    for name, mask in masks.items():
        probabilities = []
        right = []
        for row, truth in zip(features, target):
            ranked = row + bias[name] * ~seen.ravel()
            weights = np.where(mask, np.exp(ranked / temperature[name]), 0)
            probabilities.append(weights.max() / weights.sum())
            right.append(weights.argmax() == truth)
        assert found[name]["probability"] == pytest.approx(np.mean(probabilities), rel=1e-5)
        assert found[name]["right"] == np.mean(right) and 0 < np.mean(right) < 1


def test_calibrate(toy):
    """Each candidate set has the temperature of its own scores, with its bias; truths that are no
    candidate do not count."""
    dataset = data.load(str(toy))
    random = np.random.default_rng(1)
    features = torch.as_tensor(random.normal(size=(40, 30)).astype(np.float32))
    target = random.integers(30, size=40)
    seen = dataset.seen
    masks = dict(open=np.ones(30, bool), some=random.random(30) < 0.6)
    bias = dict(open=0.4, some=-1.0)
    found = experiment.calibrate(Given(), features, target, seen, masks, bias)
    for name, mask in masks.items():
        rows = [i for i in range(40) if mask[target[i]]]
        assert 0 < len(rows)
        scores = []
        for i in rows:
            scores.append([features[i, c] + bias[name] * (not seen.flat[c])
                           for c in range(30) if mask[c]])
        place = {c: k for k, c in enumerate(np.flatnonzero(mask))}
        truths = torch.tensor([place[target[i]] for i in rows])
        expected = experiment.fit_temperature(torch.tensor(scores), truths)
        assert found[name] == pytest.approx(expected, rel=1e-5)
