"""From options to numbers: recipes, decisions on validation, probabilities, going on, and what ends
a training."""

import shutil
import signal
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import compcos
import data
from compcos import CompCos, Settings
from feasibility import conformal_threshold
from lab import features as image_features
from lab import run as runs
from lab import words
from lab.files import read_rows, write_rows
from toy import command, contents, metrics_of, numbers, refusal, refused_run, run


def inputs_of(toy):
    """Return the dataset, its features by phase, and the word vectors of states and objects."""
    dataset = data.load(str(toy))
    features = image_features.load_features(dataset)[1]
    vectors = words.word_vectors([*dataset.states, *dataset.objects], str(toy / "vectors.txt"))
    return dataset, features, vectors[:5], vectors[5:]


# ---- recipes and settings ----


def test_recipes_of_datasets():
    assert runs.compcos_settings("paper", "utzappos", {}) == Settings.paper("utzappos")
    assert runs.compcos_settings("paper", "photos", dict(lr=0.1)) == \
        Settings.paper("folder", lr=0.1)
    assert runs.compcos_settings("strong", "shapes", {}) == Settings.strong()


def test_the_command_equals_fit(toy, tmp_path):
    """Test AUC to the last digit, of members with candidates that are chosen, and closed."""
    dataset, features, *vectors = inputs_of(toy)
    for world, members in (("open", 2), ("closed", 1)):
        out = run(toy, tmp_path / world, "--members", members, "--world", world)
        settings = Settings.strong(epochs=4, members=members, hidden=64, lr=1e-2, batch_size=32,
                                   min_epoch_steps=5, world=world)
        model = compcos.fit(features["train"], dataset.targets["train"], *vectors, seed=0,
                            validation=(features["val"], dataset.targets["val"]),
                            settings=settings, device="cpu")
        report = compcos.evaluate_model(model, features["test"], dataset.targets["test"])
        assert report["auc"] == numbers(out)["test"]["open"]["exact"]["auc"]


def test_data_without_unseen_compositions(toy, tmp_path, capsys):
    """Trains, evaluates its seen half and predicts; what does not exist is null."""
    rows = read_rows(toy / "images.csv")
    known = {(row["state"], row["object"]) for row in rows if row["split"] == "train"}
    kept = [row.values() for row in rows if (row["state"], row["object"]) in known]
    write_rows(toy / "images.csv", rows[0].keys(), kept)
    out = run(toy, tmp_path / "run")
    metrics = numbers(out)
    assert metrics["test"]["open"]["exact"]["best_seen"] > 0.3
    assert metrics["test"]["open"]["exact"]["auc"] is None and metrics["bias"]["open"] == 0
    notes = capsys.readouterr().out.partition("hard mask: ")[2]
    assert "nan" not in notes and "where the composition had training photos.\n" in notes
    command("--checkpoint", out, "--features", toy / "features.npz", "--top", 1)


def test_a_model_that_breaks_the_contract_is_told():
    model = CompCos(np.eye(5), np.ones((6, 5)), 8).prepare(np.eye(5, 6) > 0)
    score = model.score
    model.score = lambda *given: score(*given).mT
    with pytest.raises(ValueError, match=r"CompCos.score must .* \(2, 5, 6\), got \(2, 6, 5\)"):
        runs.check_model(model, torch.zeros(3, 8))


# ---- decisions on validation ----


class Given(nn.Module):
    """A model whose scores are the features."""

    states = torch.zeros(5, 1)
    objects = torch.zeros(6, 1)
    feature_dim = 30

    def compositions(self):
        return None

    def score(self, features, compositions):
        return features.reshape(-1, 5, 6)


@pytest.mark.parametrize("shown, distraction, words", [
    (20, 0.0, "leaves 28 of 30 compositions"), (20, -0.5, "none, since no τ gains more"),
    (18, 3.0, "none, since validation shows 18 unseen compositions; at least 19")])
