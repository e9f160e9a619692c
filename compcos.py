"""CompCos: the model, its loss, training, evaluation and prediction, on arrays (paper, Sec. 3).

Copy this file with evaluate.py and feasibility.py into any project; it needs torch and NumPy. In
the clone, `python compcos.py` trains and evaluates on a dataset; `--help` lists its options.

    model = fit(x, y, state_vectors, object_vectors, validation=(xv, yv))
    print(evaluate_model(model, xt, yt)["auc"])
    indices, scores = predict(model, xt, k=3)

Shapes: N images, B images of a batch, F features of an image, S states, O objects, C = S*O
compositions, P chosen compositions, V numbers of a word vector, D numbers of the shared space.
A composition (s, o) has the index s * O + o. Arguments are arrays, lists or tensors.
"""

import copy
import io
import math
import numbers
import os
import time
import warnings
import zipfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

if __name__ == "__main__":
    # Idle threads of OpenMP sleep soon instead of spinning; read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as nnf

try:
    from evaluate import BiasSweep
    from feasibility import MIXES, feasibility_scores
except ImportError as error:  # it names the file of a foreign module of this name
    raise ImportError(f"{error}: put the folder of compcos.py first in sys.path, and restart "
                      "Python") from None

# Scores that training holds at once. A CPU keeps them in its cache, a GPU prefers large kernels.
TRAINING_SCORES = {"cpu": 1 << 19, "cuda": 1 << 26}
EVALUATION_SCORES = {"cpu": 1 << 22, "cuda": 1 << 26}  # scores that evaluation holds at once
STEPS_BEFORE_CAPTURE = 3  # eager steps that CUDA needs before a step can be captured
FEW_COMPOSITIONS = 20     # with fewer unseen compositions, validation says little about them
FORMAT = 1                # of the files that `save` writes
FOLDER_BIT = 16           # of a zip member's attributes, as in MS-DOS


# ---- settings ----


def setting(paper, strong=None, help="", *, choices=None, least=-math.inf, above=-math.inf,
            below=math.inf):
    """Declare a setting, as a dataclass field.

    Args:
        paper: the value in the paper's recipe, which is the default.
        strong: the value in the strong recipe; None if it is the paper's.
        help: one line of explanation for `--help`.
        choices: the allowed names, for a setting that is a str.
        least, above, below: the range of a number: least <= value, above < value < below.
    """
    if strong is None:
        strong = paper
    limits = dict(least=least, above=above, below=below)
    return field(default=paper, metadata=dict(strong=strong, help=help, choices=choices,
                                              limits=limits))


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of the training of any model.

    Each setting is one line; its command-line option, its check and its record are made from it.

    Raises:
        ValueError: a value of another type or out of range.
    """

    world: str = setting("open", help="compositions that compete in training: all (open), or only "
                         "the seen ones (closed)", choices=("open", "closed"))
    epochs: int = setting(300, 40, "greatest number of epochs", least=1)
    min_epoch_steps: int = setting(0, 65, "least number of steps of an epoch; small data is "
                                   "passed over several times", least=0)
    patience: int = setting(0, 20, "stop after this many epochs without a better validation "
                            "score; 0 never stops early", least=0)
    batch_size: int = setting(128, help="images of a training step", least=1)
    lr: float = setting(5e-5, 5e-4, "learning rate of Adam", above=0)
    weight_decay: float = setting(5e-5, 0.0, "weight decay of Adam", least=0)
    ema_decay: float = setting(0.0, 0.998, "greatest decay of the exponential moving average of "
                               "the weights; 0 uses the weights themselves", least=0, below=1)

    def __post_init__(self):
        for declared in fields(self):
            rule = declared.metadata
            value = check_value(declared.name, getattr(self, declared.name), declared.type,
                                rule["choices"], **rule["limits"])
            object.__setattr__(self, declared.name, value)  # the class is frozen

    @classmethod
    def strong(cls, **changes):
        """Return the strong recipe with some settings changed.

        Args:
            changes: settings by name.

        Raises:
            ValueError: a value of another type or out of range.
        """
        recipe = {declared.name: declared.metadata["strong"] for declared in fields(cls)}
        return cls(**recipe | changes)


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """Settings of CompCos. The defaults are the paper's recipe for MIT-States.

    Raises:
        ValueError: a value of another type or out of range.
    """

    members: int = setting(1, 4, "models that are trained apart and whose scores are averaged",
                           least=1)
    scale: float = setting(20.0, 2.6, "factor of the cosines in the softmax, one over the "
                           "temperature", above=0)
    margin: float = setting(0.4, 7.2 / 2.6, "margin of an unseen composition whose feasibility "
                            "is 1, after the warm-up; 0 trains without margins", least=0)
    warmup: int = setting(15, help="epochs until the margins reach their full size; the "
                          "first epoch has none", least=0)
    mix: str = setting("mean", help="feasibility (Eq. 5): the mean or the max of the "
                       "similarities of state and object, or that of state or object alone",
                       choices=MIXES)
    train_candidates: str = setting("all", "auto", "compositions that compete in open-world "
                                    "training: all (after the first epoch), the seen ones, or auto "
                                    "(the seen where they are half or more, and validation shows "
                                    "few others)",
                                    choices=("all", "seen", "auto"))
    hidden: int = setting(768, help="width of the image embedder", least=1)
    dropout: float = setting(0.5, 0.85, "dropout of the image embedder", least=0, below=1)
    dim: int = setting(0, 300, "numbers of the shared space; 0 takes those of the word vectors",
                       least=0)
    normalize_image_embeddings: bool = setting(True, False, "give image embeddings unit length, "
                                               "so that scores are cosines")
    logit_adjustment: float = setting(0.0, 0.5, "weight of the logit adjustment by the log of the "
                                      "training images of a seen composition", least=0)
    word_lr_factor: float = setting(1.0, 10.0, "learning rate of the word embeddings over that of "
                                    "the rest", above=0)

    @classmethod
    def paper(cls, dataset, **changes):
        """Return the paper's recipe for a dataset with some settings changed.

        Args:
            dataset: "mitstates", "utzappos", "cgqa", "shapes", or "folder" for data of one's own.
            changes: settings by name.

        Raises:
            ValueError: another dataset, or a value of another type or out of range.
        """
        if dataset not in DATASET_SETTINGS:
            raise ValueError(f"dataset must be one of {', '.join(DATASET_SETTINGS)}, got "
                             f"{dataset!r}; use 'folder' for all others")
        return cls(**DATASET_SETTINGS[dataset] | changes)


# What the paper's recipe changes for a dataset. A folder of one's own takes as many steps as by the
# strong recipe, at a learning rate at which they suffice.
DATASET_SETTINGS = {
    "mitstates": {},
    "utzappos": dict(scale=50.0, margin=1.0),
    "cgqa": dict(scale=100.0),
    "shapes": dict(epochs=40, lr=1e-3),
    "folder": dict(epochs=40, min_epoch_steps=65, patience=20, lr=1e-3),
}


# ---- arguments ----

KINDS = {int: (numbers.Integral, "a whole number"), float: (numbers.Real, "a finite number"),
         bool: ((bool, np.bool_), "True or False"), str: (str, "a text")}


def check_value(name, value, kind, choices=None, *, least=-math.inf, above=-math.inf,
                below=math.inf):
    """Return a value as a plain int, float, bool or str; ValueError outside its range.

    Numbers of NumPy become Python's, which JSON files hold.
    """
    accepted, expected = KINDS[kind]
    fits = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
    if choices:
        expected = f"one of {', '.join(choices)}"
        fits = fits and value in choices
    elif fits and not (least <= value < below and value > above):  # nan is never in range
        limits = {"at least": least, "above": above, "below": below}
        given = [f"{word} {limit}" for word, limit in limits.items() if math.isfinite(limit)]
        expected = " and ".join(given) or expected
        fits = False
    if not fits:
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return kind(value)


def check_seed(seed):
    """Return a seed as an int; ValueError unless `draw_order` can take it."""
    return check_value("seed", seed, int, least=0, below=1 << 43)


def as_tensor(values, device=None, name="values"):
    """Return numbers as a tensor on a device; ValueError for anything but an array of numbers."""
    if not torch.is_tensor(values):
        array = np.array(values)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{name} must be an array of real numbers, got {array.dtype} of shape "
                             f"{array.shape}")
        values = torch.as_tensor(array.astype(array.dtype.newbyteorder("=")))
    return values.to(device=device)


def check_shape(name, array, *shapes):
    """Raise ValueError unless an array has one of these shapes; a letter is any length above 0."""
    for shape in shapes:
        fits = [length > 0 if isinstance(size, str) else length == size
                for size, length in zip(shape, array.shape)]
        if len(shape) == array.ndim and all(fits):
            return
    expected = " or ".join(str(tuple(shape)).replace("'", "") for shape in shapes)
    raise ValueError(f"{name} must have the shape {expected}, got {tuple(array.shape)}")


def check_finite(name, rows):
    """Raise ValueError unless all numbers of (N, ...) are finite."""
    finite = rows.isfinite().flatten(1).all(1)
    if not finite.all():
        raise ValueError(f"{name} must be finite, got nan or infinity in row "
                         f"{int(finite.int().argmin())}: mend the row")


def as_images(model, features):
    """Return images (N, F) as numbers of the model's type, on its device."""
    features = as_tensor(features, model.states.device, "features").to(model.states.dtype)
    check_shape("features", features, ("N", model.feature_dim))
    return features


