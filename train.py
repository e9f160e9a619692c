"""The training loop, the contract of a model that it trains, and the scoring of images.

It has no command line: `python compcos.py` and `python baselines.py` train.

**What a model offers** (CompCos, its members and the compared systems alike; a model of your own
needs no more, and `baselines.BaselineModel` gives it the rows marked *). `check_model` looks at it
before training.

| name | is |
| --- | --- |
| `states`, `objects` * | tensors with S and O rows; only their lengths and device are read here |
| `loss(features (B, F), target (B,))` | 0-dim, the mean over the batch; targets are s * O + o |
| `after_epoch(epoch)` * | what changes from epoch to epoch, epoch = 1, 2, ... (see below) |
| `compositions()` * | what all images share in scoring, computed once for many images; or None |
| `score(features (B, F), compositions)` | (B, S, O), higher is better |
| `feasibility(seen (S, O))` * | (S, O) array, what the hard mask compares with its threshold |
| `config` | the constructor's plain settings, kept in best.pt |
| `parameter_groups(lr)` | optional: Adam's groups, where not all parameters learn at one rate |

`loss` sees the whole batch. (CompCos computes its own for some images of a batch at a time, so
there each image has a loss of its own, which looks at no other image.)

**What a captured step forbids.** On CUDA a step is recorded once as a graph and replayed. So in
`loss`: nothing reads a value back (`.item()`, `float(tensor)`, `if tensor:`), shapes do not change
from step to step, and what changes from epoch to epoch is a tensor that `after_epoch` updates in
place (a Python number would stay as it was when recorded). Where an epoch changes more than that,
`after_epoch` returns True, and the step is recorded anew. `fit(..., eager=True)`, on the command
line `--eager`, turns the recording off.

Shapes: N images, B images of a batch, F features, S states, O objects, C = S*O compositions, (s, o)
at s * O + o.
"""

import copy
import math
import time
import warnings
from contextlib import contextmanager

import numpy as np
import torch
from torch.nn import functional as nnf

from lab import shell
from lab.files import load_tensors, reading, write_rows, writing
from evaluate import BiasSweep
from feasibility import hard_mask

LOG = ("epoch", "loss", "validation", "seconds")  # of an epoch, in its history and in log.csv
SAVE_SECONDS = 30                             # a crash costs at most so much, and an epoch
CHUNK = {"cpu": 1 << 22, "cuda": 1 << 27}     # scores held at once in evaluation, whatever N
WARM_UP_STEPS = 3                             # eager steps that CUDA needs before a capture


def as_tensor(values, device=None):
    """A tensor of numbers: a tensor as it is, an array or a list copied. ValueError: no numbers."""
    if torch.is_tensor(values):
        return values.to(device=device)
    array = np.array(values)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"an array of {array.dtype} {array.shape}: expected real numbers")
    return torch.as_tensor(array, device=device)


def primitive_vectors(state_vectors, object_vectors):
    """Both as new float32 tensors, (S, D) and (O, D). ValueError: other shapes, different D."""
    states = as_tensor(state_vectors).float().clone()
    objects = as_tensor(object_vectors).float().clone()
    if states.ndim != 2 or objects.ndim != 2 or states.shape[1] != objects.shape[1]:
        raise ValueError(f"state and object vectors of shapes {tuple(states.shape)}, "
                         f"{tuple(objects.shape)}: expected (S, D) and (O, D) with the same D")
    return states, objects


def split_linear(linear, states, objects):
    """Linear([e_s; e_o]) as a sum, a_s + b_o: what states (S, D) and objects (O, D) bring to it,
    (S, H) with the bias, and (O, H)."""
    of_states, of_objects = linear.weight.chunk(2, dim=1)
    return nnf.linear(states, of_states, linear.bias), nnf.linear(objects, of_objects)


# ---- scoring ----


