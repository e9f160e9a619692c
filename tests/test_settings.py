"""Settings: the value of each in every recipe, their checks, and that one is one line."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import compcos
from compcos import Settings, TrainingSettings, load

SOURCE = Path(__file__).parent.parent / "compcos.py"


def test_every_value_of_every_recipe():
    """A change of a recipe is to be made here, too."""
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
    assert dataclasses.asdict(Settings()) == paper
    assert set(compcos.DATASET_SETTINGS) == set(of_dataset)
    for dataset, changes in of_dataset.items():
        assert dataclasses.asdict(Settings.paper(dataset)) == paper | changes
    assert dataclasses.asdict(Settings.strong()) == paper | strong
    assert Settings.strong(members=1).members == Settings.paper("shapes", members=1).members == 1
    names = [declared.name for declared in dataclasses.fields(TrainingSettings)]
    assert dataclasses.asdict(TrainingSettings.strong()) == {
        name: (paper | strong)[name] for name in names}


@pytest.mark.parametrize("changes, message", [
    (dict(epochs=2.5), "epochs must be a whole number, got 2.5"),
    (dict(epochs=True), "epochs must be a whole number, got True"),
    (dict(members="4"), "members must be a whole number, got '4'"),
    (dict(lr=0), "lr must be above 0, got 0"),
    (dict(scale=float("nan")), "scale must be above 0, got nan"),
    (dict(margin=-1), "margin must be at least 0, got -1"),
    (dict(dropout=1.0), "dropout must be at least 0 and below 1, got 1.0"),
    (dict(world="Closed"), "world must be one of open, closed, got 'Closed'"),
    (dict(mix=["mean"]), "mix must be one of mean, max, state, object, got"),
    (dict(normalize_image_embeddings=1), "normalize_image_embeddings must be True or False")])
def test_settings_of_a_wrong_type_or_range(changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        Settings(**changes)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="dataset must be one of mitstates.*got 'birds'"):
        Settings.paper("birds")


def test_numbers_of_numpy_become_plain():
    settings = Settings(epochs=np.int64(3), lr=np.float32(0.5), scale=3,
                        normalize_image_embeddings=np.bool_(False))
    values = dataclasses.asdict(settings)
    assert json.loads(json.dumps(values)) == values and values["scale"] == 3.0
    assert [type(values[name]) for name in ("epochs", "lr", "scale")] == [int, float, float]


def test_a_setting_is_one_line(tmp_path):
    """It is known, checked, has a value in both recipes, is in the model, and is recorded."""
    line = '    smoothing: float = setting(0.0, 0.1, "label smoothing", least=0, below=1)\n'
    source = SOURCE.read_text(encoding="utf-8")
    place = source.index("    margin: float = setting(")
    (tmp_path / "edited.py").write_text(source[:place] + line + source[place:], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("edited", tmp_path / "edited.py")
    edited = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "edited", edited)
        spec.loader.exec_module(edited)
    assert edited.Settings.paper("cgqa").smoothing == 0
    assert edited.Settings.strong().smoothing == 0.1
    with pytest.raises(ValueError, match="smoothing must be at least 0 and below 1, got 1"):
        edited.Settings(smoothing=1)
    model = edited.CompCos(np.eye(2), np.eye(2), 3, edited.Settings(smoothing=0.2))
    edited.save(model, tmp_path / "model.pt")
    assert edited.load(tmp_path / "model.pt").settings.smoothing == 0.2
    with pytest.raises(ValueError, match="model.pt must be .*smoothing"):
        load(tmp_path / "model.pt")
