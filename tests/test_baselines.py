"""Tests of lab/baselines.py: golden files, the direct forms of reference.py, settings, the command.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from compcos import reproducible, setting, train_epochs
from feasibility import feasibility_scores
from lab import baselines
from reference import DIRECT, published
from toy import make_toy

GOLDEN = np.load(Path(__file__).parent / "data/baselines.npz")
EXPECTED = json.loads((Path(__file__).parent / "data/baselines.json").read_text())["losses"]
NAMES = dict(leplus="label_embed_plus", aop="attributes_as_operators", symnet="symnet", tmn="tmn")
SYSTEMS = (*NAMES, "visprod")
S, O = 16, 12


def golden(name):
    array = torch.from_numpy(GOLDEN[name])
    return array if array.is_floating_point() else array.long()


def golden_model(name):
    """Return the model with the golden parameters and draws, without dropout."""
    prefix = f"{NAMES[name]}/param/"
    sizes = dict(modules=4, width=6, rank=8, negatives=5) if name == "tmn" else {}
    dim = GOLDEN[f"{prefix}{'obj' if name == 'aop' else 'attr'}_embedder.weight"].shape[1]
    system = baselines.MODELS[name]
    model = system(np.zeros((S, dim)), np.zeros((O, dim)), 32, system.Settings(**sizes))
    negatives = golden("neg_state") * O + golden("neg_object")
    model.draw_negatives = lambda target, count: negatives[:, :count]
    model.draw_third = lambda state, object_: golden("comm_state")
    with torch.no_grad():
        for key, value in published(model).items():
            given = golden(prefix + key)
            if key.endswith("embedder.weight"):
                given = given[:len(value)]  # TMN has one more row, unused
            if key.endswith("joint_linear2.weight"):
                given = given[1 + 4:]  # logits of softmaxes over one number
            assert given.shape == value.shape, key
            value.copy_(given)
    return model.train(name == "tmn")  # of the others it would turn dropout on


@pytest.mark.parametrize("name", NAMES)
def test_golden_loss_gradients_and_scores(name):
    model = golden_model(name)
    target = golden("state") * O + golden("object")
    loss = model.loss(golden("x"), target)
    expected = EXPECTED[NAMES[name]]
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-5)

    loss.backward()
    gradients = published(model, lambda tensor: tensor.grad)
    for key, norm in expected["grad_norms"].items():
        ours = gradients.get(key)
        ours = 0.0 if ours is None else ours.norm().item()
        if norm is None or norm < 1e-6:
            assert ours < 1e-6, key
        else:
            assert ours == pytest.approx(norm, rel=2e-4), key
    if name == "tmn":
        for key, value in published(model).items():
            if "running" in key:
                after = GOLDEN[f"tmn/after/{key}"]
                np.testing.assert_allclose(value.numpy(), after, rtol=1e-5, atol=1e-6)

    state, object_ = golden("pairs").T
    with torch.no_grad():
        scores = model.eval()(golden("x")[:8])[:, state, object_]
    np.testing.assert_allclose(scores.numpy(), GOLDEN[f"{NAMES[name]}/scores"], rtol=1e-5)


def small(name, **settings):
    """Return a prepared model of odd sizes in float64 with gates that differ, and a batch of 9
    (features, targets)."""
    torch.manual_seed(1)
    seen = torch.rand(7, 5) < 0.5
    if name == "tmn":
        settings = dict(layers=4, modules=3, width=4, rank=6, negatives=8) | settings
    system = baselines.MODELS[name]
    vectors = torch.randn(7, 10), torch.randn(5, 10)
    model = system(*vectors, 6, system.Settings(**settings)).double().prepare(seen)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    listed = seen.flatten().nonzero().squeeze(1)
    return model, torch.randn(9, 6).double(), listed[torch.randint(len(listed), (9,))]


@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize("name, settings", [*((name, {}) for name in DIRECT),
                                            ("tmn", dict(layers=2))])
def test_scores_equal_the_direct_form(name, settings, size, monkeypatch):
    """It does so in chunks of one and all at once."""
    monkeypatch.setattr(baselines, "chunk_size", lambda part: size)
    model, x, _ = small(name, **settings)
    model.eval()
    for buffer in model.buffers():
        if buffer.dtype == torch.float64 and buffer.ndim == 1:
            buffer += torch.rand_like(buffer)  # running statistics of no round numbers
    pairs = torch.cartesian_prod(torch.arange(7), torch.arange(5))
    with torch.no_grad():
        scores = model(x)
        expected = DIRECT[name](published(model), x, pairs)
    assert scores.shape == (9, 7, 5)
    torch.testing.assert_close(scores.flatten(1), expected, rtol=1e-9, atol=1e-12)


def test_visprod_learns_the_likelihood_of_its_scores():
    model, x, target = small("visprod")
    likelihood = model(x).flatten(1)[range(9), target]
    torch.testing.assert_close(model.loss(x, target), -likelihood.mean())


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_step_of_training(name):
    """Every parameter is in one group and learns, fixed vectors do not; feasibility stays that of
    the word vectors; nothing in the loss reads a value back, which a captured step forbids."""
    model, x, target = small(name)
    groups = [dict(params=[*model.parameters()], lr=1e-3)]
    if hasattr(model, "parameter_groups"):
        groups = model.parameter_groups(1e-3)
    slow = dict(tmn=1e-6, aop=1e-4).get(name, 1e-3)
    assert min(group["lr"] for group in groups) == pytest.approx(slow)

    before = {key: value.clone() for key, value in model.state_dict().items()}
    loss = model.loss(x, target)
    loss.backward()
    torch.optim.Adam(groups, weight_decay=5e-5).step()
    after = model.state_dict()
    fixed = dict(aop={"states"}, symnet={"states", "objects"}, visprod={"states", "objects"})
    still = {key for key in after if torch.equal(after[key], before[key])}
    assert still == fixed.get(name, set())

    expected = feasibility_scores(*model.word_vectors, model.seen.numpy())
    np.testing.assert_array_equal(model.feasibility(), expected)

    # A tensor on the "meta" device has a shape and no values: to read one is an error.
    for attribute, value in vars(model.train().to("meta")).items():
        if torch.is_tensor(value):
            setattr(model, attribute, value.to("meta"))
    assert model.loss(x.to("meta"), target.to("meta")).shape == ()


def test_negatives_are_all_training_compositions_but_the_truth():
    model, _, target = small("leplus")
    listed = set(model.seen.flatten().nonzero().squeeze(1).tolist())
    torch.manual_seed(0)
    for truth, row in zip(target.tolist(), model.draw_negatives(target, 20_000)):
        values, counts = row.unique(return_counts=True)
        assert set(values.tolist()) == listed - {truth}
        # 20,000 draws among n - 1: a standard deviation is below 1/28 of the mean here, six of them
        # are allowed
        assert (counts / (20_000 / (len(listed) - 1)) - 1).abs().max() < 6 / 28


def test_third_states_follow_their_definition():
    seen = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 0, 1], [0, 0, 0], [0, 0, 0], [1, 0, 0]]) > 0
    settings = baselines.settings_of("aop", "toy")
    model = baselines.AttributesAsOperators(torch.randn(6, 4), torch.randn(3, 4), 5, settings)
    model.prepare(seen)
    torch.manual_seed(0)
    count = 20_000
    for state, object_ in seen.nonzero().tolist():
        with_it = seen[:, object_].nonzero().squeeze(1).tolist()
        others = [i for i in with_it if i != state]
        # all pairs (i, k) are equally likely; object 1 was seen with state 0 alone
        ks = [k for i in others for k in with_it if k != i] or [state]
        expected = torch.bincount(torch.tensor(ks), minlength=6) / len(ks)
        third = model.draw_third(torch.full((count,), state), torch.full((count,), object_))
        shares = torch.bincount(third, minlength=6) / count
        torch.testing.assert_close(shares, expected, rtol=0, atol=6 * 0.5 / count**0.5)


def test_two_threads_do_not_race():
    """The gradient of an indexed table, as of aop's matrices, is added up in one order."""
    settings = baselines.settings_of("aop", "shapes", epochs=1)
    weights = []
    torch.set_num_threads(2)
    for _ in range(2):
        with reproducible(torch.device("cpu"), 0):
            model = baselines.AttributesAsOperators(
                torch.randn(2, 100), torch.randn(3, 100), 8, settings)
            model.prepare(torch.ones(2, 3).bool())
            list(train_epochs(model, torch.randn(256, 8), torch.randint(6, (256,))))
        weights.append(model.operators)
    torch.set_num_threads(1)
    assert torch.equal(*weights)