def as_examples(model, features, targets):
    """Return features as `as_images` does, all finite, and targets as `as_targets` does."""
    features = as_images(model, features)
    check_finite("features", features)
    return features, as_targets(targets, *shape_of(model), len(features))


def shape_of(model):
    """Return the numbers of states and objects."""
    return len(model.states), len(model.objects)


def as_targets(targets, states, objects, count="N"):
    """Return targets as indices (N,), an int64 tensor on the CPU.

    Args:
        targets: whole numbers of any type, indices s * O + o (N,), or states and objects (N, 2).
        states, objects: S and O.
        count: N, where it is known.
    """
    values = as_tensor(targets, "cpu", "targets").double()
    check_shape("targets", values, (count,), (count, 2))
    limits = torch.tensor([states, objects] if values.ndim == 2 else [states * objects])
    wrong = values[(values < 0) | (values >= limits) | (values != values.floor())]
    if len(wrong):
        raise ValueError("targets must be whole numbers s * O + o, or pairs (s, o), with s below "
                         f"{states} and o below {objects}, got {wrong[0]:g}")
    values = values.long()
    if values.ndim == 2:
        values = values[:, 0] * objects + values[:, 1]
    return values


def check_seen(seen, targets):
    """Raise ValueError unless targets (N,) are all seen, by a mask (S, O)."""
    unseen = targets[~seen.flatten()[targets]]
    if len(unseen):
        raise ValueError(f"targets must be seen compositions, got the unseen index {unseen[0]}")


def as_mask(name, mask, states, objects):
    """Return a mask of compositions, bool of shape (S, O) or (C,), as a new array (S, O)."""
    mask = as_tensor(mask, "cpu", name)
    check_shape(name, mask, (states, objects), (states * objects,))
    if mask.dtype != torch.bool or not mask.any():
        raise ValueError(f"{name} must be bool and hold at least one True, got {mask.dtype} of sum "
                         f"{mask.sum():g}")
    return mask.reshape(states, objects).numpy().copy()


def as_word_vectors(state_vectors, object_vectors):
    """Return word vectors as new float32 tensors, (S, V) and (O, V)."""
    states = as_tensor(state_vectors, "cpu", "state_vectors").float().clone()
    objects = as_tensor(object_vectors, "cpu", "object_vectors").float().clone()
    check_shape("state_vectors", states, ("S", "V"))
    check_shape("object_vectors", objects, ("O", states.shape[1]))
    check_finite("state_vectors", states)
    check_finite("object_vectors", objects)
    return states, objects


def shown_by(targets, shape):
    """Return the compositions that targets (N,) show, an array of a shape (S, O), bool."""
    shown = np.zeros(shape, bool)
    shown.flat[np.asarray(targets)] = True
    return shown


def seen_of(model, seen=None):
    """Return the seen mask (S, O) that is given, or else the model's own, as an array."""
    if seen is None:
        seen = model.seen
    if seen is None:
        raise ValueError("seen must be given: this model does not know which compositions were "
                         "seen in training")
    return as_mask("seen", seen, *shape_of(model))


def candidates_of(model, candidates=None):
    """Return a mask of candidates (S, O) as an array; None: all compositions."""
    if candidates is None:
        return np.ones(shape_of(model), bool)
    return as_mask("candidates", candidates, *shape_of(model))


def pick_device(name="auto"):
    """Return the torch.device of a name; "auto" is the best one of this machine.

    Under torchrun "auto" and "cuda" are the GPU of this process.

    Args:
        name: "auto", "cpu", "cuda", "cuda:1", "mps", or a torch.device.

    Raises:
        ValueError: the device is not available.
    """
    if name == "auto":
        best = torch.accelerator.current_accelerator(check_available=True)
        name = best.type if best else "cpu"
    try:
        if name == "cuda" and "LOCAL_RANK" in os.environ:
            name = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
            torch.cuda.set_device(name)  # of streams and graphs, too
        torch.zeros(1, device=name)
    except Exception:  # torch raises many kinds, by device and build
        raise ValueError(f"device must be one that this machine has, got {str(name)!r}: pass auto "
                         "for the best one, or cpu") from None
    return torch.device(name)


# ---- the model ----


