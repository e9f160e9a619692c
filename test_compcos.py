"""The model, its losses and prediction against the plain form, the definition and the published
answers."""

import copy
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import features as image_features
import train
import experiment
from compcos import (
    CompCos,
    FusedLoss,
    Members,
    PUBLISHED,
    build,
    compcos_loss,
    load_published,
    log_counts,
    mix_batch,
    predict,
)
from reference import plain_cosines

HERE = Path(__file__).parent


def small(S=5, O=7, D=6, F=8, seed=0, dtype=torch.float32):
    """A small model in evaluation mode, a batch, its targets, and a seen mask that holds them."""
    torch.manual_seed(seed)
    model = CompCos(torch.randn(S, D), torch.randn(O, D), F, hidden=12).to(dtype).eval()
    seen = torch.rand(S, O) < 0.4
    seen[torch.arange(S), torch.arange(S) % O] = True
    target = seen.flatten().nonzero()[torch.randint(int(seen.sum()), (9,)), 0]
    return model, torch.randn(9, F, dtype=dtype), target, seen


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
    count = min(len(model.states), len(model.objects))
    noise = torch.randn_like(a[:count])
    wanted = -a[:count] + distance * noise / noise.norm(dim=1, keepdim=True) * a[:count].norm(
        dim=1, keepdim=True
    )
    with torch.no_grad():
        model.objects[:count] = torch.linalg.solve(of_object, wanted.T).T.to(model.objects.dtype)


@pytest.mark.parametrize("distance", [None, 0.3, 1e-2])
def test_factorised_equals_plain_in_float64(distance):
    model, x, target, seen = small(dtype=torch.float64)
    if distance:
        oppose(model, distance)
    weight = torch.randn(9, 5, 7, dtype=torch.float64)
    fast, plain = model(x), plain_cosines(model, x)
    torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-10)
    first, second = (
        gradients(model, (cosines * weight).sum()) for cosines in (fast, plain_cosines(model, x))
    )
    assert (first - second).norm() <= 1e-10 * second.norm()
    assert fast.abs().max() <= 1 + 1e-12


@pytest.mark.parametrize("distance", [1e-2, 1e-4, 1e-6])
def test_cosines_of_nearly_opposite_halves_stay_cosines(distance):
    """In [-1, 1] for images that look like these compositions, no worse than ten times plain."""
    for seed in range(5):
        model, _, _, _ = small(S=20, O=20, D=50, seed=seed)
        oppose(model, distance)
        model.eval()
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
        fast = cosines[:, diagonal, diagonal]
        assert (fast - truth).abs().max() <= 10 * (plain - truth).abs().max()


@pytest.mark.parametrize("distance", [None, 0.3, 1e-2, 1e-4, 1e-6])
def test_factorised_is_as_exact_as_plain_in_float32(distance):
    """Against float64 from the same parameters: within 1e-5, or, where b_o is nearly -a_s, no worse
    than the plain form."""
    model, x, target, seen = small(S=20, O=20, D=50, seed=1)
    if distance:
        oppose(model, distance)
    exact = copy.deepcopy(model).double()
    weight = torch.randn(9, 20, 20)
    for measure in (
        lambda m, y, form: form(m, y).detach().flatten(),
        lambda m, y, form: gradients(m, (form(m, y) * weight.to(y)).sum()),
    ):
        truth = measure(exact, x.double(), plain_cosines)
        plain, fast = (
            (measure(model, x, form) - truth).norm() / truth.norm()
            for form in (plain_cosines, lambda m, y: m(y))
        )
        assert fast <= max(1e-5 if distance is None else 0, 3 * plain)


