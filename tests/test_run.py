"""From a folder to the table: the files of a run, resuming, that no run removes another, errors,
probabilities, and the built-in dataset."""

import json
import shlex
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lab import shell
from lab.files import write_rows
import compcos
import data
import evaluate
from lab import run as experiment
from lab import features as image_features
import train
from compcos import CompCos
from lab.run import read_rows as rows_of
from feasibility import feasibility_scores, conformal_threshold, hard_mask

@pytest.fixture
def toy(tmp_path):
    """Own data with features in a folder of this test."""
    return make_toy(tmp_path / "toy")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run with its data, only read."""
    folder = tmp_path_factory.mktemp("finished")
    return run(make_toy(folder / "toy"), folder / "run", "--save-scores", "--mask", "paper")


def make_toy(folder):
    """5 states x 6 objects, 17 compositions, features that tell state and object with noise."""
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


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """Of an epoch: one pass over data as small as these."""
    monkeypatch.setitem(compcos.STRONG, "min_epoch_steps", 5)


def run(dataset, out, *options):
    """compcos.py's main on short training; returns --out."""
    short = ["--epochs", 4, "--members", 1, "--hidden", 64, "--lr", 1e-2, "--batch-size", 32]
    arguments = ["--dataset", dataset, "--device", "cpu", *short, "--out", out, *options]
    compcos.main([str(argument) for argument in arguments])
    return out


def refusal(capsys, *arguments):
    """The one error line in which `run` ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("error: ") == 1, error
    return error.splitlines()[-1]


def numbers(folder):
    """metrics.json without what may differ between two runs of the same seed."""
    metrics = json.loads((folder / "metrics.json").read_text())
    del metrics["settings"]
    return metrics


def contents(folder):
    """Every file below a folder but locks, path -> bytes."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# ---- the files ----


def test_files_of_a_run(finished):
    """Every number of metrics.json and of the tables, from the saved scores and the model alone."""
    metrics = json.loads((finished / "metrics.json").read_text())
    dataset = data.load(str(finished.parent / "toy"))
    features = image_features.load_features(dataset)[1]
    model = CompCos.load(finished / "best.pt")
    seen = dataset.seen
    rho = feasibility_scores(model.states.detach(), model.objects.detach(), seen)
    scores = np.load(finished / "scores.npy")
    target = dataset.targets["test"]
    expected = model(torch.as_tensor(features["test"])).detach().flatten(1)
    np.testing.assert_allclose(scores, expected, atol=1e-6)

    candidates = dict(closed=dataset.candidates("test"), open=np.ones(30, bool),
                      open_masked=hard_mask(rho, seen, metrics["threshold"]).ravel())
    names = np.array([f"{s} {o}" for s in dataset.states for o in dataset.objects])
    for name, mask in candidates.items():
        swept = evaluate.BiasSweep(seen.ravel(), candidates=mask, pairs=np.argwhere(seen | True))
        swept.update(scores, target)
        bias = metrics["bias"][name]
        reports = dict(exact=swept.report(), published=swept.report("published"),
                       fixed_bias=evaluate.accuracy_at(swept, bias))
        for protocol, report in metrics["test"][name].items():
            assert report == pytest.approx(reports[protocol], abs=1e-12)
        assert metrics["candidates"]["test"][name] == mask.sum()
        assert (np.load(finished / f"scores_{name}.npz")["candidates"] == mask).all()
        answers = np.where(mask, scores + bias * ~seen.ravel(), -np.inf).argmax(1)
        predictions = rows_of(finished / "predictions.csv")
        assert [row[name] for row in predictions] == list(names[answers])
        right = 0
        for row in rows_of(finished / "compositions.csv"):
            right += int(row["images"]) * float(row[name])
        assert right == pytest.approx((answers == target).sum(), abs=1e-2)
        curve = np.load(finished / "curves.npz")[f"{name}_seen"]
        np.testing.assert_allclose(curve, swept.curve().seen)

    # τ is the best of 50 by validation AUC alone
    unseen = rho[~seen]
    aucs = {}
    for tau in np.linspace(unseen.min(), unseen.max(), 50):
        masks = dict(one=hard_mask(rho, seen, tau).ravel())
        validation = torch.as_tensor(features["val"]), dataset.targets["val"]
        swept, _ = train.sweep(model, *validation, seen, masks)["one"]
        aucs[tau] = swept.report()["auc"]
    assert metrics["threshold"] == pytest.approx(max(aucs, key=aucs.get))

    log = rows_of(finished / "log.csv")
    best = max(log, key=lambda row: float(row["validation"]))
    assert len(log) == 4 and best["epoch"] == str(metrics["best_epoch"])
    np.testing.assert_allclose(model.checkpoint["feature_std"], features["train"].std(0), atol=1e-5)
    found = experiment.read_feasibility(finished / "feasibility.csv", dataset.states,
                                        dataset.objects)
    np.testing.assert_allclose(found, rho, atol=1e-6)