class CompCos(nn.Module):
    """Images and compositions in one space, compared by cosine (Eq. 1).

    φ(s, o) = W [φ(s); φ(o)] embeds a composition; the embeddings of states and objects begin as
    word vectors and are trained. ω, which is Linear, LayerNorm, ReLU, Dropout, Linear, embeds an
    image.

    A parameter that is made here and used in `composition_scores` or `image_losses` is trained.

    Args:
        state_vectors: word vectors (S, V), one for each state, finite.
        object_vectors: word vectors (O, V), one for each object, finite.
        feature_dim: F, the numbers of an image, at least 1.
        settings: the Settings; the paper's by default.

    Raises:
        ValueError: vectors of other shapes, or not finite.
    """

    def __init__(self, state_vectors, object_vectors, feature_dim, settings=Settings()):
        super().__init__()
        states, objects = as_word_vectors(state_vectors, object_vectors)
        vector_dim = states.shape[1]
        dim = settings.dim or vector_dim
        self.settings = settings
        self.feature_dim = feature_dim
        self.history = []       # a row for each epoch of training
        self.checkpoint = None  # of a loaded model, what else its file holds
        self.states = nn.Parameter(states)    # φ of the states, (S, V)
        self.objects = nn.Parameter(objects)  # φ of the objects, (O, V)
        self.projection = nn.Linear(2 * vector_dim, dim)  # W
        self.image_embedder = nn.Sequential(  # ω
            nn.Linear(feature_dim, settings.hidden), nn.LayerNorm(settings.hidden), nn.ReLU(),
            nn.Dropout(settings.dropout), nn.Linear(settings.hidden, dim))
        self.seen = None     # (S, O) bool, known after `prepare`
        self.offsets = None  # (S, O), the logit adjustment of the seen, after `prepare`

    # ---- scoring ----

    def forward(self, features):
        """Return the scores of images with every composition; see `score`.

        No matrix of composition embeddings is made. Where the two parts of φ(s, o) nearly cancel,
        with ε = |a_s + b_o| / |a_s|, float32 leaves an error of about 2e-7 / ε, as in the plain
        form.

        Args:
            features: numbers (B, F).

        Returns:
            A tensor (B, S, O), cosines in [-1, 1] in evaluation mode.
        """
        return self.score(features, self.compositions())

    def cosines(self, features, pairs):
        """Return the scores of images with chosen compositions.

        Args:
            features: numbers (B, F).
            pairs: whole numbers (P, 2), state and object.

        Returns:
            A tensor (B, P).
        """
        return self.score(features, self.compositions(), pairs)

    def score(self, features, compositions, pairs=None):
        """Return the scores of images: cosines, as long as image embeddings are normalised.

        With `normalize_image_embeddings=False` a score is |ω(x)| times the cosine.

        Args:
            features: numbers (B, F).
            compositions: what `compositions()` returns.
            pairs: whole numbers (P, 2), state and object; None: all compositions.

        Returns:
            A tensor (B, S, O), or (B, P) with pairs.
        """
        return self.composition_scores(*self.products(features, compositions), pairs)

    def embed_images(self, features):
        """Return ω(x), the embeddings of images, of unit length.

        `normalize_image_embeddings=False` skips the normalisation, so the norm of ω(x) acts as
        confidence.

        Args:
            features: numbers (B, F).

        Returns:
            A tensor (B, D).

        Raises:
            ValueError: features of another shape.
        """
        embedded = self.image_embedder(as_images(self, features))
        if self.settings.normalize_image_embeddings:
            embedded = nnf.normalize(embedded)
        return embedded

    def compositions(self):
        """Return what all images share in scoring.

        φ(s, o) = a_s + b_o, so no matrix of all compositions is needed.

        Returns:
            Tensors a (S, D), b (O, D) and 1 / |a_s + b_o| (S, O).
        """
        a, b = split_linear(self.projection, self.states, self.objects)
        # |a_s + b_o|² = |a_s|² + |b_o|² + 2 a_s·b_o, in float64: where a_s is nearly -b_o the sum
        # cancels, and float32 has no digits left (MPS has no float64).
        wide = torch.float32 if a.device.type == "mps" else torch.float64
        x = a.to(wide)
        y = b.to(wide)
        squared = x.square().sum(1, keepdim=True) + y.square().sum(1) + 2 * x @ y.T  # (S, O)
        return a, b, squared.clamp_min(1e-24).rsqrt().to(a.dtype)

    def products(self, features, compositions):
        """Return x·a_s (B, S) and x·b_o (B, O) of images (B, F), and 1 / |a_s + b_o| (S, O)."""
        images = self.embed_images(features)  # x, (B, D)
        a, b, inverse_length = compositions
        return images @ a.T, images @ b.T, inverse_length

    def composition_scores(self, by_state, by_object, inverse_length, pairs=None):
        """Return the scores (x·a_s + x·b_o) / |a_s + b_o| of images.

        This is the place to change the scores: training and evaluation take them from here.

        Args:
            by_state, by_object, inverse_length: tensors (B, S), (B, O), (S, O), from `products`.
            pairs: whole numbers (P, 2), state and object; None: all compositions.

        Returns:
            A tensor (B, S, O), or (B, P) with pairs.
        """
        if pairs is None:
            scores = (by_state[:, :, None] + by_object[:, None, :]) * inverse_length  # (B, S, O)
        else:
            state, object_ = as_tensor(pairs, by_state.device, "pairs").T
            column = state * by_object.shape[1] + object_
            # Unlike by_state[:, state], an embedding look-up has a deterministic gradient on GPUs.
            sums = nnf.embedding(state, by_state.T) + nnf.embedding(object_, by_object.T)
            scores = (sums * nnf.embedding(column, inverse_length.view(-1, 1))).T     # (B, P)
        if self.settings.normalize_image_embeddings and not self.training:
            scores.clamp_(-1, 1)  # rounding may lead beyond
        return scores

    def embed_compositions(self, pairs):
        """Return φ(s, o) in the plain form W [φ(s); φ(o)], of unit length.

        Args:
            pairs: whole numbers (P, 2), state and object.

        Returns:
            A tensor (P, D).
        """
        state, object_ = as_tensor(pairs, self.states.device, "pairs").T
        words = [nnf.embedding(state, self.states), nnf.embedding(object_, self.objects)]
        return nnf.normalize(self.projection(torch.cat(words, dim=1)))

    def feasibility(self, seen=None):
        """Return feasibility ρ from the present embeddings (Eq. 3 to 5).

        Args:
            seen: (S, O) bool; None takes the model's own.

        Returns:
            A float64 array (S, O) in [-1, 1]; seen compositions are 1.

        Raises:
            ValueError: no seen mask is known, or one of another shape.
        """
        return feasibility_scores(self.states, self.objects, seen_of(self, seen),
                                  mix=self.settings.mix)

    # ---- training ----

    def prepare(self, seen, targets=None):
        """Configure the training objective. Call after `.to(device)`.

        In the closed world only seen compositions compete (Eq. 2). In the open world all compete,
        with margins on the unseen (Eq. 7 and 8), except in the first epoch, where only the seen
        compete, as in the published code.

        Args:
            seen: (S, O) bool, the compositions with training images.
            targets: training targets, (N,) or (N, 2). The logit adjustment needs them.

        Returns:
            The model.

        Raises:
            ValueError: a mask of another shape or type, targets that are missing, out of range or
                unseen.
        """
        seen = as_mask("seen", seen, *shape_of(self))
        if targets is None:
            if self.settings.logit_adjustment:
                raise ValueError("targets must be given for the logit adjustment, got None: call "
                                 "prepare(seen, targets)")
            targets = np.flatnonzero(seen)
        indices = as_targets(targets, *seen.shape).numpy()
        check_seen(seen, indices)
        # A composition without an image counts as one with one image.
        images = np.bincount(indices, minlength=seen.size).clip(1).reshape(seen.shape)
        adjustment = self.settings.logit_adjustment * (np.log(images) - np.log(images[seen]).mean())

        # Masks and offsets are made here and not in the loss: a captured step cannot index by a
        # mask, since the shape of the result would have to be read back.
        device = self.states.device
        self.seen = torch.as_tensor(seen, device=device)
        self.offsets = torch.as_tensor(adjustment, dtype=self.states.dtype, device=device)
        self.margins = torch.zeros_like(self.offsets)                 # α·ρ
        self.seen_pairs = self.seen.nonzero()                         # (P, 2)
        self.seen_offsets = self.offsets[self.seen]                   # (P,)
        # The place of each composition among the seen, (C,); that of an unseen one is past the end.
        place = self.seen.flatten().cumsum(0) - 1
        self.seen_place = torch.where(self.seen.flatten(), place, len(self.seen_pairs))
        self.only_seen_compete = True  # until `after_epoch`
        return self

    def loss(self, features, target):
        """Return the mean loss of images.

        Args:
            features: numbers (B, F).
            target: (B,) indices s * O + o, or (B, 2) state and object.

        Returns:
            A 0-dim tensor.

        Raises:
            ValueError: `prepare` was not called, features of another width, targets out of range,
                or unseen where only the seen compete.
        """
        check_prepared(self)
        target = as_targets(target, *shape_of(self), len(features))
        target = target.to(self.seen.device)
        if self.only_seen_compete:
            check_seen(self.seen, target)
        return self.loss_of(*self.products(features, self.compositions()), target)

    def loss_of(self, by_state, by_object, inverse_length, target):
        """Return the mean loss of images, a 0-dim tensor.

        Args:
            by_state, by_object, inverse_length: tensors (B, S), (B, O), (S, O), from `products`.
            target: int64 tensor (B,) on the model's device.
        """
        computed = (by_state, by_object, inverse_length)
        if self.only_seen_compete:
            scores = self.composition_scores(*computed, self.seen_pairs)    # (B, P)
            return compcos_loss(scores, self.seen_place[target], scale=self.settings.scale,
                                offsets=self.seen_offsets)
        scores = self.composition_scores(*computed)                         # (B, S, O)
        return compcos_loss(scores, target, scale=self.settings.scale, seen=self.seen,
                            margin=self.margins, offsets=self.offsets)

    def backward(self, features, target):
        """Add the gradients of `loss` to the parameters, computed for some images at a time.

        The scores of a large batch are never held at once. Nothing is checked, since a captured
        step cannot read values back.

        Args:
            features: tensor (B, F) on the model's device.
            target: int64 tensor (B,) there, indices s * O + o.

        Returns:
            The loss, a 0-dim tensor.

        Raises:
            ValueError: `prepare` was not called, or features of another width.
        """
        check_prepared(self)
        shared = self.products(features, self.compositions())
        competing = len(self.seen_pairs) if self.only_seen_compete else self.seen.numel()
        limit = TRAINING_SCORES.get(features.device.type, TRAINING_SCORES["cpu"])
        chunks = math.ceil(len(target) * competing / limit)
        if chunks == 1:  # the plain way is the same, and faster on a GPU
            loss = self.loss_of(*shared, target)
            loss.backward()
            return loss.detach()
        # Products are computed once a batch. Detached copies of them collect the gradients of all
        # chunks, which are then propagated to the parameters once.
        leaves = [value.detach().requires_grad_(value.requires_grad) for value in shared]
        by_state, by_object, inverse_length = leaves
        parts = zip(by_state.chunk(chunks), by_object.chunk(chunks), target.chunk(chunks))
        total = 0
        for states, objects, truth in parts:
            loss = self.loss_of(states, objects, inverse_length, truth)
            loss = loss * (len(truth) / len(target))  # its share of the mean
            loss.backward()
            total = total + loss.detach()
        used = [(value, leaf.grad) for value, leaf in zip(shared, leaves) if leaf.grad is not None]
        if used:  # parts of the model that are frozen have no gradient
            torch.autograd.backward(*zip(*used))
        return total

    def after_epoch(self, epoch):
        """Set the margins α·ρ of the next epoch from the present embeddings (Eq. 8).

        α grows linearly to `margin` at epoch `warmup`.

        Args:
            epoch: the epoch that has ended, 1, 2, ...

        Returns:
            True if the training step must be captured anew.
        """
        if self.settings.world == "closed" or self.settings.train_candidates == "seen":
            return False
        alpha = self.settings.margin * min(1.0, epoch / max(self.settings.warmup, 1))
        # In place: a captured step reads this tensor.
        self.margins.copy_(alpha * torch.as_tensor(self.feasibility()))
        was_first = self.only_seen_compete
        self.only_seen_compete = False
        return was_first

    def parameter_groups(self, lr):
        """Return Adam's two groups: word embeddings learn at `word_lr_factor` times the rate.

        Args:
            lr: learning rate of all but the word embeddings, above 0.

        Returns:
            A list of two dicts, `params` and `lr`.
        """
        return adam_groups(self, ("states", "objects"), lr * self.settings.word_lr_factor, lr)