def chunks(model, features, compositions):
    """Yield (slice, scores (B, C)) over images (N, F), as many at once as `CHUNK` scores allow (at
    least one)."""
    composition_count = len(model.states) * len(model.objects)
    size = max(1, CHUNK.get(features.device.type, CHUNK["cpu"]) // composition_count)
    for start in range(0, len(features), size):
        part = slice(start, start + size)
        yield part, model.score(features[part], compositions).flatten(1)


@torch.no_grad()
def sweep(model, features, target, seen, candidates):
    """Score images (N, F) once, against every mask (C,) of the dict `candidates`: {name:
    (BiasSweep, kept)}. The model is left in evaluation mode.

    Scores are reduced where they are made: of each image only the best seen and the best unseen
    candidate leave the device, as kept = (scores, columns, scores, columns), (N,) each. Every mask
    must hold all seen compositions.
    """
    device = features.device
    model.eval()
    seen_columns = torch.as_tensor(np.flatnonzero(seen), device=device)
    hidden = {}  # what is added to the scores, so that only a mask's unseen candidates can be best
    for name, mask in candidates.items():
        allowed = torch.as_tensor(mask & ~seen.ravel(), device=device)
        hidden[name] = torch.where(allowed, 0.0, -torch.inf)
    found = {name: [] for name in candidates}  # of each block of images, what is kept of them
    for _, scores in chunks(model, features, model.compositions()):
        best_seen, place = scores[:, seen_columns].max(1)             # (B,) each
        for name in candidates:
            best_unseen, column = (scores + hidden[name]).max(1)      # (B,) each
            found[name].append((best_seen, seen_columns[place], best_unseen, column))
    result = {}
    for name, mask in candidates.items():
        kept = tuple(torch.cat(blocks).cpu().numpy() for blocks in zip(*found[name]))
        swept = BiasSweep(seen.ravel(), candidates=mask, pairs=index_pairs(seen))
        swept.update_topk(*(array[:, None] for array in kept), target)  # (N, 1): the best one
        result[name] = (swept, kept)
    return result


def index_pairs(seen):
    """(C, 2): state and object of every composition, in the order s * O + o."""
    return np.stack(np.unravel_index(np.arange(seen.size), seen.shape), axis=1)


def selection(report):
    """The number that chooses the best epoch: AUC, or the accuracy of the half that has images."""
    for key in ("auc", "best_seen", "best_unseen"):
        if math.isfinite(report[key]):
            return report[key]
    return 0.0


# ---- probabilities ----

WIDEST = 100  # times the mean deviation of an image's scores: the greatest temperature


@torch.no_grad()
def fit_temperature(scores, target):
    """T > 0 with which softmax(scores / T) gives the truths the greatest likelihood (temperature
    scaling), a float; 1 where the scores of no image differ.

    scores (N, P), target (N,) columns. One more image is counted to which every answer is equally
    right, so that T is above 0 even where the truth always has the greatest score.
    """
    unit = scores.std(1, correction=0).mean()  # nan: no image
    if not unit > 0:
        return 1.0
    # The mean of -log softmax(scores · b)[truth] is convex in b = 1 / T. Its slope, the mean score
    # that the softmax expects less that of the truths, grows with b: halve where it is 0.
    of_truth = scores.gather(1, target[:, None]).mean()
    wanted = (len(scores) * of_truth + scores.mean()) / (len(scores) + 1)
    low = 1 / unit / WIDEST
    high = 1 / unit * WIDEST
    for _ in range(16):  # to 1.4e-4
        sharpness = (low * high).sqrt()  # b
        expected = ((sharpness * scores).softmax(1) * scores).sum(1).mean()
        if expected < wanted:
            low = sharpness
        else:
            high = sharpness
    return float(1 / sharpness)


# ---- training ----


class EMA:
    """A running average of the weights over steps, which is smoother than the weights themselves.

    After step t = 1, 2, ... the average moves to the weights by 1 - decay, with decay =
    min(greatest, (1 + t) / (10 + t)): the first steps, far from the end, are soon forgotten.
    With greatest = 0 it is the weights themselves.
    """

    def __init__(self, model, greatest):
        self.weights = [weight.detach() for weight in model.parameters()]
        self.average = [weight.clone() for weight in self.weights]
        self.greatest = greatest
        self.steps = 0

    def update(self):
        """Take in the weights after one more step."""
        self.steps += 1
        decay = min(self.greatest, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.average, self.weights, 1 - decay)

    @contextmanager
    def exchange(self):
        """Inside, the average is the model's weights."""
        trained = [weight.clone() for weight in self.weights]
        try:
            torch._foreach_copy_(self.weights, self.average)
            yield
        finally:
            torch._foreach_copy_(self.weights, trained)

    def state_dict(self):
        """What `load_state_dict` takes, as of a model and an optimiser."""
        return dict(average=self.average, steps=self.steps)

    def load_state_dict(self, state):
        """Go on from what `state_dict` gave."""
        torch._foreach_copy_(self.average, state["average"])
        self.steps = state["steps"]


def make_step(model, optimizer, features, targets, *, eager=False):
    """Return `step(index (B,)) -> None`, which trains on those images, and the 0-dim sum of losses
    that it adds to.

    On CUDA the step is captured as a graph after three eager ones and replayed, unless `eager`.
    """
    total = torch.zeros((), device=features.device, dtype=features.dtype)

    def step(index):
        optimizer.zero_grad(set_to_none=True)
        loss = model.loss(features[index], targets[index])
        loss.backward()
        optimizer.step()
        total.add_(loss.detach() * len(index))

    if features.device.type != "cuda" or eager:
        return step, total
    return captured(step), total


def captured(step):
    """`step` as CUDA graphs, one for each length of a batch; the first three steps run as they are.

    Shapes are fixed in a graph, so the shorter batch that ends an epoch has a graph of its own.
    """
    # Of this step alone: torch keeps the work space of cuBLAS by stream, and may free it with the
    # first graph that was captured there.
    side = torch.cuda.Stream()
    graphs = {}                 # length of a batch -> (graph, the index that it reads)
    warm_up_steps = 0

    def run(index):
        nonlocal warm_up_steps
        if warm_up_steps < WARM_UP_STEPS:
            warm_up_steps += 1
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), warnings.catch_warnings():
                # Adam's word that this step is not captured
                warnings.filterwarnings("ignore", ".*capturable.*")
                step(index)
            torch.cuda.current_stream().wait_stream(side)
            return
        if len(index) not in graphs:
            graph = torch.cuda.CUDAGraph()
            static_index = index.clone()
            with torch.cuda.graph(graph, stream=side):
                step(static_index)
            graphs[len(index)] = (graph, static_index)
        graph, static_index = graphs[len(index)]
        static_index.copy_(index)
        graph.replay()

    return run