def test_same_seed_same_numbers_and_several_seeds(toy, tmp_path, capsys):
    """The mean is of all seeds in the folder, also of those that are there as another joins."""
    one = run(toy, tmp_path / "one")
    several = run(toy, tmp_path / "several", "--seed", 0, 1)
    assert numbers(one) == numbers(several / "seed0") != numbers(several / "seed1")
    capsys.readouterr()
    run(toy, several, "--seed", 2, "--resume")
    aucs = []
    for seed in range(3):
        metrics = numbers(several / f"seed{seed}")
        aucs.append(metrics["test"]["open"]["exact"]["auc"])
    summary = json.loads((several / "metrics.json").read_text())
    of_open = [summary[name]["test"]["open"]["exact"]["auc"] for name in ("mean", "std")]
    assert summary["settings"]["seeds"] == [0, 1, 2]
    assert of_open == pytest.approx([np.mean(aucs), np.std(aucs, ddof=1)])
    printed = capsys.readouterr().out
    assert "mean ± std of 3 seeds" in printed
    assert f"{100 * of_open[0]:.1f} ± {100 * of_open[1]:.1f}" in printed
    assert "features.npz, frozen; vectors " in printed  # what the numbers rest on


def test_data_without_unseen_compositions(toy, tmp_path):
    """Trains, evaluates its seen half and predicts; what does not exist is null."""
    rows = rows_of(toy / "images.csv")
    known = {(row["state"], row["object"]) for row in rows if row["split"] == "train"}
    kept = [row.values() for row in rows if (row["state"], row["object"]) in known]
    write_rows(toy / "images.csv", rows[0].keys(), kept)
    out = run(toy, tmp_path / "run")
    report = numbers(out)["test"]["open"]["exact"]
    assert report["best_seen"] > 0.3 and report["auc"] is None
    assert CompCos.load(out / "best.pt")(torch.zeros(1, 16)).isfinite().all()


def test_a_fourth_candidate_set_is_one_entry(toy, tmp_path, monkeypatch, capsys):
    """It is measured, written, printed and predicted from."""
    three = experiment.candidate_sets

    def four(seen, *arguments, **named):
        return three(seen, *arguments, **named) | dict(seen_only=seen.ravel())

    monkeypatch.setattr(experiment, "candidate_sets", four)
    out = run(toy, tmp_path / "run")
    assert "\nseen_only " in capsys.readouterr().out
    assert numbers(out)["test"]["seen_only"]["exact"]["best_unseen"] == 0
    assert {"seen_only", "seen_only_score"} <= rows_of(out / "predictions.csv")[0].keys()
    rows = compcos.predict_images(CompCos.load(out / "best.pt"), ["a"], np.zeros((1, 16)), top=2,
                                  candidates="seen_only")
    assert all(row["seen"] for row in rows)


# ---- decisions on validation ----


class Given(torch.nn.Module):
    """A model whose scores are the features."""

    states = torch.zeros(5, 1)
    objects = torch.zeros(6, 1)

    def compositions(self):
        return None

    def score(self, features, compositions):
        return features.reshape(-1, 5, 6)


