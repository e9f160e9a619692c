"""The training loop and the scoring of images, the same for CompCos and the systems it is compared with.

A model holds `states` and `objects` (S or O rows each) and offers `compositions()`, what all images share, and
`score(features, compositions) -> (B, S, O)`, higher is better.
Shapes: N images, B images of a batch, F features, S states, O objects, C = S*O compositions, (s, o) at s * O + o.
"""

import copy
import csv
import math
import sys
import time
import warnings

import numpy as np
import torch

import common
from evaluate import BiasSweep

SAVE_SECONDS = 30                             # at most this much training is lost to a crash
NOTHING = dict(epoch=0, best=dict(value=-math.inf), history=[])  # the state before the first epoch
CHUNK = {"cpu": 1 << 22, "cuda": 1 << 27}     # scores held at once in evaluation, so memory does not grow with N


def primitive_vectors(state_vectors, object_vectors):
    """Both as new float32 tensors, (S, D) and (O, D). ValueError: other shapes, different D, none, not finite."""
    vectors = [torch.as_tensor(rows).float().clone() for rows in (state_vectors, object_vectors)]
    if any(rows.ndim != 2 or rows.shape[1] != vectors[0].shape[1] or not rows.numel() for rows in vectors):
        shapes = " and ".join(str(tuple(rows.shape)) for rows in vectors)
        raise ValueError(f"state and object vectors of shapes {shapes}: expected (S, D) and (O, D) with the same D")
    if not all(rows.isfinite().all() for rows in vectors):
        raise ValueError("state or object vectors hold NaN or infinite values: repair or drop them before training")
    return vectors