@pytest.mark.parametrize("chunk", [1, 70, 1 << 20])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_fused_loss_equals_plain(chunk, dtype, tolerance, monkeypatch):
    monkeypatch.setitem(FusedLoss.ELEMENTS, "cpu", chunk)
    model, x, target, seen = small(dtype=dtype)
    oppose(model, 0.3)
    for epoch in (0, 1, 20):  # before the first update, in the warm-up, after it
        model.set_training(seen, scale=20.0, margin=0.4, warmup=15)
        if epoch:
            model.after_epoch(epoch)
        margin = (
            None
            if not epoch
            else 0.4 * min(1, epoch / 15) * torch.as_tensor(model.feasibility(seen))
        )
        fused = model.loss(x, target)
        plain = compcos_loss(plain_cosines(model, x), target, scale=20.0, seen=seen, margin=margin)
        assert abs(fused - plain) <= tolerance * plain
        first, second = (
            gradients(model, model.loss(x, target)),
            gradients(
                model,
                compcos_loss(plain_cosines(model, x), target, scale=20.0, seen=seen, margin=margin),
            ),
        )
        assert (first - second).norm() <= tolerance * second.norm()


def test_loss_from_the_definition():
    """Eq. 7 and 8 written out for one image; before the margins only the seen compete, which is Eq.
    2."""
    cosines, rho = torch.rand(1, 2, 3) * 2 - 1, torch.rand(2, 3)
    seen = torch.tensor([[True, False, True], [False, False, True]])
    logits = 20 * torch.where(seen, cosines[0], cosines[0] - 0.4 * rho)
    expected = -torch.log(torch.exp(logits[1, 2]) / torch.exp(logits).sum())
    found = compcos_loss(cosines, torch.tensor([5]), scale=20.0, seen=seen, margin=0.4 * rho)
    torch.testing.assert_close(found, expected)
    arrays = dict(seen=seen.numpy(), margin=(0.4 * rho).numpy())
    found = compcos_loss(cosines.numpy(), np.array([5]), scale=20.0, **arrays)
    torch.testing.assert_close(found, expected)
    only = -torch.log(torch.exp(20 * cosines[0, 1, 2]) / torch.exp(20 * cosines[0][seen]).sum())
    torch.testing.assert_close(
        compcos_loss(cosines, torch.tensor([5]), scale=20.0, seen=seen), only
    )


def test_sign_of_the_margin():
    """Raising ρ of an unseen composition lowers its logit in training, so that it is pushed away
    less."""
    seen, share = torch.tensor([[True, False, False]]), []
    for rho in (-0.5, 0.0, 0.5, 1.0):
        cosines = torch.full((1, 1, 3), 0.5, requires_grad=True)
        margin = torch.tensor([[0.0, rho, 0.2]])
        loss = compcos_loss(cosines, torch.tensor([0]), scale=1.0, seen=seen, margin=margin)
        loss.backward()
        share.append(float(cosines.grad[0, 0, 1]))
    assert share == sorted(share, reverse=True) and share[0] > share[-1] > 0


def golden():
    """The published model's parameters, batch and answers."""
    arrays, answers = (
        dict(np.load(HERE / "tests/data/model.npz")),
        json.loads((HERE / "tests/data/model.json").read_text()),
    )
    weights = {
        name.removeprefix("param/"): torch.as_tensor(value)
        for name, value in arrays.items()
        if name.startswith("param/")
    }
    return weights, arrays, answers["losses"]