def test_the_justified_threshold(shown, distraction, words):
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
    threshold, _, said = runs.best_threshold(*given, mask="justified")
    assert (0.1 < threshold <= rho[1, 2]) if "leaves" in words else threshold == -1
    assert words in said
    assert runs.best_threshold(*given)[0] >= threshold
    assert conformal_threshold(np.arange(39.0)) == 1.0  # the second smallest of 39


# ---- probabilities ----


def test_temperature_is_the_likeliest():
    """Against the likelihood itself, on a fine grid of temperatures; scores of any size."""
    random = torch.Generator().manual_seed(0)
    for size in (1e-3, 1.0, 300.0):
        scores = size * torch.randn(400, 7, generator=random)
        truth_of_model = (scores / (0.7 * size)).softmax(1).multinomial(1, generator=random)[:, 0]
        found = runs.fit_temperature(scores, truth_of_model)
        grid = size * torch.linspace(0.4, 1.2, 801)
        losses = []
        for temperature in grid:
            logs = (scores / temperature).log_softmax(1)
            more = logs.mean()  # the image to which every answer is equally right
            losses.append(logs.gather(1, truth_of_model[:, None]).sum() + more)
        assert found == pytest.approx(float(grid[torch.stack(losses).argmax()]), abs=2e-3 * size)


@pytest.mark.filterwarnings("error")
def test_temperature_at_its_limits():
    """Always right: sure, but not without end. Worse than chance: no answer is likelier. Nothing to
    tell it from, or a single candidate: 1."""
    scores = torch.eye(5)
    right = runs.fit_temperature(scores, torch.arange(5))
    # of six images one is equally right for all: (5 + 1/5) / 6 is the share of the truth
    share = (5 + 1 / 5) / 6
    assert float((scores / right).softmax(1)[0, 0]) == pytest.approx(share, abs=1e-4)
    assert runs.fit_temperature(scores, (torch.arange(5) + 1) % 5) > 10
    assert runs.fit_temperature(torch.ones(3, 4), torch.tensor([0, 1, 2])) == 1.0
    assert runs.fit_temperature(torch.zeros(0, 4), torch.arange(0)) == 1.0
    assert runs.fit_temperature(torch.randn(3, 1), torch.zeros(3, dtype=int)) == 1.0


def test_probabilities_of_the_scores_as_they_are_ranked():
    """Of the candidates alone, with the bias. Images whose truth is none do not count for the
    temperature, and are wrong in the test."""
    random = np.random.default_rng(1)
    seen = random.random((5, 6)) < 0.5
    features = random.normal(size=(40, 30)).astype(np.float32)
    target = np.where(random.random(40) < 0.5, features.argmax(1), random.integers(30, size=40))
    mask = random.random(30) < 0.6
    bias = -1.0
    given = (Given(), torch.as_tensor(features), target, seen)
    inside = mask[target]
    ranked = torch.as_tensor(features + np.float32(bias) * ~seen.ravel())[:, mask]
    place = torch.as_tensor(mask.cumsum() - 1)[target]
    expected = runs.fit_temperature(ranked[inside], place[inside])
    temperature = runs.calibrate(*given, dict(some=mask), dict(some=bias))["some"]
    assert 0 < inside.sum() < 40 and temperature == pytest.approx(expected, rel=1e-3)
    shares, answers = (ranked / temperature).softmax(1).max(1)
    found = runs.calibration(*given, mask, bias, temperature)
    assert found["confidence"] == pytest.approx(float(shares.mean()), rel=1e-5)
    assert found["accuracy"] == (np.flatnonzero(mask)[answers] == target).mean()


