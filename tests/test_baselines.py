"""Tests of baselines.py: the golden files, the direct forms of reference.py, the draws, the
command."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lab import baselines
from lab.files import write_rows
from reference import DIRECT, published
from test_experiment import make_toy

GOLDEN = np.load(Path(__file__).parent / "data/baselines.npz")
EXPECTED = json.loads((Path(__file__).parent / "data/baselines.json").read_text())["losses"]
NAMES = dict(leplus="label_embed_plus", aop="attributes_as_operators", symnet="symnet", tmn="tmn")
S, O = 16, 12


def golden(name):
    array = torch.from_numpy(GOLDEN[name])
    return array if array.is_floating_point() else array.long()


def golden_model(name):
    """The model with the golden parameters, without dropout."""
    prefix = f"{NAMES[name]}/param/"
    sizes = dict(modules=4, width=6, rank=8, negatives=5) if name == "tmn" else {}
    dim = GOLDEN[f"{prefix}{'obj' if name == 'aop' else 'attr'}_embedder.weight"].shape[1]
    seen = np.ones((S, O), bool)
    model = baselines.MODELS[name](np.zeros((S, dim)), np.zeros((O, dim)), 32, seen, **sizes)
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
    negatives = golden("neg_state") * O + golden("neg_object")
    third = [golden("comm_state")] if name == "aop" else []
    loss = model.loss(golden("x"), target, negatives, *third)
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
    """A model of odd sizes in float64 with gates that differ, its seen mask and a batch of 9
    (features, target)."""
    torch.manual_seed(1)
    seen = torch.rand(7, 5) < 0.5
    if name == "tmn":
        settings = dict(layers=4, modules=3, width=4, rank=6, negatives=8) | settings
    vectors = torch.randn(7, 10), torch.randn(5, 10)
    model = baselines.MODELS[name](*vectors, 6, seen, **settings).double()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    listed = seen.flatten().nonzero().squeeze(1)
    return model, seen, torch.randn(9, 6).double(), listed[torch.randint(len(listed), (9,))]


@pytest.mark.parametrize("numbers", [1, 1 << 20])
@pytest.mark.parametrize("name, settings", [*((name, {}) for name in baselines.MODELS),
                                            ("tmn", dict(layers=2))])
def test_scores_equal_the_direct_form(name, settings, numbers, monkeypatch):
    """In chunks of one and all at once."""
    monkeypatch.setattr(baselines, "chunk", lambda tensor: numbers)
    model, _, x, _ = small(name, **settings)
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
    model, _, x, target = small("visprod")
    likelihood = model.score(x).flatten(1)[range(9), target]
    torch.testing.assert_close(model.loss(x, target), -likelihood.mean())


@pytest.mark.parametrize("name", baselines.MODELS)
def test_a_step_of_training(name):
    """Every parameter is in one group and learns, fixed vectors do not; the config rebuilds the
    model; and nothing in the loss reads a value back, which a captured step forbids."""
    model, seen, x, target = small(name)
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

    again = type(model)(np.zeros((7, 10)), np.zeros((5, 10)), seen=seen, **model.config).double()
    again.load_state_dict(after)
    torch.testing.assert_close(again.eval()(x), model.eval()(x), rtol=0, atol=0)

    # A tensor on the "meta" device has a shape and no values: to read one is an error.
    model = model.train().to("meta")
    assert model.loss(x.to("meta"), target.to("meta")).shape == ()


def test_negatives_are_all_training_compositions_but_the_truth():
    _, seen, _, target = small("leplus")
    listed = set(seen.flatten().nonzero().squeeze(1).tolist())
    torch.manual_seed(0)
    for truth, row in zip(target.tolist(), baselines.NegativeSampler(seen)(target, 20_000)):
        values, counts = row.unique(return_counts=True)
        assert set(values.tolist()) == listed - {truth}
        # 20,000 draws among n - 1: a standard deviation is below 1/28 of the mean here, six of them
        # are allowed
        assert (counts / (20_000 / (len(listed) - 1)) - 1).abs().max() < 6 / 28


def test_third_states_follow_their_definition():
    seen = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 0, 1], [0, 0, 0], [0, 0, 0], [1, 0, 0]]) > 0
    model = baselines.AttributesAsOperators(torch.randn(6, 4), torch.randn(3, 4), 5, seen)
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


# ---- the command ----


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A folder of features without word vectors; words.txt beside it has them."""
    folder = make_toy(tmp_path_factory.mktemp("data") / "toy")
    (folder / "vectors.txt").rename(folder.parent / "words.txt")
    return folder


