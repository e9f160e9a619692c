"""Prediction for photos, what is unlike the training photos, and published checkpoints."""

import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from compcos import Ensemble
from lab import answers, results
from lab import features as image_features
from lab.answers import load_published, load_run, predict_images
from lab.files import read_rows
from toy import command, make_toy, metrics_of, refusal, run

GOLDEN = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of two members with its data, only read."""
    folder = tmp_path_factory.mktemp("finished")
    return run(make_toy(folder / "toy"), folder / "run", "--epochs", 2, "--members", 2)


# ---- prediction ----


def test_predicting_images(drawn, tmp_path, capsys):
    """By the command that a run prints; from each candidate set; without what cannot be read."""
    out = tmp_path / "a run's"
    command("--data-root", drawn, "--device", "cpu", "--epochs", 1, "--hidden", 64, "--features",
            "pixels", "--out", out)
    expectation, last = capsys.readouterr().out.splitlines()[-2:]
    given = shlex.split(last.partition("; next: ")[2])
    assert given[:2] == ["python", "compcos.py"]
    for candidates in results.CANDIDATE_SETS:
        command(*given[2:], "--candidates", candidates, "--top", 3)
        lines = capsys.readouterr().out.splitlines()
        assert (lines[0] == expectation) == (candidates == "open_masked")
        assert lines[-4].startswith(given[-1])
    broken = tmp_path / "broken.png"
    broken.write_bytes(Path(given[-1]).read_bytes()[:300])
    options = [*given[2:], broken, "--csv", tmp_path / "new/answers.csv"]
    assert "broken.png" in refusal(capsys, *options)
    command(*options, "--skip-broken")
    images = {row["image"] for row in read_rows(tmp_path / "new/answers.csv")}
    assert images == {given[-1]}
    assert "cannot write" in refusal(capsys, *given[2:], "--csv", out)


def test_predictions_as_a_table(finished, tmp_path):
    """Rows of --csv are those of predict_images, sorted by biased scores; probabilities
    are the softmax over the candidates allowed."""
    features = finished.parent / "toy/features.npz"
    model = load_run(finished)
    assert isinstance(model, Ensemble)
    model.checkpoint["bias"]["open"] = 0.7  # so that the order differs from that of the scores
    stored = data.read_features(features)
    rows = predict_images(model, stored["files"], stored["features"], top=30, candidates="open")
    scores = model(torch.as_tensor(stored["features"])).detach().flatten(1).numpy()
    biased = scores + 0.7 * ~model.seen.flatten().numpy()
    ranked = np.array([row["score"] for row in rows]).reshape(len(scores), 30)
    np.testing.assert_allclose(ranked, -np.sort(-biased), rtol=1e-5, atol=1e-6)
    shares = torch.tensor(ranked / model.checkpoint["temperature"]["open"]).softmax(1)
    found = [row["probability"] for row in rows]
    np.testing.assert_allclose(found, shares.flatten(), rtol=1e-4, atol=1e-7)

    table = tmp_path / "answers.csv"
    command("--checkpoint", finished / "best.pt", "--features", features, "--top", 2, "--csv",
            table, "--device", "cpu")
    expected = predict_images(load_run(finished), stored["files"], stored["features"], top=2)
    assert read_rows(table) == [{name: str(value) for name, value in row.items()}
                                for row in expected]
    with pytest.raises(ValueError, match="one of closed, .*got 'new'"):
        predict_images(model, ["a"], np.ones((1, 16)), candidates="new")


def test_expectation_is_measured_on_the_answers_of_prediction(finished):
    """Confidence, and accuracy by half, from the rows that prediction gives for the test images."""
    dataset = data.load(str(finished.parent / "toy"))
    test = image_features.load_features(dataset)[1]["test"]
    rows = predict_images(load_run(finished), dataset.images["test"], test, top=1)
    measured = metrics_of(finished)["calibration"]
    probability = np.mean([row["probability"] for row in rows])
    assert measured["confidence"] == pytest.approx(probability, rel=1e-6)
    truth = dataset.targets["test"]
    right = np.array([row["state"] + row["object"] for row in rows])
    right = right == [f"s{c // 6}o{c % 6}" for c in truth]
    is_seen = dataset.seen.ravel()[truth]
    assert measured["accuracy"] == pytest.approx(right.mean())
    assert measured["seen"]["accuracy"] == pytest.approx(right[is_seen].mean())
    assert measured["unseen"]["accuracy"] == pytest.approx(right[~is_seen].mean())
    assert measured["unseen"]["compositions"] == 4


@pytest.mark.parametrize("change", [b"text", [1, 2], dict(weights={}), dict(format=0),
                                    dict(extra={})])
def test_a_best_of_something_else(finished, tmp_path, capsys, change):
    """Text, another object, no weights, an older format, and a file of `save` without names."""
    path = tmp_path / "best.pt"
    content = change
    if isinstance(change, dict):
        content = torch.load(finished / "best.pt", weights_only=True) | change
    torch.save(content, path)
    if isinstance(change, bytes):
        path.write_bytes(change)
    error = refusal(capsys, "--checkpoint", path, "--predict", "a.png")
    assert str(path) in error and "weights_only" not in error
    assert ("has no names of states" in error) == (change == dict(extra={}))


# ---- unknown content ----


def photos(count, middle=0.0, seed=0):
    """Features (count, 12) about one of four directions, or all about another `middle`."""
    random = np.random.default_rng(seed)
    centres = 3 * np.eye(12)[np.arange(count) % 4]
    return (centres + random.normal(size=(count, 12)) / 2 + middle).astype(np.float32)


def test_typicality_from_its_definition():
    train = photos(80)
    targets = np.arange(80) % 4 * 5
    validation = photos(30, seed=1)
    others = np.concatenate([photos(9, seed=2), -photos(5, seed=3), photos(5, middle=2)])
    means = np.stack([train[targets == target].mean(0) for target in np.unique(targets)])

    def distance(photo):
        cosines = means @ photo / np.linalg.norm(means, axis=1) / np.linalg.norm(photo)
        return 1 - cosines.max()

    known = np.array([distance(photo) for photo in validation])
    expected = [(1 + np.sum(known >= distance(photo))) / 31 for photo in others]
    profile = answers.training_profile(train, targets, validation)
    found = answers.typicality(torch.as_tensor(others), profile)
    np.testing.assert_allclose(found, expected)
    assert found.min() == pytest.approx(1 / 31) and found.max() > 0.3


def test_one_in_twenty_known_photos_is_marked():
    """And none with fewer than 19 validation photos, however far it is."""
    def marked(validation, others):
        profile = answers.training_profile(photos(400), np.arange(400) % 4, validation)
        return answers.typicality(torch.as_tensor(others), profile) <= answers.UNLIKE

    shares = [marked(photos(39, seed=seed + 1), photos(200, seed=seed + 100)).mean()
              for seed in range(40)]
    assert np.mean(shares) == pytest.approx(0.05, abs=3 * np.std(shares) / 40 ** 0.5)
    assert not marked(photos(18, seed=1), -photos(1)) and marked(photos(19, seed=1), -photos(1))


def test_the_least_typicality_of_19_photos_is_printed_as_a_mark(finished, tmp_path, capsys):
    """1 / 20 is 5 %, also in the table."""
    contents = torch.load(finished / "best.pt", weights_only=True)
    contents["extra"]["profile"]["distances"] = torch.zeros(19)
    torch.save(contents, tmp_path / "best.pt")
    np.savez(tmp_path / "far.npz", files=["far.png"], features=np.ones((1, 16)))
    given = ["--checkpoint", tmp_path / "best.pt", "--features", tmp_path / "far.npz"]
    command(*given)
    assert "far.png  unlike the training photos (typicality 5.0%)" in capsys.readouterr().out
    command(*given, "--csv", tmp_path / "answers.csv")
    assert read_rows(tmp_path / "answers.csv")[0]["typicality"] == "0.05"


@pytest.mark.parametrize("change, count, noted", [
    (lambda known: known, 300, False), (lambda known: known / 3, 20, True),
    (lambda known: known / 3, 19, False), (lambda known: -known.sum(0) + known / 10, 20, True)])
def test_features_of_another_kind_are_noted(finished, capsys, change, count, noted):
    """Of another length, or far away, from 20 photos on."""
    stored = data.read_features(finished.parent / "toy/features.npz")["features"]
    changed = change(stored)[:count]
    predict_images(load_run(finished), np.arange(len(changed)), changed)
    assert ("most of these photos" in capsys.readouterr().err) == noted


def test_unlike_photos_are_marked(finished, tmp_path, capsys):
    stored = data.read_features(finished.parent / "toy/features.npz")["features"]
    np.savez(tmp_path / "two.npz", files=["near.png", "far.png"],
             features=[stored[0], -stored.sum(0)])
    command("--checkpoint", finished, "--features", tmp_path / "two.npz", "--top", 1)
    near, _, far, _ = capsys.readouterr().out.splitlines()[-4:]
    assert near == "near.png"
    assert far.startswith("far.png") and "unlike the training photos" in far


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_of_features_that_no_table_can_hold(finished, tmp_path, capsys):
    np.savez(tmp_path / "two.npz", files=["caf\udce9.png"], features=np.zeros((1, 8)))
    error = refusal(capsys, "--checkpoint", finished, "--features", tmp_path / "two.npz")
    assert "is not UTF-8: rename the file" in error


# ---- published checkpoints ----


def test_published_files_load(tmp_path):
    """A checkpoint as published: parameters under `net` beside a NumPy scalar; the last layer at 4
    where dropout counts. float64 keeps its digits."""
    arrays = dict(np.load(GOLDEN / "model.npz"))
    exact = {}
    for name, value in arrays.items():
        if name.startswith("param/"):
            name = name.removeprefix("param/").replace("mod.3", "mod.4")
            exact[name] = torch.as_tensor(value).double() + 1e-12
    torch.save({"net": exact, "AUC": np.float64(0.3)}, tmp_path / "published.t7")
    model = load_published(tmp_path / "published.t7")
    cosines = model(torch.as_tensor(arrays["x"]).double()).detach()
    np.testing.assert_allclose(cosines, arrays["cosine"], atol=1e-6)
    assert torch.equal(model.projection.weight, exact["projection.weight"])
    np.testing.assert_allclose(model.feasibility(arrays["seen"]), arrays["feasibility"], atol=1e-6)
    with pytest.raises(ValueError, match="expected a published CompCos") as raised:
        load_published(exact | {"projection.weight": torch.zeros(20, 41)})
    assert "\n" not in str(raised.value)
