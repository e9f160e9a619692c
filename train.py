"""The training loop, the contract of a model that it trains, and the scoring of images.

It has no command line: `python compcos.py` and `python baselines.py` train.

**What a model offers** (CompCos, its members and the compared systems alike; a model of your own
needs no more, and `baselines.Compared` gives it the rows marked *). `check_model` looks at it
before training.

| name | is |
| --- | --- |
| `states`, `objects` * | tensors with S and O rows; only their lengths and device are read here |
| `loss(features (B, F), target (B,))` | 0-dim, the mean over the batch; targets are s * O + o |
| `after_epoch(epoch)` * | what changes from epoch to epoch, epoch = 1, 2, ... |
| `compositions()` * | what all images share in scoring, computed once for many images; or None |
| `score(features (B, F), compositions)` | (B, S, O), higher is better |
| `feasibility(seen (S, O))` * | (S, O) array, what the hard mask compares with its threshold |
| `config` | the constructor's plain settings, kept in best.pt |
| `parameter_groups(lr)` | optional: Adam's groups, where not all parameters learn at one rate |
| `after_training(validate)` | optional: choose on validation what is not trained; a dict of it |

**What a captured step forbids.** On CUDA a step is recorded once as a graph and replayed. So in
`loss`: nothing reads a value back (`.item()`, `float(tensor)`, `if tensor:`), shapes do not change
from step to step, and what changes from epoch to epoch is a tensor that `after_epoch` updates in
place (a Python number would stay as it was when recorded). `fit(..., eager=True)`, on the command
line `--eager`, turns the recording off.

**Several processes** (torchrun) train one model together when all call `fit`: each takes its share
of every batch and of the images that are evaluated, so `loss` must be a mean over the batch. Inside
`common.alone()` a process trains for itself.

Shapes: N images, B images of a batch, F features, S states, O objects, C = S*O compositions, (s, o)
at s * O + o.
"""

import csv
import math
import platform
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

import common
import data
from evaluate import BiasSweep

LAST = dict(settings=dict, model=dict, optimizer=dict, epoch=int, best=dict, history=list,
            average=list, average_steps=int, threads=int)  # what last.pt holds
LOG = ("epoch", "loss", "validation", "seconds")  # of an epoch, in its history and in log.csv
SAVE_SECONDS = 30                             # at most this much training is lost to a crash
CHUNK = {"cpu": 1 << 22, "cuda": 1 << 27}     # scores held at once in evaluation, whatever N
WARM_UP_STEPS = 3                             # eager steps that CUDA needs before a capture


def as_tensor(values, device=None):
    """A tensor of numbers: a tensor as it is, an array or a list copied, whatever its byte order or
    layout. ValueError: no numbers."""
    if torch.is_tensor(values):
        return values.to(device or values.device)
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"an array of {array.dtype} {array.shape}: expected real numbers")
    return torch.as_tensor(array.astype(array.dtype.newbyteorder("=")), device=device)


def primitive_vectors(state_vectors, object_vectors):
    """Both as new float32 tensors, (S, D) and (O, D). ValueError: other shapes, different D, none,
    not finite."""
    vectors = [as_tensor(rows).float().clone() for rows in (state_vectors, object_vectors)]
    for rows in vectors:
        if rows.ndim != 2 or rows.shape[1] != vectors[0].shape[1] or not rows.numel():
            shapes = " and ".join(str(tuple(rows.shape)) for rows in vectors)
            raise ValueError(f"state and object vectors of shapes {shapes}: expected (S, D) and "
                             "(O, D) with the same D")
    if not all(rows.isfinite().all() for rows in vectors):
        raise ValueError("state or object vectors hold NaN or infinite values: repair or drop "
                         "them before training")
    return vectors


# ---- scoring ----


