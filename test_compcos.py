"""The model, its losses and prediction against the plain form, the definition and the published answers."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import features as image_features
import train
from compcos import CompCos, FusedLoss, compcos_loss, load_published, objective, predict
from reference import plain_cosines

HERE = Path(__file__).parent


def small(S=5, O=7, D=6, F=8, seed=0, dtype=torch.float32):
    """A small model in evaluation mode, a batch, its targets, and a seen mask that holds them."""
    torch.manual_seed(seed)
    model = CompCos(torch.randn(S, D), torch.randn(O, D), F, hidden=12).to(dtype).eval()
    seen = torch.rand(S, O) < .4
    seen[torch.arange(S), torch.arange(S) % O] = True
    target = seen.flatten().nonzero()[torch.randint(int(seen.sum()), (9,)), 0]
    return model, torch.randn(9, F, dtype=dtype), target, seen


def gradients(model, value):
    """The gradient of a number for every parameter, flat."""
    model.zero_grad()
    value.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def oppose(model, distance):
    """Move object i so that b_i = -a_i up to `distance` times |a_i|: the norm of their sum then nearly cancels."""
    of_state, of_object = model.projection.weight.detach().double().chunk(2, dim=1)
    a = model.states.detach().double() @ of_state.T + model.projection.bias.detach().double()
    count = min(len(model.states), len(model.objects))
    noise = torch.randn_like(a[:count])
    wanted = -a[:count] + distance * noise / noise.norm(dim=1, keepdim=True) * a[:count].norm(dim=1, keepdim=True)
    with torch.no_grad():
        model.objects[:count] = torch.linalg.solve(of_object, wanted.T).T.to(model.objects.dtype)


@pytest.mark.parametrize("distance", [None, .3, 1e-2])
def test_factorised_equals_plain_in_float64(distance):
    model, x, target, seen = small(dtype=torch.float64)
    if distance:
        oppose(model, distance)
    weight = torch.randn(9, 5, 7, dtype=torch.float64)
    fast, plain = model(x), plain_cosines(model, x)
    torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-10)
    first, second = (gradients(model, (cosines * weight).sum()) for cosines in (fast, plain_cosines(model, x)))
    assert (first - second).norm() <= 1e-10 * second.norm()
    assert fast.abs().max() <= 1 + 1e-12


@pytest.mark.parametrize("distance", [None, .3, 1e-2])
def test_factorised_is_as_exact_as_plain_in_float32(distance):
    """Against float64 from the same parameters: within 1e-5, or, where b_o is nearly -a_s, no worse than the plain form."""
    model, x, target, seen = small(S=20, O=20, D=50, seed=1)
    if distance:
        oppose(model, distance)
    exact = copy.deepcopy(model).double()
    weight = torch.randn(9, 20, 20)
    for measure in (lambda m, y, form: form(m, y).detach().flatten(), lambda m, y, form: gradients(m, (form(m, y) * weight.to(y)).sum())):
        truth = measure(exact, x.double(), plain_cosines)
        plain, fast = ((measure(model, x, form) - truth).norm() / truth.norm() for form in (plain_cosines, lambda m, y: m(y)))
        assert fast <= max(1e-5 if distance is None else 0, 3 * plain)


@pytest.mark.parametrize("chunk", [1, 70, 1 << 20])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_fused_loss_equals_plain(chunk, dtype, tolerance, monkeypatch):
    monkeypatch.setitem(FusedLoss.ELEMENTS, "cpu", chunk)
    model, x, target, seen = small(dtype=dtype)
    oppose(model, .3)
    for epoch in (0, 1, 20):  # before the first update, in the warm-up, after it
        loss, after_epoch = objective(model, seen, scale=20.0, margin=.4, warmup=15)
        if epoch:
            after_epoch(epoch)
        margin = None if not epoch else .4 * min(1, epoch / 15) * torch.as_tensor(model.feasibility(seen))
        fused = loss(x, target)
        plain = compcos_loss(plain_cosines(model, x), target, scale=20.0, seen=seen, margin=margin)
        assert abs(fused - plain) <= tolerance * plain
        first, second = gradients(model, loss(x, target)), gradients(model, compcos_loss(
            plain_cosines(model, x), target, scale=20.0, seen=seen, margin=margin))
        assert (first - second).norm() <= tolerance * second.norm()


def test_loss_from_the_definition():
    """Eq. 7 and 8 written out for one image; before the margins only the seen compete, which is Eq. 2."""
    cosines, rho = torch.rand(1, 2, 3) * 2 - 1, torch.rand(2, 3)
    seen = torch.tensor([[True, False, True], [False, False, True]])
    logits = 20 * torch.where(seen, cosines[0], cosines[0] - .4 * rho)
    expected = -torch.log(torch.exp(logits[1, 2]) / torch.exp(logits).sum())
    found = compcos_loss(cosines, torch.tensor([5]), scale=20.0, seen=seen, margin=.4 * rho)
    torch.testing.assert_close(found, expected)
    only = -torch.log(torch.exp(20 * cosines[0, 1, 2]) / torch.exp(20 * cosines[0][seen]).sum())
    torch.testing.assert_close(compcos_loss(cosines, torch.tensor([5]), scale=20.0, seen=seen), only)


def test_sign_of_the_margin():
    """Raising ρ of an unseen composition lowers its logit in training, so that it is pushed away less."""
    seen, share = torch.tensor([[True, False, False]]), []
    for rho in (-.5, 0., .5, 1.):
        cosines = torch.full((1, 1, 3), .5, requires_grad=True)
        margin = torch.tensor([[0., rho, .2]])
        loss = compcos_loss(cosines, torch.tensor([0]), scale=1.0, seen=seen, margin=margin)
        loss.backward()
        share.append(float(cosines.grad[0, 0, 1]))
    assert share == sorted(share, reverse=True) and share[0] > share[-1] > 0


def golden():
    """The published model's parameters, batch and answers."""
    arrays, answers = dict(np.load(HERE / "tests/data/model.npz")), json.loads((HERE / "tests/data/model.json").read_text())
    weights = {name.removeprefix("param/"): torch.as_tensor(value) for name, value in arrays.items() if name.startswith("param/")}
    return weights, arrays, answers["losses"]