def test_threshold_hides_at_most_a_twentieth():
    """Over draws of what exists, validation and another composition alike: 5 % hidden on average;
    none below 19."""
    random = np.random.default_rng(0)
    for n in (19, 51, 130):
        hidden = []
        for _ in range(4000):
            rho = random.normal(size=n + 1)
            hidden.append(rho[n] < conformal_threshold(rho[:n]))
        assert np.mean(hidden) < 0.05 + 3 * (0.05 * 0.95 / 4000) ** 0.5
    assert conformal_threshold(random.normal(size=18)) == -np.inf
    assert conformal_threshold(np.arange(39.0)) == 1.0  # the second smallest of 39


@pytest.mark.parametrize("shown, distraction, hides", [(20, 0.0, True), (20, -0.5, False),
                                                       (18, 3.0, False)])
def test_the_justified_threshold(shown, distraction, hides):
    """It hides two of low ρ that attract answers, and none of those that exist; nothing where
    that gains less than a mask is expected to lose (here 2.6 of 4.8 %), or too few unseen ones are
    shown."""
    random = np.random.default_rng(0)
    seen = np.arange(30).reshape(5, 6) < 8
    rho = np.where(np.arange(30) < 28, 0.5 + np.arange(30) / 60, 0.1).reshape(5, 6)
    target = np.repeat(np.arange(8 + shown), 3)
    scores = random.normal(size=(len(target), 30)) + 2 * (np.arange(30) == target[:, None])
    scores[:, 28:] += distraction
    given = (Given(), torch.as_tensor(scores).float(), target, seen, rho)
    threshold, _ = experiment.best_threshold(*given, mask="justified")
    assert (0.1 < threshold <= rho[1, 2]) if hides else threshold == -1
    assert experiment.best_threshold(*given)[0] >= threshold


@pytest.mark.parametrize("seen_count, unseen_count, train_candidates", [
    (30, 19, "seen"), (30, 20, "all"), (29, 19, "all")])
def test_few_unseen_compositions_among_many_seen_do_not_compete(
        seen_count, unseen_count, train_candidates, capsys):
    """Of 60 at least 30 seen, and fewer than 20 unseen in validation: said, and can be undone."""
    seen = np.arange(60).reshape(6, 10) < seen_count
    shown = 59 - np.arange(unseen_count)
    dataset = SimpleNamespace(seen=seen, targets=dict(val=np.append(shown, 0)))
    assert experiment.choose_train_candidates(dataset) == train_candidates
    assert ("--train_candidates" in capsys.readouterr().out) == (train_candidates == "seen")


# ---- going on ----


@pytest.mark.parametrize("world", ["open", "closed"])
def test_interrupted_and_resumed_equals_uninterrupted(toy, tmp_path, monkeypatch, capsys, world):
    whole = run(toy, tmp_path / "whole", "--world", world)
    out = tmp_path / "part"
    validated = []

    def interrupt(report):
        validated.append(report)
        if len(validated) == 3:
            signal.raise_signal(signal.SIGTERM)
        return report["auc"]

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(experiment, "selection", interrupt)
        run(toy, out, "--world", world)
    assert stop.value.code == 143 and "--resume" in capsys.readouterr().err
    assert not (out / "best.pt").exists()
    assert torch.load(out / "last.pt", weights_only=True)["epoch"] == 2
    run(toy, out, "--world", world, "--resume")
    assert numbers(out) == numbers(whole)
    for ours, expected in zip(rows_of(out / "log.csv"), rows_of(whole / "log.csv"), strict=True):
        assert ours["loss"] == expected["loss"] and ours["validation"] == expected["validation"]