class Ensemble(nn.Module):
    """Several CompCos, trained apart, whose scores are averaged. It is used as one model is.

    Members differ in initial weights and dropout; they share the order of the images. Methods take
    and return what those of `CompCos` do.

    Args:
        members: CompCos models of the same settings and sizes, at least one.
    """

    def __init__(self, members):
        super().__init__()
        self.members = nn.ModuleList(members)
        self.settings = members[0].settings
        self.feature_dim = members[0].feature_dim
        self.history = []
        self.checkpoint = None

    forward = CompCos.forward              # (B, F) -> (B, S, O)
    cosines = CompCos.cosines              # (B, F), (P, 2) -> (B, P)
    parameter_groups = CompCos.parameter_groups

    @property
    def states(self):
        """The state embeddings (S, V) of the first member."""
        return self.members[0].states

    @property
    def objects(self):
        """The object embeddings (O, V) of the first member."""
        return self.members[0].objects

    @property
    def seen(self):
        """The seen mask (S, O), which all members share."""
        return self.members[0].seen

    def compositions(self):
        """Return what all images share in scoring, a list with an entry for each member."""
        return [member.compositions() for member in self.members]

    def score(self, features, compositions, pairs=None):
        """Return the mean scores of the members, (B, S, O), or (B, P) with pairs (P, 2)."""
        scores = [member.score(features, shared, pairs)
                  for member, shared in zip(self.members, compositions)]
        return sum(scores) / len(scores)

    def feasibility(self, seen=None):
        """Return the mean feasibility of the members, an array (S, O)."""
        return np.mean([member.feasibility(seen) for member in self.members], axis=0)

    def prepare(self, seen, targets=None):
        """Configure the training objective of every member; see `CompCos.prepare`."""
        for member in self.members:
            member.prepare(seen, targets)
        return self

    def loss(self, features, target):
        """Return the sum of the members' losses, so that each gets its own gradient."""
        return sum(member.loss(features, target) for member in self.members)

    def backward(self, features, target):
        """Add the gradients of `loss` to the parameters; return the loss, a 0-dim tensor."""
        losses = []
        streams = []
        for member in self.members:
            with stream_of_its_own(features.device) as stream:
                losses.append(member.backward(features, target))
            streams.append(stream)
        for stream in filter(None, streams):  # None on a CPU
            torch.cuda.current_stream().wait_stream(stream)
        return sum(losses)

    def after_epoch(self, epoch):
        """Set the margins of each member; return True if the step must be captured anew."""
        return any([member.after_epoch(epoch) for member in self.members])