def test_published_model():
    weights, arrays, answers = golden()
    model, x = load_published(weights), torch.as_tensor(arrays["x"])
    np.testing.assert_allclose(model(x).detach(), arrays["cosine"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        model.feasibility(arrays["seen"]), arrays["feasibility"], rtol=0, atol=1e-6
    )
    target = torch.as_tensor(arrays["state"] * 12 + arrays["object"])
    names = {
        "image_embedder.mod.0": "image_embedder.0",
        "image_embedder.mod.1": "image_embedder.1",
        "image_embedder.mod.3": "image_embedder.4",
        "attr_embedder.weight": "states",
        "obj_embedder.weight": "objects",
    }
    for setting, answer in answers.items():
        world = "closed" if setting.startswith("closed") else "open"
        model.set_training(arrays["seen"], world=world, scale=50.0, margin=1.0, warmup=15)
        if setting.startswith("open_epoch"):
            model.after_epoch(int(setting.removeprefix("open_epoch")))
        value = model.loss(x, target)
        gradients(model, value)
        assert value.item() == pytest.approx(answer["loss"], rel=1e-5), setting
        ours = dict(model.named_parameters())
        for name, norm in answer["grad_norms"].items():
            for theirs, mine in names.items():
                name = name.replace(theirs, mine)
            assert float(ours[name].grad.norm()) == pytest.approx(norm, rel=2e-4), (setting, name)


def test_published_files_load(tmp_path):
    """A checkpoint as published: parameters under `net` beside a NumPy scalar; the last layer at 4
    where dropout counts."""
    weights, arrays, _ = golden()
    weights = {name.replace("mod.3", "mod.4"): value for name, value in weights.items()}
    torch.save({"net": weights, "AUC": np.float64(0.3)}, tmp_path / "published.t7")
    model = load_published(tmp_path / "published.t7")
    np.testing.assert_allclose(
        model(torch.as_tensor(arrays["x"])).detach(), arrays["cosine"], atol=1e-6
    )
    for wrong in ({"weight": torch.zeros(3)}, {"net": 3}, {"a": "b"}):
        with pytest.raises(ValueError, match="not a published CompCos"):
            load_published(wrong)
    other = weights | {"projection.weight": torch.zeros(20, 41)}
    with pytest.raises(ValueError, match="size mismatch") as raised:
        load_published(other)
    assert "\n" not in str(raised.value)


def test_published_parameters_in_float64_keep_their_digits():
    weights, _, _ = golden()
    weights = {name: torch.as_tensor(value).double() + 1e-12 for name, value in weights.items()}
    model = load_published(weights)
    assert torch.equal(model.projection.weight, weights["projection.weight"])


def test_cosines_of_chosen_pairs():
    model, x, _, _ = small(dtype=torch.float64)
    pairs = np.array([[4, 6], [0, 0], [4, 6]])
    torch.testing.assert_close(
        model.cosines(x, pairs), model(x)[:, pairs[:, 0], pairs[:, 1]], rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        model.embed_compositions(pairs).norm(dim=1), torch.ones(3, dtype=torch.float64)
    )


def test_predict_ranks_by_biased_cosine():
    model, x, _, seen = small()
    model.checkpoint = dict(seen=seen)
    cosines = model(x).detach().flatten(1).numpy()
    allowed = np.arange(35) % 3 > 0
    ranked = np.where(allowed, cosines + 0.3 * ~seen.flatten().numpy(), -np.inf).argsort(1)[
        :, ::-1
    ][:, :4]
    indices, scores = predict(model, x.numpy(), k=4, candidates=allowed, bias=0.3)
    np.testing.assert_array_equal(indices, ranked)
    np.testing.assert_allclose(scores, np.take_along_axis(cosines, ranked, 1), rtol=1e-6)
    assert predict(model, x, k=99, candidates=allowed)[0].shape == (9, allowed.sum()) and predict(
        model, x[:0]
    )[0].shape == (0, 5)
    assert not model.training and predict(model.train(), x) and model.training
    for wrong, message in (
        (dict(k=0), "k 0"),
        (dict(k=2.0), "k 2.0"),
        (dict(bias=np.inf), "inf"),
        (dict(bias="0.3"), "bias is '0.3'"),
        (dict(candidates=allowed.reshape(7, 5)), r"\(7, 5\).*\(S, O\) \(5, 7\)"),
        (dict(candidates=np.ones(3, bool)), "35"),
        (dict(candidates=np.zeros(35, bool)), "0 allowed"),
    ):
        with pytest.raises(ValueError, match=message):
            predict(model, x, **wrong)
    for wrong in (x[:, :3], x * torch.nan):
        with pytest.raises(ValueError, match="trained on"):
            predict(model, wrong)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["list", ">f4", ">f8", "F", "read-only", "reversed"])
