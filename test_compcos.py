"""The model, its losses and prediction against the plain form, the definition and the published
answers."""

import copy
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf

import compcos
import train
from compcos import CompCos, compcos_loss, load_published, predict

HERE = Path(__file__).parent


def plain_cosines(model, features):
    """Eq. 1 as it is written, (B,S,O): every composition embedded by W [φ(s); φ(o)], (C,D)."""
    shape = (len(model.states), len(model.objects))
    embeddings = model.embed_compositions(list(np.ndindex(shape)))
    return (model.embed_images(features) @ embeddings.T).view(-1, *shape)


def small(S=5, O=7, D=6, F=8, seed=0, dtype=torch.float32, **config):
    """A small model in evaluation mode, a batch, its targets, and a seen mask that holds them."""
    torch.manual_seed(seed)
    config = dict(feature_dim=F, hidden=12) | config
    model = compcos.build(torch.randn(S, D), torch.randn(O, D), **config)
    seen = torch.rand(S, O) < 0.4
    seen[torch.arange(S), torch.arange(S) % O] = True
    target = seen.flatten().nonzero()[torch.randint(int(seen.sum()), (9,)), 0]
    return model.to(dtype).eval(), torch.randn(9, F, dtype=dtype), target, seen


def gradients(model, value):
    """The gradient of a number for every parameter, flat."""
    model.zero_grad()
    value.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def oppose(model, distance):
    """Move object i so that b_i = -a_i up to `distance` times |a_i|: the norm of their sum then
    nearly cancels."""
    of_state, of_object = model.projection.weight.detach().double().chunk(2, dim=1)
    a = model.states.detach().double() @ of_state.T + model.projection.bias.detach().double()
    a = a[:len(model.objects)]
    noise = torch.randn_like(a)
    noise *= distance * a.norm(dim=1, keepdim=True) / noise.norm(dim=1, keepdim=True)
    with torch.no_grad():
        moved = torch.linalg.solve(of_object, (noise - a).T).T
        model.objects[:len(a)] = moved.to(model.objects.dtype)


# ---- scores ----


@pytest.mark.parametrize("distance", [1e-2, 1e-4, 1e-6])
def test_cosines_of_nearly_opposite_halves_stay_cosines(distance):
    """In [-1, 1] for images that look like these compositions, no worse than ten times plain."""
    for seed in range(5):
        model, _, _, _ = small(S=20, O=20, D=50, seed=seed)
        oppose(model, distance)
        exact = copy.deepcopy(model).double()
        diagonal = torch.arange(20)
        own = exact.embed_compositions(torch.stack([diagonal, diagonal], dim=1)).detach()
        images = torch.cat([own, -own])
        model.image_embedder = torch.nn.Identity()
        exact.image_embedder = torch.nn.Identity()
        with torch.no_grad():
            truth = plain_cosines(exact, images)[:, diagonal, diagonal]
            plain = plain_cosines(model, images.float())[:, diagonal, diagonal]
            cosines = model(images.float())
        assert truth.abs().max() > 0.999  # so an error would lead outside
        assert cosines.abs().max() <= 1
        error = (cosines[:, diagonal, diagonal] - truth).abs().max()
        assert error <= 10 * (plain - truth).abs().max()


def test_cosines_of_chosen_pairs():
    """Those of all compositions there, to the gradient; a pair may come twice, and -1 is none."""
    model, x, _, _ = small(dtype=torch.float64)
    pairs = np.array([[4, 6], [0, 0], [4, 6]])
    chosen = model(x)[:, pairs[:, 0], pairs[:, 1]]
    torch.testing.assert_close(model.cosines(x, pairs), chosen, rtol=0, atol=1e-12)
    found = gradients(model, model.cosines(x, pairs).square().sum())
    torch.testing.assert_close(found, gradients(model, chosen.square().sum()))
    with pytest.raises(IndexError):
        model.cosines(x, [[-1, 0]])


# ---- the loss ----


