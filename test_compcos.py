"""The method against the plain form, the definition and the published answers; training, its states
and files.

Shapes: S states, O objects, D numbers of the shared space and of word vectors, F features.
"""

import copy
import dataclasses
import io
import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf

import compcos
from compcos import CompCos, Settings, evaluate_model, fit, load, predict, save, train_epochs
from evaluate import evaluate

HERE = Path(__file__).parent


def plain_cosines(model, features):
    """Return Eq. 1 as it is written, (B, S, O): all compositions embedded by W [φ(s); φ(o)]."""
    shape = (len(model.states), len(model.objects))
    embeddings = model.embed_compositions(list(np.ndindex(shape)))
    return (model.embed_images(features) @ embeddings.T).view(-1, *shape)


def small(S=5, O=7, D=6, F=8, seed=0, dtype=torch.float32, **changes):
    """Return a small model in evaluation mode, a batch, its targets, a seen mask that has them."""
    torch.manual_seed(seed)
    settings = Settings(**dict(hidden=12) | changes)
    model = compcos.build(torch.randn(S, D), torch.randn(O, D), F, settings)
    seen = torch.rand(S, O) < 0.4
    seen[torch.arange(S), torch.arange(S) % O] = True
    target = seen.flatten().nonzero()[torch.randint(int(seen.sum()), (9,)), 0]
    return model.to(dtype).eval(), torch.randn(9, F, dtype=dtype), target, seen


def gradients(model, run_backward):
    """Return the gradient of every parameter, flat, after a call that computes them."""
    model.zero_grad()
    run_backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


# ---- scores ----


@pytest.mark.parametrize("distance", [1e-1, 1e-2, 1e-3, 1e-4])
def test_cosines_of_nearly_opposite_parts(distance):
    """The error grows as one over their distance; images that look like these pairs have 1."""
    model, *_ = small(S=20, O=20, D=50)
    with torch.no_grad():
        # W = [M, -M] makes φ(s, o) M times the difference of two words, nearly equal for s = o.
        half = model.projection.weight[:, :50]
        model.projection.weight.copy_(torch.cat([half, -half], dim=1))
        model.projection.bias.zero_()
        model.objects.copy_(model.states + distance * torch.randn(20, 50))
    diagonal = torch.arange(20)
    pairs = torch.stack([diagonal, diagonal], dim=1)
    images = copy.deepcopy(model).double().embed_compositions(pairs).float()
    model.image_embedder = torch.nn.Identity()
    model.feature_dim = 50
    cosines = model(images)
    assert cosines.abs().max() <= 1
    assert (1 - cosines[diagonal, diagonal, diagonal]).max() < 1e-6 / distance


def test_cosines_of_chosen_pairs():
    """They are those of all compositions, to the gradient; a pair may come twice."""
    model, x, _, _ = small(dtype=torch.float64)
    pairs = np.array([[4, 6], [0, 0], [4, 6]])
    chosen = model(x)[:, pairs[:, 0], pairs[:, 1]]
    torch.testing.assert_close(model.cosines(x, pairs), chosen, rtol=0, atol=1e-12)
    by_pairs = gradients(model, model.cosines(x, pairs).square().sum().backward)
    torch.testing.assert_close(by_pairs, gradients(model, chosen.square().sum().backward))


# ---- the loss ----


def plain_loss(model, x, target, seen, alpha):
    """Return Eq. 7 of the plain cosines, or where alpha is None Eq. 2, of the seen alone."""
    cosines = plain_cosines(model, x)
    if alpha is None:
        logits = 20 * torch.where(seen, cosines, -torch.inf)
    else:
        rho = torch.as_tensor(model.feasibility(seen)).to(cosines.dtype)
        logits = 20 * torch.where(seen, cosines, cosines - alpha * rho)
    return nnf.cross_entropy(logits.flatten(1), target)