def test_arrays_of_any_layout_give_the_same_predictions_and_models(kind):
    def given(values):
        values = np.asarray(values)
        if kind == "list":
            return values.tolist()
        if kind == "F":
            return np.asfortranarray(values)
        if kind == "reversed":
            return values[::-1].copy()[::-1]
        if kind == "read-only":
            values = values.copy()
            values.flags.writeable = False
            return values
        if values.dtype.kind == "f":
            return values.astype(kind)
        return values.astype(values.dtype.newbyteorder(">"))

    model, x, _, _ = small()
    pairs = [[0, 1], [4, 6]]
    for found, expected in zip(predict(model, given(x)), predict(model, x)):
        np.testing.assert_array_equal(found, expected)
    assert torch.equal(model.cosines(x, given(pairs)), model.cosines(x, pairs))
    assert torch.equal(model.embed_compositions(given(pairs)), model.embed_compositions(pairs))
    states, objects = model.states.detach(), model.objects.detach()
    assert torch.equal(CompCos(given(states), given(objects), 3).states, states)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, ">i8"])
def test_the_loss_takes_targets_of_any_integer_kind(dtype):
    model, x, target, seen = small()
    cosines = model(x).detach()
    expected = compcos_loss(cosines, target, scale=20.0, seen=seen)
    found = compcos_loss(cosines, target.numpy().astype(dtype), scale=20.0, seen=seen.numpy())
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(seen=torch.ones(5, 7, dtype=torch.uint8)), "seen torch.uint8"),
        (dict(seen=torch.ones(35, dtype=torch.bool)), r"seen torch.bool \(35,\)"),
        (dict(target=torch.zeros(9)), "target torch.float32"),
        (dict(target=torch.zeros(8, dtype=torch.int64)), r"\(8,\)"),
        (dict(cosines=torch.zeros(9, 35)), r"cosines \(9, 35\)"),
        (dict(margin=torch.zeros(7, 5)), r"margin has shape \(7, 5\)"),
        (dict(cosines=np.zeros((9, 5, 7), complex)), "complex128"),
    ],
)
def test_the_loss_says_which_array_does_not_fit(wrong, message):
    model, x, target, seen = small()
    right = dict(cosines=model(x).detach(), target=target, seen=seen, margin=torch.zeros(5, 7))
    assert compcos_loss(**right, scale=20.0) > 0
    with pytest.raises(ValueError, match=message):
        compcos_loss(**right | wrong, scale=20.0)


@pytest.mark.parametrize("world", ["open", "closed"])
@pytest.mark.parametrize(
    "seen, message",
    [
        (np.ones((5, 7), np.uint8), "seen is torch.uint8"),
        (np.ones((7, 5), bool), r"\(7, 5\).*expected bool \(5, 7\)"),
        (np.ones(35, bool), r"\(35,\)"),
        (np.zeros((5, 7), bool), "with 0 seen"),
    ],
)
def test_training_says_what_seen_must_be(seen, message, world):
    model, _, _, _ = small()
    with pytest.raises(ValueError, match=message):
        model.set_training(seen, world=world)


@pytest.mark.parametrize("pairs", [[0, 1], [[0.0, 1.0]], np.zeros((2, 5), int), [[True, False]]])
def test_pairs_are_two_integers_each(pairs):
    model, x, _, _ = small()
    with pytest.raises(ValueError, match="expected integers"):
        model.cosines(x, pairs)
    with pytest.raises(ValueError, match="expected integers"):
        model.embed_compositions(pairs)


def test_no_composition_has_a_negative_index():
    model, x, _, _ = small()
    with pytest.raises(IndexError):
        model.cosines(x, [[-1, 0]])
    with pytest.raises(IndexError):
        model.embed_compositions([[-1, 0]])


@pytest.mark.parametrize(
    "wrong",
    [
        dict(scale=0.0),
        dict(margin=-0.1),
        dict(warmup=-1),
        dict(scale=float("nan")),
        dict(world="Closed"),
        dict(mix="median"),
        dict(mix_images=2.0),
        dict(word_rate=0.0),
    ],
)
def test_training_refuses(wrong):
    model, _, _, seen = small()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        model.set_training(seen, **wrong)