def test_interval_of_an_accuracy_is_of_whole_compositions():
    """Of two compositions one is right: a quarter of the resamples has none, a quarter both."""
    right = np.arange(60) < 30
    found = runs.accuracy_interval(right, np.arange(60) // 30)
    assert found == dict(accuracy=0.5, accuracy_low=0, accuracy_high=1, compositions=2)


# ---- going on ----


@pytest.mark.parametrize("world, members", [("open", 1), ("open", 2), ("closed", 1)])
def test_interrupted_and_resumed_equals_uninterrupted(toy, tmp_path, monkeypatch, capsys, world,
                                                      members):
    """SIGTERM in the third epoch, then in the first one of what goes on, then to the end."""
    options = ["--world", world, "--members", members, "--warmup", 2, "--save-scores"]
    whole = run(toy, tmp_path / "whole", *options)
    out = tmp_path / "part"
    select = compcos.selection
    for epochs, more in ((3, []), (1, ["--resume"])):
        reports = []

        def interrupt(report):
            reports.append(report)
            if len(reports) == epochs:
                signal.raise_signal(signal.SIGTERM)
            return select(report)

        with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
            patch.setattr(compcos, "selection", interrupt)
            run(toy, out, *options, *more)
        assert stop.value.code == 143 and "--resume" in capsys.readouterr().err
        assert torch.load(out / "last.pt", weights_only=True)["epoch"] == 2
        assert not (out / "best.pt").exists()
    run(toy, out, *options, "--resume")
    assert numbers(out) == numbers(whole)
    logs = [read_rows(folder / "log.csv") for folder in (out, whole)]
    for ours, expected in zip(*logs, strict=True):
        assert ours["loss"] == expected["loss"] and ours["validation"] == expected["validation"]
    assert (out / "scores.npy").read_bytes() == (whole / "scores.npy").read_bytes()


def test_resume_refuses_other_photos(toy, tmp_path, capsys):
    """And leaves all files, the cached features too, as they were."""
    random = np.random.default_rng(0)

    def draw(row):
        photo = Image.fromarray(random.integers(0, 256, (4, 4), np.uint8))
        photo.save(toy / "images" / row["image"])

    (toy / "images").mkdir()
    rows = read_rows(toy / "images.csv")
    for row in rows:
        draw(row)
    out = run(toy, tmp_path / "run", "--features", "pixels", "--epochs", 1)
    draw(rows[0])
    before = contents(tmp_path)
    error = refused_run(capsys, toy, out, "--features", "pixels", "--epochs", 1, "--resume")
    assert "data_crc32" in error and contents(tmp_path) == before


@pytest.mark.parametrize("change", [
    dict(epoch=1.5), dict(history=["one", "two"]), dict(model={}), [1, 2], dict(settings=[]),
    dict(epoch="two")])
def test_a_last_of_crafted_values(toy, tmp_path, capsys, change):
    out = run(toy, tmp_path / "run", "--epochs", 2)
    if isinstance(change, dict):
        change = torch.load(out / "last.pt", weights_only=True) | change
    torch.save(change, out / "last.pt")
    assert str(out) in refused_run(capsys, toy, out, "--resume")


def test_an_error_in_training_keeps_the_last_epoch(tmp_path):
    """A bug in validation, a loss that is not finite, or Ctrl-C."""
    out = tmp_path / "kept"

    def epochs(error):
        yield dict(epoch=1, history=[dict(loss=1.0, validation=0.1)])
        raise error

    for error, message in ((ZeroDivisionError("a bug"), "^a bug$"),
                           (ValueError("diverged"), "kept: diverged"),
                           (KeyboardInterrupt(), "stopped: pass --out .* --resume")):
        with pytest.raises(type(error), match=message):
            runs.save_epochs(epochs(error), None, dict(epochs=2), out)
        assert torch.load(out / "last.pt")["epoch"] == 1
        shutil.rmtree(out)


def test_a_signal_while_the_last_epoch_is_saved_costs_nothing(tmp_path, monkeypatch):
    saves = Mock(side_effect=[KeyboardInterrupt, None])
    monkeypatch.setattr(runs, "save_state", saves)
    states = [dict(epoch=1, history=[dict(loss=1.0, validation=0.1)])]
    with pytest.raises(KeyboardInterrupt, match="--resume"):
        runs.save_epochs(states, None, dict(epochs=1), tmp_path)
    assert saves.call_count == 2


def test_a_disk_that_fills_up_is_named_and_costs_no_file(tmp_path):
    """As a limit to the size of files, of which torch.save itself would say less."""
    resource = pytest.importorskip("resource")
    (tmp_path / "last.pt").write_text("old")
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000, most))
    try:
        with pytest.raises(OSError, match="27.* cannot write .*last.pt: File too large"):
            runs.save_state(tmp_path, dict(model=torch.zeros(100000)), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
    assert (tmp_path / "last.pt").read_text() == "old" and len([*tmp_path.iterdir()]) == 1


# ---- a final model ----


def test_a_final_model_of_all_photos(toy, tmp_path, capsys):
    """It equals a fit on all data, knows all compositions, and leaves the run as it was. It is
    refused for other data, and without a finished run."""
    out = run(toy, tmp_path / "run", "--members", 2, "--seed", 3)
    before = contents(out)
    command("--final", out, "--device", "cpu")
    after = contents(out)
    final = after.pop("final.pt")
    assert after == before and final != before["best.pt"]
    assert "accuracy of final.pt is not measured" in capsys.readouterr().out

    dataset, features, *vectors = inputs_of(toy)
    before = compcos.load(out / "best.pt")
    settings = compcos.replace(before.settings, epochs=metrics_of(out)["best_epoch"])
    targets = np.concatenate([dataset.targets[phase] for phase in data.PHASES])
    every = np.concatenate([features[phase] for phase in data.PHASES])
    expected = compcos.fit(every, targets, *vectors, settings=settings, seed=3, device="cpu")
    model = compcos.load(out / "final.pt")
    for weight, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight, other)
    assert (model.seen.numpy().ravel() == np.isin(np.arange(30), targets)).all()
    assert model.checkpoint["candidates"]["closed"][targets].all()
    for name in ("bias", "temperature", "threshold"):
        assert model.checkpoint[name] == before.checkpoint[name]
    command("--checkpoint", out / "final.pt", "--features", toy / "features.npz", "--top", 1)
    assert "accuracy of final.pt is not measured" in capsys.readouterr().out

    stored = dict(np.load(toy / "features.npz"))
    np.savez(toy / "features.npz", **stored | dict(features=stored["features"] + 1))
    assert "data of" in refusal(capsys, "--final", out)
    (out / "best.pt").unlink()
    assert "must be the folder of a finished run" in refusal(capsys, "--final", out)