def test_resume_refuses_other_data_and_files(toy, tmp_path, capsys):
    out = run(toy, tmp_path / "run")
    stored = dict(np.load(toy / "features.npz"))
    np.savez(toy / "features.npz", **stored | dict(features=stored["features"] + 1))
    before = contents(out)
    assert "data_crc32" in refusal(capsys, toy, out, "--resume")
    assert contents(out) == before
    shutil.copy(out / "best.pt", out / "last.pt")
    assert "last.pt" in refusal(capsys, toy, out, "--resume")


def test_resume_uses_the_weights_of_the_run(toy, tmp_path, capsys):
    """Those of the features, which it recorded, though they are not named again; if the file is
    another one meanwhile, it stops."""
    weights = tmp_path / "weights.pt"
    weights.write_text("one")
    stored = dict(np.load(toy / "features.npz"))
    kind = image_features.cache_key(None, weights, True)
    np.savez(toy / "features.npz", **stored, key=kind)
    out = run(toy, tmp_path / "run", "--weights", weights)
    run(toy, out, "--resume", "--epochs", 5)
    settings = json.loads((out / "metrics.json").read_text())["settings"]
    assert (settings["epochs"], settings["weights"]) == (5, str(weights))
    weights.write_text("another")
    assert "--weights" in refusal(capsys, toy, out, "--resume")


def test_no_run_removes_another(toy, tmp_path, capsys):
    """Not by the same command, by further seeds or by another form; what joins leaves the rest."""
    out = run(toy, tmp_path / "seeds", "--seed", 0, 1)
    single = run(toy, tmp_path / "single")
    before = contents(tmp_path)
    taken = ": --resume goes on with it, another --out begins one"
    for folder, options, message in (
            (out, ["--seed", 3], taken), (single, [], taken), (single, ["--seed", 0, 1], taken),
            (single, ["--seed", 0, 1, "--resume"], "single seed, which others cannot join"),
            (single, ["--seed", 1, "--resume"], "seed: 0 there, 1 here"),
            (single, ["--resume", "--epochs", 2], "past --epochs 2"),
            (out, ["--seed", 0, 1, "--resume", "--margin", 0.1], "margin: "),
            (out, ["--seed", 7, "--resume", "--epochs", 5], "epochs: 4 there, 5 ")):
        assert message in refusal(capsys, toy, folder, *options)
        assert contents(tmp_path) == before

    run(toy, out, "--seed", 2, "--resume")
    after = contents(tmp_path)
    del before["seeds/metrics.json"]  # the mean, now of three
    assert before.items() <= after.items()
    for path in tmp_path.glob("**/last.pt"):
        path.unlink()
    assert "holds a run without last.pt" in refusal(capsys, toy, single, "--resume")
    assert "margin: " in refusal(capsys, toy, out, "--seed", 7, "--resume", "--margin", 0.1)