def fit(model, features, targets, validate, *, epochs, batch_size, lr, weight_decay, seed, out,
        settings, average=0.0, patience=None, min_epoch_steps=0, resume=False, eager=False):
    """Train with Adam on images (N, F) and targets (N,), both on the model's device; leave the best
    weights in `model`.

    `validate()` gives the number to maximise after each epoch. Every epoch draws its order, dropout
    and negatives from (seed, epoch), so `resume=True` goes on from `out/last.pt`, if it is there,
    to the same numbers. `average` is the greatest decay of a EMA, which is what validates
    and what is left in `model`. With `patience`, training ends once so many epochs have brought
    nothing better. An epoch is as many passes over the images as `min_epoch_steps` steps need, at least
    one. Returns the history, a list of {epoch, loss, validation, seconds}. ValueError: bad input,
    last.pt of another run, a loss or weights that are not finite. However it ends, `out/last.pt`
    holds the last whole epoch.
    """
    check_training(model, targets)
    size = min(batch_size, len(features))
    passes = max(1, math.ceil(min_epoch_steps * size / len(features)))
    parts = dict(model=model, optimizer=adam(model, lr, weight_decay, features.device),
                 average=EMA(model, average))
    state = dict(epoch=0, best=dict(epoch=0, value=-math.inf), history=[])
    if resume and (out / "last.pt").exists():
        state = go_on(out / "last.pt", parts, settings, epochs)
    state["settings"] = settings
    steps = make_step(model, parts["optimizer"], features, targets, eager=eager)
    saved_at = time.monotonic()
    try:
        with shell.Progress("training", epochs - state["epoch"], "epochs") as progress:
            for epoch in range(state["epoch"] + 1, epochs + 1):
                if patience and epoch > state["best"]["epoch"] + patience:
                    break
                started = time.monotonic()
                order = draw_order(len(features), passes, seed, epoch).to(features.device)
                loss = train_epoch(parts, *steps, order.split(size), epoch)
                if model.after_epoch(epoch):
                    steps = make_step(model, parts["optimizer"], features, targets, eager=eager)
                state = finish_epoch(state, parts, epoch, loss, validate, started)
                progress.update(note=f"epoch {epoch}, loss {loss:.4f}, validation AUC "
                                     f"{100 * state['history'][-1]['validation']:.2f} %")
                if time.monotonic() - saved_at > SAVE_SECONDS:
                    save(out, state)
                    saved_at = time.monotonic()
        save(out, state)
    except BaseException as error:
        kept = keep(out, state)
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"stopped: {kept}") from None
        raise
    model.load_state_dict(state["best"]["model"])
    return state["history"]


def train_epoch(parts, step, total, batches, epoch):
    """A step for each of some batches, indices (B,); the mean loss of an image. ValueError: it, or
    a weight, is not finite."""
    model = parts["model"]
    model.train()
    total.zero_()
    for batch in batches:
        step(batch)
        parts["average"].update()
    loss = float(total) / sum(map(len, batches))
    broken = sum(int((~weight.isfinite()).sum()) for weight in model.parameters())
    if broken or not math.isfinite(loss):
        lr = parts["optimizer"].param_groups[0]["lr"]
        raise ValueError(f"after epoch {epoch} the loss is {loss:.3g} and {broken} numbers of the "
                         f"weights are not finite: training has diverged; lower --lr ({lr:g}) or "
                         "--scale, or look for outliers in the features")
    return loss


