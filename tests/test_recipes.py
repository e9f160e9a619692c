"""Recipes and members from the command line: lengths in steps, resuming, loading, predicting, what
ends a training; changing the project as README says."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lab import baselines
from lab import shell
from lab.files import load_tensors
import compcos
import data
from lab import run as experiment
from lab import features
import train
from compcos import CompCos, Ensemble, predict_images
from test_compcos import Edited
from test_experiment import few_steps, numbers, rows_of, run, toy  # noqa: F401, fixtures

Edited.__name__ = "CompCos"  # as after an edit of the class itself
README = Path(__file__).parent.parent / "README.md"


def settings_of(folder):
    return json.loads((folder / "metrics.json").read_text())["settings"]


def test_a_folder_gets_the_strong_recipe(monkeypatch):
    """A named dataset the paper's; a setting of a dataset that is none is told."""
    strong = compcos.defaults()["other"]
    assert strong["recipe"] == "strong" and compcos.defaults()["utzappos"]["recipe"] == "paper"
    assert compcos.defaults("strong")["utzappos"] == strong | dict(vectors=["word2vec"])
    monkeypatch.setitem(compcos.DATASET_SETTINGS, "birds", dict(scal=50.0, epochs=100))
    with pytest.raises(ValueError, match="the defaults of 'birds' set scal: expected .* scale"):
        compcos.defaults()


def test_members_resumed_equal_uninterrupted(toy, tmp_path):  # noqa: F811
    """Two members of the strong recipe, one epoch and one more, against two at once; best.pt scores
    as their mean, as was saved, and gives the feasibility that was reported."""
    options = ["--members", 2, "--warmup", 2, "--save-scores", "--epochs"]
    whole = run(toy, tmp_path / "whole", *options, 2)
    part = run(toy, tmp_path / "part", *options, 1)
    run(toy, part, *options, 2, "--resume")
    assert numbers(part) == numbers(whole)
    model = CompCos.load(whole / "best.pt")
    assert isinstance(model, Ensemble) and len(model.members) == 2
    dataset = data.load(str(toy))
    test = torch.as_tensor(features.load_features(dataset)[1]["test"])
    scores = model(test).detach().flatten(1)
    np.testing.assert_allclose(scores, np.load(whole / "scores.npy"), atol=1e-5)
    rho = model.feasibility(dataset.seen)
    np.testing.assert_allclose(rho, model.checkpoint["feasibility"], atol=1e-6)


def test_a_new_parameter_is_trained_saved_and_loaded(toy, tmp_path, monkeypatch):  # noqa: F811
    """By the code that has it; by other code the file is refused."""
    with monkeypatch.context() as patch:
        patch.setattr(compcos, "CompCos", Edited)
        out = run(toy, tmp_path / "run", "--save-scores")
        model = Edited.load(out / "best.pt")
        assert model.of_scores.item() != 1 and model.of_loss.item() != 1
        test = features.load_features(data.load(str(toy)))[1]["test"]
        scores = model(torch.as_tensor(test)).detach().flatten(1)
        np.testing.assert_allclose(scores, np.load(out / "scores.npy"), atol=1e-5)
    with pytest.raises(ValueError, match="best.pt.*of_scores.*train anew") as raised:
        CompCos.load(out / "best.pt")
    assert "\n" not in str(raised.value)


# ---- prediction ----