@pytest.mark.parametrize("chunk", [1, 70, 1 << 20])
@pytest.mark.parametrize("world", ["open", "closed"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_loss_and_its_gradients_in_chunks_equal_the_plain_form(
        chunk, world, dtype, tolerance, monkeypatch):
    """In the first epoch, in the warm-up and after it."""
    monkeypatch.setitem(compcos.TRAINING_SCORES, "cpu", chunk)
    model, x, target, seen = small(dtype=dtype, world=world)
    model.prepare(seen)
    for epoch in (0, 1, 20):
        alpha = None
        if epoch:
            model.after_epoch(epoch)
        if epoch and world == "open":
            alpha = 0.4 * min(1, epoch / 15)
        plain = plain_loss(model, x, target, seen, alpha)
        expected = gradients(model, plain.backward)
        assert abs(model.loss(x, target) - plain) <= tolerance * plain
        computed = gradients(model, partial(model.backward, x, target))
        assert (computed - expected).norm() <= tolerance * expected.norm()


def golden():
    """Return the published model, with its weights, and the golden arrays and losses."""
    arrays = dict(np.load(HERE / "tests/data/model.npz"))
    answers = json.loads((HERE / "tests/data/model.json").read_text())
    weights = {}
    for name, value in arrays.items():
        if name.startswith("param/"):
            weights[our_name(name.removeprefix("param/"))] = torch.as_tensor(value)
    hidden, feature_dim = weights["image_embedder.0.weight"].shape
    settings = Settings.paper("utzappos", hidden=hidden)
    models = {}
    for world in ("open", "closed"):
        changed = dataclasses.replace(settings, world=world)
        models[world] = CompCos(weights["states"], weights["objects"], feature_dim, changed).eval()
        models[world].load_state_dict(weights)
    return models, arrays, answers["losses"]


def our_name(name):
    """Return our name of a published parameter."""
    names = {"image_embedder.mod.3": "image_embedder.4", "image_embedder.mod": "image_embedder",
             "attr_embedder.weight": "states", "obj_embedder.weight": "objects"}
    for published, ours in names.items():
        name = name.replace(published, ours)
    return name


def test_published_model():
    models, arrays, answers = golden()
    x = torch.as_tensor(arrays["x"])
    np.testing.assert_allclose(models["open"](x).detach(), arrays["cosine"], rtol=0, atol=1e-6)
    rho = models["open"].feasibility(arrays["seen"])
    np.testing.assert_allclose(rho, arrays["feasibility"], rtol=0, atol=1e-6)
    target = np.stack([arrays["state"], arrays["object"]], 1)
    for setting, answer in answers.items():
        model = models[setting.split("_")[0]]
        model.prepare(arrays["seen"])
        if setting.startswith("open_epoch"):
            model.after_epoch(int(setting.removeprefix("open_epoch")))
        value = model.loss(x, target)
        gradients(model, value.backward)
        assert value.item() == pytest.approx(answer["loss"], rel=1e-5), setting
        parameters = dict(model.named_parameters())
        for name, norm in answer["grad_norms"].items():
            computed = float(parameters[our_name(name)].grad.norm())
            assert computed == pytest.approx(norm, rel=2e-4), (setting, name)


# ---- the strong recipe ----


def test_strong_logits_and_offsets_from_the_definition():
    """z = c (ω(x)·a_s + ω(x)·b_o) / |a_s + b_o|, ω(x) of any length; + (log n - mean over the
    seen) / 2 on the seen, - 7.2 ρ on the unseen; a seen pair without an image counts as one."""
    model, x, target, seen = small(dtype=torch.float64, dim=9, normalize_image_embeddings=False,
                                   scale=2.6, margin=7.2 / 2.6, warmup=2, logit_adjustment=0.5)
    a, b, _ = model.compositions()
    image = model.image_embedder(x)
    sums = a[:, None] + b                                          # (S, O, D)
    expected = torch.einsum("nd,sod->nso", image, sums) / sums.norm(dim=2)
    torch.testing.assert_close(model(x), expected)
    model.prepare(seen, target)
    logs = torch.bincount(target, minlength=35).clamp_min(1).double().log().view(5, 7)
    logs -= logs[seen].mean()
    adjusted = nnf.cross_entropy((2.6 * expected + 0.5 * logs)[:, seen],
                                 seen.flatten().cumsum(0)[target] - 1)
    torch.testing.assert_close(model.loss(x, target), adjusted)
    model.after_epoch(9)
    rho = torch.as_tensor(model.feasibility(seen))
    logits = (2.6 * expected + torch.where(seen, 0.5 * logs, -7.2 * rho)).flatten(1)
    torch.testing.assert_close(model.loss(x, target), nnf.cross_entropy(logits, target))


def test_without_a_warm_up_margins_begin_at_their_greatest():
    """The step must be captured anew after the first epoch alone."""
    model, _, _, seen = small(warmup=0)
    assert model.prepare(seen).after_epoch(1) and not model.after_epoch(2)
    np.testing.assert_allclose(model.margins, 0.4 * model.feasibility(), rtol=1e-6)


def test_the_seen_alone_may_compete_for_good():
    model, _, _, seen = small(train_candidates="seen")
    assert not model.prepare(seen).after_epoch(3)
    assert model.only_seen_compete


def test_words_learn_at_a_rate_of_their_own():
    model, *_ = small(word_lr_factor=10.0, lr=1e-3)
    for group in compcos.adam(model, torch.device("cpu")).param_groups:
        is_words = any(weight is model.states for weight in group["params"])
        assert group["lr"] == (1e-2 if is_words else 1e-3)


def test_members_are_models_trained_apart():
    """Two members without dropout end where each would alone, and score as their mean; each weight
    has one name, and is in one group of Adam."""
    together, x, target, seen = small(dropout=0.0, members=2, warmup=2, word_lr_factor=10.0)
    apart = [copy.deepcopy(member) for member in together.members]
    for model in (together, *apart):
        model.prepare(seen)
        train_shortly(model, x, target)
    torch.testing.assert_close(together(x), (apart[0](x) + apart[1](x)) / 2)
    expected = (apart[0].feasibility() + apart[1].feasibility()) / 2
    np.testing.assert_allclose(together.feasibility(), expected, atol=1e-6)
    count = 2 * len(apart[0].state_dict())
    grouped = [group["params"] for group in together.parameter_groups(1.0)]
    assert len(together.state_dict()) == sum(map(len, grouped)) == count


def test_average_of_the_weights_from_its_definition():
    model = torch.nn.Linear(1, 1, bias=False)
    average = compcos.EMA(model, 0.5)
    expected = model.weight.item()
    for step in range(1, 20):
        with torch.no_grad():
            model.weight += 1
        average.update()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.item()
    assert average.average[0].item() == pytest.approx(expected, rel=1e-5)


# ---- every edit trains ----


def train_shortly(model, x, target, eager=False, **changes):
    """Return the losses of some epochs of one pass in batches of 4."""
    changes = dict(epochs=2, batch_size=4, lr=1e-2) | changes
    settings = dataclasses.replace(model.settings, **changes)
    for part in (model, *getattr(model, "members", [])):
        part.settings = settings
    states = list(train_epochs(model, x, target, eager=eager))
    model.eval()
    return [row["loss"] for row in states[-1]["history"]]


@pytest.fixture(params=[1, 1 << 20])
def chunk(request, monkeypatch):
    """Scores that a batch is trained on at once: those of one image, or all."""
    monkeypatch.setitem(compcos.TRAINING_SCORES, "cpu", request.param)


@pytest.mark.parametrize("world", ["open", "closed"])
def test_three_times_the_loss_of_each_image_is_three_times_the_loss(world, chunk, monkeypatch):
    """In the first and in the second epoch, which has margins; at a rate that moves nothing. With
    smoothed labels, which no infinite logit of what does not compete would survive."""
    model, x, target, seen = small(dropout=0.0, world=world)
    smooth = partial(nnf.cross_entropy, reduction="none", label_smoothing=0.1)
    values = []
    for factor in (1, 3):
        monkeypatch.setattr(compcos, "image_losses", lambda *given: factor * smooth(*given))
        model.prepare(seen)
        whole = model.loss(x, target).item()
        values.append(train_shortly(model, x, target, lr=1e-9))
    np.testing.assert_allclose(values[1], 3 * np.array(values[0]), rtol=1e-4)
    assert values[1][0] == pytest.approx(whole, rel=1e-4)  # the mean over the images


class Edited(CompCos):
    """A parameter more in the scores, and one in the loss, a learnt temperature."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.of_scores = torch.nn.Parameter(torch.ones(()))
        self.of_loss = torch.nn.Parameter(torch.ones(()))

    def composition_scores(self, *computed):
        return self.of_scores * super().composition_scores(*computed)

    def loss_of(self, *computed):
        return self.of_loss * super().loss_of(*computed)


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_new_parameter_of_scores_or_loss_trains(epoch, chunk, monkeypatch):
    """In one step: with margins, and where only the seen compete."""
    monkeypatch.setattr(compcos, "CompCos", Edited)
    model, x, target, seen = small(lr=1e-2)
    model.train().prepare(seen)
    if epoch:
        model.after_epoch(epoch)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    step, _ = compcos.make_step(model, compcos.adam(model, x.device), x, target)
    step(torch.arange(9))
    for name, weight in model.named_parameters():
        assert not torch.equal(weight, before[name]), name


@pytest.mark.parametrize("trained", [("states", "projection"), ("image_embedder",), ("objects",)])
def test_frozen_parts_stay_and_the_rest_trains(trained, chunk):
    """Also where such a training, whose optimiser knows fewer weights, is resumed. Without
    validation the last epoch is the best."""
    model, x, target, seen = small(epochs=2)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.startswith(trained))
    before = copy.deepcopy(model.state_dict())
    states = list(train_epochs(model.prepare(seen), x, target))
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]) != weight.requires_grad, name
    assert states[0]["best"]["epoch"] == 1 and states[1]["best"]["epoch"] == 2
    assert len(list(train_epochs(model, x, target, state=states[0]))) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("world, members", [("open", 1), ("open", 2), ("closed", 1)])
def test_captured_step_equals_eager(world, members):
    """On CUDA the captured step, a short last batch and the change to margins included, and the
    same code run eagerly give the same weights."""
    device = torch.device("cuda")
    results = []
    for eager in (True, False):
        model, x, target, seen = small(dropout=0.0, members=members, world=world,
                                       logit_adjustment=0.5)
        model.to(device).prepare(seen, target)
        values = train_shortly(model, x.to(device), target, epochs=4, eager=eager)
        results.append([*model.parameters(), torch.tensor(values)])
    for captured, eagerly in zip(*results):
        torch.testing.assert_close(captured, eagerly, rtol=1e-4, atol=1e-6)


# ---- training ----


SEEN = np.arange(20).reshape(4, 5) % 2 == 0  # of `problem`


def problem():
    """Return arguments of `fit`, 40 images of seen compositions, and validation, with all: numbers
    that every type can hold."""
    random = np.random.default_rng(0)
    words = random.normal(size=(9, 6)).astype(np.float32)
    centres = random.integers(0, 50, size=(20, 8))
    y = np.arange(0, 80, 2) % 20
    yv = np.arange(20)
    x = centres[y] + random.integers(0, 9, size=(40, 8))
    xv = centres[yv] + random.integers(0, 9, size=(20, 8))
    return (x, y, words[:4], words[4:]), (xv, yv)


QUICK = Settings.strong(hidden=12, dim=6, epochs=3, batch_size=16, min_epoch_steps=0, members=2,
                        warmup=2, lr=1e-3)


def test_arrays_of_every_type_give_the_same_answers():
    """Lists, arrays and tensors; targets as indices and as pairs."""
    (x, y, states, objects), (xv, yv) = problem()
    pairs = np.stack(np.divmod(y, 5), 1)
    kinds = [(x.tolist(), y.tolist()), (x.astype(np.uint8), pairs.astype(np.uint16)),
             (x.astype(">f4"), y.astype(np.float64)), (torch.tensor(x).int(), torch.tensor(pairs))]
    answers = []
    for images, targets in kinds:
        model = fit(images, targets, states.tolist(), torch.tensor(objects), settings=QUICK,
                    validation=(xv.tolist(), torch.tensor(yv)), device="cpu")
        report = evaluate_model(model, xv.astype(np.float16), yv.tolist())
        answers.append((report, predict(model, images)[1].tolist()))
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("members", [1, 2])
def test_a_loop_of_ones_own(members):
    """It lowers the loss; plain `loss` and `backward` take the same steps."""
    (x, y, states, objects), _ = problem()
    x = torch.tensor(x).float() / 50
    y = torch.tensor(y)
    results = []
    for how in ("loss", "backward"):
        torch.manual_seed(0)
        settings = Settings.strong(members=members, hidden=12, dropout=0.0)
        model = compcos.build(states, objects, 8, settings).prepare(SEEN, y)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        values = []
        for epoch in range(1, 9):
            optimizer.zero_grad()
            if how == "loss":
                loss = model.loss(x, y)
                loss.backward()
            else:
                loss = model.backward(x, y)
            optimizer.step()
            values.append(loss.item())
            model.after_epoch(epoch)
        assert values[7] < 0.9 * values[1]  # the first is of the seen alone
        results.append(model.state_dict())
    assert same(dict(results[0]), dict(results[1]))


def fresh(settings=QUICK, seed=0):
    """Return the arguments of `train_epochs`: a new model, images, targets, and its validation."""
    (x, y, states, objects), validation = problem()
    torch.manual_seed(seed)
    model = compcos.build(states, objects, 8, settings).prepare(SEEN, y)
    return model, x / 50, y, compcos.validator(model, *validation)


def same(one, other):
    """Tell if two states are equal bit for bit, but for the seconds."""
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            key == "seconds" or same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_resumed_from_any_state_equals_uninterrupted():
    """Also where the resumed training is interrupted in its first epoch and resumed again from the
    same state, which does not change."""
    whole = list(train_epochs(*fresh()))
    assert [state["epoch"] for state in whole] == [1, 2, 3]
    for state in whole[:2]:
        before = copy.deepcopy(state)

        def interrupt():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            list(train_epochs(*fresh(seed=7)[:3], interrupt, state=state))
        assert same(state, before)
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        for start in (state, torch.load(buffer)):
            rest = list(train_epochs(*fresh(seed=7), state=start))
            assert same(rest[-1], whole[-1])


def test_first_order_of_the_images():
    """It comes from (seed, epoch) alone; two passes follow one another."""
    assert compcos.draw_order(5, 2, 0, 2).tolist() == [3, 4, 1, 0, 2, 3, 4, 2, 1, 0]
    assert compcos.draw_order(5, 2, 1, 1).tolist() == [0, 4, 3, 1, 2, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("least, steps", [(0, 3), (2, 3), (3, 5), (65, 65)])
def test_an_epoch_is_whole_passes(least, steps):
    """It has as many passes over 40 images, in batches of 16, as its least steps need."""
    settings = dataclasses.replace(QUICK, epochs=1, min_epoch_steps=least)
    state, = train_epochs(*fresh(settings))
    assert state["optimizer"][0]["step"] == steps


def test_patience_ends_a_training():
    settings = dataclasses.replace(QUICK, epochs=9, patience=2)
    values = iter([0.1, 0.3, 0.3, 0.2, 0.9])
    states = list(train_epochs(*fresh(settings)[:3], lambda: next(values)))
    assert [row["validation"] for row in states[-1]["history"]] == [0.1, 0.3, 0.3, 0.2]
    assert [state["best"]["epoch"] for state in states] == [1, 2, 2, 2]
    assert same(states[-1]["best"], states[1]["best"])
    assert not list(train_epochs(*fresh(settings), state=states[-1]))


def test_what_diverges_is_said_to():
    model, x, y, _ = fresh(dataclasses.replace(QUICK, lr=1e30))
    with pytest.raises(ValueError, match=r"diverged in epoch \d: the loss is .*lower lr \(1e\+30"):
        list(train_epochs(model, x, y))


def test_fit_leaves_torch_as_it_was():
    """Random numbers and deterministic flags, also where training ends in an error."""
    arguments, _ = problem()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for on_epoch in (None, "no function"):
        with pytest.raises(TypeError) if on_epoch else nullcontext():
            fit(*arguments, settings=QUICK, on_epoch=on_epoch, device="cpu")
        assert torch.equal(torch.get_rng_state(), before)
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize("world", ["open", "closed"])
def test_fit_returns_the_best_epoch_and_tells_each(world):
    """The best epoch's average is what validation chose, in the closed world among what training
    and validation show; a seed gives the same model again."""
    arguments, (xv, yv) = problem()
    settings = dataclasses.replace(QUICK, world=world, lr=1e-2)
    validation = (xv[:9], yv[:9])
    rows = []
    run = partial(fit, *arguments, settings=settings, validation=validation, device="cpu")
    model = run(on_epoch=rows.append)
    assert rows == model.history and [row["epoch"] for row in rows] == [1, 2, 3]
    candidates = SEEN.ravel() | (np.arange(20) < 9) | (world == "open")
    best = max(row["validation"] for row in rows)
    assert evaluate_model(model, *validation, candidates=candidates)["auc"] == best
    assert same([*run(seed=0).parameters()], [*model.parameters()])
    assert not same([*run(seed=1).parameters()], [*model.parameters()])


@pytest.mark.parametrize("seen, unseen, chosen", [(20, 19, "seen"), (20, 20, "all"),
                                                  (19, 1, "all"), (20, None, "all")])
def test_candidates_of_training_are_resolved(seen, unseen, chosen):
    """The seen alone where they are half of all and validation shows fewer than 20 unseen ones."""
    shown = None
    if unseen is not None:
        shown = np.arange(40) >= 40 - unseen
    resolved = compcos.resolve_candidates(QUICK, np.arange(40) < seen, shown)
    assert resolved.train_candidates == chosen


def test_a_state_of_another_training_is_refused():
    """Each crafted state in one line; none is believed."""
    good = list(train_epochs(*fresh()))[1]
    history, best, model, moments = [good[key] for key in ("history", "best", "model", "optimizer")]
    states = "members.0.states"
    wrong_parts = dict(
        epoch=[float("nan"), 1.5, 0, -3, True, "2", 1, 3],
        history=[None, ["1", "2"], history[:1], history[::-1],
                 [dict(row, validation=float("nan")) for row in history]],
        best=[None, dict(best, epoch=3), dict(best, epoch=float("nan")), dict(best, model={})],
        model=[{}, dict(model, **{states: torch.ones(4, 6).int()}),
               dict(model, **{states: torch.ones(6, 4)})],
        ema=[None, good["ema"][::-1]],
        optimizer=[[], {}, moments | {99: moments[0]}, moments | {0: moments[1]},
                   moments | {0: dict(moments[0], step=torch.tensor(-50.0))},
                   moments | {0: dict(moments[0], step="9")}])
    crafted = [[], {}, "state"]
    for key, values in wrong_parts.items():
        crafted += [{**good, key: value} for value in values]
        crafted.append({name: good[name] for name in good if name != key})
    for state in crafted:
        with pytest.raises(ValueError, match="cannot resume: state must be [^\n]*$"):
            list(train_epochs(*fresh(), state=state))
    for settings in (dataclasses.replace(QUICK, members=1), dataclasses.replace(QUICK, epochs=1)):
        with pytest.raises(ValueError, match="cannot resume"):
            list(train_epochs(*fresh(settings), state=good))


# ---- evaluation and prediction ----


@pytest.mark.parametrize("topk", [1, 3, 99])
@pytest.mark.parametrize("kind", ["some", "unseen", "seen"])
def test_evaluation_equals_that_of_all_scores(topk, kind, monkeypatch):
    """In blocks of two images, also where candidates leave out seen compositions."""
    monkeypatch.setitem(compcos.EVALUATION_SCORES, "cpu", 70)
    model, x, target, seen = small(members=2)
    model.prepare(seen)
    target[:4] = (~seen).flatten().nonzero()[:4, 0]
    seen = seen.numpy()
    masks = dict(some=np.arange(35).reshape(5, 7) % 3 > 0, unseen=~seen, seen=seen)
    scores = model(x).detach().flatten(1).numpy()
    expected = evaluate(scores, target.numpy(), seen.ravel(), candidates=masks[kind].ravel(),
                        pairs=list(np.ndindex(5, 7)), topk=min(topk, 35))
    report = evaluate_model(model, x, target, candidates=masks[kind], topk=topk)
    assert report.keys() == expected.keys()
    for name, value in expected.items():
        assert report[name] == pytest.approx(value, abs=1e-6, nan_ok=True), name


def test_predict_ranks_by_biased_scores(monkeypatch):
    monkeypatch.setitem(compcos.EVALUATION_SCORES, "cpu", 70)
    model, x, _, seen = small()
    model.prepare(seen)
    cosines = model(x).detach().flatten(1).numpy()
    allowed = np.arange(35) % 3 > 0
    biased = np.where(allowed, cosines + 0.3 * ~seen.flatten().numpy(), -np.inf)
    ranked = biased.argsort(1)[:, ::-1][:, :4]
    options = dict(k=4, candidates=allowed, bias=0.3)
    indices, scores = predict(model, x.numpy(), **options)
    np.testing.assert_array_equal(indices, ranked)
    np.testing.assert_allclose(scores, np.take_along_axis(cosines, ranked, 1), rtol=1e-6)
    assert predict(model, x, k=99, candidates=allowed)[0].shape == (9, allowed.sum())
    shares = torch.tensor(biased / 0.5).softmax(1).gather(1, torch.tensor(ranked.copy()))
    given = compcos.rank_compositions(model, x, temperature=0.5, **options)[2]
    np.testing.assert_allclose(given, shares, rtol=1e-5)


# ---- files ----


@pytest.mark.parametrize("members", [1, 2])
def test_a_saved_model_comes_back(members, tmp_path):
    """With settings, seen, history and the same answers; written to a path as to an open file."""
    arguments, validation = problem()
    settings = dataclasses.replace(QUICK, members=members)
    model = fit(*arguments, validation=validation, settings=settings, device="cpu")
    path = tmp_path / "model.pt"
    save(model, path, threshold=0.25)
    with open(tmp_path / "open.pt", "wb") as file:
        save(model, file, threshold=0.25)
    for loaded in (load(tmp_path / "open.pt"), CompCos.load(str(path))):
        assert loaded.settings == model.settings and loaded.settings.train_candidates != "auto"
        assert loaded.history == model.history and torch.equal(loaded.seen, model.seen)
        assert loaded.checkpoint == dict(threshold=0.25)
        assert evaluate_model(loaded, *validation) == evaluate_model(model, *validation)
    double = small(dtype=torch.float64)[0]
    save(double, tmp_path / "double.pt")
    assert same(dict(load(tmp_path / "double.pt").state_dict()), dict(double.state_dict()))


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    model = small()[0]
    path = tmp_path / "model.pt"
    save(model, path)
    before = path.read_bytes()

    def full(contents, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compcos.torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        save(model, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_no_flipped_bit_loads_as_other_weights(tmp_path):
    """In headers, directory and data of an archive, which have about as many bits."""
    model = small(hidden=3, F=2, S=3, O=2, D=2)[0]
    path = tmp_path / "model.pt"
    save(model, path)
    contents = path.read_bytes()
    flips = np.random.default_rng(0).choice(8 * len(contents), 400, replace=False).tolist()
    # The bit that marks a tensor's file as a folder, which torch takes for empty.
    folder_bit = 8 * (contents.rindex(b"archive/data/0") - 8) + 4
    refused = 0
    for flip in [folder_bit, *flips]:
        damaged = bytearray(contents)
        damaged[flip // 8] ^= 1 << flip % 8
        path.write_bytes(damaged)
        try:
            loaded = load(path)
        except ValueError as error:
            assert "\n" not in str(error)
            refused += 1
        else:
            assert flip != folder_bit
            assert same(dict(loaded.state_dict()), dict(model.state_dict())), flip
    assert refused > 100


def test_other_files_are_answered_in_one_line(tmp_path):
    """One of other contents, an older file, one that is no archive, and none."""
    path = tmp_path / "other.pt"
    torch.save(dict(format=0), path)
    with pytest.raises(ValueError, match="other.pt must be a file.*the format of another version"):
        load(path)
    path.write_text("text")
    assert compcos.check_archive(path) == []
    with pytest.raises(ValueError, match="other.pt must be a file.*it is no archive"):
        load(path)
    with pytest.raises(OSError):
        load(tmp_path / "none.pt")


ALONE = """
import sys
import numpy as np
import compcos
from compcos import Settings, evaluate_model, fit, predict
from feasibility import hard_mask
arrays = np.load("arrays.npz")
x, y, states, objects, xv, yv = arrays.values()
settings = Settings.strong(members=2, epochs=2, min_epoch_steps=0, hidden=12)
model = fit(x, y, states, objects, validation=(xv, yv), settings=settings, device="cpu")
mask = hard_mask(model.feasibility(), model.seen, 0.1)
report = evaluate_model(model, xv, yv, candidates=mask.ravel())
compcos.save(model, "model.pt")
loaded = compcos.load("model.pt")
assert evaluate_model(loaded, xv, yv, candidates=mask) == report
assert predict(loaded, xv)[0].shape == (20, 5)
assert predict(loaded, xv, k=3)[0].shape == (20, 3)
print(sorted(name for name in sys.modules if name in sys.argv[1:]))
"""


def test_three_files_suffice(tmp_path):
    """Beside other modules that bear the names of this project's, and that nothing imports."""
    foreign = ["train", "data", "common", "words", "features", "lab"]
    for name in ("compcos", "evaluate", "feasibility"):
        shutil.copy(HERE / f"{name}.py", tmp_path)
    for name in foreign:
        (tmp_path / f"{name}.py").write_text("raise ImportError('foreign')")
    arguments, validation = problem()
    arrays = dict(zip("abcdef", [*arguments, *validation]))
    np.savez(tmp_path / "arrays.npz", **arrays)
    (tmp_path / "use.py").write_text(ALONE)
    done = subprocess.run([sys.executable, "use.py", *foreign], cwd=tmp_path, capture_output=True,
                          text=True, env={"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_without_a_margin_only_the_seen_compete():
    model, x, target, seen = small()
    cosines = model(x)
    place = (seen.flatten().cumsum(0) - 1)[target]
    chosen = compcos.compcos_loss(cosines[:, seen], place, scale=5.0)
    torch.testing.assert_close(compcos.compcos_loss(cosines, target, scale=5.0, seen=seen), chosen)
    with pytest.raises(ValueError, match="target.* must be seen"):
        compcos.compcos_loss(cosines, target, scale=5.0, seen=~seen)