# ---- what is wrong ----


@pytest.mark.parametrize("options, message", [
    (["--vectors", "nowhere.txt"], "nowhere.txt"), (["--features", "nowhere.npz"], "nowhere.npz"),
    (["--device", "cuda:9"], "device"), (["--lr", 1e30], "lower lr"),
    (["--lr", -1], "lr must be above 0, got -1"), (["--predict", "a.png"], "--checkpoint"),
    (["--checkpoint", "nowhere.pt", "--predict", "a.png"], "nowhere.pt"),
    (["--out", "/dev/null/run"], "cannot write into ")])
def test_bad_options(toy, tmp_path, capsys, options, message):
    assert message in refused_run(capsys, toy, tmp_path / "run", *options)
    assert not (tmp_path / "run/metrics.json").exists() and not list(tmp_path.glob("**/*.part"))


def test_help_explains_every_option(capsys):
    """Each setting has an option with both recipes' values; an example ends the text."""
    with pytest.raises(SystemExit):
        command("--help")
    printed = " ".join(capsys.readouterr().out.split())
    for field in compcos.fields(Settings):
        assert f"--{field.name.replace('_', '-')} " in printed
    assert not set("ωτρφ") & set(printed)
    assert "paper 0.4, strong 2.76923" in printed
    assert "python compcos.py --checkpoint" in printed[-400:]


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
                          ("untrained", ["--epochs", 1, "--lr", 1e-30])):
        out = tmp_path / name
        command("--data-root", drawn, "--out", out, "--device", "cpu", "--epochs", 20, "--hidden",
                128, "--members", 1, *options)
        auc[name] = numbers(out)["test"]["open"]["exact"]["auc"]
    assert 20 * auc["untrained"] < 0.1 < auc["closed"] < auc["open"] < 0.75
    assert numbers(tmp_path / "open")["feasibility_auroc"] > 0.8