def test_predictions_as_a_table(toy, tmp_path, capsys):  # noqa: F811
    """Rows of --csv are those of predict_images, sorted by biased scores; probabilities
    are the softmax over the candidates allowed; one line for bad input."""
    out = run(toy, tmp_path / "run", "--epochs", 2, "--members", 2)
    model = CompCos.load(out / "best.pt")
    model.checkpoint["bias"]["open"] = 0.7  # so that the order differs from that of the scores
    stored = data.read_features(toy / "features.npz")
    rows = predict_images(model, stored["files"], stored["features"], top=30, candidates="open")
    scores = model(torch.as_tensor(stored["features"])).detach().flatten(1).numpy()
    biased = scores + 0.7 * ~model.checkpoint["seen"].flatten().numpy()
    ranked = np.array([row["score"] for row in rows]).reshape(len(scores), 30)
    np.testing.assert_allclose(ranked, -np.sort(-biased), rtol=1e-5, atol=1e-6)
    shares = torch.tensor(ranked / model.checkpoint["temperature"]["open"]).softmax(1)
    found = [row["probability"] for row in rows]
    np.testing.assert_allclose(found, shares.flatten(), rtol=1e-4, atol=1e-7)

    command = ["--checkpoint", str(out / "best.pt"), "--features", str(toy / "features.npz")]
    table = tmp_path / "answers.csv"
    compcos.main([*command, "--top", "2", "--csv", str(table)])
    expected = predict_images(CompCos.load(out / "best.pt"), stored["files"], stored["features"],
                              top=2)
    assert rows_of(table) == [{name: str(value) for name, value in row.items()}
                              for row in expected]
    for options, message in ((["--csv", str(out)], "cannot write"),
                             (["--predict", "a.png"], "either --predict IMAGE")):
        with pytest.raises(SystemExit):
            compcos.main([*command, *options])
        assert message in capsys.readouterr().err


# ---- what ends a training ----


def fit(out, *, lr=1e-2, validate=lambda: 0.5, **options):
    """`train.fit` of a small model on 40 images; its history."""
    torch.manual_seed(0)
    seen = torch.eye(4, 5) > 0
    model = CompCos(torch.randn(4, 6), torch.randn(5, 6), 8, hidden=12).prepare(seen)
    x = torch.randn(40, 8)
    target = torch.arange(40) % 4 * 6
    keywords = dict(epochs=3, batch_size=16, weight_decay=0.0, seed=0, out=out, settings={})
    return train.fit(model, x, target, validate, lr=lr, **keywords | options)


def test_lengths_are_counted_in_steps(tmp_path, monkeypatch):
    """An epoch has as many whole passes as its least steps need; patience ends a training."""
    orders = []
    draw = train.draw_order
    monkeypatch.setattr(train, "draw_order", lambda *given: orders.append(draw(*given))
                        or orders[-1])
    for min_epoch_steps, passes in ((0, 1), (2, 1), (3, 2), (65, 26)):
        orders.clear()
        fit(tmp_path, epochs=1, min_epoch_steps=min_epoch_steps)
        counts = torch.bincount(torch.cat(orders))
        assert counts.tolist() == [passes] * 40
    values = iter([0.1, 0.3, 0.3, 0.2, 0.9])
    history = fit(tmp_path, epochs=9, patience=2, validate=lambda: next(values))
    assert [row["validation"] for row in history] == [0.1, 0.3, 0.3, 0.2]


def test_what_diverges_is_said_to(tmp_path):
    with pytest.raises(ValueError, match=r"after epoch \d .* not finite.*lower --lr \(1e\+30\)"):
        fit(tmp_path, lr=1e30)
    with pytest.raises(ValueError, match="after epoch 1 the loss is nan"):
        fit(tmp_path, lr=float("inf"))


def test_an_error_of_the_last_save_hides_no_other(tmp_path, monkeypatch, capsys):
    """A full disk after a bug in validation, or after Ctrl-C: both are told."""
    def validate():
        if not values:
            raise error
        return values.pop()

    def full(source, place):
        raise OSError(28, "No space left on device")

    for error, message in ((ZeroDivisionError("a bug"), "a bug"),
                           (KeyboardInterrupt(), "stopped: .*last.pt")):
        values = [0.1]
        with monkeypatch.context() as patch, pytest.raises(type(error), match=message):
            patch.setattr(shell.os, "replace", full)
            fit(tmp_path, validate=validate)
        assert "epoch 1 is not kept" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
    values = [0.1]
    with pytest.raises(KeyboardInterrupt, match="from which --resume goes on"):
        fit(tmp_path, validate=validate)
    assert torch.load(tmp_path / "last.pt")["epoch"] == 1