def build(state_vectors, object_vectors, feature_dim, settings):
    """Return a new CompCos, or an Ensemble of `settings.members` of them.

    Args:
        state_vectors, object_vectors: word vectors (S, V) and (O, V), finite.
        feature_dim: F, the numbers of an image, at least 1.
        settings: the Settings.

    Returns:
        A model on the CPU with random initial weights.

    Raises:
        ValueError: vectors of other shapes, or not finite.
    """
    members = [CompCos(state_vectors, object_vectors, feature_dim, settings)
               for _ in range(settings.members)]
    return members[0] if len(members) == 1 else Ensemble(members)


def check_prepared(model):
    """Raise ValueError unless a CompCos knows its training objective."""
    if model.offsets is None:
        raise ValueError("the model must be prepared before it is trained: call "
                         "model.prepare(seen, targets) first")


@contextmanager
def stream_of_its_own(device):
    """Run what is inside on a new stream of a GPU, so that small kernels of several run at once.

    Yields:
        The stream, for which the caller waits; None on other devices.
    """
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream


def adam_groups(model, parts, own_lr, lr):
    """Return Adam's two groups: weights of the named parts learn at `own_lr`, all others at `lr`.

    Args:
        model: a module.
        parts: attribute names, of the module or of modules in it.
        own_lr, lr: learning rates.
    """
    own = []
    rest = []
    for name, weight in model.named_parameters():
        group = rest if set(parts).isdisjoint(name.split(".")) else own
        group.append(weight)
    return [dict(params=own, lr=own_lr), dict(params=rest, lr=lr)]


def split_linear(linear, states, objects):
    """Return Linear([e_s; e_o]) as a sum a_s + b_o: a (S, H) with the bias, and b (O, H)."""
    of_states, of_objects = linear.weight.chunk(2, dim=1)
    return nnf.linear(states, of_states, linear.bias), nnf.linear(objects, of_objects)


# ---- the loss ----


def compcos_loss(cosines, target, *, scale, seen=None, margin=None, offsets=0.0):
    """Return the cross-entropy with feasibility margins on unseen compositions (Eq. 2, 7 and 8).

    The sign of the margin confuses people: a feasible composition has the LARGER margin, so its
    logit is lowered more, the softmax takes it for beaten, and training pushes it away LESS. With
    scale 1, α = 1 and cosine 0.5 for all of the true `wet dog`, the feasible `wet cat` (ρ = 0.8)
    and the infeasible `ripe dog` (ρ = -0.2), the logits are 0.5, 0.5 - 0.8 = -0.3 and 0.5 + 0.2 =
    0.7. The gradients on the two unseen cosines are their softmax shares:

    >>> cosines = torch.full((1, 1, 3), 0.5, requires_grad=True)
    >>> seen, margin = torch.tensor([[True, False, False]]), torch.tensor([[1.0, 0.8, -0.2]])
    >>> compcos_loss(cosines, torch.tensor([0]), scale=1.0, seen=seen, margin=margin).backward()
    >>> [round(share, 2) for share in cosines.grad.flatten().tolist()]
    [-0.63, 0.17, 0.46]

    Args:
        cosines: tensor (B, S, O), or (B, P) of chosen compositions.
        target: whole numbers (B,), s * O + o, or columns of the chosen.
        scale: 1 / T above 0, a number, or a 0-dim tensor that is learnt.
        seen: bool of shape (S, O) or (P,). None: all of the chosen are seen.
        margin: α·ρ, of the shape of seen or a number, which lowers the cosines of unseen
            compositions (Eq. 8). None: only the seen compete (Eq. 2).
        offsets: added to the logits of the seen (not in the paper), a tensor of the shape of seen
            or a number.

    Returns:
        The mean over the images, a 0-dim tensor.

    Raises:
        ValueError: other shapes, or an unseen target where only the seen compete.
    """
    target = as_tensor(target, cosines.device, "target").long()
    added = offsets
    if seen is not None:
        seen = as_tensor(seen, cosines.device, "seen")
        check_shape("seen", seen, cosines.shape[1:])
        # Logits are scale·cos + offsets where seen, scale·(cos - margin) elsewhere (Eq. 8).
        lowered = as_tensor(0.0 if margin is None else margin, cosines.device, "margin")
        added = torch.where(seen, offsets, -scale * lowered).to(cosines.dtype)
    logits = (scale * cosines).add_(added).flatten(1)
    if seen is not None and margin is None:
        check_seen(seen, target)
        logits = logits[:, seen.flatten()]
        target = (seen.flatten().cumsum(0) - 1)[target]  # its column among the seen
    return image_losses(logits, target).mean()


def image_losses(logits, target):
    """Return the loss of each image, the cross-entropy of Eq. 2 and 7.

    This is the place to change the loss. Training passes some images of a batch at a time, so the
    loss of an image must not depend on the others.

    Args:
        logits: tensor (B, P) of the P compositions that compete, all finite: all compositions, or
            the seen ones (in the closed world, and in the first epoch of the open world).
        target: int64 tensor (B,), the column of the true composition.

    Returns:
        A tensor (B,).
    """
    return nnf.cross_entropy(logits, target, reduction="none")


# ---- training ----