def test_published_model():
    weights, arrays, answers = golden()
    model, x = load_published(weights), torch.as_tensor(arrays["x"])
    np.testing.assert_allclose(model(x).detach(), arrays["cosine"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(model.feasibility(arrays["seen"]), arrays["feasibility"], rtol=0, atol=1e-6)
    target = torch.as_tensor(arrays["state"] * 12 + arrays["object"])
    names = {"image_embedder.mod.0": "image_embedder.0", "image_embedder.mod.1": "image_embedder.1",
             "image_embedder.mod.3": "image_embedder.4", "attr_embedder.weight": "states", "obj_embedder.weight": "objects"}
    for setting, answer in answers.items():
        loss, after_epoch = objective(model, arrays["seen"], world=setting[:6] if setting.startswith("closed") else "open",
                                      scale=50.0, margin=1.0, warmup=15)
        if setting.startswith("open_epoch"):
            after_epoch(int(setting.removeprefix("open_epoch")))
        gradients(model, value := loss(x, target))
        assert value.item() == pytest.approx(answer["loss"], rel=1e-5), setting
        ours = dict(model.named_parameters())
        for name, norm in answer["grad_norms"].items():
            for theirs, mine in names.items():
                name = name.replace(theirs, mine)
            assert float(ours[name].grad.norm()) == pytest.approx(norm, rel=2e-4), (setting, name)


def test_published_files_load(tmp_path):
    """A checkpoint as published: parameters under `net` beside a NumPy scalar; the last layer at 4 where dropout counts."""
    weights, arrays, _ = golden()
    weights = {name.replace("mod.3", "mod.4"): value for name, value in weights.items()}
    torch.save({"net": weights, "AUC": np.float64(.3)}, tmp_path / "published.t7")
    model = load_published(tmp_path / "published.t7")
    np.testing.assert_allclose(model(torch.as_tensor(arrays["x"])).detach(), arrays["cosine"], atol=1e-6)
    for wrong in ({"weight": torch.zeros(3)}, {"net": 3}, {"a": "b"}):
        with pytest.raises(ValueError, match="not a published CompCos"):
            load_published(wrong)


def test_cosines_of_chosen_pairs():
    model, x, _, _ = small(dtype=torch.float64)
    pairs = np.array([[4, 6], [0, 0], [4, 6]])
    torch.testing.assert_close(model.cosines(x, pairs), model(x)[:, pairs[:, 0], pairs[:, 1]], rtol=0, atol=1e-12)
    torch.testing.assert_close(model.embed_compositions(pairs).norm(dim=1), torch.ones(3, dtype=torch.float64))


def test_predict_ranks_by_biased_cosine():
    model, x, _, seen = small()
    model.checkpoint = dict(seen=seen)
    cosines = model(x).detach().flatten(1).numpy()
    allowed = np.arange(35) % 3 > 0
    ranked = np.where(allowed, cosines + .3 * ~seen.flatten().numpy(), -np.inf).argsort(1)[:, ::-1][:, :4]
    indices, scores = predict(model, x.numpy(), k=4, candidates=allowed, bias=.3)
    np.testing.assert_array_equal(indices, ranked)
    np.testing.assert_allclose(scores, np.take_along_axis(cosines, ranked, 1), rtol=1e-6)
    assert predict(model, x, k=99, candidates=allowed)[0].shape == (9, allowed.sum()) and predict(model, x[:0])[0].shape == (0, 5)
    assert not model.training and predict(model.train(), x) and model.training
    for wrong, message in ((dict(k=0), "k 0"), (dict(bias=np.inf), "inf"), (dict(candidates=np.ones(3, bool)), "35"),
                           (dict(candidates=np.zeros(35, bool)), "0 allowed")):
        with pytest.raises(ValueError, match=message):
            predict(model, x, **wrong)
    for wrong in (x[:, :3], x * torch.nan):
        with pytest.raises(ValueError, match="trained on"):
            predict(model, wrong)


@pytest.mark.parametrize("wrong", [dict(scale=0.0), dict(margin=-.1), dict(warmup=-1), dict(scale=float("nan")),
                                   dict(world="Closed"), dict(mix="median")])
def test_objective_refuses(wrong):
    model, _, _, seen = small()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        objective(model, seen, **wrong)


def test_model_refuses_vectors():
    for states, objects in ((np.ones((2, 3)), np.ones((2, 4))), (np.ones(3), np.ones((2, 3))), (np.full((2, 3), np.nan), np.ones((2, 3)))):
        with pytest.raises(ValueError, match="vectors"):
            CompCos(states, objects, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_captured_step_equals_eager():
    """On CUDA: the captured step and the same code run eagerly give the same weights, a short last batch included."""
    device, results = image_features.pick_device("cuda"), []
    for batch in (9, 64):  # 64: batches are never full, so nothing is captured
        model, x, _, seen = small(F=8)
        model, x = model.to(device), torch.randn(9 * 8 + 4, 8, generator=torch.Generator().manual_seed(1)).to(device)
        target = seen.flatten().nonzero()[:, 0].to(device)
        target = target[torch.arange(len(x), device=device) % len(target)]
        loss, after_epoch = objective(model, seen)
        after_epoch(3)
        adam = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True, capturable=True)
        step, total = train.stepper(model, loss, adam, x, target, batch)
        for i in range(0, len(x), 9):
            step(torch.arange(i, min(i + 9, len(x)), device=device))
        results.append([parameter.detach().cpu() for parameter in model.parameters()] + [total.cpu()])
    for captured, eager in zip(*results):
        torch.testing.assert_close(captured, eager, rtol=1e-4, atol=1e-6)
