"""Settings and arguments: the values of every recipe; wrong use is answered in one line."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch

import compcos
from compcos import (Settings, TrainingSettings, compcos_loss, evaluate_model, fit, predict,
                     setting)
from test_compcos import QUICK, problem, small


# ---- settings ----


def test_every_value_of_every_recipe():
    """A change of a recipe is to be made here, too; a new setting or dataset need not."""
    paper = dict(world="open", epochs=300, min_epoch_steps=0, patience=0, batch_size=128, lr=5e-5,
                 weight_decay=5e-5, ema_decay=0.0, members=1, scale=20.0, margin=0.4, warmup=15,
                 mix="mean", train_candidates="all", hidden=768, dropout=0.5, dim=0,
                 normalize_image_embeddings=True, logit_adjustment=0.0, word_lr_factor=1.0)
    of_dataset = dict(
        mitstates={}, utzappos=dict(scale=50.0, margin=1.0), cgqa=dict(scale=100.0),
        shapes=dict(epochs=40, lr=1e-3),
        folder=dict(epochs=40, min_epoch_steps=65, patience=20, lr=1e-3))
    strong = dict(epochs=40, min_epoch_steps=65, patience=20, lr=5e-4, weight_decay=0.0,
                  ema_decay=0.998, members=4, scale=2.6, margin=7.2 / 2.6, dropout=0.85, dim=300,
                  train_candidates="auto", normalize_image_embeddings=False, logit_adjustment=0.5,
                  word_lr_factor=10.0)
    recipes = [(Settings(), paper), (Settings.strong(), paper | strong),
               (Settings.strong(members=1), paper | strong | dict(members=1)),
               (Settings.paper("cgqa", members=2), paper | dict(scale=100.0, members=2))]
    recipes += [(Settings.paper(name), paper | changes) for name, changes in of_dataset.items()]
    for settings, expected in recipes:
        assert {name: getattr(settings, name) for name in expected} == expected
    for declared in dataclasses.fields(TrainingSettings):
        value = getattr(TrainingSettings.strong(), declared.name)
        assert value == (paper | strong).get(declared.name, value)


@pytest.mark.parametrize("changes, message", [
    (dict(epochs=2.5), "epochs must be a whole number, got 2.5"),
    (dict(epochs=True), "epochs must be a whole number, got True"),
    (dict(scale=float("nan")), "scale must be above 0, got nan"),
    (dict(margin=-1), "margin must be at least 0, got -1"),
    (dict(dropout=1.0), "dropout must be at least 0 and below 1, got 1.0"),
    (dict(world="Closed"), "world must be one of open, closed, got 'Closed'"),
    (dict(mix=["mean"]), "mix must be one of mean, max, state, object.*, got"),
    (dict(normalize_image_embeddings=1), "normalize_image_embeddings must be True or False")])
def test_settings_of_a_wrong_type_or_range(changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        Settings(**changes)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="dataset must be one of mitstates.*got 'unknown'"):
        Settings.paper("unknown")


def test_numbers_of_numpy_become_plain():
    settings = Settings(epochs=np.int64(3), lr=np.float32(0.5), scale=3,
                        normalize_image_embeddings=np.bool_(False))
    values = dataclasses.asdict(settings)
    assert json.loads(json.dumps(values)) == values and values["scale"] == 3.0
    assert [type(values[name]) for name in ("epochs", "lr", "scale")] == [int, float, float]


def test_a_setting_is_one_line():
    """It is checked and has a value in both recipes; test_change_it.py has its option."""
    @dataclasses.dataclass(frozen=True)
    class Own(Settings):
        smoothing: float = setting(0.0, 0.1, "label smoothing", least=0, below=1)

    assert Own.paper("cgqa").smoothing == 0
    model = compcos.build(np.eye(2), np.eye(2), 3, Own.strong(members=1))
    assert model.settings.smoothing == 0.1
    with pytest.raises(ValueError, match="smoothing must be at least 0 and below 1, got 1"):
        Own(smoothing=1)


# ---- arguments ----


def wrong(call, **changes):
    """Call a function with some of its arguments replaced by wrong ones."""
    (x, y, states, objects), _ = problem()
    model, batch, target, seen = small()
    prepared = copy.deepcopy(model).prepare(seen)
    images = dict(features=batch, target=target)
    calls = dict(
        fit=(fit, dict(features=x, targets=y, state_vectors=states, object_vectors=objects,
                       settings=QUICK, device="cpu")),
        loss=(prepared.loss, images),
        unprepared=(model.loss, images),
        adjusted=(small(logit_adjustment=0.5)[0].prepare, dict(seen=seen)),
        evaluate=(evaluate_model, dict(model=prepared, features=batch, targets=target)),
        predict=(predict, dict(model=model, features=batch)),
        cosines=(compcos_loss, dict(cosines=model(batch).detach(), target=target, scale=20.0,
                                    seen=seen)))
    function, arguments = calls[call]
    return function(**arguments | changes)


@pytest.mark.parametrize("call, changes, message", [
    ("fit", dict(targets=[1]), r"targets must have the shape \(40,\) or \(40, 2\), got \(1,\)"),
    ("fit", dict(targets=[20] * 40), "targets must be .*s below 4 and o below 5, got 20"),
    ("fit", dict(targets=[1.5] * 40), "targets must be whole numbers.*got 1.5"),
    ("fit", dict(targets=["red"] * 40), "targets must be an array of real numbers, got <U3"),
    ("fit", dict(features=np.full((40, 8), np.inf)), "features must be finite, got nan"),
    ("fit", dict(object_vectors=np.ones((5, 4))), r"object_vectors must have the shape \(O, 6\)"),
    ("fit", dict(state_vectors=np.full((4, 6), np.nan)), "state_vectors must be finite"),
    ("fit", dict(seen=np.ones((5, 4), bool)), r"seen must have the shape \(4, 5\) or \(20,\), got"),
    ("fit", dict(seen=np.ones((4, 5))), "seen must be bool and hold at least one True, got"),
    ("fit", dict(seen=np.arange(20) == 0), "targets must be seen compositions, got the unseen "
                                           "index 2"),
    ("fit", dict(validation=(np.ones((3, 9)), [1] * 3)), r"features .*\(N, 8\), got \(3, 9\)"),
    ("fit", dict(device="cuda:9"), "device must be one that this machine has, got 'cuda:9'"),
    ("fit", dict(seed=-1), "seed must be at least 0 and below"),
    ("loss", dict(features=torch.ones(9, 3)), r"features must have the shape \(N, 8\), got"),
    ("loss", dict(target=[1] * 9), "targets must be seen compositions, got the unseen index 1"),
    ("unprepared", {}, r"the model must be prepared .*call model.prepare\(seen, targets\)"),
    ("adjusted", {}, "targets must be given for the logit adjustment, got None"),
    ("evaluate", dict(topk=0), "topk must be at least 1, got 0"),
    ("predict", dict(bias=0.3), "seen must be given: this model does not know"),
    ("predict", dict(bias=np.nan), "bias must be a finite number, got nan"),
    ("predict", dict(k=0), "k must be at least 1, got 0"),
    ("predict", dict(candidates=np.zeros(35, bool)), "candidates must be bool and hold"),
    ("cosines", dict(seen=torch.ones(5, 1, dtype=bool)), r"seen must have the shape \(5, 7\)")])
def test_wrong_use_is_answered_in_one_line(call, changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        wrong(call, **changes)
    assert "\n" not in str(raised.value)