def fit(features, targets, state_vectors, object_vectors, *, validation=None, seen=None,
        settings=None, seed=0, device="auto", on_epoch=None, eager=False):
    """Train CompCos on images and return the model of the best epoch, in evaluation mode.

    In a notebook, set the environment variable GOMP_SPINCOUNT=10000 before torch is imported if
    other processes use the processor: idle threads of OpenMP otherwise spin, and a step takes
    several times as long.

    Args:
        features: numbers (N, F) of the training images, of any type, finite.
        targets: (N,) indices s * O + o, or (N, 2) state and object.
        state_vectors, object_vectors: word vectors (S, V) and (O, V), finite.
        validation: (features, targets) whose exact AUC chooses the epoch, among all compositions,
            or in the closed world among those that training and validation show. Where validation
            shows only seen or only unseen compositions, their accuracy chooses. None: the last
            epoch is taken, and nothing stops early.
        seen: (S, O) bool, compositions seen in training; None: those with training images.
        settings: a Settings; None: `Settings.strong()`.
        seed: whole number from 0 on, from which initial weights, order and dropout are drawn.
        device: "auto", "cpu", "cuda", "mps".
        on_epoch: function called after each epoch with {epoch, loss, validation, seconds}.
        eager: on CUDA, do not capture the training step as a graph.

    Returns:
        A CompCos, or an Ensemble with several members. `history` holds a row for each epoch.

    Raises:
        ValueError: arrays that do not fit each other, or a loss that is not finite.
    """
    settings = settings or Settings.strong()
    device = pick_device(device)
    shape = (len(state_vectors), len(object_vectors))
    features = as_tensor(features, name="features")
    check_shape("features", features, ("N", "F"))
    targets = as_targets(targets, *shape, len(features))
    seen = shown_by(targets, shape) if seen is None else as_mask("seen", seen, *shape)
    shown = None
    if validation is not None:
        validation_features, validation_targets = validation
        shown = shown_by(as_targets(validation_targets, *shape), shape)
    settings = resolve_candidates(settings, seen, shown)

    with reproducible(device, seed):
        model = build(state_vectors, object_vectors, features.shape[-1], settings).to(device)
        model.prepare(seen, targets)
        validate = None
        if validation is not None:
            candidates = seen | shown if settings.world == "closed" else None
            validate = validator(model, validation_features, validation_targets, candidates)
        for state in train_epochs(model, features, targets, validate, seed=seed, eager=eager):
            if on_epoch is not None:
                on_epoch(state["history"][-1])
    return finish(model, state)


def resolve_candidates(settings, seen, shown=None):
    """Return the settings with `train_candidates="auto"` resolved to "all" or "seen".

    The seen alone compete where they are at least half of all compositions and validation shows few
    unseen ones. Most of the unseen then exist, and as candidates they would be taught to be wrong;
    how wrong, by the margins, so few cannot tell.

    Args:
        settings: a TrainingSettings.
        seen: (S, O) bool.
        shown: (S, O) bool, the compositions that validation shows; None: "auto" is "all".
    """
    if getattr(settings, "train_candidates", None) != "auto":
        return settings
    chosen = "all"
    if shown is not None and seen.mean() >= 0.5 and (shown & ~seen).sum() < FEW_COMPOSITIONS:
        chosen = "seen"
    return replace(settings, train_candidates=chosen)


def validator(model, features, targets, candidates=None):
    """Return a function that gives the number by which the best epoch is chosen."""
    features, targets = as_examples(model, features, targets)
    return lambda: selection(evaluate_model(model, features, targets, candidates=candidates))


def selection(report):
    """Return the AUC of a report, or the accuracy of the half (seen, unseen) that has images."""
    for key in ("auc", "best_seen", "best_unseen"):
        if math.isfinite(report[key]):
            return report[key]
    return 0.0


@contextmanager
def reproducible(device, seed):
    """Seed the random numbers inside and let a CPU's sums be deterministic; restore both after."""
    seed = check_seed(seed)
    mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    # torch seeds all GPUs at once.
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(gpus):
        try:
            # Without this a CPU adds up the gradient of `table[index]` in the order in which its
            # threads come.
            torch.set_deterministic_debug_mode("warn" if device.type == "cpu" else "default")
            torch.utils.deterministic.fill_uninitialized_memory = False  # to fill it takes time
            torch.manual_seed(seed)
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            torch.utils.deterministic.fill_uninitialized_memory = fill


def finish(model, state):
    """Give a model the weights of the best epoch of a training state; return it, to evaluate."""
    model.load_state_dict(state["best"]["model"])
    model.history = state["history"]
    return model.eval()


def train_epochs(model, features, targets, validate=None, *, seed=0, state=None, eager=False):
    """Train a prepared model with Adam, an epoch at a time, as `model.settings` say.

    An epoch passes over the images as often as `min_epoch_steps` steps need, at least once. Its
    order, its dropout and all else that it draws come from (seed, epoch). So a training that goes
    on from a state of an earlier one gives the same numbers.

    Args:
        model: a model that keeps the contract of `lab.baselines.BaselineModel`, on its device.
        features: numbers (N, F).
        targets: (N,) or (N, 2).
        validate: function without arguments that returns the finite number to maximise. None: the
            last epoch is the best one, and nothing stops early.
        seed: whole number from 0 on.
        state: a state that an earlier call yielded, to go on from there; it is not changed.
        eager: on CUDA, do not capture the training step as a graph.

    Yields:
        After each epoch a copy of everything needed to resume after it: `epoch`; `history`, a row
        {epoch, loss, validation, seconds} for each epoch; `best`, its `epoch` and its weights,
        `model`; and `model`, `optimizer` and `ema` as they are now.

    Raises:
        ValueError: arrays that do not fit the model, a state of another training, or a loss that
            is not finite.
    """
    settings = model.settings
    features, targets = as_examples(model, features, targets)
    targets = targets.to(features.device)
    size = min(settings.batch_size, len(features))
    passes = max(1, math.ceil(settings.min_epoch_steps * size / len(features)))
    optimizer = adam(model, features.device)
    ema = EMA(model, settings.ema_decay)
    if state is None:
        state = dict(epoch=0, history=[], best=dict(epoch=0))
    else:
        check_state(state, model, optimizer, validate)
        restore(state, model, optimizer, ema)
    run_step, total = make_step(model, optimizer, features, targets, eager=eager)
    for epoch in range(state["epoch"] + 1, settings.epochs + 1):
        since_best = state["epoch"] - state["best"]["epoch"]
        if settings.patience and since_best >= settings.patience:
            break
        began = time.monotonic()
        order = draw_order(len(features), passes, seed, epoch).to(features.device)
        model.train()
        total.zero_()
        for batch in order.split(size):
            run_step(batch)
            ema.update()
        loss = float(total) / len(order)
        if not math.isfinite(loss):
            raise ValueError(f"training diverged in epoch {epoch}: the loss is {loss}; lower lr "
                             f"({settings.lr:g}) or scale, or look for outliers in the features")
        if model.after_epoch(epoch):
            run_step, total = make_step(model, optimizer, features, targets, eager=eager)
        state = finish_epoch(state, model, optimizer, ema, loss, validate)
        state["history"][-1]["seconds"] = time.monotonic() - began
        yield state


def draw_order(count, passes, seed, epoch):
    """Seed an epoch by (seed, epoch) and return its order of images, (count * passes,).

    Passes follow one another without a short batch between them.
    """
    torch.manual_seed((seed << 20) + epoch)
    return torch.cat([torch.randperm(count) for _ in range(passes)])


def finish_epoch(state, model, optimizer, ema, loss, validate):
    """Return a copy of everything needed to resume after this epoch, a new state."""
    epoch = state["epoch"] + 1
    history = state["history"]
    best = state["best"]
    value = math.nan
    trained = copy.deepcopy(model.state_dict())
    torch._foreach_copy_(ema.weights, ema.average)  # the average validates
    if validate is not None:
        value = float(validate())
    if validate is None or epoch == 1 or value > history[best["epoch"] - 1]["validation"]:
        best = dict(epoch=epoch, model=copy.deepcopy(model.state_dict()))
    model.load_state_dict(trained)
    row = dict(epoch=epoch, loss=loss, validation=value)
    return dict(epoch=epoch, history=[*history, row], best=best, model=trained,
                optimizer=copy.deepcopy(optimizer.state_dict()["state"]),
                ema=copy.deepcopy(ema.average))