def test_runs_without_a_folder_are_numbered(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = ["--dataset", str(toy), "--device", "cpu", "--members", "1", "--epochs"]
    first, second = Path("runs/toy-compcos-open"), Path("runs/toy-compcos-open-2")
    compcos.main([*short, "2"])
    before = contents(first)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(experiment, "selection", lambda _: signal.raise_signal(signal.SIGINT))
        compcos.main([*short, "1"])
    assert list(second.iterdir()) == [second / ".lock"]  # begun, and nothing kept
    compcos.main([*short, "1", "--resume"])
    assert f"written to {second}; next: python compcos.py --checkpoint {second}" in \
        capsys.readouterr().out
    assert numbers(second)["best_epoch"] == 1
    compcos.main([*short, "1", "--world", "closed", "--resume"])
    assert contents(first) == before and Path("runs/toy-compcos-closed/best.pt").exists()


def test_a_disk_that_fills_up_loses_nothing(toy, tmp_path, monkeypatch, capsys):
    """The error names the file, what was there stays, and --resume makes the rest, also the scores
    anew, which are there."""
    begun = run(toy, tmp_path / "begun", "--save-scores", "--epochs", 2)
    whole = run(toy, tmp_path / "whole", "--save-scores")
    before = contents(begun)
    replace = shell.os.replace
    for name in ("last.pt", "scores.npy", "metrics.json"):
        out = shutil.copytree(begun, tmp_path / name)

        def fill_up(part, path):
            if path.name == name:
                raise OSError(28, "No space left on device")
            replace(part, path)

        with monkeypatch.context() as patch:
            patch.setattr(shell.os, "replace", fill_up)
            error = refusal(capsys, toy, out, "--resume")
        assert f"cannot write {out / name}: No space left on device" in error
        assert contents(out)[name] == before[name] and not list(out.glob(".*.part"))
        run(toy, out, "--resume")
        for file in ("scores.npy", "predictions.csv", "compositions.csv", "feasibility.csv"):
            assert (out / file).read_bytes() == (whole / file).read_bytes()
        assert numbers(out) == numbers(whole)


# ---- what is wrong ----


@pytest.mark.parametrize("options, message", [
    (["--vectors", "nowhere.txt"], "nowhere.txt"), (["--features", "nowhere.npz"], "nowhere.npz"),
    (["--device", "cuda:9"], "device"), (["--lr", 1e30], "lower --lr"),
    (["--predict", "a.png"], "--checkpoint"),
    (["--checkpoint", "nowhere.pt", "--predict", "a.png"], "nowhere.pt"),
    (["--out", "/dev/null/run"], "cannot write into ")])
def test_bad_options(toy, tmp_path, capsys, options, message):
    assert message in refusal(capsys, toy, tmp_path / "run", *options)
    assert not (tmp_path / "run/metrics.json").exists() and not list(tmp_path.glob("**/*.part"))


@pytest.mark.parametrize("change", [b"text", [1, 2], dict(settings=dict(model="tmn")),
                                    dict(weights={})])
def test_a_best_that_is_none(finished, tmp_path, change):
    path = tmp_path / "best.pt"
    earlier = torch.load(finished / "best.pt", weights_only=True)  # as of before these features
    del earlier["feature_mean"]
    torch.save(earlier, path)
    with pytest.raises(ValueError, match="expected the best.pt of a compcos.*; train anew"):
        CompCos.load(path)
    if isinstance(change, dict):
        change = torch.load(finished / "best.pt", weights_only=True) | change
    torch.save(change, path)
    if isinstance(change, bytes):
        path.write_bytes(change)
    with pytest.raises(ValueError, match="best.pt") as error:
        CompCos.load(path)
    assert "\n" not in str(error.value) and "weights_only" not in str(error.value)


@pytest.mark.parametrize("content", [
    b"\xff\xfe", b"state,object,feasibility\nold,dog,0.5\n", b"state\n",
    b"state,object,feasibility\nold,cat,high\n"])
def test_a_feasibility_that_is_none(tmp_path, content):
    path = tmp_path / "feasibility.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="feasibility.csv"):
        experiment.read_feasibility(path, ["old"], ["cat"])


# ---- probabilities ----


def test_temperature_is_the_likeliest():
    """Against the likelihood itself, on a fine grid of temperatures; scores of any size."""
    random = torch.Generator().manual_seed(0)
    for size in (1e-3, 1.0, 300.0):
        scores = size * torch.randn(400, 7, generator=random)
        truth_of_model = (scores / (0.7 * size)).softmax(1).multinomial(1, generator=random)[:, 0]
        found = train.fit_temperature(scores, truth_of_model)
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
    right = train.fit_temperature(scores, torch.arange(5))
    # of six images one is equally right for all: (5 + 1/5) / 6 is the share of the truth
    share = (5 + 1 / 5) / 6
    assert float((scores / right).softmax(1)[0, 0]) == pytest.approx(share, abs=1e-4)
    assert train.fit_temperature(scores, (torch.arange(5) + 1) % 5) > 10
    assert train.fit_temperature(torch.ones(3, 4), torch.tensor([0, 1, 2])) == 1.0
    assert train.fit_temperature(torch.zeros(0, 4), torch.arange(0)) == 1.0


def test_probabilities_of_the_scores_as_they_are_ranked():
    """Of the candidates alone, with the bias. Images whose truth is none do not count for the
    temperature, and are wrong in the test."""
    random = np.random.default_rng(1)
    seen = random.random((5, 6)) < 0.5
    features = random.normal(size=(40, 30)).astype(np.float32)
    target = np.where(random.random(40) < 0.5, features.argmax(1), random.integers(30, size=40))
    mask = random.random(30) < 0.6
    bias = -1.0
    given = (Given(), torch.as_tensor(features), target, seen, dict(some=mask), dict(some=bias))
    inside = mask[target]
    ranked = torch.as_tensor(features + np.float32(bias) * ~seen.ravel())[:, mask]
    place = torch.as_tensor(mask.cumsum() - 1)[target]
    expected = train.fit_temperature(ranked[inside], place[inside])
    temperature = experiment.calibrate(*given)["some"]
    assert 0 < inside.sum() < 40 and temperature == pytest.approx(expected, rel=1e-3)
    shares, answers = (ranked / temperature).softmax(1).max(1)
    right = (np.flatnonzero(mask)[answers] == target).mean()
    found = experiment.certainty(*given, dict(some=temperature))["some"]
    assert found == pytest.approx(dict(probability=float(shares.mean()), right=right), rel=1e-5)


# ---- prediction from the command line ----


def predict(capsys, *arguments):
    """(status, what is printed) of compcos.py."""
    status = 0
    try:
        compcos.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = stop.code
    output = capsys.readouterr()
    return status, (output.out + output.err).splitlines()


def test_predicting_images(drawn, tmp_path, capsys):
    """By the command that a run prints; from each candidate set; without what cannot be read."""
    out = tmp_path / "a run"
    pixels = ["--features", "pixels"]
    short = ["--data-root", drawn, "--device", "cpu", "--epochs", 1, "--hidden", 64]
    status, lines = predict(capsys, *short, *pixels, "--out", out)
    command = shlex.split(lines[-1].partition("; next: ")[2])
    assert command[:2] == ["python", "compcos.py"]
    for candidates in experiment.CANDIDATE_SETS:
        options = ["--candidates", candidates, "--top", 3]
        status, lines = predict(capsys, *command[2:], *options)
        assert status == 0 and len(lines) == 1 + 4 and candidates in lines[0]
        assert lines[1] == command[-1]
    broken = tmp_path / "broken.png"
    broken.write_bytes(Path(command[-1]).read_bytes()[:300])
    options = [*command[2:], broken, "--csv", tmp_path / "new/answers.csv"]
    status, lines = predict(capsys, *options)
    assert status == 2 and "broken.png" in lines[-1]
    status, lines = predict(capsys, *options, "--skip-broken")
    images = {row["image"] for row in rows_of(tmp_path / "new/answers.csv")}
    assert status == 0 and images == {command[-1]}


# ---- the built-in dataset ----


def test_shapes_are_what_the_docstring_says(drawn):
    dataset = data.load("shapes", drawn)
    assert len(dataset.states) + len(dataset.objects) == 30 and dataset.feasible.sum() == 105
    shown = dataset.candidates("val") | dataset.candidates("test")
    assert dataset.feasible.ravel()[shown].all()


def test_learning_is_earned(drawn, tmp_path):
    """The open model beats the closed one in the open world; an untrained one is far below."""
    auc = {}
    for name, options in (("open", []), ("closed", ["--world", "closed"]),
                          ("untrained", ["--epochs", "1", "--lr", "1e-30"])):
        out = tmp_path / name
        compcos.main(["--data-root", str(drawn), "--out", str(out), "--device", "cpu", "--epochs",
                      "20", "--hidden", "128", "--members", "1", *options])
        auc[name] = numbers(out)["test"]["open"]["exact"]["auc"]
    assert 20 * auc["untrained"] < 0.1 < auc["closed"] < auc["open"] < 0.75
    assert numbers(tmp_path / "open")["feasibility_auroc"] > 0.8