def test_model_refuses_vectors():
    for states, objects in (
        (np.ones((2, 3)), np.ones((2, 4))),
        (np.ones(3), np.ones((2, 3))),
        (np.full((2, 3), np.nan), np.ones((2, 3))),
    ):
        with pytest.raises(ValueError, match="vectors"):
            CompCos(states, objects, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_captured_step_equals_eager():
    """On CUDA: the captured step and the same code run eagerly give the same weights, a short last
    batch included."""
    device, results = image_features.pick_device("cuda"), []
    for batch in (9, 64):  # 64: batches are never full, so nothing is captured
        model, x, _, seen = small(F=8)
        model, x = (
            model.to(device),
            torch.randn(9 * 8 + 4, 8, generator=torch.Generator().manual_seed(1)).to(device),
        )
        target = seen.flatten().nonzero()[:, 0].to(device)
        target = target[torch.arange(len(x), device=device) % len(target)]
        model.set_training(seen)
        model.after_epoch(3)
        adam = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True, capturable=True)
        step, total = train.stepper(model, adam, x, target)
        for i in range(0, len(x), 9):
            step(torch.arange(i, min(i + 9, len(x)), device=device))
        results.append(
            [parameter.detach().cpu() for parameter in model.parameters()] + [total.cpu()]
        )
    for captured, eager in zip(*results):
        torch.testing.assert_close(captured, eager, rtol=1e-4, atol=1e-6)


# ---- the strong recipe ----


STRONG = dict(scale=2.6, margin=7.2 / 2.6, warmup=2, counts=0.5, word_rate=10.0)


def strong(dtype=torch.float64, **settings):
    """A small model of the strong recipe without dropout, its batch and how often each composition
    is met."""
    _, x, target, seen = small(dtype=dtype)
    torch.manual_seed(3)
    model = CompCos(
        torch.randn(5, 6), torch.randn(7, 6), 8, hidden=12, dropout=0.0, dim=9, unit_images=False
    ).to(dtype)
    images = torch.randint(0, 50, (5, 7))
    return model.set_training(seen, images=images, **(STRONG | settings)), x, target, seen, images


def test_strong_logits_from_the_definition():
    """z = c (ω(x)·a_s + ω(x)·b_o) / |a_s + b_o|, ω(x) of its own length."""
    model, x, _, _, _ = strong()
    a, b, _ = model.compositions()
    image = model.image_embedder(x)
    for s, o in ((0, 0), (4, 6), (2, 3)):
        expected = (image @ a[s] + image @ b[o]) / (a[s] + b[o]).norm()
        torch.testing.assert_close(model(x)[:, s, o], expected)
    assert a.shape == (5, 9) and model.config["dim"] == 9