def restore(state, model, optimizer, ema):
    """Bring model, optimiser and average to where a state ended."""
    model.load_state_dict(state["model"])
    # A copy, since the optimiser changes its tensors in place and the state must stay as it is.
    moments = copy.deepcopy(state["optimizer"])
    optimizer.load_state_dict(optimizer.state_dict() | dict(state=moments))
    torch._foreach_copy_(ema.average, state["ema"])  # also from another device
    ema.steps = max(int(moment["step"]) for moment in moments.values())
    model.after_epoch(state["epoch"])  # margins and the like are made anew


def check_state(state, model, optimizer, validate):
    """Raise ValueError unless a state is one that this training may have yielded.

    It is compared with the form of a state of the same epoch, made here.
    """
    weights = model.state_dict()
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    row = dict(loss=0.0, validation=0.0 if validate else math.nan, seconds=0.0)
    moments = {}
    try:
        epochs = range(1, min(state["epoch"], model.settings.epochs) + 1)
        best_epoch = int(state["best"]["epoch"])
        for index, moment in state["optimizer"].items():  # a frozen parameter has no entry
            weight = parameters[index]
            moments[index] = dict(step=torch.zeros(()), exp_avg=weight, exp_avg_sq=weight)
        form = dict(epoch=len(epochs), history=[dict(epoch=epoch, **row) for epoch in epochs],
                    best=dict(epoch=best_epoch, model=weights), model=weights, optimizer=moments,
                    ema=[*model.parameters()])
        steps = [int(moment["step"]) for moment in state["optimizer"].values()]
        fits = form_of(state) == form_of(form) and best_epoch in epochs and min(steps) > 0
    except Exception:  # a state from elsewhere may hold anything
        fits = False
    if not fits:
        raise ValueError("cannot resume: state must be one that this training yielded, with the "
                         f"same data, model and settings and at most {model.settings.epochs} "
                         "epochs: give such a state, or begin anew")


def form_of(value):
    """Return the types and shapes of all that nested dicts and lists hold, and whole numbers."""
    if isinstance(value, dict):
        return {key: form_of(part) for key, part in value.items()}
    if isinstance(value, list):
        return [form_of(part) for part in value]
    if torch.is_tensor(value):
        return value.dtype, value.shape
    if isinstance(value, float):
        return float, math.isfinite(value)
    return type(value), value


class EMA:
    """An exponential moving average of the weights over steps, smoother than the weights.

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
        """Include the weights after one more step."""
        self.steps += 1
        decay = min(self.greatest, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.average, self.weights, 1 - decay)


def adam(model, device):
    """Return Adam over a model's parameters, ready for a captured step on CUDA."""
    settings = model.settings
    groups = model.parameters()
    if hasattr(model, "parameter_groups"):
        groups = model.parameter_groups(settings.lr)
    return torch.optim.Adam(groups, lr=settings.lr, weight_decay=settings.weight_decay, fused=True,
                            capturable=device.type == "cuda")


def make_step(model, optimizer, features, targets, *, eager=False):
    """Return a training step and the sum of losses that it adds to.

    On CUDA the step is captured as a graph after three eager ones and replayed, unless `eager`.

    Args:
        model: a prepared model; `model.backward` is used where there is one, else `model.loss`.
        optimizer: from `adam`.
        features, targets: tensors (N, F) and (N,) on the model's device.

    Returns:
        `step(index (B,))`, which trains on these images, and a 0-dim tensor.
    """
    total = torch.zeros((), device=features.device, dtype=features.dtype)

    def step(index):
        optimizer.zero_grad(set_to_none=True)
        if hasattr(model, "backward"):
            loss = model.backward(features[index], targets[index])
        else:
            loss = model.loss(features[index], targets[index])
            loss.backward()
        optimizer.step()
        total.add_(loss.detach() * len(index))

    if features.device.type != "cuda" or eager:
        return step, total
    return captured(step), total


def captured(step):
    """Return a step that runs as CUDA graphs, one for each length of a batch.

    Shapes are fixed in a graph, so the shorter batch that ends an epoch has a graph of its own.
    """
    # A stream of this step alone: torch keeps the work space of cuBLAS by stream, and may free it
    # with the first graph that was captured there.
    side = torch.cuda.Stream()
    graphs = {}  # length of a batch -> (graph, the index that it reads)
    eager_steps = 0

    def run(index):
        nonlocal eager_steps
        if eager_steps < STEPS_BEFORE_CAPTURE:
            eager_steps += 1
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), warnings.catch_warnings():
                # Adam warns that this step is not captured.
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


# ---- evaluation and prediction ----


