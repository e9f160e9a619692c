"""From a folder to the table: the files of a run, resuming, that no run removes another, errors,
probabilities, and the built-in dataset."""

import csv
import json
import shlex
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
import compcos
import data
import evaluate
import experiment
import features as image_features
import train
from compcos import CompCos
from feasibility import feasibility_scores, hard_mask

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
    common.write_rows(folder / "images.csv", ["image", "state", "object", "split"], rows)
    np.savez(folder / "features.npz", files=[row[0] for row in rows],
             features=np.array(features, np.float32))
    with open(folder / "vectors.txt", "w") as file:
        for name in ("s0", "s1", "s2", "s3", "s4", "o0", "o1", "o2", "o3", "o4", "o5"):
            print(name, *random.normal(size=20).round(3), file=file)
    return folder


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """Of an epoch: one pass over data as small as these."""
    monkeypatch.setitem(compcos.STRONG, "epoch_steps", 5)


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


def rows_of(path):
    """The rows of a .csv file."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


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
        curves = np.load(finished / "curves.npz")
        np.testing.assert_allclose(curves[f"{name}_seen"], swept.curve().seen)

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
    assert [row["epoch"] for row in log] == list("1234")
    best = max(log, key=lambda row: float(row["validation"]))
    assert best["epoch"] == str(metrics["best_epoch"])
    checkpoint = torch.load(finished / "best.pt", weights_only=True)
    np.testing.assert_allclose(checkpoint["feature_mean"], features["train"].mean(0), atol=1e-5)
    np.testing.assert_allclose(checkpoint["feature_std"], features["train"].std(0), atol=1e-5)
    for file in ("feasibility.csv", "best.pt"):
        found = experiment.read_feasibility(finished / file, dataset.states, dataset.objects)
        np.testing.assert_allclose(found, rho, atol=1e-6)


def test_same_seed_same_numbers_and_several_seeds(toy, tmp_path):
    one = run(toy, tmp_path / "one")
    several = run(toy, tmp_path / "several", "--seed", 0, 1)
    assert numbers(one) == numbers(several / "seed0") != numbers(several / "seed1")
    summary = json.loads((several / "metrics.json").read_text())
    aucs = []
    for seed in (0, 1):
        metrics = numbers(several / f"seed{seed}")
        aucs.append(metrics["test"]["open"]["exact"]["auc"])
    of_open = {name: summary[name]["test"]["open"]["exact"]["auc"] for name in ("mean", "std")}
    assert of_open["mean"] == pytest.approx(np.mean(aucs))
    assert of_open["std"] == pytest.approx(abs(aucs[1] - aucs[0]) / 2**0.5)  # over n - 1


def test_scores_that_are_there_are_of_the_same_weights(toy, tmp_path):
    """A run that goes on to further epochs makes them anew, asked for or not."""
    out = run(toy, tmp_path / "run", "--save-scores", "--epochs", 1, "--lr", 1e-3)
    before = np.load(out / "scores.npy")
    run(toy, out, "--resume", "--epochs", 3, "--lr", 1e-3)
    features = image_features.load_features(data.load(str(toy)))[1]
    expected = CompCos.load(out / "best.pt")(torch.as_tensor(features["test"])).detach().flatten(1)
    scores = np.load(out / "scores.npy")
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert not np.allclose(before, scores)


def test_data_without_unseen_compositions(toy, tmp_path):
    """Trains, evaluates its seen half and predicts; what does not exist is null."""
    rows = rows_of(toy / "images.csv")
    known = {(row["state"], row["object"]) for row in rows if row["split"] == "train"}
    kept = [row.values() for row in rows if (row["state"], row["object"]) in known]
    common.write_rows(toy / "images.csv", rows[0].keys(), kept)
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
    monkeypatch.setattr(experiment, "CANDIDATE_SETS", (*experiment.CANDIDATE_SETS, "seen_only"))
    out = run(toy, tmp_path / "run")
    assert "seen_only (" in capsys.readouterr().out
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
            hidden.append(rho[n] < experiment.greatest_threshold(rho[:n]))
        assert np.mean(hidden) < 0.05 + 3 * (0.05 * 0.95 / 4000) ** 0.5
    assert experiment.greatest_threshold(random.normal(size=18)) is None
    assert experiment.greatest_threshold(np.arange(39.0)) == 1.0  # the second smallest of 39


def test_a_mask_must_gain_more_than_it_is_expected_to_lose():
    """Of n exchangeable compositions and one more, a τ that hides r of the n is expected to leave
    n / (n + 1) of the share in sight: all ranks of the one more, counted."""
    for n in (19, 40):
        for hidden in (0, 1, 3):
            in_sight = []
            for rank in range(n + 1):  # of the next one, among the others, each as likely
                threshold_rank = hidden + 1 if rank < hidden + 1 else hidden
                in_sight.append(rank >= threshold_rank)
            kept = np.mean(in_sight) / (1 - hidden / n)
            assert kept == pytest.approx(1 - experiment.expected_loss(n), abs=1e-12)


@pytest.mark.parametrize("shown, distraction, hides", [(20, 3.0, True), (20, -9.0, False),
                                                       (18, 3.0, False)])
def test_the_justified_threshold(shown, distraction, hides):
    """It hides two of low ρ that attract answers, and none of those that exist; nothing where
    that gains nothing, or too few unseen ones are shown."""
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


@pytest.mark.parametrize("seen_count, unseen_count, rivals", [
    (30, 0, "seen"), (30, 19, "seen"), (30, 20, "all"), (29, 19, "all")])
def test_few_unseen_compositions_among_many_seen_do_not_compete(
        seen_count, unseen_count, rivals, capsys):
    """Of 60 at least 30 seen, and fewer than 20 unseen in validation: said, and can be undone."""
    seen = np.arange(60).reshape(6, 10) < seen_count
    shown = 59 - np.arange(unseen_count)
    dataset = SimpleNamespace(seen=seen, targets=dict(val=np.append(shown, 0)))
    assert experiment.choose_rivals(dataset, "open") == rivals
    assert ("--rivals all" in capsys.readouterr().out) == (rivals == "seen")


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


@pytest.mark.parametrize("change, message", [
    ("margin", "margin: 2.769230769230769 there, 0.1 here"), ("features", "data_crc32"),
    ("vectors", "data_crc32"), ("epochs", "past --epochs 2"), ("cut", "last.pt"),
    ("other", "last.pt")])
def test_resume_refuses_another_run(toy, tmp_path, capsys, change, message):
    """What the settings, the data or the file of the last epoch say; all files stay."""
    out = run(toy, tmp_path / "run")
    options = dict(margin=["--margin", 0.1], epochs=["--epochs", 2]).get(change, [])
    if change == "features":
        stored = dict(np.load(toy / "features.npz"))
        np.savez(toy / "features.npz", **stored | dict(features=stored["features"] + 1))
    if change == "vectors":
        (toy / "vectors.txt").write_text((toy / "vectors.txt").read_text().replace("-", ""))
    if change == "cut":
        (out / "last.pt").write_bytes((out / "last.pt").read_bytes()[:1000])
    if change == "other":
        shutil.copy(out / "best.pt", out / "last.pt")
    before = contents(out)
    assert message in refusal(capsys, toy, out, "--resume", *options)
    assert contents(out) == before


def test_no_run_removes_another(toy, tmp_path, capsys):
    """Not by the same command, by further seeds or by another form; what joins leaves the rest."""
    out = run(toy, tmp_path / "seeds", "--seed", 0, 1)
    single = run(toy, tmp_path / "single")
    before = contents(tmp_path)
    taken = ": --resume goes on with it, another --out begins one"
    for folder, options, message in (
            (out, ["--seed", 0, 1], taken), (out, ["--seed", 3], taken), (out, [], taken),
            (single, [], taken), (single, ["--seed", 0, 1], taken),
            (single, ["--seed", 0, 1, "--resume"], "single seed, which others cannot join"),
            (single, ["--seed", 1, "--resume"], "seed: 0 there, 1 here"),
            (out, ["--seed", 0, 1, "--resume", "--margin", 0.1], "margin: "),
            (out, ["--seed", 7, "--resume", "--margin", 0.1], "margin: ")):
        assert message in refusal(capsys, toy, folder, *options)
        assert contents(tmp_path) == before

    run(toy, out, "--seed", 2, "--resume")
    after = contents(tmp_path)
    assert before.items() <= after.items() and "seeds/seed2/best.pt" in after
    run(toy, out, "--seed", 1, 2, "--resume")
    summary = json.loads((out / "metrics.json").read_text())
    assert summary["settings"]["seeds"] == [1, 2]
    assert contents(out / "seed0") == {path[len("seeds/seed0/"):]: content
                                       for path, content in before.items()
                                       if path.startswith("seeds/seed0/")}


def test_runs_without_a_folder_are_numbered(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = ["--dataset", str(toy), "--device", "cpu", "--members", "1", "--epochs"]
    folders = [Path("runs/toy-compcos-open"), Path("runs/toy-compcos-open-2")]
    compcos.main([*short, "2"])
    before = contents(folders[0])
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(experiment, "selection", lambda _: signal.raise_signal(signal.SIGINT))
        compcos.main([*short, "1"])
    assert list(folders[1].iterdir()) == [folders[1] / ".lock"]  # begun, and nothing kept
    capsys.readouterr()
    compcos.main([*short, "1", "--resume"])
    assert f"written to {folders[1]}; next: python compcos.py --checkpoint {folders[1]}" in \
        capsys.readouterr().out
    assert numbers(folders[1])["best_epoch"] == 1
    compcos.main([*short, "1", "--world", "closed", "--resume"])
    assert contents(folders[0]) == before
    assert {path.name for path in Path("runs").iterdir()} == {
        "toy-compcos-open", "toy-compcos-open-2", "toy-compcos-closed"}


@pytest.mark.parametrize("name", ["last.pt", "scores.npy", "best.pt", "metrics.json"])
def test_a_disk_that_fills_up_loses_nothing(toy, tmp_path, monkeypatch, capsys, name):
    """The error names the file, what was there stays, and --resume makes the rest."""
    out = run(toy, tmp_path / "run", "--save-scores", "--epochs", 2)
    whole = run(toy, tmp_path / "whole", "--save-scores")
    before = contents(out)
    replace = common.os.replace

    def fill_up(part, path):
        if path.name == name:
            raise OSError(28, "No space left on device")
        replace(part, path)

    with monkeypatch.context() as patch:
        patch.setattr(common.os, "replace", fill_up)
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
    (["--lr", "nan"], "argument --lr: "), (["--epochs", 0], "argument --epochs: "),
    (["--seed", -1], "argument --seed: "), (["--dropout", 1], "argument --dropout: "),
    (["--checkpoint", "nowhere.pt", "--predict", "a.png"], "nowhere.pt"),
    (["--predict", "a.png"], "--checkpoint"), (["--out", "/dev/null/run"], "cannot write into ")])
def test_bad_options(toy, tmp_path, capsys, options, message):
    assert message in refusal(capsys, toy, tmp_path / "run", *options)
    assert not (tmp_path / "run/metrics.json").exists() and not list(tmp_path.glob("**/*.part"))


@pytest.mark.parametrize("change", [
    b"text", [1, 2], {"weights": 1}, dict(model="TMN"), dict(states=["s0"], weights={}),
    "an earlier version"])
def test_a_best_that_is_none(finished, tmp_path, change):
    path = tmp_path / "best.pt"
    whole = torch.load(finished / "best.pt", weights_only=True)
    if change == "an earlier version":
        del whole["feature_mean"]
        change = {}
    torch.save(whole | change if isinstance(change, dict) else change, path)
    if isinstance(change, bytes):
        path.write_bytes(change)
    with pytest.raises(ValueError, match="best.pt") as error:
        CompCos.load(path)
    assert "\n" not in str(error.value) and "weights_only" not in str(error.value)


@pytest.mark.parametrize("content", [
    b"\xff\xfe", b"state,object,feasibility\nold,dog,0.5\n", b"state\n",
    b"state,object,feasibility\nold,cat,high\n", b"state,object,feasibility\nold,cat,nan\n"])
def test_a_feasibility_that_is_none(tmp_path, content):
    path = tmp_path / "feasibility.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="feasibility.csv"):
        experiment.read_feasibility(path, ["old"], ["cat"])


# ---- what is printed ----


def test_the_table_says_what_it_rests_on(finished):
    metrics = json.loads((finished / "metrics.json").read_text())
    about = dict(backbone="ResNet-18", vectors=["glove"], recipe="strong", members=4, epochs=40,
                 device="cpu", mask="justified")
    metrics |= dict(settings=about, best_epoch=3, threshold=0.25)
    table = experiment.table([metrics], "title")
    assert table.startswith("title (test, %)\nResNet-18; vectors glove; strong recipe, 4 members; "
                            "best epoch 3 of 40; cpu\n")
    report = metrics["test"]["open"]["exact"]
    shown = [report[key] for key in ("best_seen", "best_unseen", "best_hm", "auc")]
    cells = "".join(f"{100 * share:>7.1f}" for share in shown)
    assert f"open (30)             exact       {cells}" in table
    notes = "\n".join(experiment.table_notes(metrics))
    assert "τ = 0.250" in notes and "--confidence" in notes  # its few unseen compositions
    other = json.loads(json.dumps(metrics).replace("0.", "0.1"))
    aucs = [run["test"]["open"]["exact"]["auc"] for run in (metrics, other)]
    mean = f"{100 * np.mean(aucs):.1f} ± {100 * abs(aucs[0] - aucs[1]) / 2**0.5:.1f}"
    assert mean in experiment.table([metrics, other], "title")


# ---- probabilities ----


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
    assert experiment.fit_temperature(scores, (torch.arange(5) + 1) % 5) > 10
    for same in (torch.ones(3, 4), torch.zeros(0, 4), torch.zeros(2, 1)):
        nobody = torch.zeros(len(same), dtype=torch.int64)
        assert experiment.fit_temperature(same, nobody) == 1.0


def test_probabilities_from_the_definition():
    """Image by image. Each candidate set has the temperature of its own scores, with its bias;
    truths that are no candidate do not count there, and are wrong in the test."""
    random = np.random.default_rng(1)
    seen = random.random((5, 6)) < 0.5
    features = random.normal(size=(40, 30)).astype(np.float32)
    target = np.where(random.random(40) < 0.5, features.argmax(1), random.integers(30, size=40))
    mask = random.random(30) < 0.6
    bias = -1.0
    given = (Given(), torch.as_tensor(features), target, seen, dict(some=mask), dict(some=bias))
    temperature = experiment.calibrate(*given)["some"]
    columns = np.flatnonzero(mask).tolist()
    ranked = torch.as_tensor(features + np.float32(bias) * ~seen.ravel())[:, columns]
    inside = [i for i in range(40) if target[i] in columns]
    truths = torch.tensor([columns.index(target[i]) for i in inside])
    expected = experiment.fit_temperature(ranked[inside], truths)
    assert 0 < len(inside) < 40 and temperature == pytest.approx(expected, rel=1e-3)
    shares, answers = (ranked / temperature).softmax(1).max(1)
    right = np.mean([columns[answer] == truth for answer, truth in zip(answers, target)])
    found = experiment.certainty(*given, dict(some=temperature))["some"]
    assert found["probability"] == pytest.approx(float(shares.mean()), rel=1e-5)
    assert found["right"] == pytest.approx(right) and 0 < right < 1


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
    """By the command that a run prints; from each candidate set; by folder, where what cannot be
    read is named together."""
    out = tmp_path / "a run"
    pixels = ["--features", "pixels", "--cache", tmp_path]
    short = ["--data-root", drawn, "--device", "cpu", "--epochs", 2]
    status, lines = predict(capsys, *short, *pixels, "--out", out)
    command = shlex.split(lines[-1].partition("; next: ")[2])
    assert command[:2] == ["python", "compcos.py"]
    for candidates in experiment.CANDIDATE_SETS:
        options = ["--candidates", candidates, "--top", 3]
        status, lines = predict(capsys, *command[2:], *options)
        assert status == 0 and len(lines) == 1 + 4 and candidates in lines[0]
        assert lines[1] == command[-1]
    photos = tmp_path / "photos"
    photos.mkdir()
    shutil.copy(command[-1], photos / "whole.png")
    (photos / "broken.png").write_bytes(Path(command[-1]).read_bytes()[:300])
    options = [*command[2:-1], photos, "--csv", tmp_path / "answers.csv"]
    status, lines = predict(capsys, *options[:-2], tmp_path / "none.png", *options[-2:])
    assert status == 2 and "broken.png" in lines[-1] and "none.png" in lines[-1]
    status, lines = predict(capsys, *options, "--skip-broken")
    answers = rows_of(tmp_path / "answers.csv")
    assert status == 0 and {Path(row["image"]).name for row in answers} == {"whole.png"}


# ---- the built-in dataset ----


def test_shapes_are_what_the_docstring_says(drawn):
    dataset = data.load("shapes", drawn)
    assert len(dataset.states) + len(dataset.objects) == 30 and dataset.feasible.sum() == 105
    assert dataset.feasible[dataset.seen].all()
    assert not experiment.occurring(dataset)[~dataset.feasible].any()
    features = image_features.load_features(dataset)[1]
    photo = dataset.path(dataset.images["test"][5])
    pixels = image_features.extract([photo], backbone="pixels", device="cpu")
    np.testing.assert_allclose(features["test"][5], pixels[0], atol=1e-5)


def test_learning_is_earned(drawn, tmp_path):
    """The open model beats the closed one in the open world; an untrained one is far below."""
    def metrics_of(name, *options):
        out = tmp_path / name
        compcos.main(["--data-root", str(drawn), "--out", str(out), "--device", "cpu", "--epochs",
                      "20", "--hidden", "256", *options])
        return numbers(out)

    opened = metrics_of("open")
    closed = metrics_of("closed", "--world", "closed")
    auc = opened["test"]["open"]["exact"]["auc"]
    assert 0.15 < closed["test"]["open"]["exact"]["auc"] < auc < 0.75
    assert 0.3 < closed["test"]["closed"]["exact"]["auc"] < 0.9
    assert opened["feasibility_auroc"] > 0.8
    untrained = metrics_of("untrained", "--epochs", "1", "--lr", "1e-30")
    assert untrained["test"]["open"]["exact"]["auc"] < auc / 20
