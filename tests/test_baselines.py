"""Tests of baselines.py: the golden files, the direct forms of reference.py, the draws, the
command."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import baselines
from feasibility import feasibility_scores
from reference import DIRECT, direct_tmn_loss, published

GOLDEN = np.load(Path(__file__).parent / "data/baselines.npz")
EXPECTED = json.loads((Path(__file__).parent / "data/baselines.json").read_text())["losses"]
NAMES = {
    "leplus": "label_embed_plus",
    "aop": "attributes_as_operators",
    "symnet": "symnet",
    "tmn": "tmn",
}
S, O = 16, 12


def golden(name, dtype=torch.float32):
    array = torch.from_numpy(GOLDEN[name])
    return array.to(dtype) if array.is_floating_point() else array.long()


def golden_model(name, dtype=torch.float32):
    """The model with the golden parameters, in evaluation mode (no dropout), and its golden
    loss."""
    prefix = f"{NAMES[name]}/param/"
    dim = GOLDEN[prefix + ("obj_embedder" if name == "aop" else "attr_embedder") + ".weight"].shape[
        1
    ]
    options = {"tmn": {"modules": 4, "width": 6, "rank": 8, "negatives": 5}}.get(name, {})
    model = baselines.MODELS[name](
        np.zeros((S, dim)), np.zeros((O, dim)), 32, np.ones((S, O), bool), **options
    )
    with torch.no_grad():
        for key, value in published(model).items():
            given = golden(prefix + key)
            if key.endswith("embedder.weight"):
                given = given[: len(value)]  # TMN has one more row, unused
            if key.endswith("joint_linear2.weight"):
                given = given[1 + 4 :]  # logits of softmaxes over one number
            assert given.shape == value.shape, key
            value.copy_(given)
    model = model.to(dtype).eval()
    target = golden("state") * O + golden("object")
    negatives = golden("neg_state") * O + golden("neg_object")
    third = (golden("comm_state"),) if name == "aop" else ()
    return model, model.loss(golden("x", dtype), target, negatives, *third)


@pytest.mark.parametrize("name", NAMES)
def test_golden_loss_gradients_and_scores(name):
    model, loss = golden_model(name)
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
                np.testing.assert_allclose(
                    value.numpy(), GOLDEN[f"tmn/after/{key}"], rtol=1e-5, atol=1e-6
                )
    state, object_ = golden("pairs").T
    with torch.no_grad():
        scores = model(golden("x")[:8])[:, state, object_]
    np.testing.assert_allclose(scores.numpy(), GOLDEN[f"{NAMES[name]}/scores"], rtol=1e-5)


def small(name, **options):
    """A model of odd sizes in float64 with gates that differ, its seen mask and a batch of 9
    (features, target)."""
    torch.manual_seed(1)
    seen = torch.rand(7, 5) < 0.5
    options = {"tmn": dict(layers=4, modules=3, width=4, rank=6, negatives=8)}.get(
        name, {}
    ) | options
    model = baselines.MODELS[name](
        torch.randn(7, 10), torch.randn(5, 10), 6, seen, **options
    ).double()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    listed = seen.flatten().nonzero().squeeze(1)
    return model, seen, torch.randn(9, 6).double(), listed[torch.randint(len(listed), (9,))]


def as_pairs(index, size):
    return torch.stack([index // size, index % size], -1)


@pytest.mark.parametrize("name", baselines.MODELS)
@pytest.mark.parametrize("numbers", [1, 1 << 20])
def test_scores_equal_the_direct_form(name, numbers, monkeypatch):
    """In chunks of one and all at once."""
    monkeypatch.setattr(baselines, "chunk", lambda tensor: numbers)
    model, _, x, _ = small(name)
    model.eval()
    for buffer in model.buffers():
        if buffer.dtype == torch.float64 and buffer.ndim == 1:
            buffer += torch.rand_like(buffer)  # running statistics of no round numbers
    pairs = as_pairs(torch.arange(35), 5)
    with torch.no_grad():
        scores = model(x)
        expected = DIRECT[name](published(model), x, pairs)
    assert scores.shape == (9, 7, 5) and scores.is_contiguous()
    torch.testing.assert_close(scores.flatten(1), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_tmn_scores_of_any_number_of_layers(layers):
    model, _, x, _ = small("tmn", layers=layers)
    model.eval()
    with torch.no_grad():
        expected = DIRECT["tmn"](published(model), x, as_pairs(torch.arange(35), 5))
        torch.testing.assert_close(model(x).flatten(1), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("negatives, layers", [(8, 4), (60, 4), (8, 1)])
def test_tmn_loss_equals_the_direct_form(negatives, layers):
    """Loss, gradients and statistics, with fewer draws than training compositions and more."""
    fast, _, x, target = small("tmn", layers=layers)
    slow = small("tmn", layers=layers)[0]
    drawn = fast.negatives(target, negatives)
    loss = fast.loss(x, target, drawn)
    loss.backward()
    pairs = as_pairs(torch.cat([target[:, None], drawn], 1), 5)
    expected = direct_tmn_loss(published(slow), x, pairs)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    for (name, ours), theirs in zip(fast.named_parameters(), slow.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-7, atol=1e-11, msg=name)
    for (name, ours), theirs in zip(fast.named_buffers(), slow.buffers()):
        if "running" in name:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=name)


def test_apart_is_two_logistic_regressions():
    model, _, x, target = small("apart")
    standard = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
    expected = 0
    for head, truth in ((model.to_state, target // 5), (model.to_object, target % 5)):
        chances = torch.softmax(standard @ head.weight.T + head.bias, 1)
        expected -= chances[range(9), truth].log().mean()
    torch.testing.assert_close(model.loss(x, target), expected)


@pytest.mark.parametrize("name", baselines.MODELS)
def test_every_system_keeps_the_contract(name):
    model, seen, x, target = small(name)
    torch.manual_seed(0)
    assert model.loss(x, target).ndim == 0 and (len(model.states), len(model.objects)) == (7, 5)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.after_epoch(1)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.score(x, model.compositions()).shape == (9, 7, 5)
    torch.manual_seed(1)
    torch.rand(7, 5)  # the draws of `small`
    vectors = torch.randn(7, 10).numpy(), torch.randn(5, 10).numpy()
    expected = feasibility_scores(*vectors, seen.numpy())
    np.testing.assert_array_equal(model.feasibility(seen.numpy()), expected)


def test_negatives_are_all_training_compositions_but_the_truth():
    _, seen, _, target = small("leplus")
    listed = set(seen.flatten().nonzero().squeeze(1).tolist())
    draw = baselines.Negatives(seen)
    torch.manual_seed(0)
    drawn = draw(target, 20_000)
    for truth, row in zip(target.tolist(), drawn):
        values, counts = row.unique(return_counts=True)
        assert set(values.tolist()) == listed - {truth}
        # 20,000 draws among n - 1: a standard deviation is below 1/28 of the mean here, six of them
        # are allowed
        assert (counts / (20_000 / (len(listed) - 1)) - 1).abs().max() < 6 / 28
    torch.manual_seed(0)
    assert torch.equal(draw(target, 20_000), drawn)


def test_third_states_follow_their_definition():
    seen = torch.tensor(
        [[1, 1, 0], [1, 0, 1], [1, 0, 1], [0, 1, 0], [0, 0, 0], [1, 0, 0]], dtype=torch.bool
    )
    seen[3, 1] = False  # object 1 was seen with state 0 alone
    model = baselines.AttributesAsOperators(torch.randn(6, 4), torch.randn(3, 4), 5, seen)
    torch.manual_seed(0)
    for state, object_ in seen.nonzero().tolist():
        with_it = seen[:, object_].nonzero().squeeze(1).tolist()
        expected = np.zeros(6)
        others = [i for i in with_it if i != state]
        for i in others:
            for k in with_it:
                if k != i:
                    expected[k] += 1 / len(others) / (len(with_it) - 1)
        if not others:
            expected[state] = 1
        n = 20_000
        third = model.draw_third(torch.full((n,), state), torch.full((n,), object_))
        np.testing.assert_allclose(
            torch.bincount(third, minlength=6) / n, expected, atol=6 * 0.5 / n**0.5
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_training(name):
    """Every parameter is in one group and learns, fixed vectors do not; the config rebuilds the
    model."""
    model, seen, x, target = small(name, **({"gating_lr": 1e-6} if name == "tmn" else {}))
    groups = [dict(params=[*model.parameters()])]
    if name in ("aop", "tmn"):
        groups = model.parameter_groups(1e-3)
    assert sorted(id(p) for group in groups for p in group["params"]) == sorted(
        map(id, model.parameters())
    )
    rates = {"tmn": {1e-3, 1e-6}, "aop": {1e-3, 1e-4}}.get(name, {None})
    assert {group.get("lr") and round(group["lr"], 9) for group in groups} == rates
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.Adam(groups, lr=1e-3, weight_decay=5e-5)
    model.loss(x, target).backward()
    optimizer.step()
    fixed = {"aop": {"states"}, "symnet": {"states", "objects"}}.get(name, set())
    assert {
        key for key, value in model.state_dict().items() if torch.equal(value, before[key])
    } == fixed
    again = type(model)(np.zeros((7, 10)), np.zeros((5, 10)), seen=seen, **model.config).double()
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.eval()(x), model.eval()(x), rtol=0, atol=0)


def test_default_settings_build_models():
    for name, table in baselines.DEFAULTS.items():
        for settings in table.values():
            options = baselines.settings_of_model(settings)
            config = baselines.MODELS[name](
                torch.randn(3, 4), torch.randn(2, 4), 5, torch.ones(3, 2), **options
            ).config
            assert config.items() >= options.items()


@pytest.mark.parametrize(
    "states, objects, seen, options, said",
    [
        (torch.ones(3, 4), torch.ones(2, 5), torch.ones(3, 2), {}, "same D"),
        (torch.full((3, 4), torch.nan), torch.ones(2, 4), torch.ones(3, 2), {}, "hold NaN"),
        (torch.ones(3, 4), torch.ones(2, 4), torch.zeros(3, 2), {}, "at least 2"),
        (
            torch.ones(3, 4),
            torch.ones(2, 4),
            torch.ones(3, 2),
            {"negatives": 0},
            "negatives is 0: expected at least 1",
        ),
        (
            torch.ones(3, 4),
            torch.ones(2, 4),
            torch.ones(3, 2),
            {"layers": 0},
            "layers is 0: expected at least 1",
        ),
    ],
)
def test_bad_input_is_explained(states, objects, seen, options, said):
    with pytest.raises(ValueError, match=said):
        baselines.TMN(states, objects, 5, seen, **options)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder of 4 states, 3 objects and 160 images' features, with word vectors."""
    folder, random = tmp_path_factory.mktemp("data") / "tiny", np.random.default_rng(0)
    folder.mkdir()
    states, objects = ["old", "red", "tall", "wet"], ["cat", "dog", "pie"]
    centres = random.normal(size=(4, 3, 8))
    rows, features = ["image,state,object,split"], []
    for i in range(160):
        split = ("train", "train", "val", "test")[i % 4]
        c = random.choice({"train": 8, "val": 10, "test": 12}[split])
        s, o = [*np.ndindex(4, 3)][c * 5 % 12]
        rows.append(f"{i}.png,{states[s]},{objects[o]},{split}")
        features.append(centres[s, o] + 0.5 * random.normal(size=8))
    (folder / "images.csv").write_text("\n".join(rows) + "\n")
    np.savez(
        folder / "features.npz",
        files=[f"{i}.png" for i in range(160)],
        features=np.float32(features),
    )
    with open(folder / "vectors.txt", "w") as file:
        for word in states + objects:
            print(word, *random.normal(size=6).round(4), file=file)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_main_trains_and_reports(name, tiny, tmp_path, capsys):
    options = ["--model", name, "--dataset", str(tiny), "--epochs", "2", "--device", "cpu"]
    options += ["--width", "4", "--negatives", "3"] if name == "tmn" else []
    baselines.main([*options, "--out", str(tmp_path / "a")])
    metrics = json.loads((tmp_path / "a/metrics.json").read_text())
    assert (
        0
        <= metrics["test"]["open"]["exact"]["auc"]
        <= metrics["test"]["closed"]["exact"]["auc"]
        <= 1
    )
    assert metrics["settings"]["model"] == name and "open_masked" in capsys.readouterr().out
    lines = (tmp_path / "a/feasibility.csv").read_text().splitlines()
    known = tmp_path / "known.csv"
    rows = [line.rsplit(",", 1)[0] + f",{-i / 100:.6f}" for i, line in enumerate(lines[1:])]
    known.write_text("\n".join([lines[0], *rows, ""]))
    baselines.main([*options, "--out", str(tmp_path / "b"), "--feasibility", str(known)])
    assert (
        tmp_path / "b/feasibility.csv"
    ).read_text().splitlines() == known.read_text().splitlines()
    assert (tmp_path / "a/log.csv").read_text().split(",")[1] == (
        tmp_path / "b/log.csv"
    ).read_text().split(",")[1]
    known.write_text("\n".join([*lines[:-1], ""]))
    with pytest.raises(SystemExit) as stop:
        baselines.main([*options, "--out", str(tmp_path / "c"), "--feasibility", str(known)])
    assert stop.value.code == 2 and "wet" in capsys.readouterr().err