def draw_order(count, passes, seed, epoch):
    """The images of an epoch, (count * passes,), in the order that (seed, epoch) gives; what else
    the epoch draws is seeded.

    The passes follow one another without a short batch between them.
    """
    torch.manual_seed((seed << 20) + epoch)
    return torch.cat([torch.randperm(count) for _ in range(passes)])


def finish_epoch(state, parts, epoch, loss, validate, started):
    """The state after one more epoch, which began at `started`: copies of all that training goes on
    from. It is new, so an interrupt finds the state of one whole epoch or of the next."""
    best = state["best"]
    with parts["average"].exchange():
        value = validate()
        if value > best["value"] or not best["epoch"]:
            weights = copy.deepcopy(parts["model"].state_dict())
            best = dict(epoch=epoch, value=value, model=weights)
    row = dict(epoch=epoch, loss=loss, validation=value, seconds=time.monotonic() - started)
    state = dict(state, epoch=epoch, best=best, history=[*state["history"], row])
    for name, part in parts.items():
        state[name] = copy.deepcopy(part.state_dict())
    return state


def save(out, state):
    """`last.pt`, from which training goes on, and `log.csv`, a row an epoch."""
    with writing(out / "last.pt", "wb") as file:
        torch.save(state, file)
    write_rows(out / "log.csv", LOG, [row.values() for row in state["history"]])


def keep(out, state):
    """`save` after an error, which is not hidden by one of its own; says what is kept."""
    if not state["epoch"]:
        return "no epoch was finished"
    try:
        save(out, state)
    except Exception as error:
        lost = f"epoch {state['epoch']} is not kept: {error}"
        shell.print_status(f"warning: {lost}")
        return lost
    return f"{out / 'last.pt'} keeps the last whole epoch, from which --resume goes on"


def go_on(path, parts, settings, epochs):
    """Begin where `last.pt` ended, whose state is returned. ValueError: other settings, or past
    `epochs`."""
    with reading(path, "give the same options and data, or another --out"):
        state = load_tensors(path)
        check_settings(path, state["settings"], settings, free=["epochs", "device"])
        if state["epoch"] > epochs:
            raise ValueError(f"{path} is at epoch {state['epoch']}, past --epochs {epochs}")
        for name, part in parts.items():
            part.load_state_dict(state[name])
        for group in parts["optimizer"].param_groups:  # the run may have begun on another device
            group["capturable"] = parts["model"].states.device.type == "cuda"
        parts["model"].after_epoch(state["epoch"])  # what it sets, as margins, is made anew
    return state


def check_settings(path, there, settings, free):
    """ValueError where the settings of the run in `path` are others than these, but the free ones.
    """
    for name, value in settings.items():
        if name not in free and there.get(name) != value:
            raise ValueError(f"{path} is of another run ({name}: {there.get(name)!r} there, "
                             f"{value!r} here, which must agree)")


def adam(model, lr, weight_decay, device):
    """Adam over the model's parameters, ready for a captured step on CUDA."""
    groups = model.parameters()
    if hasattr(model, "parameter_groups"):
        groups = model.parameter_groups(lr)
    return torch.optim.Adam(groups, lr=lr, weight_decay=weight_decay, fused=True,
                            capturable=device.type == "cuda")


def check_training(model, targets):
    """ValueError for what training cannot use. Targets are looked at here once, and not in steps.
    """
    composition_count = len(model.states) * len(model.objects)
    if targets.min() < 0 or targets.max() >= composition_count:
        raise ValueError(f"targets of {targets.min()} to {targets.max()}: expected s * O + o, 0 "
                         f"to {composition_count - 1}")


REQUIRED = ("states", "objects", "loss", "after_epoch", "compositions", "score", "feasibility",
            "config")


@torch.no_grad()
def check_model(model, features, seen):
    """ValueError where a model does not keep the contract at the head of this file.

    features (N, F) on the model's device, of which two images are scored; seen (S, O) bool. The
    model is left in evaluation mode.
    """
    name = type(model).__name__
    lacking = [offer for offer in REQUIRED if not hasattr(model, offer)]
    if lacking:
        raise ValueError(f"{name} has no {', '.join(lacking)}: a model offers all of "
                         f"{', '.join(REQUIRED)}, as the head of train.py says; a subclass of "
                         "baselines.BaselineModel needs only loss, score and config")
    scores = model.eval().score(features[:2], model.compositions())
    hard_mask(model.feasibility(seen), seen, 0.0)  # says what is wrong with these
    if scores.shape[1:] != seen.shape:
        raise ValueError(f"{name}.score gives {tuple(scores.shape)} of {len(features[:2])} images: "
                         f"expected (B, S, O), here S, O = {seen.shape}")