def score_blocks(model, features):
    """Yield (slice, scores (B, C)) over images (N, F), as many at once as memory allows.

    The model is left in evaluation mode.
    """
    model.eval()
    compositions = model.compositions()
    limit = EVALUATION_SCORES.get(features.device.type, EVALUATION_SCORES["cpu"])
    size = max(1, limit // math.prod(shape_of(model)))
    for start in range(0, len(features), size):
        part = slice(start, start + size)
        yield part, model.score(features[part], compositions).flatten(1)


@torch.no_grad()
def sweep(model, features, targets, seen, candidates, topk=1):
    """Score images once, against several sets of candidates.

    Scores are reduced where they are made: for each image only the best seen and the best unseen
    candidates leave the device.

    Args:
        model: on its device; it is left in evaluation mode.
        features: tensor (N, F) on that device.
        targets: int64 indices (N,).
        seen: array (S, O) bool.
        candidates: {name: array (S, O) or (C,) bool, or None for all}.
        topk: k.

    Returns:
        {name: (BiasSweep, best)}, where best is (seen scores, seen columns, unseen scores, unseen
        columns), (N, k) each.
    """
    topk = min(topk, seen.size)
    is_seen = torch.as_tensor(seen.ravel(), device=features.device)
    masks = {name: candidates_of(model, mask).ravel() for name, mask in candidates.items()}
    hiding = {}  # name -> (C,) each, which leave only the seen or only the unseen candidates
    for name, mask in masks.items():
        allowed = torch.as_tensor(mask, device=features.device)
        hiding[name] = [torch.where(allowed & group, 0.0, -torch.inf)
                        for group in (is_seen, ~is_seen)]
    blocks = {name: [] for name in candidates}
    for _, scores in score_blocks(model, features):
        for name, (hide_unseen, hide_seen) in hiding.items():
            blocks[name].append([*best_of(scores + hide_unseen, topk),
                                 *best_of(scores + hide_seen, topk)])
    result = {}
    for name, mask in masks.items():
        best = [torch.cat(parts).cpu().numpy() for parts in zip(*blocks[name])]
        swept = BiasSweep(seen.ravel(), candidates=mask, pairs=index_pairs(seen.shape), topk=topk)
        swept.update_topk(*best, targets)
        result[name] = (swept, best)
    return result


def best_of(scores, topk):
    """Return the k best scores and columns (B, k) of (B, P), the lower column first among equals.

    Places without a column have -inf. `scores` is changed.
    """
    best = []
    columns = []
    for _ in range(topk):
        value, column = scores.max(1)
        best.append(value)
        columns.append(column)
        scores.scatter_(1, column[:, None], -torch.inf)
    return torch.stack(best, 1), torch.stack(columns, 1)


def index_pairs(shape):
    """Return state and object of every composition, (C, 2), in the order s * O + o."""
    return np.argwhere(np.ones(shape))


def evaluate_model(model, features, targets, *, seen=None, candidates=None, protocol="exact",
                   confidence=None, unit="image", topk=1):
    """Evaluate a model on images. All scores are never held at once.

    Args:
        model: a trained model; it is left in evaluation mode.
        features: numbers (N, F), finite.
        targets: (N,) indices s * O + o, or (N, 2) state and object.
        seen: (S, O) bool; None takes the model's own.
        candidates: (S, O) or (C,) bool, the compositions that may be answered; None: all.
        protocol, confidence, unit: as in `evaluate.BiasSweep.report`.
        topk: an image counts as right if the truth is among so many answers, at least 1.

    Returns:
        The report of `evaluate.BiasSweep.report`, a dict.

    Raises:
        ValueError: arrays that do not fit the model, or a topk below 1.
    """
    topk = check_value("topk", topk, int, least=1)
    seen = seen_of(model, seen)
    features, targets = as_examples(model, features, targets)
    swept, _ = sweep(model, features, targets, seen, dict(given=candidates), topk)["given"]
    return swept.report(protocol, confidence, unit)


def predict(model, features, *, k=5, candidates=None, bias=0.0, seen=None):
    """Return the k best compositions of each image.

    Args:
        model: a trained model; it is left in evaluation mode.
        features: numbers (N, F), finite.
        k: answers for each image, at least 1; no more than the candidates are given.
        candidates: (S, O) or (C,) bool, the compositions that may be answered; None: all.
        bias: added to the scores of unseen compositions to rank them, not to the scores returned;
            finite.
        seen: (S, O) bool, which a bias needs; None takes the model's own.

    Returns:
        Indices s * O + o (N, k), int64, and their scores (N, k), best first, as arrays.

    Raises:
        ValueError: arrays that do not fit the model, or numbers out of range.
    """
    return rank_compositions(model, features, k=k, candidates=candidates, bias=bias, seen=seen)[:2]


@torch.no_grad()
def rank_compositions(model, features, *, k, candidates=None, bias=0.0, seen=None, temperature=1.0):
    """Return what `predict` returns, and the probabilities (N, k) of these answers.

    They are the softmax of (score + bias·[unseen]) / temperature over the candidates.
    """
    k = check_value("k", k, int, least=1)
    bias = check_value("bias", bias, float)
    features = as_images(model, features)
    check_finite("features", features)
    allowed = candidates_of(model, candidates)
    offset = np.where(allowed, 0.0, -np.inf)
    if bias:
        offset[~seen_of(model, seen)] += bias
    offset = torch.as_tensor(offset.ravel()).to(features)
    k = min(k, int(allowed.sum()))
    blocks = []
    for _, scores in score_blocks(model, features):
        ranked = scores + offset
        indices = ranked.topk(k, dim=1).indices
        probabilities = (ranked / temperature).softmax(1)
        blocks.append((indices, scores.gather(1, indices), probabilities.gather(1, indices)))
    return tuple(torch.cat(parts).cpu().numpy() for parts in zip(*blocks))


# ---- files ----


def save(model, path_or_file, **extra):
    """Write a model into a file, whole or not at all.

    Args:
        model: a CompCos or an Ensemble.
        path_or_file: a path, or a file open for bytes.
        extra: further contents, plain values and tensors; `load` gives them as `checkpoint`.

    Raises:
        OSError: the file cannot be written.
    """
    contents = dict(format=FORMAT, model_settings=asdict(model.settings),
                    vectors=[model.states.detach(), model.objects.detach()],
                    feature_dim=model.feature_dim, weights=model.state_dict(),
                    seen=model.seen, history=model.history, extra=extra)
    buffer = io.BytesIO()  # torch.save itself turns errors of a file into others
    torch.save(contents, buffer)
    if hasattr(path_or_file, "write"):
        path_or_file.write(buffer.getvalue())
        return
    path = Path(path_or_file)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(buffer.getbuffer())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load(path, device="cpu"):
    """Return the model that `save` wrote, in evaluation mode.

    Args:
        path: the file, such as a run's `best.pt`.
        device: "auto", "cpu", "cuda", "mps".

    Returns:
        A CompCos or an Ensemble with its settings, seen mask and history; `checkpoint` is a dict of
        what else the file holds. `feasibility`, `evaluate_model` and `predict` work.

    Raises:
        OSError: no such file.
        ValueError: a damaged file, or one that holds something else.
    """
    os.stat(path)  # the error names a file that is not there
    names = check_archive(path)
    try:
        if not names:
            raise ValueError("it is no archive")
        contents = torch.load(path, map_location="cpu", weights_only=True)
        if contents["format"] != FORMAT:
            raise ValueError("it has the format of another version")
        settings = Settings(**contents["model_settings"])
        states, objects = contents["vectors"]
        model = build(states, objects, contents["feature_dim"], settings).to(states.dtype)
        model.load_state_dict(contents["weights"])
        for member in getattr(model, "members", [model]):
            member.seen = contents["seen"]
        model.history = contents["history"]
        model.checkpoint = contents["extra"]
    except Exception as error:  # torch and pickle raise all sorts for what they cannot read
        problem = error if isinstance(error, ValueError) else type(error).__name__
        raise ValueError(f"{path} must be a file of this version's save(), such as a best.pt "
                         f"({problem}): train anew, or restore the file") from None
    return model.to(pick_device(device)).eval()


def check_archive(path):
    """Return the names in an undamaged zip archive (.npz, torch.save), [] for any other file.

    ValueError: the archive is damaged. torch.load itself compares no checksums, and reads
    uninitialised memory where a member is wrongly marked as a folder.
    """
    try:
        if not zipfile.is_zipfile(path):
            return []
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            for member in archive.infolist():
                is_folder = member.external_attr & FOLDER_BIT
                if names.count(member.filename) > 1 or is_folder and not member.is_dir():
                    raise ValueError(f"wrong entry of {member.filename}")
                with archive.open(member) as file:
                    while file.read(1 << 20):  # at the end the checksum is compared
                        pass
    except Exception as error:  # zipfile and zlib raise many kinds
        raise ValueError(f"{path} is damaged ({error!r}): make or fetch it again") from None
    return names


CompCos.load = staticmethod(load)


def main(argv=None):
    """Train and evaluate, or predict: run the command, which lies in lab/ beside this file."""
    from lab.run import main as run_command
    run_command(argv)


if __name__ == "__main__":
    main()