def chunks(model, features, compositions):
    """Yield (slice, scores (B, C)) over images (N, F), as many at once as `CHUNK` scores allow (at least one)."""
    S, O = len(model.states), len(model.objects)
    size = max(1, CHUNK.get(features.device.type, 1 << 22) // (S * O))
    for part in (slice(i, i + size) for i in range(0, len(features), size)):
        yield part, model.score(features[part], compositions).flatten(1)


@torch.no_grad()
def sweep(model, features, target, seen, candidates, *, save=None):
    """Score images (N, F) once, against every candidate mask (C,) of the dict `candidates`: {name: (BiasSweep, kept)}.

    Scores are reduced where they are made: of each image only the best seen and the best unseen candidate leave the
    device, as kept = (scores, columns, scores, columns), (N,) each. `save` (N, C), array or memory map, takes the scores.
    """
    was_training, device = model.training, features.device
    model.eval()
    columns = torch.as_tensor(np.flatnonzero(seen), device=device)
    hidden = {name: torch.where(torch.as_tensor(mask & ~seen.ravel(), device=device), 0.0, -torch.inf)
              for name, mask in candidates.items()}
    rows = {name: [] for name in candidates}
    for part, scores in chunks(model, features, model.compositions()):
        if save is not None:
            save[part] = scores.cpu().numpy()
        best, where = scores[:, columns].max(1)
        for name in candidates:
            rows[name].append((best, columns[where], *(scores + hidden[name]).max(1)))
    model.train(was_training)
    pairs, result = index_pairs(seen), {}
    for name, mask in candidates.items():
        kept = tuple(torch.cat(column).cpu().numpy() for column in zip(*rows[name]))
        result[name] = BiasSweep(seen.ravel(), candidates=mask, pairs=pairs), kept
        result[name][0].update_kept(*(column[:, None] for column in kept), target)
    return result


def index_pairs(seen):
    """(C, 2): state and object of every composition, in the order s * O + o."""
    return np.stack(np.unravel_index(np.arange(seen.size), seen.shape), axis=1)


def selection(report):
    """The number that chooses the best epoch: AUC, or the accuracy of the half that has images."""
    return next((report[key] for key in ("auc", "best_seen", "best_unseen") if math.isfinite(report[key])), 0.0)


def stepper(model, loss, optimizer, features, targets, batch_size):
    """Return `step(index (B,)) -> None`, which trains on those images, and the 0-dim sum of losses that it adds to.

    On CUDA the step is captured as a graph after three eager ones and replayed for full batches: one code for both.
    """
    total = torch.zeros((), device=features.device)

    def step(index):
        optimizer.zero_grad(set_to_none=True)
        value = loss(features[index], targets[index])
        value.backward()
        optimizer.step()
        total.add_(value.detach() * len(index))

    if features.device.type != "cuda":
        return step, total
    static = torch.zeros(batch_size, dtype=torch.int64, device=features.device)
    graph, eager = torch.cuda.CUDAGraph(), [0]
    side = torch.cuda.Stream()

    def captured(index):
        if len(index) < batch_size or eager[0] < 3:  # the last short batch, and the warm-up that a capture needs
            eager[0] += len(index) == batch_size
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*capturable.*")  # Adam's word that this step is not captured
                step(index)
            return torch.cuda.current_stream().wait_stream(side)
        static.copy_(index)
        if eager[0] == 3:
            eager[0] = 4
            with torch.cuda.graph(graph):
                step(static)
        graph.replay()

    return captured, total


def fit(model, loss, features, targets, validate, *, epochs, batch_size, lr, weight_decay, seed, out, settings,
        after_epoch=None, resume=False):
    """Train with Adam on images (N, F) and targets (N,), both on the model's device; leave the best weights in `model`.

    `validate()` gives the number to maximise after each epoch; `after_epoch(epoch)` runs before it. Every epoch draws
    its order, dropout and negatives from (seed, epoch), so `resume=True` goes on from `out/last.pt`, if it is there, to
    the same numbers. Returns the history, a list of {epoch, loss, validation, seconds}. ValueError: bad input, last.pt
    of another run, a loss that is not finite. However it ends, `out/last.pt` holds the last whole epoch.
    """
    check_training(model, features, targets, epochs, batch_size)
    state = load_last(out, settings, epochs) if resume else NOTHING
    optimizer = adam(model, lr, weight_decay, features.device, state)
    if state["epoch"]:
        model.load_state_dict(state["model"])
        if after_epoch:
            after_epoch(state["epoch"])
    size = min(batch_size, len(features))
    step, total = stepper(model, loss, optimizer, features, targets, size)
    start = saved = time.monotonic()
    first = state["epoch"]
    try:
        for epoch in range(first + 1, epochs + 1):
            mean = train_epoch(model, step, total, len(features), size, seed, epoch)
            if after_epoch:
                after_epoch(epoch)
            value, weights = validate(), copy.deepcopy(model.state_dict())
            best = dict(epoch=epoch, value=value, model=weights) if value > state["best"]["value"] else state["best"]
            seconds = (time.monotonic() - start) / (epoch - first)
            state = dict(epoch=epoch, model=weights, optimizer=copy.deepcopy(optimizer.state_dict()), best=best,
                         history=state["history"] + [dict(epoch=epoch, loss=mean, validation=value, seconds=seconds)])
            announce(state, epochs, seconds)
            if time.monotonic() - saved > SAVE_SECONDS:
                save_last(out, state, settings)
                saved = time.monotonic()
    except KeyboardInterrupt:
        kept = f"epoch {state['epoch']} is kept in {out / 'last.pt'}, from which --resume goes on"
        raise KeyboardInterrupt(f"stopped: {kept if state['epoch'] else 'no epoch was finished'}") from None
    finally:
        if state["epoch"] > first:
            save_last(out, state, settings)
    model.load_state_dict(state["best"]["model"])
    return state["history"]


def check_training(model, features, targets, epochs, batch_size):
    """ValueError for what training cannot use."""
    count = len(model.states) * len(model.objects)
    if epochs < 1 or batch_size < 1:
        raise ValueError(f"{epochs} epochs of batches of {batch_size}: expected at least 1 of each")
    if not len(features) or len(features) != len(targets):
        raise ValueError(f"{len(features)} features and {len(targets)} targets: expected as many, one or more")
    if broken := int((~features.isfinite()).any(1).sum()):
        raise ValueError(f"features of {broken} of {len(features)} images are not finite: repair them or leave them out")
    if targets.min() < 0 or targets.max() >= count:
        raise ValueError(f"targets of {int(targets.min())} to {int(targets.max())}: expected s * O + o, 0 to {count - 1}")


def adam(model, lr, weight_decay, device, state):
    """The optimiser, with the moments of `state` if it holds an epoch, ready for a captured step on CUDA."""
    groups = model.parameter_groups(lr) if hasattr(model, "parameter_groups") else model.parameters()
    optimizer = torch.optim.Adam(groups, lr=lr, weight_decay=weight_decay, fused=True, capturable=device.type == "cuda")
    if state["epoch"]:
        optimizer.load_state_dict(state["optimizer"])
        for group in optimizer.param_groups:  # the run may have begun on another device
            group["capturable"] = device.type == "cuda"
    return optimizer


def train_epoch(model, step, total, count, size, seed, epoch):
    """One pass over `count` images in batches of `size`, in the order that (seed, epoch) gives; the mean loss."""
    torch.manual_seed((seed << 20) + epoch)
    order = torch.randperm(count).to(total.device)
    model.train()
    total.zero_()
    for i in range(0, count, size):
        step(order[i:i + size])
    mean = float(total) / count
    if not math.isfinite(mean):
        raise ValueError(f"the loss is {mean} in epoch {epoch}: lower --lr or --scale, or look for outliers in the features")
    return mean


def announce(state, epochs, seconds):
    """A line an epoch on stderr, when that is a terminal."""
    if sys.stderr.isatty():
        row, best = state["history"][-1], state["best"]
        print(f"epoch {row['epoch']}/{epochs}  loss {row['loss']:.4f}  validation AUC {100 * row['validation']:.2f} %  "
              f"best {100 * best['value']:.2f} % (epoch {best.get('epoch', '-')})  "
              f"{common.duration(seconds * (epochs - row['epoch']))} left", file=sys.stderr)


def save_last(out, state, settings):
    """`last.pt`, from which training goes on, and `log.csv`, a row an epoch."""
    with common.writing(out / "last.pt", "wb") as file:
        torch.save(dict(state, settings=settings), file)
    with common.writing(out / "log.csv") as file:
        writer = csv.DictWriter(file, state["history"][0])
        writer.writeheader()
        writer.writerows(state["history"])


def load_last(out, settings, epochs):
    """The state that `save_last` left in `out`; NOTHING if there is none. ValueError: other settings, or past `epochs`."""
    path = out / "last.pt"
    if not path.exists():
        return NOTHING
    state = load_file(path, ("settings", "model", "optimizer", *NOTHING))
    differ = [f"{key}: {state['settings'].get(key)!r} there, {settings.get(key)!r} here"
              for key in sorted(state["settings"].keys() | settings.keys()) if key not in ("epochs", "device")
              and state["settings"].get(key) != settings.get(key)]
    if differ:
        raise ValueError(f"{path} is of another run ({'; '.join(differ)}): give the same options and data, another "
                         "--out, or leave --resume out")
    if state["epoch"] > epochs:
        raise ValueError(f"{path} is past {epochs} epochs, at {state['epoch']}: give --epochs {state['epoch']} or more")
    return state


def load_file(path, keys):
    """The dictionary that torch.save left at `path`. ValueError if it is none or lacks one of `keys`."""
    try:
        held = torch.load(path, weights_only=True, map_location="cpu")
    except OSError:
        raise
    except Exception as error:  # of zip, pickle and the weights-only loader
        raise ValueError(f"{path} is no checkpoint ({str(error).splitlines()[0][:160]})") from None
    if not isinstance(held, dict) or not set(keys) <= held.keys():
        raise ValueError(f"{path} is no such checkpoint of this project: it needs {', '.join(keys)} (for published "
                         "files: compcos.load_published)")
    return held