@pytest.mark.parametrize("name", ["leplus", "aop", "tmn", "symnet"])
def test_a_loss_before_prepare_is_told(name):
    settings = baselines.settings_of(name, "toy")
    model = baselines.MODELS[name](torch.randn(6, 4), torch.randn(3, 4), 5, settings)
    with pytest.raises(ValueError, match=r"must be prepared .* model.prepare\(seen\) first"):
        model.loss(torch.randn(7, 5), torch.arange(7))


# ---- settings ----


def test_settings_are_those_of_the_published_comparison():
    """A dataset that is not named has those of "other"; settings that are added play no part."""
    table = json.loads((Path(__file__).parent / "data/baseline_settings.json").read_text())
    of_training = dict(world="open", patience=0, ema_decay=0.0)
    for name in SYSTEMS:
        for dataset in ("shapes", "mitstates", "utzappos", "cgqa", "birds"):
            settings = asdict(baselines.settings_of(name, dataset))
            settings["vectors"] = baselines.vectors_of(name, dataset)
            expected = table[name].get(dataset, table[name]["other"])
            assert settings | of_training | expected == settings


# ---- the command ----


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Return a folder of features without word vectors; words.txt beside it has them."""
    folder = make_toy(tmp_path_factory.mktemp("data") / "toy")
    (folder / "vectors.txt").rename(folder.parent / "words.txt")
    return folder


def run(toy, out, *options):
    """Return metrics.json of a run in a folder."""
    baselines.main(["--dataset", str(toy), "--device", "cpu", "--out", str(out),
                    *map(str, options)])
    return json.loads((out / "metrics.json").read_text())


@pytest.mark.parametrize("name", SYSTEMS)
def test_main_trains_and_reports(name, toy, tmp_path):
    options = ["--epochs", 2, "--vectors", toy.parent / "words.txt"]
    metrics = run(toy, tmp_path / "run", "--model", name, *options)
    closed = metrics["test"]["closed"]["exact"]["auc"]
    assert 0 <= metrics["test"]["open"]["exact"]["auc"] <= closed <= 1
    assert metrics["settings"]["model"] == name


class Mine(baselines.VisProd):
    @dataclass(frozen=True)
    class Settings(baselines.BaselineModel.Settings):
        factor: float = setting(1.0, help="a setting of its own", least=0)


def test_settings_of_a_model_of_ones_own(toy, tmp_path, monkeypatch):
    """An option comes before the settings of the dataset, and these before the class's own."""
    monkeypatch.setitem(baselines.MODELS, "mine", Mine)
    own = dict(factor=3.0, epochs=30, min_epoch_steps=9)
    monkeypatch.setitem(baselines.DATASET_SETTINGS, "mine", dict(other=own))
    options = ["--model", "mine", "--vectors", "random", "--factor", 2]
    settings = run(toy, tmp_path / "own", *options)["settings"]
    assert settings.items() >= (own | dict(factor=2.0, lr=5e-5)).items()


@pytest.mark.parametrize("options, shown", [
    ([], "VisProd (two logistic regressions)"), (["--model", "aop"], "--commutative")])
def test_help_explains_the_systems_and_the_settings_of_one(capsys, options, shown):
    with pytest.raises(SystemExit):
        baselines.main([*options, "--help"])
    text = capsys.readouterr().out
    assert shown in text and "--gating-lr" not in text
    assert text.endswith("example: python -m lab.baselines --model leplus --dataset utzappos\n")


@pytest.mark.parametrize("model, option, value, said", [
    ("tmn", "--gating-lr", -1, "gating_lr must be at least 0, got -1"),
    ("aop", "--width", 3, "unrecognized arguments: --width 3")])
def test_options_that_cannot_be_are_one_line(toy, tmp_path, capsys, model, option, value, said):
    with pytest.raises(SystemExit) as end:
        run(toy, tmp_path, "--model", model, "--vectors", "random", option, value)
    last = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and "error: " in last and said in last