def test_apart_chooses_its_weight_decay(tiny, tmp_path, capsys, monkeypatch):
    chosen = []
    monkeypatch.setattr(baselines, "WEIGHT_DECAYS", (1e-4, 100.0))
    for more in ([], ["--weight-decay", "0.5"]):
        out = tmp_path / str(len(chosen))
        baselines.main(
            [
                "--model",
                "apart",
                "--dataset",
                str(tiny),
                "--epochs",
                "20",
                "--device",
                "cpu",
                "--out",
                str(out),
                *more,
            ]
        )
        metrics = json.loads((out / "metrics.json").read_text())
        chosen.append(metrics["settings"]["weight_decay"])
    assert chosen == [1e-4, 0.5]  # 100 leaves nothing but the frequencies


def test_a_model_of_ones_own_is_a_class_and_a_line(tiny, tmp_path, capsys, monkeypatch):
    class Mine(baselines.Compared):  # a linear map of the image, compared with the sum of the words
        def __init__(self, state_vectors, object_vectors, feature_dim, seen, *, scale=1.0):
            super().__init__(state_vectors, object_vectors)
            self.config = dict(feature_dim=feature_dim, scale=scale)
            self.images = torch.nn.Linear(feature_dim, self.states.shape[1])

        def loss(self, features, target):
            return F.cross_entropy(self(features).flatten(1), target)

        def compositions(self):
            return (self.states[:, None] + self.objects).flatten(0, 1)

        def score(self, features, compositions):
            scores = self.config["scale"] * self.images(features) @ compositions.T
            return scores.view(-1, len(self.states), len(self.objects))

    monkeypatch.setitem(baselines.MODELS, "mine", Mine)
    common = ["--model", "mine", "--dataset", str(tiny), "--device", "cpu", "--out"]
    baselines.main([*common, str(tmp_path / "whole"), "--epochs", "4"])
    for more in (["--epochs", "2"], ["--epochs", "4", "--resume", "--save-scores"]):
        baselines.main([*common, str(tmp_path / "resumed"), *more])
    whole, resumed = (
        json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("whole", "resumed")
    )
    assert whole["test"] == resumed["test"]
    assert set(whole["test"]) == {"closed", "open", "open_masked"}
    files = {path.name for path in (tmp_path / "resumed").iterdir()}
    assert files >= {
        "best.pt",
        "last.pt",
        "log.csv",
        "scores.npy",
        "predictions.csv",
        "compositions.csv",
        "feasibility.csv",
        "curves.npz",
        "metrics.json",
    }
    monkeypatch.setitem(
        baselines.DEFAULTS, "mine", dict(other=baselines.TRAINING | dict(scale=2.0, epochs=1))
    )
    baselines.main([*common, str(tmp_path / "scaled")])
    settings = json.loads((tmp_path / "scaled/metrics.json").read_text())["settings"]
    assert (settings["scale"], settings["epochs"]) == (2.0, 1)
    # what only the dataset's own entry has goes to the constructor, too; the rest to the training
    own = dict(scale=3.0, epochs=None, steps=30, patience_steps=9, average=0.5)
    monkeypatch.setitem(baselines.DEFAULTS, "mine", {"tiny": own})
    baselines.main([*common, str(tmp_path / "own")])
    contents = torch.load(tmp_path / "own/best.pt", weights_only=True)
    assert (contents["config"]["scale"], contents["settings"]["patience"]) == (3.0, 10)
    for wrong, said in (dict(other=dict(width=3)), "got an unexpected keyword argument 'width'"), (
            dict(lr=1e-3), "unsupported operand"):
        capsys.readouterr()
        monkeypatch.setitem(baselines.DEFAULTS, "mine", wrong)
        with pytest.raises(SystemExit) as end:
            baselines.main([*common, str(tmp_path / "wrong")])
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.count("\n") == 1 and said in error
        assert error.startswith("error: baselines.DEFAULTS['mine'][") and "of Mine," in error


@pytest.mark.parametrize("model, options, said", [
    ("tmn", ["--gating-lr", "inf"], "--gating-lr is inf: expected a positive number"),
    ("aop", ["--feasibility", "none.csv"], "no file --feasibility none.csv: expected"),
    ("aop", ["--feasibility", "."], ". is no plain file"),
    ("apart", ["--seed", "1", "1"], "seeds [1, 1]: expected different numbers")])
def test_options_that_cannot_be_are_one_line(tiny, tmp_path, capsys, monkeypatch, model, options,
                                             said):
    monkeypatch.setattr(baselines, "choose_weight_decay", lambda *_: pytest.fail("too late"))
    with pytest.raises(SystemExit) as end:
        baselines.main(["--model", model, "--dataset", str(tiny), "--device", "cpu",
                        "--epochs", "1", "--out", str(tmp_path / "out"), *options])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith(f"error: {said}") and error.count("\n") == 1