def chunks(model, features, compositions):
    """Yield (slice, scores (B, C)) over images (N, F), as many at once as `CHUNK` scores allow (at
    least one)."""
    composition_count = len(model.states) * len(model.objects)
    size = max(1, CHUNK.get(features.device.type, 1 << 22) // composition_count)
    for start in range(0, len(features), size):
        part = slice(start, start + size)
        yield part, model.score(features[part], compositions).flatten(1)


@torch.no_grad()
def sweep(model, features, target, seen, candidates, *, save=None, primitives=True):
    """Score images (N, F) once, against every mask (C,) of the dict `candidates`: {name:
    (BiasSweep, kept)}.

    Scores are reduced where they are made: of each image only the best seen and the best unseen
    candidate leave the device, as kept = (scores, columns, scores, columns), (N,) each. Every mask
    must hold all seen compositions. `save` (N, C), array or memory map, takes the scores; of
    several processes each scores its share of the images, and then `save` is not for them. Without
    `primitives` the accuracies on states and objects are left out, which saves their time.
    """
    was_training = model.training
    features = features[common.share(len(features))]
    device = features.device
    model.eval()
    seen_columns = torch.as_tensor(np.flatnonzero(seen), device=device)
    hidden = {}  # what is added to the scores, so that only a mask's unseen candidates can be best
    for name, mask in candidates.items():
        allowed = torch.as_tensor(mask & ~seen.ravel(), device=device)
        hidden[name] = torch.where(allowed, 0.0, -torch.inf)
    rows = {name: [] for name in candidates}
    for part, scores in chunks(model, features, model.compositions()):
        if save is not None:
            save[part] = scores.cpu().numpy()
        best_seen, where = scores[:, seen_columns].max(1)
        for name in candidates:
            best_unseen, column = (scores + hidden[name]).max(1)
            rows[name].append((best_seen, seen_columns[where], best_unseen, column))
    model.train(was_training)
    pairs = index_pairs(seen) if primitives else None
    # Weights that are not numbers spoil the scores of every image, so the last ones tell.
    if len(features) and not best_seen.isfinite().all():
        raise ValueError("the model's scores are not finite: training has diverged; lower --lr or "
                         "--scale, or look for outliers in the features")
    result = {}
    for name, mask in candidates.items():
        columns = [torch.cat(column).cpu().numpy() for column in zip(*rows[name])]
        shares = [share for share in common.gather(columns) if share]  # empty: had no image
        kept = tuple(np.concatenate(column) for column in zip(*shares))
        swept = BiasSweep(seen.ravel(), candidates=mask, pairs=pairs)
        swept.update_kept(*(column[:, None] for column in kept), target)
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


# ---- training ----


class WeightAverage:
    """A running average of the weights over steps, which is smoother than the weights themselves.

    After step t = 1, 2, ... the average moves to the weights by 1 - decay, with decay =
    min(greatest, (1 + t) / (10 + t)): the first steps, far from the end, are soon forgotten.
    """

    def __init__(self, model, greatest):
        self.weights = list(model.parameters())
        self.average = [weight.detach().clone() for weight in self.weights]
        self.greatest = greatest
        self.steps = 0

    @torch.no_grad()
    def update(self):
        """Take in the weights after one more step."""
        self.steps += 1
        decay = min(self.greatest, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.average, [weight.detach() for weight in self.weights], 1 - decay)

    @torch.no_grad()
    def exchange(self):
        """Put the average into the model and keep its weights here; a second call undoes it."""
        weights = [weight.detach().clone() for weight in self.weights]
        torch._foreach_copy_(self.weights, self.average)
        torch._foreach_copy_(self.average, weights)


def stepper(model, optimizer, features, targets, *, eager=False):
    """Return `step(index (B,)) -> None`, which trains on those images, and the 0-dim sum of losses
    that it adds to.

    On CUDA the step is captured as a graph after three eager ones and replayed, unless `eager`. Of
    several processes each takes its part of the images, and `total` the losses of these.
    """
    total = torch.zeros((), device=features.device, dtype=features.dtype)
    parameters = list(model.parameters())
    processes = common.processes()
    rank = common.rank()

    def loss_of(index):
        """The mean loss of a batch; of several processes, this one's part of it."""
        if processes == 1:
            return model.loss(features[index], targets[index])
        # The mean over a batch is the sum of the means over its parts, each times its share of the
        # images; and so is its gradient.
        part = index[rank::processes]
        share = len(part) / len(index)
        if not share:
            part = index[:1]  # without an image of its own it still goes through the step with all
        return model.loss(features[part], targets[part]) * share

    def step(index):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(index)
        if loss.ndim:
            raise ValueError(f"{type(model).__name__}.loss gives {tuple(loss.shape)}: expected a "
                             "0-dim tensor, the mean over the batch")
        loss.backward()
        if processes > 1:
            add_up_gradients(parameters)
        optimizer.step()
        total.add_(loss.detach() * len(index))

    if features.device.type != "cuda" or eager:
        return step, total
    return captured(step), total


@torch.no_grad()
def add_up_gradients(parameters):
    """Put into each gradient its sum over the processes, by one message for all of them."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    with common.group() as distributed:
        distributed.all_reduce(flat)
    sums = flat.split([gradient.numel() for gradient in gradients])
    sums = [part.view_as(gradient) for part, gradient in zip(sums, gradients)]
    torch._foreach_copy_(gradients, sums)


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
            # "thread_local": what other threads ask of CUDA, as nccl's does, does not end a capture
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                step(static_index)
            graphs[len(index)] = (graph, static_index)
        graph, static_index = graphs[len(index)]
        static_index.copy_(index)
        graph.replay()

    return run


def fit(model, features, targets, validate, *, epochs, batch_size, lr, weight_decay, seed, out,
        settings, average=0.0, patience=None, passes=1, resume=False, eager=False, job=None):
    """Train with Adam on images (N, F) and targets (N,), both on the model's device; leave the best
    weights in `model`.

    `validate()` gives the number to maximise after each epoch. Every epoch draws its order, dropout
    and negatives from (seed, epoch), so `resume=True` goes on from `out/last.pt`, if it is there,
    to the same numbers. `average` above 0 is the greatest decay of a WeightAverage: it is what
    validates and what is left in `model`. With `patience`, training ends once so many epochs have
    brought nothing better. An epoch is `passes` over the images. `job` is the common.Progress of
    a job of several trainings, in which the epochs of this one are counted. Returns the history, a
    list of {epoch, loss, validation, seconds}. ValueError: bad input, last.pt of another run, a
    loss that is not finite. However it ends, `out/last.pt` holds the last whole epoch.

    Several processes train the model together, with the same arguments; the first one writes.
    ConnectionError: one of them has ended.
    """
    check_training(model, features, targets, epochs, batch_size)
    state = load_last(out, settings, epochs) if resume else None
    run = Run(model, lr, weight_decay, average, features.device)
    if state:
        continue_run(run, state, out)
    agree(run, out)
    if job is not None:  # epochs of an earlier start count, and so does the time that they took
        job.advance(run.epoch)
        job.start -= sum(row["seconds"] for row in run.history)
    size = min(batch_size, len(features))
    step, total = stepper(model, run.optimizer, features, targets, eager=eager)
    with common.signals_together() as is_stopping, last_epoch_kept(run, out, settings):
        train_epochs(run, step, total, validate, count=len(features), size=size, seed=seed,
                     epochs=epochs, patience=patience, passes=passes, out=out, settings=settings,
                     is_stopping=is_stopping, job=job)
    if job is not None:
        job.advance(epochs - run.epoch)  # those that `patience` has spared
    run.take_best()
    return run.history


@contextmanager
def last_epoch_kept(run, out, settings):
    """However the block ends, last.pt holds the last whole epoch; who stops it is told so."""
    first = run.epoch
    try:
        try:
            yield
        finally:
            if run.epoch > first:
                with common.signals_held():
                    run.save(out, settings)
    except (KeyboardInterrupt, ConnectionError) as error:
        saved = "no epoch was finished"
        if run.epoch:
            saved = f"epoch {run.epoch} is kept in {out / 'last.pt'}, from which --resume goes on"
        why = "stopped" if isinstance(error, KeyboardInterrupt) else error
        raise type(error)(f"{why}: {saved}") from None


def train_epochs(run, step, total, validate, *, count, size, seed, epochs, patience, passes, out,
                 settings, is_stopping, job):
    """The epochs of `fit`, with `count` images in batches of `size`; last.pt is written now and
    then. KeyboardInterrupt: `is_stopping()`."""
    saved_at = time.monotonic()
    for epoch in range(run.epoch + 1, epochs + 1):
        if patience and epoch - 1 - run.best_epoch >= patience:
            break
        started = time.monotonic()
        loss = train_epoch(run.model, step, total, count, size, seed, epoch, run.average, passes)
        run.model.after_epoch(epoch)
        value = run.validate(validate)
        seconds = time.monotonic() - started
        run.keep(epoch, value, dict(epoch=epoch, loss=loss, validation=value, seconds=seconds))
        if job is not None:
            job.advance(1)
        announce(run, epochs, job)
        if time.monotonic() - saved_at > SAVE_SECONDS:
            run.save(out, settings)
            saved_at = time.monotonic()
        if is_stopping():
            raise KeyboardInterrupt


def agree(run, out):
    """Let all processes begin with the first one's numbers.

    OSError: not all have read last.pt. ValueError: two are on one GPU.
    """
    device = run.model.states.device
    epochs = common.gather(run.epoch)
    if len(set(epochs)) > 1:
        raise OSError(f"{out / 'last.pt'}: the processes go on from epochs {epochs}, by rank: "
                      "--out needs a folder that all machines share")
    places = common.gather((platform.node(), str(device)))
    if device.type == "cuda" and len(set(places)) < len(places):
        raise ValueError(f"the processes are on {places}, by rank: to train one model each needs a "
                         "GPU of its own; start as many as there are GPUs, without a number in "
                         "--device")
    if len(epochs) > 1:
        with common.group() as distributed:
            for tensor in run.live():
                distributed.broadcast(tensor.detach(), 0)


class Run:
    """Where a training stands: the model, its optimiser and average, and copies of them at the last
    whole epoch."""

    def __init__(self, model, lr, weight_decay, average, device):
        self.model = model
        self.average = WeightAverage(model, average) if average else None
        self.optimizer = adam(model, lr, weight_decay, device)
        self.epoch = 0
        self.best_epoch = 0
        self.best_value = -math.inf
        self.candidate = None    # averaged tensors of an epoch that validated better than the best
        self.best = None         # the model's tensors at the best epoch
        self.snapshot = None     # all that training goes on from, at the last whole epoch
        self.history = []
        self.announced = time.monotonic()

    def go_on(self, state, device):
        """Begin where `state`, read from last.pt, ended."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:  # the run may have begun on another device
            group["capturable"] = device.type == "cuda"
        if self.average:
            self.average.steps = state["average_steps"]
            averaged = [tensor.to(device) for tensor in state["average"]]
            torch._foreach_copy_(self.average.average, averaged)
        self.epoch = state["epoch"]
        self.best_epoch = state["best"]["epoch"]
        self.best_value = float(state["best"]["value"])
        self.best = [tensor.to(device) for tensor in state["best"]["model"].values()]
        for row in state["history"]:
            for name in LOG:
                value_at(row, (int, float), name)
        self.history = state["history"]
        self.snapshot = self.copy()
        self.model.after_epoch(self.epoch)  # what it sets, as margins, is not stored but made anew

    def live(self):
        """Every tensor that training changes, always in the same order."""
        tensors = list(self.model.state_dict().values())
        for slot in self.optimizer.state_dict()["state"].values():
            tensors += [value for value in slot.values() if torch.is_tensor(value)]
        if self.average:
            tensors += self.average.average
        return tensors

    def copy(self):
        """Copies of all that training goes on from, in the order of `live`, and how many steps are
        averaged."""
        steps = self.average.steps if self.average else 0
        return [tensor.detach().clone() for tensor in self.live()], steps

    def validate(self, validate):
        """The value of the model as it would be used: with its average of the weights, if there is
        one."""
        if self.average is None:
            return validate()
        self.average.exchange()
        value = validate()
        if value > self.best_value:
            weights = self.model.state_dict().values()
            self.candidate = [tensor.detach().clone() for tensor in weights]
        self.average.exchange()
        return value

    def keep(self, epoch, value, row):
        """Count an epoch as done. All is copied before the first attribute changes: an interrupt
        finds a whole epoch."""
        snapshot = self.copy()
        state = dict(snapshot=snapshot, epoch=epoch, history=[*self.history, row])
        if value > self.best_value:
            tensors = snapshot[0][:len(self.model.state_dict())]
            if self.average:
                tensors = self.candidate
            state |= dict(best=tensors, best_epoch=epoch, best_value=value)
        self.__dict__.update(state)  # one call, which no interrupt divides

    @torch.no_grad()
    def save(self, out, settings):
        """`last.pt`, from which training goes on, and `log.csv`, a row an epoch. The model goes
        back to that epoch."""
        tensors, steps = self.snapshot
        torch._foreach_copy_([tensor.detach() for tensor in self.live()], tensors)
        if common.rank() > 0:
            return
        names = list(self.model.state_dict())
        best = dict(epoch=self.best_epoch, value=self.best_value, model=dict(zip(names, self.best)))
        state = dict(epoch=self.epoch, model=self.model.state_dict(),
                     optimizer=self.optimizer.state_dict(), best=best, history=self.history,
                     settings=settings, average_steps=steps, threads=torch.get_num_threads(),
                     average=self.average.average if self.average else [])
        with common.writing(out / "last.pt", "wb") as file:
            torch.save(state, file)
        write_log(out, self.history)

    @torch.no_grad()
    def take_best(self):
        """Put the weights of the best epoch into the model."""
        weights = [tensor.detach() for tensor in self.model.state_dict().values()]
        torch._foreach_copy_(weights, self.best)


def check_training(model, features, targets, epochs, batch_size):
    """ValueError for what training cannot use."""
    count = len(model.states) * len(model.objects)
    if epochs < 1 or batch_size < 1:
        raise ValueError(f"epochs {epochs}, batch size {batch_size}: expected at least 1 of each")
    if not len(features) or len(features) != len(targets):
        raise ValueError(f"features of {data.count(len(features), 'image')} and targets of "
                         f"{len(targets):,}: expected as many, one or more")
    broken = int((~features.isfinite()).any(1).sum())
    if broken:
        raise ValueError(f"features of {broken:,} of {data.count(len(features), 'image')} are not "
                         "finite: repair them or leave them out")
    if targets.min() < 0 or targets.max() >= count:
        raise ValueError(f"targets of {int(targets.min())} to {int(targets.max())}: expected s * "
                         f"O + o, 0 to {count - 1}")


REQUIRED = ("states", "objects", "loss", "after_epoch", "compositions", "score", "feasibility",
           "config")


@torch.no_grad()
def check_model(model, features, seen):
    """ValueError where a model does not keep the contract at the head of this file.

    features (N, F) on the model's device, of which two images are scored; seen (S, O) bool.
    """
    name = type(model).__name__
    lacking = [offer for offer in REQUIRED if not hasattr(model, offer)]
    if lacking:
        raise ValueError(f"{name} has no {', '.join(lacking)}: a model offers all of "
                         f"{', '.join(REQUIRED)}, as the head of train.py says; a subclass of "
                         "baselines.Compared needs only loss, score and config")
    primitives = (len(model.states), len(model.objects))
    if primitives != seen.shape:
        raise ValueError(f"{name} has {data.count(primitives[0], 'state')} and "
                         f"{data.count(primitives[1], 'object')}: expected {seen.shape[0]} and "
                         f"{seen.shape[1]}, as its word vectors have rows")
    was_training = model.training
    model.eval()
    scores = model.score(features[:2], model.compositions())
    model.train(was_training)
    expected = (len(features[:2]), *seen.shape)
    if tuple(scores.shape) != expected:
        raise ValueError(f"{name}.score gives {tuple(scores.shape)} for "
                         f"{data.count(expected[0], 'image')}: expected (B, S, O), here {expected}")
    rho = np.shape(model.feasibility(seen))
    if rho != seen.shape:
        raise ValueError(f"{name}.feasibility gives {rho}: expected (S, O), here {seen.shape}")


def adam(model, lr, weight_decay, device):
    """Adam over the model's parameters, ready for a captured step on CUDA."""
    groups = model.parameters()
    if hasattr(model, "parameter_groups"):
        groups = model.parameter_groups(lr)
    return torch.optim.Adam(groups, lr=lr, weight_decay=weight_decay, fused=True,
                            capturable=device.type == "cuda")


def train_epoch(model, step, total, count, size, seed, epoch, average=None, passes=1):
    """Passes over `count` images in batches of `size`, in orders that (seed, epoch) gives; the mean
    loss."""
    order = draw_order(count, passes, seed, epoch).to(total.device)
    model.train()
    total.zero_()
    for start in range(0, len(order), size):
        step(order[start:start + size])
        if average is not None:
            average.update()
    if common.processes() > 1:
        with common.group() as distributed:
            distributed.all_reduce(total)
    mean = float(total) / len(order)
    if not math.isfinite(mean):
        raise ValueError(f"the loss is {mean} in epoch {epoch}: lower --lr or --scale, or look "
                         "for outliers in the features")
    return mean


def draw_order(count, passes, seed, epoch):
    """The images of an epoch, (count * passes,), in the order that (seed, epoch) gives; what else
    the epoch draws is seeded.

    The passes follow one another without a short batch between them. Several processes draw one
    order, but dropout and mixed images of their own.
    """
    seed_devices((seed << 20) + epoch)
    order = torch.cat([torch.randperm(count) for _ in range(passes)])
    if common.processes() > 1:
        sequence = np.random.SeedSequence([seed, epoch, common.rank()])
        seed_devices(int(sequence.generate_state(1, np.uint64)[0]))
    return order


def seed_devices(seed):
    """As torch.manual_seed, for the kinds of device that are here.

    For each kind that is not, that one notes the whole stack of calls, to seed it later: on a GPU
    this takes as long as two steps.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def announce(run, epochs, job=None):
    """A line on stderr: an epoch on a terminal, a minute in a batch job's log. It says how long
    this training still takes, or the whole `job`."""
    now = time.monotonic()
    if not common.is_terminal(sys.stderr) and now - run.announced < common.BATCH_SECONDS:
        return
    run.announced = now
    row = run.history[-1]
    recent = run.history[-20:]
    seconds = sum(row["seconds"] for row in recent) / len(recent)
    left = f"{common.duration(seconds * (epochs - row['epoch']))} left"
    if job is not None:
        left = job.line(now)
    common.say(f"epoch {row['epoch']}/{epochs}  loss {row['loss']:.4f}  validation AUC "
               f"{100 * row['validation']:.2f} %  "
               f"best {100 * run.best_value:.2f} % (epoch {run.best_epoch or '-'})  {left}")


def write_log(out, history):
    """`log.csv`, a row an epoch; `seconds` are those of that epoch alone.

    The history is in last.pt, too: a file that another program holds open costs a warning only.
    """
    try:
        with common.writing(out / "log.csv") as file:
            writer = csv.DictWriter(file, LOG)
            writer.writeheader()
            writer.writerows(history)
    except OSError as error:
        warnings.warn(f"{error}; the history is kept in {out / 'last.pt'}", stacklevel=2)


def continue_run(run, state, out):
    """Let a run begin where `state`, read from last.pt, ended; log.csv is made anew from its
    history."""
    threads = state["threads"]
    if threads != torch.get_num_threads():
        warnings.warn(f"{out / 'last.pt'} was made with {data.count(threads, 'thread')}, and this "
                      f"process has {torch.get_num_threads()}: sums are rounded differently, so "
                      "numbers may differ",
                      stacklevel=2)
    with reading(out / "last.pt", "leave --resume out, or give another --out"):
        run.go_on(state, run.model.states.device)
    if run.history and common.rank() == 0:
        write_log(out, run.history)


def load_last(out, settings, epochs):
    """The state that `Run.save` left in `out`; None if there is none. ValueError: other settings,
    or past `epochs`."""
    path = out / "last.pt"
    if not path.exists():
        return None
    differ = []
    with reading(path, "leave --resume out, or give another --out"):
        state = load_file(path, LAST)
        for key in sorted(state["settings"].keys() | settings.keys()):
            there = state["settings"].get(key)
            here = settings.get(key)
            if key not in ("epochs", "device") and there != here:
                differ.append(f"{key}: {there!r} there, {here!r} here")
    if differ:
        raise ValueError(f"{path} is of another run ({data.some(differ)}): give the same options "
                         "and data, another --out, or leave --resume out")
    if state["epoch"] > epochs:
        raise ValueError(f"{path} is past epoch {epochs}, at {state['epoch']}: give --epochs "
                         f"{state['epoch']} or more")
    return state


# ---- reading what a run left ----


@contextmanager
def reading(path, remedy):
    """Inside, the file `path` is read: whatever is wrong with its content is one ValueError.

    Its one line names the file, what is wrong, and the `remedy`. OSError and a lack of memory pass.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():  # a pipe would be waited for for ever
            raise ValueError(f"{path} is no plain file")
        yield path
    except Exception as error:  # of zip, pickle, CSV and JSON, and of what is not in them
        data.raise_if_unread(error)
        if common.is_out_of_memory(error):
            raise
        problem = str(error)
        if str(path) not in problem:
            problem = f"{path} cannot be used ({data.reason(error)})"
        raise ValueError(f"{problem}; {remedy}") from None


def value_at(content, kinds, *path):
    """What is at a path of keys. ValueError names a path without a value of these kinds."""
    value = content
    where = ", ".join(map(str, path))
    try:
        for key in path:
            value = value[key]
    except (LookupError, TypeError):
        raise ValueError(f"it has no {where}") from None
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ValueError(f"its {where} is a {type(value).__name__}")
    return value


def load_file(path, kinds):
    """The dictionary that torch.save left at `path`. ValueError if it is none, or lacks one of the
    types `kinds`, name -> type."""
    with reading(path, "expected a checkpoint of this project (published ones: by "
                 "compcos.load_published)"):
        contents = data.load_tensors(path)
        if not isinstance(contents, dict):
            raise ValueError(f"it holds a {type(contents).__name__}")
        for name, kind in kinds.items():
            value_at(contents, kind, name)
    return contents


if __name__ == "__main__":
    print("train.py is the training loop and the contract of a model; run "
          "`python compcos.py` to train.")