@pytest.mark.parametrize("epoch", [0, 1, 5])
@pytest.mark.parametrize("mix_images", [0.0, 0.5])
def test_strong_loss_equals_the_plain_form(epoch, mix_images):
    """Value and gradients, before the first feasibility, in the warm-up and after it."""
    found = []
    for plain in (False, True):
        model, x, target, seen, images = strong(plain=plain, mix_images=mix_images)
        if epoch:
            model.after_epoch(epoch)
        torch.manual_seed(5)  # the same images are mixed
        value = model.loss(x, target)
        found.append((value.detach(), gradients(model, value)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-10, atol=0)
    assert (found[0][1] - found[1][1]).norm() <= 1e-10 * found[1][1].norm()


def test_offsets_from_the_equations():
    """+ (log n - mean over the seen) / 2 on the seen, - 7.2 ρ on the unseen; a seen pair without an
    image counts as one."""
    model, x, target, seen, images = strong()
    model.after_epoch(9)
    rho = torch.as_tensor(model.feasibility(seen))
    logs = images.clamp_min(1).double().log()
    offset = torch.where(seen, 0.5 * (logs - logs[seen].mean()), -7.2 * rho)
    expected = torch.nn.functional.cross_entropy((2.6 * model(x) + offset).flatten(1), target)
    torch.testing.assert_close(model.loss(x, target), expected)
    torch.testing.assert_close(
        log_counts(seen, images)[seen].mean(), torch.zeros((), dtype=torch.float64)
    )


def test_mixing():
    """Half of the images, λ uniform in [1/2, 1]; each is λ times itself and 1 - λ times the partner
    of its second target."""
    torch.manual_seed(0)
    features = torch.arange(20000.0)[:, None]
    mixed, second, share = mix_batch(features, torch.arange(20000), 0.5)
    touched = share < 1
    assert abs(touched.float().mean() - 0.5) < 0.02 and share.min() >= 0.5
    assert abs(share[touched].mean() - 0.75) < 0.01
    torch.testing.assert_close(
        mixed[:, 0], share * features[:, 0] + (1 - share) * second, rtol=1e-5, atol=1e-2
    )


def test_mixed_truths_weigh_by_their_share():
    cosines = torch.randn(4, 2, 3)
    seen = torch.ones(2, 3, dtype=torch.bool)
    target, second, share = (
        torch.tensor([0, 1, 2, 3]),
        torch.tensor([5, 1, 0, 4]),
        torch.tensor([0.5, 0.7, 1.0, 0.9]),
    )
    found = compcos_loss(cosines, target, scale=3.0, seen=seen, mixed=(second, share))
    logs = (3 * cosines).flatten(1).log_softmax(1)
    expected = (
        -sum(
            w * logs[i, a] + (1 - w) * logs[i, b]
            for i, (a, b, w) in enumerate(zip(target, second, share))
        )
        / 4
    )
    torch.testing.assert_close(found, expected)


def trained(config, settings, *, seed=0, epochs=3, average=0.0):
    """The weights after a short training by `fit`'s steps."""
    torch.manual_seed(seed)
    model, x, target, seen = small(F=8)
    torch.manual_seed(7)
    model = build(torch.randn(5, 6), torch.randn(7, 6), dict(feature_dim=8, hidden=12) | config)
    model.set_training(seen, images=torch.ones(5, 7), **settings)
    run = train.Run(model, 1e-2, 5e-5, average, x.device)
    step, total = train.stepper(model, run.optimizer, x, target)
    for epoch in range(1, epochs + 1):
        train.train_epoch(model, step, total, len(x), 4, seed, epoch, run.average)
        model.after_epoch(epoch)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_every_switch_set_back_is_the_published_recipe():
    """The settings of PUBLISHED, given as the command line gives them, change nothing of what the
    published model does."""
    config = {key: PUBLISHED[key] for key in ("dropout", "dim", "unit_images", "members")}
    settings = {key: PUBLISHED[key] for key in ("counts", "mix_images", "word_rate")}
    back = trained(config, dict(scale=20.0, margin=0.4, warmup=2) | settings)
    assert torch.equal(back, trained({}, dict(scale=20.0, margin=0.4, warmup=2)))


@pytest.mark.parametrize("world", ["open", "closed"])
def test_training_by_the_plain_loss_is_training_by_the_fused(world):
    """Three epochs; `--plain-loss` is where an edit of compcos_loss changes training."""
    settings = dict(world=world, scale=20.0, margin=0.4, warmup=2)
    fused = trained({}, settings)
    plain = trained({}, settings | dict(plain=True))
    torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("world", ["open", "closed"])
@pytest.mark.parametrize("mix_images", [0.0, 0.5])
def test_an_own_loss_is_live(world, mix_images, monkeypatch):
    """Another compcos_loss is what training minimises: in both worlds, by both recipes."""
    import compcos

    def smoothed(cosines, target, *, scale, **_):
        return torch.nn.functional.cross_entropy(
            scale * cosines.flatten(1), target, label_smoothing=0.1
        )

    settings = dict(world=world, mix_images=mix_images, plain=True)
    before = trained({}, settings)
    monkeypatch.setattr(compcos, "compcos_loss", smoothed)
    assert not torch.equal(before, trained({}, settings))


@pytest.mark.parametrize("choice", [dict(world="closed"), dict(rivals="seen"), dict()])
def test_a_loss_of_each_image_gets_the_logits_that_compete(choice, monkeypatch):
    """Label smoothing, which no infinite logit survives, is that over the seen while they alone
    compete, and then that over all."""
    import compcos

    model, x, target, seen = small()
    smooth = partial(torch.nn.functional.cross_entropy, label_smoothing=0.1)
    monkeypatch.setattr(compcos, "image_losses", partial(smooth, reduction="none"))
    model.set_training(seen, scale=3.0, warmup=0, plain=True, **choice)
    logits = 3.0 * model(x).flatten(1)
    place = [seen.flatten().nonzero()[:, 0].tolist().index(truth) for truth in target]
    expected = smooth(logits[:, seen.flatten()], torch.tensor(place))
    torch.testing.assert_close(model.loss(x, target), expected)
    model.after_epoch(1)
    if not choice:
        margin = torch.as_tensor(3.0 * 0.4 * model.feasibility(seen)).float()
        expected = smooth(logits - torch.where(seen, 0.0, margin).flatten(), target)
    torch.testing.assert_close(model.loss(x, target), expected)


def test_unseen_compositions_that_do_not_compete_change_no_mixed_truth():
    """A column more of unseen objects moves the indices alone."""
    torch.manual_seed(0)
    cosines = torch.randn(4, 2, 4)
    seen = torch.tensor([[True, True, True, False]] * 2)
    share = torch.tensor([0.5, 0.7, 1.0, 0.9])
    losses = []
    for count in (3, 4):
        target = torch.tensor([0, count + 1, 2, count])
        second = torch.tensor([count + 2, 1, 0, count + 1])
        losses.append(compcos_loss(cosines[:, :, :count], target, scale=3.0,
                                   seen=seen[:, :count], mixed=(second, share)))
    torch.testing.assert_close(*losses)


def test_without_a_margin_no_unseen_composition_is_a_target():
    model, x, target, seen = small()
    target[3] = int((~seen.flatten()).nonzero()[0])
    with pytest.raises(ValueError, match="only the seen compete"):
        compcos_loss(model(x), target, scale=1.0, seen=seen)


def test_members_are_models_trained_apart():
    """Two members without dropout end where each would alone, and score as their mean."""
    settings = dict(scale=20.0, margin=0.4, warmup=2)
    torch.manual_seed(7)
    states, objects = torch.randn(5, 6), torch.randn(7, 6)
    together = build(states, objects, dict(feature_dim=8, hidden=12, dropout=0.0, members=2))
    apart = [copy.deepcopy(member) for member in together.members]
    _, x, target, seen = small()
    for model in (together, *apart):
        model.set_training(seen, **settings)
        optimizer = train.adam(model, 1e-2, 0.0, x.device)
        step, _ = train.stepper(model, optimizer, x, target)
        for _ in range(3):
            step(torch.arange(9))
        model.after_epoch(1)
    assert isinstance(together, Members)
    torch.testing.assert_close(together(x), (apart[0](x) + apart[1](x)) / 2)
    expected = (apart[0].feasibility(seen) + apart[1].feasibility(seen)) / 2
    np.testing.assert_allclose(together.feasibility(seen), expected, atol=1e-6)


def test_weight_average_from_its_definition():
    model = torch.nn.Linear(1, 1, bias=False)
    average = train.WeightAverage(model, 0.5)
    expected = model.weight.item()
    for step in range(1, 20):
        with torch.no_grad():
            model.weight += 1
        average.update()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.item()
    weight = model.weight.item()
    average.exchange()
    assert model.weight.item() == pytest.approx(expected, rel=1e-5) and expected != weight
    average.exchange()
    assert model.weight.item() == weight


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