def run(toy, out, *options):
    """metrics.json of a run in a folder."""
    baselines.main(["--dataset", str(toy), "--device", "cpu", "--out", str(out),
                    *map(str, options)])
    return json.loads((out / "metrics.json").read_text())


@pytest.mark.parametrize("name", baselines.MODELS)
def test_main_trains_and_reports(name, toy, tmp_path):
    known = tmp_path / "known.csv"
    rows = [[f"s{state}", f"o{object_}", 0.25] for state, object_ in np.ndindex(5, 6)]
    write_rows(known, ["state", "object", "feasibility"], rows)
    options = ["--model", name, "--epochs", 2, "--feasibility", known]
    if name != "visprod":  # it needs no words
        options += ["--vectors", toy.parent / "words.txt"]
    if name == "tmn":
        options += ["--width", 4]
    metrics = run(toy, tmp_path / "run", *options)
    closed = metrics["test"]["closed"]["exact"]["auc"]
    assert 0 <= metrics["test"]["open"]["exact"]["auc"] <= closed <= 1
    settings = metrics["settings"]
    assert settings.items() >= dict(model=name, epochs=2, feasibility=str(known)).items()
    contents = torch.load(tmp_path / "run/best.pt", weights_only=True)
    assert (contents["feasibility"] == 0.25).all()
    if name == "tmn":  # an option, a folder's default, the constructor's own
        assert contents["config"].items() >= dict(width=4, negatives=20, rank=64).items()


def test_two_threads_do_not_race(toy, tmp_path):
    """Where they add up the gradient of an indexed table, as of aop's matrices."""
    torch.set_num_threads(2)
    for name in "ab":
        run(toy, tmp_path / name, "--model", "aop", "--vectors", "random", "--epochs", 1)
    torch.set_num_threads(1)
    first, second = [(tmp_path / name / "best.pt").read_bytes() for name in "ab"]
    assert first == second


class Mine(baselines.VisProd):
    def __init__(self, *arguments, scale=1.0):
        super().__init__(*arguments)
        self.config["scale"] = scale


def test_settings_of_a_model_of_ones_own(toy, tmp_path, monkeypatch):
    """What DEFAULTS has goes to the constructor and to the training, and an option before it."""
    monkeypatch.setitem(baselines.MODELS, "mine", Mine)
    own = dict(scale=3.0, epochs=30, min_epoch_steps=9)
    monkeypatch.setitem(baselines.DEFAULTS, "mine", dict(other=own))
    options = ["--model", "mine", "--vectors", "random", "--scale", 2]
    settings = run(toy, tmp_path / "own", *options)["settings"]
    assert settings.items() >= (own | dict(scale=2.0, lr=5e-5)).items()


@pytest.mark.parametrize("model, option, value, said", [
    ("tmn", "--gating-lr", -1, "argument --gating-lr: '-1'"),
    ("tmn", "--layers", 0, "'0': it is 0: expected"),
    ("aop", "--width", 3, "aop has no setting width: leave"),
    ("aop", "--feasibility", "none.csv", "none.csv"),
    ("mine", "--seed", 0, "the defaults of 'other' set width: expected any of epochs, ")])
def test_options_that_cannot_be_are_one_line(toy, tmp_path, capsys, monkeypatch, model, option,
                                             value, said):
    monkeypatch.setitem(baselines.MODELS, "mine", Mine)
    monkeypatch.setitem(baselines.DEFAULTS, "mine", dict(other=dict(width=3)))
    with pytest.raises(SystemExit) as end:
        run(toy, tmp_path, "--model", model, "--vectors", "random", option, value)
    last = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and "error: " in last and said in last