# ---- what README's "Change it" says ----


def examples():
    """Its blocks, as it prints them: own loss, own model."""
    section = README.read_text(encoding="utf-8").split("## Change it")[1].split("\n## ")[0]
    blocks = re.findall("```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        statements = [line for line in block.splitlines() if line and "import" not in line]
        assert len(statements) <= 15
    return blocks


@pytest.mark.parametrize("recipe, world", [("paper", "open"), ("strong", "closed")])
def test_the_loss_of_readme_is_trained_by(toy, tmp_path, monkeypatch, recipe, world):  # noqa: F811
    options = ["--recipe", recipe, "--world", world, "--epochs", 2]
    losses = [[float(row["loss"]) for row in
               rows_of(run(toy, tmp_path / "before", *options) / "log.csv")]]
    names = vars(compcos).copy()
    exec(examples()[0], names)
    monkeypatch.setattr(compcos, "image_losses", names["image_losses"])
    losses.append([float(row["loss"]) for row in
                   rows_of(run(toy, tmp_path / "after", *options) / "log.csv")])
    # (1 - p)² < 1, so each focal loss is below the cross-entropy
    assert 0 < losses[1][0] < losses[0][0] and losses[1][1] < losses[0][1]


def test_the_model_of_readme_runs(toy, tmp_path, monkeypatch):  # noqa: F811
    """Training, resuming, all candidate sets, best.pt; test_reproduce.py has such a report."""
    monkeypatch.setattr(baselines, "MODELS", dict(visprod=baselines.VisProd))
    names = {}
    exec(examples()[1], names)
    assert baselines.MODELS["mine"] is names["Mine"]
    common_options = ["--dataset", str(toy), "--device", "cpu", "--out"]
    for out, epochs, more in (("whole", 4, []), ("part", 2, []), ("part", 4, ["--resume"])):
        options = ["--model", "mine", "--epochs", str(epochs), *more]
        baselines.main([*common_options, str(tmp_path / out), *options])
    assert numbers(tmp_path / "part") == numbers(tmp_path / "whole")
    assert tuple(numbers(tmp_path / "part")["test"]) == experiment.CANDIDATE_SETS
    contents = load_tensors(tmp_path / "part/best.pt")
    assert len(contents["weights"]["to_state.weight"]) == 5


def test_a_dataset_with_a_name_of_its_own(toy, tmp_path, monkeypatch):  # noqa: F811
    """A line in data.FOLDERS; one in compcos.DATASET_SETTINGS, of which the rest is as for MIT-States."""
    shutil.move(toy, tmp_path / "my-birds")
    monkeypatch.setattr(data, "FOLDERS", dict(data.FOLDERS))
    monkeypatch.setattr(compcos, "DATASET_SETTINGS", dict(compcos.DATASET_SETTINGS))
    data.FOLDERS["birds"] = "my-birds"
    options = ["--data-root", tmp_path, "--epochs", 1]
    assert settings_of(run("birds", tmp_path / "strong", *options))["recipe"] == "strong"
    compcos.DATASET_SETTINGS["birds"] = dict(scale=50.0, lr=1e-3)
    found = settings_of(run("birds", tmp_path / "paper", *options))
    assert (found["recipe"], found["scale"], found["margin"]) == ("paper", 50.0, 0.4)


def test_a_model_that_breaks_the_contract_is_told():
    model = CompCos(np.eye(5), np.ones((6, 5)), 8)
    score = model.score

    def check(message):
        with pytest.raises(ValueError, match=message):
            train.check_model(model, torch.zeros(3, 8), np.eye(5, 6) > 0)

    model.score = lambda *given: score(*given).mT
    check(r"CompCos.score gives \(2, 6, 5\) of 2 images: expected \(B, S, O\), here .*\(5, 6\)")
    model.feasibility = lambda seen: np.zeros(3)
    check(r"feasibility is float64 \(3,\)")
    del model.config
    check("CompCos has no config: a model offers all of states, objects, loss")