@pytest.mark.parametrize("chunk", [1, 70, 1 << 20])
@pytest.mark.parametrize("world", ["open", "closed"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_loss_in_chunks_equals_plain(chunk, world, dtype, tolerance, monkeypatch):
    """Before the first update, in the warm-up and after it: the value, and the gradients."""
    monkeypatch.setitem(compcos.CHUNK, "cpu", chunk)
    model, x, target, seen = small(dtype=dtype)
    for epoch in (0, 1, 20):
        model.prepare(seen, world=world)
        margin = None
        if epoch:
            model.after_epoch(epoch)
        if epoch and world == "open":
            margin = 0.4 * min(1, epoch / 15) * torch.as_tensor(model.feasibility(seen))
        plain = compcos_loss(plain_cosines(model, x), target, scale=20.0, seen=seen, margin=margin)
        expected = gradients(model, plain)
        model.zero_grad()
        value = model.loss(x, target)
        assert all(weight.grad is None for weight in model.parameters())
        assert abs(value - plain) <= tolerance * plain
        assert (gradients(model, value) - expected).norm() <= tolerance * expected.norm()


def test_loss_from_the_definition():
    """Eq. 7 and 8 written out for one image; before the margins only the seen compete, which is Eq.
    2."""
    cosines, rho = torch.rand(1, 2, 3) * 2 - 1, torch.rand(2, 3)
    seen = torch.tensor([[True, False, True], [False, False, True]])
    target = torch.tensor([5])
    logits = 20 * torch.where(seen, cosines[0], cosines[0] - 0.4 * rho)
    expected = -torch.log(torch.exp(logits[1, 2]) / torch.exp(logits).sum())
    found = compcos_loss(cosines, target.numpy(), scale=20.0, seen=seen.numpy(),
                         margin=(0.4 * rho).numpy())
    torch.testing.assert_close(found, expected)
    only = -torch.log(torch.exp(20 * cosines[0, 1, 2]) / torch.exp(20 * cosines[0][seen]).sum())
    torch.testing.assert_close(compcos_loss(cosines, target, scale=20.0, seen=seen), only)


def golden():
    """The published model's parameters, batch and answers."""
    arrays = dict(np.load(HERE / "tests/data/model.npz"))
    answers = json.loads((HERE / "tests/data/model.json").read_text())
    weights = {}
    for name, value in arrays.items():
        if name.startswith("param/"):
            weights[name.removeprefix("param/")] = torch.as_tensor(value)
    return weights, arrays, answers["losses"]


def test_published_model():
    weights, arrays, answers = golden()
    model = load_published(weights)
    x = torch.as_tensor(arrays["x"])
    np.testing.assert_allclose(model(x).detach(), arrays["cosine"], rtol=0, atol=1e-6)
    rho = model.feasibility(arrays["seen"])
    np.testing.assert_allclose(rho, arrays["feasibility"], rtol=0, atol=1e-6)
    target = torch.as_tensor(arrays["state"] * 12 + arrays["object"])
    ours = {"image_embedder.mod.3": "image_embedder.4", "image_embedder.mod": "image_embedder",
            "attr_embedder.weight": "states", "obj_embedder.weight": "objects"}
    for setting, answer in answers.items():
        world = "closed" if setting.startswith("closed") else "open"
        model.prepare(arrays["seen"], world=world, scale=50.0, margin=1.0, warmup=15)
        if setting.startswith("open_epoch"):
            model.after_epoch(int(setting.removeprefix("open_epoch")))
        value = model.loss(x, target)
        gradients(model, value)
        assert value.item() == pytest.approx(answer["loss"], rel=1e-5), setting
        parameters = dict(model.named_parameters())
        for name, norm in answer["grad_norms"].items():
            for theirs, mine in ours.items():
                name = name.replace(theirs, mine)
            found = float(parameters[name].grad.norm())
            assert found == pytest.approx(norm, rel=2e-4), (setting, name)


def test_published_files_load(tmp_path):
    """A checkpoint as published: parameters under `net` beside a NumPy scalar; the last layer at 4
    where dropout counts. float64 keeps its digits."""
    weights, arrays, _ = golden()
    exact = {}
    for name, value in weights.items():
        exact[name.replace("mod.3", "mod.4")] = value.double() + 1e-12
    torch.save({"net": exact, "AUC": np.float64(0.3)}, tmp_path / "published.t7")
    model = load_published(tmp_path / "published.t7")
    cosines = model(torch.as_tensor(arrays["x"]).double()).detach()
    np.testing.assert_allclose(cosines, arrays["cosine"], atol=1e-6)
    assert torch.equal(model.projection.weight, exact["projection.weight"])
    with pytest.raises(ValueError, match="expected a published CompCos") as raised:
        load_published(weights | {"projection.weight": torch.zeros(20, 41)})
    assert "\n" not in str(raised.value)


# ---- the strong recipe ----


def test_strong_logits_and_offsets_from_the_definition():
    """z = c (ω(x)·a_s + ω(x)·b_o) / |a_s + b_o|, ω(x) of its own length; + (log n - mean over the
    seen) / 2 on the seen, - 7.2 ρ on the unseen; a seen pair without an image counts as one."""
    model, x, target, seen = small(dtype=torch.float64, dim=9, normalize_image_embeddings=False)
    a, b, _ = model.compositions()
    image = model.image_embedder(x)
    sums = a[:, None] + b                                          # (S, O, D)
    expected = torch.einsum("nd,sod->nso", image, sums) / sums.norm(dim=2)
    torch.testing.assert_close(model(x), expected)
    images = torch.randint(0, 3, (5, 7))
    model.prepare(seen, scale=2.6, margin=7.2 / 2.6, warmup=2, counts=0.5, images=images)
    logs = images.clamp_min(1).double().log()
    logs -= logs[seen].mean()
    model.after_epoch(9)
    rho = torch.as_tensor(model.feasibility(seen))
    offset = torch.where(seen, 0.5 * logs, -7.2 * rho)
    logits = (2.6 * expected + offset).flatten(1)
    torch.testing.assert_close(model.loss(x, target), nnf.cross_entropy(logits, target))


@pytest.mark.parametrize("warmup, shares", [(0, [1, 1, 1]), (2, [0.5, 1, 1])])
def test_margins_grow_to_the_greatest_in_the_warm_up(warmup, shares):
    """α grows linearly to its greatest value at epoch `warmup`, where it stays."""
    model, _, _, seen = small()
    model.prepare(seen, margin=0.4, warmup=warmup)
    rho = model.feasibility(seen)
    for epoch, share in enumerate(shares, 1):
        model.after_epoch(epoch)
        np.testing.assert_allclose(model.loss_arguments["margin"], share * 0.4 * rho, rtol=1e-6)


def test_words_learn_at_a_rate_of_their_own():
    """The first step of Adam is its rate, whatever the gradient."""
    model, x, target, seen = small()
    model.train().prepare(seen, word_lr_factor=10.0)
    weights = (model.states, model.projection.weight)
    before = copy.deepcopy(weights)
    step, _ = train.make_step(model, train.adam(model, 1e-3, 0.0, x.device), x, target)
    step(torch.arange(9))
    for weight, old, rate in zip(weights, before, (1e-2, 1e-3)):
        assert (weight - old).abs().median().item() == pytest.approx(rate, rel=1e-2)


def test_members_are_models_trained_apart():
    """Two members without dropout end where each would alone, and score as their mean; each weight
    has one name, and is in one group of Adam."""
    together, x, target, seen = small(dropout=0.0, members=2)
    apart = [copy.deepcopy(member) for member in together.members]
    for model in (together, *apart):
        model.prepare(seen, warmup=2, word_lr_factor=10.0)
        train_shortly(model, x, target)
    torch.testing.assert_close(together(x), (apart[0](x) + apart[1](x)) / 2)
    expected = (apart[0].feasibility(seen) + apart[1].feasibility(seen)) / 2
    np.testing.assert_allclose(together.feasibility(seen), expected, atol=1e-6)
    count = 2 * len(apart[0].state_dict())
    grouped = [group["params"] for group in together.parameter_groups(1.0)]
    assert len(together.state_dict()) == sum(map(len, grouped)) == count


def test_weight_average_from_its_definition():
    model = torch.nn.Linear(1, 1, bias=False)
    average = train.EMA(model, 0.5)
    expected = model.weight.item()
    for step in range(1, 20):
        with torch.no_grad():
            model.weight += 1
        average.update()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.item()
    weight = model.weight.item()
    with average.exchange():
        assert model.weight.item() == pytest.approx(expected, rel=1e-5) and expected != weight
    assert model.weight.item() == weight


def test_settings_of_both_recipes():
    """Those of the paper, and of the strong one what differs; a change is to be made here, too."""
    shared = dict(epochs=300, lr=5e-5, weight_decay=5e-5, batch_size=128, hidden=768, dropout=0.5,
                  warmup=15, mix="mean", members=1, dim=None, normalize_image_embeddings=True, counts=0.0,
                  average=0.0, word_lr_factor=1.0, patience=0, train_candidates="all", min_epoch_steps=0)
    paper = compcos.defaults("paper")
    for name, scale, margin in (("mitstates", 20, 0.4), ("utzappos", 50, 1.0), ("cgqa", 100, 0.4)):
        assert paper[name] == paper[name] | shared | dict(scale=scale, margin=margin)
    folder = dict(epochs=40, min_epoch_steps=65, patience=20)
    other = paper["other"]
    assert other == other | shared | folder | dict(scale=20, margin=0.4, lr=1e-3)
    strong = dict(members=4, scale=2.6, normalize_image_embeddings=False, dim=300, margin=7.2 / 2.6, counts=0.5,
                  dropout=0.85, average=0.998, weight_decay=0, lr=5e-4, word_lr_factor=10, train_candidates=None)
    other = compcos.defaults()["other"]
    assert other == other | shared | folder | strong


# ---- every edit trains ----


def train_shortly(model, x, target, epochs=2, lr=1e-2, eager=False):
    """The losses of some epochs of one pass in batches of 4, trained as `fit` does."""
    parts = dict(model=model, optimizer=train.adam(model, lr, 5e-5, x.device),
                 average=train.EMA(model, 0.0))
    losses = []
    is_another = True
    for epoch in range(1, epochs + 1):
        if is_another:
            steps = train.make_step(model, parts["optimizer"], x, target, eager=eager)
        order = train.draw_order(len(x), 1, 0, epoch).to(x.device)
        losses.append(train.train_epoch(parts, *steps, order.split(4), epoch))
        is_another = model.after_epoch(epoch)
    return losses


@pytest.fixture(params=[1, 1 << 20])
def chunk(request, monkeypatch):
    """How many scores a batch is trained on at once: some images of it, or all."""
    monkeypatch.setitem(compcos.CHUNK, "cpu", request.param)


@pytest.mark.parametrize("world", ["open", "closed"])
def test_three_times_the_loss_of_each_image_is_three_times_the_loss(world, chunk, monkeypatch):
    """In the first and in the second epoch, which has margins; at a rate that moves nothing. With
    smoothed labels, which no infinite logit of what does not compete would survive."""
    model, x, target, seen = small(dropout=0.0)
    smooth = partial(nnf.cross_entropy, reduction="none", label_smoothing=0.1)
    losses = []
    for factor in (1, 3):
        monkeypatch.setattr(compcos, "image_losses", lambda *given: factor * smooth(*given))
        model.prepare(seen, world=world)
        whole = model.loss(x, target).item()
        losses.append(train_shortly(model, x, target, lr=1e-9))
    np.testing.assert_allclose(losses[1], 3 * np.array(losses[0]), rtol=1e-4)
    assert losses[1][0] == pytest.approx(whole, rel=1e-4)  # the mean over the images


class Edited(CompCos):
    """A parameter more in the scores, and one in the loss, a learnt temperature."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.of_scores = torch.nn.Parameter(torch.ones(()))
        self.of_loss = torch.nn.Parameter(torch.ones(()))

    def compare(self, *computed):
        return self.of_scores * super().compare(*computed)

    def loss_of(self, *computed):
        self.loss_arguments["scale"] = 20 * self.of_loss
        return super().loss_of(*computed)


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_new_parameter_of_scores_or_loss_trains(epoch, chunk, monkeypatch):
    """In one step: with margins, and where only the seen compete."""
    monkeypatch.setattr(compcos, "CompCos", Edited)
    model, x, target, seen = small()
    model.train().prepare(seen)
    if epoch:
        model.after_epoch(epoch)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    step, _ = train.make_step(model, train.adam(model, 1e-2, 0.0, x.device), x, target)
    step(torch.arange(9))
    for name, weight in model.named_parameters():
        assert not torch.equal(weight, before[name]), name


def test_three_epochs_equal_the_loss_without_chunks(monkeypatch):
    """Dropout is drawn once a batch, so chunks change rounding alone."""
    losses = []
    for chunk in (1, 1 << 20):
        monkeypatch.setitem(compcos.CHUNK, "cpu", chunk)
        model, x, target, seen = small(members=2)
        model.prepare(seen, warmup=2)
        losses.append(train_shortly(model, x, target, epochs=3))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("world, members", [("open", 1), ("open", 2), ("closed", 1)])
def test_captured_step_equals_eager(world, members):
    """On CUDA the captured step, a short last batch and the change to margins included, and the
    same code run eagerly give the same weights."""
    device = torch.device("cuda")
    results = []
    for eager in (True, False):
        model, x, target, seen = small(dropout=0.0, members=members)
        model.to(device).prepare(seen, world=world, counts=0.5, images=np.eye(5, 7))
        losses = train_shortly(model, x.to(device), target.to(device), epochs=4, eager=eager)
        results.append([*model.parameters(), torch.tensor(losses)])
    for captured, eagerly in zip(*results):
        torch.testing.assert_close(captured, eagerly, rtol=1e-4, atol=1e-6)


# ---- prediction ----


def test_predict_ranks_by_biased_cosine():
    model, x, _, seen = small()
    model.checkpoint = dict(seen=seen, feature_mean=x.mean(0), feature_std=x.std(0))
    cosines = model(x).detach().flatten(1).numpy()
    allowed = np.arange(35) % 3 > 0
    biased = np.where(allowed, cosines + 0.3 * ~seen.flatten().numpy(), -np.inf)
    ranked = biased.argsort(1)[:, ::-1][:, :4]
    indices, scores = predict(model, x.numpy(), k=4, candidates=allowed, bias=0.3)
    np.testing.assert_array_equal(indices, ranked)
    np.testing.assert_allclose(scores, np.take_along_axis(cosines, ranked, 1), rtol=1e-6)
    assert predict(model, x, k=99, candidates=allowed)[0].shape == (9, allowed.sum())


# ---- bad input ----


@pytest.mark.parametrize("name, wrong, message", [
    ("loss", dict(seen=torch.eye(5, 7) > 2, margin=None), "only the seen compete"),
    ("loss", dict(seen=torch.ones(5, 1, dtype=bool)), r"seen \(5, 1\).*expected \(B, S, O\)"),
    ("loss", dict(margin=torch.ones(7)), r"margin \(7,\).*expected \(B, S, O\)"),
    ("training", dict(seen=np.ones((7, 5), bool)), r"\(7, 5\): expected bool \(5, 7\)"),
    ("training", dict(scale=float("nan")), "scale is nan"),
    ("training", dict(world="Closed"), "world 'Closed'.*expected open or closed"),
    ("predict", dict(bias=0.3), "needs to know the seen"),
    ("predict", dict(candidates=np.ones((7, 5), bool)), r"candidates \(7, 5\), 35 of them"),
    ("predict", dict(candidates=np.zeros(35, bool)), "0 of them True"),
    ("predict", dict(features=torch.zeros(9, 3)), r"\(9, 3\): expected \(N, 8\)"),
    ("predict", dict(features=torch.full((1, 8), torch.nan)), "all finite"),
    ("model", dict(object_vectors=np.ones((2, 4))), "the same D")])
def test_bad_input_is_one_line(name, wrong, message):
    model, x, target, seen = small()
    cosines = model(x).detach()
    calls = dict(
        loss=partial(compcos_loss, cosines, target, scale=20.0, seen=seen, margin=0.1),
        training=partial(model.prepare, seen=seen),
        predict=partial(predict, model, features=x),
        model=partial(CompCos, np.ones((2, 3)), feature_dim=4))
    with pytest.raises(ValueError, match=message) as raised:
        calls[name](**wrong)
    assert "\n" not in str(raised.value)
