"""CompCos: the model, its losses, prediction, and the command that trains and evaluates it (paper,
Sec. 3).

Shapes: N images, B images of a batch, S states, O objects, C = S*O compositions, P chosen pairs, D
shared space, F features, K members. A composition (s, o) has the index s * O + o.
"""

import argparse
import csv
import fnmatch
import glob
from functools import partial
from pathlib import Path
from typing import NamedTuple

import common

if __name__ == "__main__":
    common.wait_gently()  # before torch is imported

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as nnf

import data
import experiment
import features as image_features
import train
from feasibility import MIXES, feasibility_scores


NEEDED = dict(  # of a checkpoint's parts, to score as the trained model did
    settings=dict(backbone=str),
    config=dict(feature_dim=int, hidden=int, dropout=(float, int), dim=int, unit_images=bool))


class Halves(NamedTuple):
    """φ(s, o) = a_s + b_o of all compositions, without a matrix of them."""

    of_state: torch.Tensor          # a (S, D)
    of_object: torch.Tensor         # b (O, D)
    inverse_length: torch.Tensor    # 1 / |a_s + b_o| (S, O)


class CompCos(nn.Module):
    """Images and compositions in one space, compared by cosine (Eq. 1).

    `state_vectors` (S, V) and `object_vectors` (O, V) initialise φ's primitive embeddings, which
    are trained; ω is Linear(F, hidden), LayerNorm, ReLU, Dropout, Linear(hidden, D). `dim` is D;
    None, as published: that of the vectors. `unit_images=False` leaves ω(x) its length, which then
    carries confidence: `score` gives |ω(x)| times the cosine. ValueError: vectors of other shapes
    or not finite.
    """

    def __init__(self, state_vectors, object_vectors, feature_dim, *, hidden=768, dropout=0.5,
                 dim=None, unit_images=True):
        super().__init__()
        states, objects = train.primitive_vectors(state_vectors, object_vectors)
        vector_dim = states.shape[1]
        dim = dim or vector_dim
        self.config = dict(feature_dim=feature_dim, hidden=hidden, dropout=dropout, dim=dim,
                           unit_images=unit_images)
        # of a loaded model: vocabulary, seen, feasibility, threshold, bias, settings
        self.checkpoint = None
        self.states = nn.Parameter(states)    # φ of the primitives, (S, V)
        self.objects = nn.Parameter(objects)  # (O, V)
        self.projection = nn.Linear(2 * vector_dim, dim)  # W: [φ(s); φ(o)] -> φ(s, o)
        self.image_embedder = nn.Sequential(  # ω
            nn.Linear(feature_dim, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(hidden, dim))
        self.training_loss = None  # set by set_training
        self.register_buffer("prior", None)  # (S, O), added to the scores; set by after_training

    @classmethod
    def load(cls, path, device="cpu"):
        """The model of a `best.pt`, in evaluation mode; no data is needed. Its `checkpoint` is what
        else the file holds.

        A file of several members gives `Members`, which score, predict and explain as one model
        does.
        """
        checkpoint = experiment.load_best(path, cls.__name__)
        for part, kinds in NEEDED.items():
            for name, kind in kinds.items():
                if not isinstance(checkpoint[part].get(name), kind):
                    raise ValueError(f"{path} is damaged: no {name} in its {part}; train anew, "
                                     "or restore the file")
        weights = {}
        for name, tensor in checkpoint.pop("weights").items():
            if "training_loss." not in name:  # what a loss of your own has learnt scores nothing
                weights[name] = tensor
        try:
            states = weights_of_first(weights, "states")
            objects = weights_of_first(weights, "objects")
            names = (checkpoint["states"], checkpoint["objects"])
            if (len(states), len(objects)) != tuple(map(len, names)):
                raise TypeError("they are of other states or objects")
            model = build(states, objects, checkpoint["config"])
            if weights_of_first(weights, "prior") is not None:
                model.set_prior(torch.zeros(len(states), len(objects)))
            model.load_state_dict(weights)
        except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[-1].strip()
            raise ValueError(f"{path}: its weights do not fit its config, or not this "
                             f"version of the model ({why})") from None
        model.checkpoint = checkpoint
        return model.to(image_features.pick_device(device)).eval()

    def forward(self, features):
        """Cosines (B, S, O) of images (B, F) with every composition, factorised: no (C, D) matrix
        is made; plus the prior, where one was set.

        For images of unit length the cosines lie in [-1, 1] in evaluation mode. Where the halves of
        φ(s, o) are nearly opposite, ε = |a_s + b_o| / |a_s| being small, float32 leaves an error of
        about 2e-7 / ε, so 0.2 at ε = 1e-6: as much as that of the plain form, whose sum cancels
        alike. In training mode a cosine may lie outside [-1, 1] by this error.
        """
        return self.score(features, self.compositions())

    def compositions(self):
        """What all images share (`Halves`)."""
        of_state, of_object = self.projection.weight.chunk(2, dim=1)
        a = nnf.linear(self.states, of_state, self.projection.bias)
        b = nnf.linear(self.objects, of_object)
        # |a_s + b_o|² = |a_s|² + |b_o|² + 2 a_s·b_o, in float64: where a_s is nearly -b_o the sum
        # cancels, and float32 has no digits left (MPS has no float64).
        wide = torch.float32 if a.device.type == "mps" else torch.float64
        x = a.to(wide)
        y = b.to(wide)
        squared = x.square().sum(1, keepdim=True) + y.square().sum(1) + 2 * x @ y.T  # (S, O)
        return Halves(a, b, squared.clamp_min(1e-24).rsqrt().to(a.dtype))

    def score(self, features, compositions):
        """Cosines (B, S, O) = (x·a_s + x·b_o) / |a_s + b_o| for unit x = ω(image), from
        `compositions()`; and the prior, where one was set."""
        by_state, by_object = products(self.embed_images(features), compositions)
        sums = by_state[:, :, None] + by_object[:, None, :]
        scores = sums * compositions.inverse_length
        if self.config["unit_images"] and not self.training:
            scores.clamp_(-1, 1)  # rounding may lead beyond, see forward
        if self.prior is not None:
            scores += self.prior
        return scores

    def cosines(self, features, pairs):
        """Cosines (B, P) of images (B, F) with chosen compositions, pairs (P, 2) int."""
        compositions = self.compositions()
        pairs = as_pairs(pairs, features.device)
        # unlike a[pairs[:, 0]], an embedding look-up has a deterministic gradient on GPUs
        of_state = nnf.embedding(pairs[:, 0], compositions.of_state)
        of_object = nnf.embedding(pairs[:, 1], compositions.of_object)
        chosen = of_state + of_object  # (P, D)
        return self.embed_images(features) @ nnf.normalize(chosen).T

    def embed_images(self, features):
        """ω: (B, F) -> (B, D), of unit length unless the model was made with
        `unit_images=False`."""
        embedded = self.image_embedder(features)
        if self.config["unit_images"]:
            embedded = nnf.normalize(embedded)
        return embedded

    def embed_compositions(self, pairs):
        """φ in the plain form W [φ(s); φ(o)]: pairs (P, 2) int -> (P, D), unit length."""
        pairs = as_pairs(pairs, self.states.device)
        state = nnf.embedding(pairs[:, 0], self.states)
        object_ = nnf.embedding(pairs[:, 1], self.objects)
        primitives = torch.cat([state, object_], dim=1)  # (P, 2V)
        return nnf.normalize(self.projection(primitives))

    def feasibility(self, seen, *, mix="mean"):
        """ρ (S, O) in [-1, 1] of Eq. 3-5 from the present primitive embeddings, a NumPy array; seen
        (S, O) bool."""
        return feasibility_scores(self.states, self.objects, seen, mix=mix)

    def set_training(self, seen, **settings):
        """Say how the model is to be trained: `seen` (S, O) bool and the keywords of
        `TrainingLoss`. Returns the model."""
        self.training_loss = TrainingLoss(self, seen, **settings)
        return self

    def loss(self, features, target):
        """What training minimises, of features (B, F) and targets (B,); `set_training` comes
        first."""
        return self.training_loss(self, features, target)

    def after_epoch(self, epoch):
        """Take the feasibility of the present embeddings for the margins of the epochs to come;
        epoch = 1, 2, ..."""
        self.training_loss.after_epoch(self, epoch)

    def set_prior(self, prior):
        """Add `prior` (S, O) to all scores from now on; None: nothing."""
        self.prior = prior

    def after_training(self, validate):
        """Choose what `choose_prior` chooses, where the training settings ask for it."""
        return choose_prior(self, self.training_loss, validate)

    def parameter_groups(self, lr):
        """Adam's groups: the word embeddings learn at `word_rate` times the rate of the rest."""
        word_rate = self.training_loss.word_rate
        if word_rate == 1:
            return [dict(params=list(self.parameters()), lr=lr)]
        words = [self.states, self.objects]
        rest = []  # with what a loss of your own may learn
        for name, parameter in self.named_parameters():
            if name not in ("states", "objects"):
                rest.append(parameter)
        return [dict(params=rest, lr=lr), dict(params=words, lr=lr * word_rate)]


class Members(nn.Module):
    """Several CompCos, trained apart, whose scores are averaged: the same contract as one.

    Each has its own initial weights and its own draws; they share the order of the images.
    """

    def __init__(self, members):
        super().__init__()
        self.members = nn.ModuleList(members)
        self.config = members[0].config | dict(members=len(members))
        self.checkpoint = None

    @property
    def states(self):
        """(S, V) of the first member."""
        return self.members[0].states

    @property
    def objects(self):
        """(O, V) of the first member."""
        return self.members[0].objects

    def forward(self, features):
        """(B, F) -> (B, S, O)."""
        return self.score(features, self.compositions())

    def compositions(self):
        """What all images share, of each member."""
        return [member.compositions() for member in self.members]

    def score(self, features, compositions):
        """(B, F) -> (B, S, O), the mean over the members."""
        total = self.members[0].score(features, compositions[0])
        for member, shared in zip(self.members[1:], compositions[1:]):
            total += member.score(features, shared)
        return total / len(self.members)

    def cosines(self, features, pairs):
        """(B, F), (P, 2) -> (B, P), the mean over the members."""
        return torch.stack([member.cosines(features, pairs) for member in self.members]).mean(0)

    def feasibility(self, seen, *, mix="mean"):
        """(S, O), the mean over the members."""
        return np.mean([member.feasibility(seen, mix=mix) for member in self.members], axis=0)

    def set_training(self, seen, **settings):
        """As that of CompCos, for every member."""
        for member in self.members:
            member.set_training(seen, **settings)
            member.training_loss.is_alone = False
        return self

    def loss(self, features, target):
        """The sum of the members' losses: the gradient of each is what it would be alone."""
        losses = [partial(member.loss, features, target) for member in self.members]
        return torch.stack(side_by_side(losses, features.device)).sum()

    def after_epoch(self, epoch):
        """Each member's margins come from its own embeddings."""
        for member in self.members:
            member.after_epoch(epoch)

    def set_prior(self, prior):
        """As that of CompCos, for every member."""
        for member in self.members:
            member.set_prior(prior)

    def after_training(self, validate):
        """As that of CompCos, for all members together."""
        return choose_prior(self, self.members[0].training_loss, validate)

    def parameter_groups(self, lr):
        """The members' groups, those of one rate together."""
        together = {}
        for member in self.members:
            for group in member.parameter_groups(lr):
                together.setdefault(group["lr"], []).extend(group["params"])
        return [dict(params=params, lr=rate) for rate, params in together.items()]


def as_pairs(pairs, device):
    """The (P, 2) int64 tensor of what is given as states and objects, or a ValueError."""
    pairs = train.as_tensor(pairs, device)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not is_integer(pairs):
        raise ValueError(f"pairs are {pairs.dtype} {tuple(pairs.shape)}: expected integers (P, 2), "
                         "the state and the object of each")
    return pairs.long()


def as_seen(seen, model):
    """The seen compositions (S, O) as a bool tensor on the model's device, or a ValueError."""
    seen = train.as_tensor(seen, model.states.device)
    shape = (len(model.states), len(model.objects))
    if seen.dtype != torch.bool or seen.shape != shape or not seen.any():
        raise ValueError(f"seen is {seen.dtype} {tuple(seen.shape)} with {int(seen.sum())} seen: "
                         f"expected bool {shape}, states by objects, one or more seen")
    return seen


def is_integer(tensor):
    """Whether a tensor holds integers; bool are none."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def products(embedded, halves):
    """x·a_s (B, S) and x·b_o (B, O) of embedded images x (B, D) with `Halves`."""
    return embedded @ halves.of_state.T, embedded @ halves.of_object.T


def side_by_side(functions, device):
    """The tensor or tensors that each function gives; on CUDA on streams of their own, so that
    small kernels share the GPU."""
    if device.type != "cuda" or len(functions) == 1:
        return [function() for function in functions]
    main = torch.cuda.current_stream()
    results = []
    streams = []
    for function in functions:
        stream = torch.cuda.Stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            results.append(function())
        streams.append(stream)
    for stream, result in zip(streams, results):
        main.wait_stream(stream)
        for tensor in [result] if torch.is_tensor(result) else result:
            # Else its memory may be used again on its own stream while it is still read here.
            tensor.record_stream(main)
    return results


def build(state_vectors, object_vectors, config):
    """A CompCos of these settings, or `Members` where config["members"] is above 1."""
    of_member = dict(config)
    count = of_member.pop("members", 1)
    if count == 1:
        return CompCos(state_vectors, object_vectors, **of_member)
    return Members([CompCos(state_vectors, object_vectors, **of_member) for _ in range(count)])


def weights_of_first(weights, name):
    """A tensor of a state dict of one model, or of the first of several members."""
    return weights.get(name, weights.get(f"members.0.{name}"))


# ---- the loss ----


def compcos_loss(cosines, target, *, scale, seen, margin=None, counts=None, mixed=None):
    """Cross-entropy over compositions with feasibility margins on the unseen ones (Eq. 2, 7 and 8):
    a 0-dim tensor.

    Tensors or arrays: cosines (B, S, O); target (B,) int in s * O + o; scale = 1 / T > 0; seen
    (S, O) bool. margin (S, O) = α·ρ lowers the cosines of unseen compositions and is ignored where
    seen; None: only the seen compete. counts (S, O), not in the paper, is added to the logits of
    the seen: how often each is met in training. mixed, not in the paper, is two tensors (second
    target (B,), share (B,)) for images that are mixtures: the truth of each is its target to the
    share, its second target to 1 - share. ValueError: other shapes or kinds, or an unseen target
    where only the seen compete.

    The sign confuses people: a feasible composition has the LARGER margin, and a lowered logit is
    one that the softmax already takes for beaten, so training pushes it away LESS. With scale 1, α
    = 1 and cosine 0.5 for all of the true `wet dog`, the feasible `wet cat` (ρ = 0.8) and the
    infeasible `ripe dog` (ρ = -0.2), the logits are 0.5, 0.5 - 0.8 = -0.3 and 0.5 + 0.2 = 0.7; the
    gradients on the two unseen cosines are their softmax shares:

    >>> cosines = torch.full((1, 1, 3), 0.5, requires_grad=True)
    >>> seen, margin = torch.tensor([[True, False, False]]), torch.tensor([[1.0, 0.8, -0.2]])
    >>> compcos_loss(cosines, torch.tensor([0]), scale=1.0, seen=seen, margin=margin).backward()
    >>> [round(share, 2) for share in cosines.grad.flatten().tolist()]
    [-0.63, 0.17, 0.46]
    """
    if not scale > 0:
        raise ValueError(f"scale = 1 / T is {scale}: expected a positive number")
    cosines = train.as_tensor(cosines)
    target = train.as_tensor(target, cosines.device)
    seen = train.as_tensor(seen, cosines.device)
    fits = cosines.ndim == 3 and seen.shape == cosines.shape[1:] and len(cosines) == target.numel()
    if not fits or target.ndim != 1 or not is_integer(target) or seen.dtype != torch.bool:
        raise ValueError(f"cosines {tuple(cosines.shape)}, target {target.dtype} "
                         f"{tuple(target.shape)}, seen {seen.dtype} {tuple(seen.shape)}: expected "
                         "(B, S, O), integers (B,), bool (S, O)")
    logits = scale * (cosines - _full_margin(seen, margin, cosines.dtype))
    if counts is not None:
        counts = train.as_tensor(counts, seen.device).to(logits.dtype)
        logits = logits + torch.where(seen, counts, 0.0)
    logits = logits.flatten(1)
    target = target.long()
    if margin is None:
        logits, target, mixed = of_the_seen(logits, target, mixed, seen.flatten())
    return mean_loss(logits, target, mixed)


def of_the_seen(logits, target, mixed, seen):
    """Where only the seen (C,) compete: their logits (B, P) of all (B, C), and target (B,) and
    `mixed` as columns of these. ValueError: an unseen target.

    The unseen have no logit then, for an infinite one is more than some losses bear.
    """
    if not seen[target].all():
        raise ValueError("a target is an unseen composition, and without a margin only the seen "
                         "compete: expected seen targets, or a margin")
    position = seen.cumsum(0) - 1  # of a composition among the seen
    if mixed is not None:
        second, share = mixed
        mixed = (position[second], share)
    return logits[:, seen], position[target], mixed


def image_losses(logits, target):
    """The loss of each image (B,), here the cross-entropy of Eq. 2 and 7.

    logits (B, P) of the P compositions that compete, all finite: all C, or the seen alone (in the
    closed world, with `rivals` "seen", and in the first epoch of the open world). target (B,) int:
    the column of the truth, whose logit should be the greatest.
    """
    return nnf.cross_entropy(logits, target, reduction="none")


def mean_loss(logits, target, mixed=None):
    """The mean of `image_losses` over a batch; `mixed` as in `compcos_loss`."""
    losses = image_losses(logits, target)
    if mixed is not None:
        second, share = mixed
        losses = share * losses + (1 - share) * image_losses(logits, second)
    return losses.mean()


def _full_margin(seen, margin, dtype):
    """What Eq. 8 takes from each cosine: nothing where seen, else the margin, or everything where
    there is none yet."""
    if margin is None:
        margin = torch.inf
    margin = train.as_tensor(margin, seen.device).to(dtype)
    if margin.ndim and margin.shape != seen.shape:
        raise ValueError(f"margin has shape {tuple(margin.shape)}: expected that of seen, "
                         f"{tuple(seen.shape)}")
    return torch.where(seen, 0.0, margin).to(dtype)


def softmax_minus_truth(logits, truths):
    """The summed cross-entropy of logits (b, C), and the denominators (b, 1) of their softmax.

    `logits` is overwritten by its gradient, softmax - truth, times these denominators, which the
    caller divides out at the end: one pass fewer. truths: columns (b, 1) and their weights (b, 1),
    or one column and None.
    """
    logit = 0
    for column, weight in truths:
        value = logits.gather(1, column)
        logit = value if weight is None else logit + weight * value
    # Cross-entropy = log Σ exp(z) - z(truth), with the greatest logit taken out so that exp does
    # not overflow.
    top = logits.amax(1, keepdim=True)
    total = logits.sub_(top).exp_().sum(1, keepdim=True)  # logits now holds exp(z - top)
    loss = (total.log() + top - logit).sum()
    for column, weight in truths:
        logits.scatter_add_(1, column, -total if weight is None else -total * weight)
    return loss, total


class FusedLoss(torch.autograd.Function):
    """`compcos_loss` of the factorised cosines, with its gradients: no (B, S, O) tensor outlives a
    chunk of images.

    The softmax of a chunk is known as soon as its logits are, so its gradients are made while it is
    in the cache. Memory: two chunks of max(1, ELEMENTS // C) images, whatever the batch. Equal to
    the plain form in the tests.
    """

    # numbers a chunk: they stay in the cache; a GPU wants large kernels
    ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}

    @staticmethod
    def forward(ctx, by_state, by_object, factor, penalty, target, second=None, share=None):
        """The mean cross-entropy of a batch, and (kept for `backward`) its gradients.

        by_state (B, S) = x·a_s; by_object (B, O) = x·b_o; factor (S, O) = scale / |a_s + b_o|;
        penalty (S, O), what is taken from each logit; target (B,); for mixed images second (B,) and
        share (B,). The logits are z(s, o) = (by_state_s + by_object_o) · factor(s, o) - penalty(s,
        o).
        """
        batch, state_count = by_state.shape
        object_count = by_object.shape[1]
        elements = FusedLoss.ELEMENTS.get(by_state.device.type, 1 << 20)
        step = max(1, elements // (state_count * object_count))
        grad_state = torch.empty_like(by_state)
        grad_object = torch.empty_like(by_object)
        grad_factor = factor.new_zeros(state_count * object_count)
        loss = factor.new_zeros(())
        offset = -penalty
        # two buffers, used again for every chunk: the sums by_state + by_object, and the logits
        sums = factor.new_empty(min(step, batch), state_count, object_count)
        logits = factor.new_empty(min(step, batch), state_count, object_count)
        for start in range(0, batch, step):
            part = slice(start, start + step)
            x = by_state[part, :, None]
            y = by_object[part, None, :]
            plus = sums[:len(x)]
            z = logits[:len(x)]
            torch.add(x, y, out=plus)
            flat = torch.addcmul(offset, plus, factor, out=z).flatten(1)  # (b, C)
            truths = [(target[part, None], None)]
            if second is not None:
                weight = share[part, None]
                truths = [(target[part, None], weight), (second[part, None], 1 - weight)]
            chunk_loss, total = softmax_minus_truth(flat, truths)
            loss += chunk_loss
            each = (total * batch).reciprocal_()  # (b, 1)
            # z = plus · factor - penalty, so d/d plus = d/dz · factor, and d/d factor = Σ over
            # images of d/dz · plus.
            z.mul_(factor)
            grad_state[part] = z.sum(2) * each
            grad_object[part] = z.sum(1) * each
            grad_factor.addmv_(z.mul_(plus).flatten(1).T, each[:, 0])
        # The products above have one factor too many: z was multiplied by it for the other two.
        grad_factor = grad_factor.view(state_count, object_count).div_(factor)
        ctx.save_for_backward(grad_state, grad_object, grad_factor)
        return loss / batch

    @staticmethod
    def backward(ctx, grad):
        """The saved gradients, scaled; none for penalty, target, second and share."""
        grad_state, grad_object, grad_factor = ctx.saved_tensors
        return grad * grad_state, grad * grad_object, grad * grad_factor, None, None, None, None


class TrainingLoss(nn.Module):
    """What training minimises, and what changes from epoch to epoch.

    The model is an argument of its calls, not an attribute: the loss is itself a part of the model.

    closed world: Eq. 2. open world: Eq. 7, in the first epoch over the seen compositions alone, as
    the published code does. After each epoch ρ comes from the present embeddings, and α grows
    linearly to `margin` at epoch `warmup` (0: at once; margin 0: the paper's α = 0). `plain` trains
    by `compcos_loss` as it stands, in both worlds, instead of the faster forms: the numbers are the
    same up to rounding, so this is where to try a loss of your own (on CUDA eagerly: its shapes
    change after the first epoch). `rivals` "seen": the seen compositions alone compete in the open
    world, too, in all epochs.

    Of the strong recipe, and not in the paper: `counts` times (log n - its mean over the seen) is
    added to the logits of the seen, n (S, O) = `images` of a composition in training (0 counts as
    1); the share `mix_images` of a batch is mixed with other images of it; `word_rate` multiplies
    the rate of the word embeddings; with `partner_prior`, `choose_prior` follows the training.
    """

    def __init__(self, model, seen, *, world="open", scale=20.0, margin=0.4, warmup=15, mix="mean",
                 counts=0.0, images=None, mix_images=0.0, word_rate=1.0, partner_prior=False,
                 rivals="all", plain=False):
        super().__init__()
        numbers = [scale, margin, warmup, counts, mix_images, word_rate]
        if not (scale > 0 and margin >= 0 and warmup >= 0 and np.isfinite(numbers).all()):
            raise ValueError(f"scale (1/T) is {scale}, margin (α) {margin}, warmup {warmup}: "
                             "expected finite numbers, the first above 0, the others 0 or more")
        if not 0 <= mix_images <= 1 or word_rate <= 0 or counts < 0:
            raise ValueError(f"mix_images {mix_images}, word_rate {word_rate}, counts {counts}: "
                             "expected a share of 0 to 1, a number above 0, and one of 0 or more")
        if world not in ("open", "closed") or mix not in list(MIXES):
            raise ValueError(f"world {world!r}, mix {mix!r}: expected open or closed; one of "
                             f"{', '.join(MIXES)}")
        if rivals not in ("all", "seen"):
            raise ValueError(f"rivals {rivals!r}: expected all or seen")
        self.seen_alone = world == "closed" or rivals == "seen"
        self.scale = scale
        self.margin = margin
        self.warmup = warmup
        self.mix = mix
        self.mix_images = mix_images
        self.word_rate = word_rate
        self.partner_prior = partner_prior
        self.plain = plain
        self.is_alone = True  # no other member fills a GPU meanwhile
        device = model.states.device
        dtype = model.states.dtype
        seen = as_seen(seen, model)
        offsets = None
        if counts:
            offsets = counts * log_counts(seen.cpu(), images)  # on the CPU: MPS has no float64
            offsets = offsets.to(device, dtype)
        pairs = seen.nonzero()
        # position[c]: the row of composition c in `pairs`, -1 where it is unseen
        position = torch.full((seen.numel(),), -1, device=device)
        place = pairs[:, 0] * seen.shape[1] + pairs[:, 1]
        position[place] = torch.arange(len(pairs), device=device)
        self.register_buffer("seen", seen, persistent=False)
        self.register_buffer("offsets", offsets, persistent=False)
        # those of `pairs`, looked up here: in a captured step a mask cannot be an index
        seen_offsets = None if offsets is None else offsets[seen]
        self.register_buffer("seen_offsets", seen_offsets, persistent=False)
        self.register_buffer("pairs", pairs, persistent=False)
        self.register_buffer("position", position, persistent=False)
        # what is taken from the logits (S, O): the margin times the scale
        penalty = torch.zeros(seen.shape, device=device, dtype=dtype)
        self.register_buffer("penalty", penalty, persistent=False)
        self.set_penalty(None)

    def forward(self, model, features, target):
        """The loss of images (B, F) and targets (B,): a 0-dim tensor."""
        mixed = None
        if self.mix_images:
            features, *mixed = mix_batch(features, target, self.mix_images)
        if self.plain:
            margin = self.penalty / self.scale if self.has_margins else None
            return compcos_loss(model(features), target, scale=self.scale, seen=self.seen,
                                margin=margin, counts=self.offsets, mixed=mixed)
        if self.seen_alone:
            return self.closed(model, features, target, mixed)
        penalty = self.penalty
        if self.offsets is not None:
            penalty = penalty - self.offsets  # added to the logits of the seen, 0 elsewhere
        if self.is_alone:
            # Images and compositions meet only in the logits: a GPU makes both at once.
            work = [model.compositions, partial(model.embed_images, features)]
            compositions, embedded = side_by_side(work, features.device)
        else:
            compositions = model.compositions()
            embedded = model.embed_images(features)
        by_state, by_object = products(embedded, compositions)
        factor = self.scale * compositions.inverse_length
        second, share = mixed or (None, None)
        return FusedLoss.apply(by_state, by_object, factor, penalty, target, second, share)

    def closed(self, model, features, target, mixed):
        """Eq. 2: only the seen compositions are scored, (B, P), and compete."""
        logits = self.scale * model.cosines(features, self.pairs)
        if self.offsets is not None:
            logits = logits + self.seen_offsets
        if mixed is not None:
            second, share = mixed
            mixed = (self.position[second], share)
        return mean_loss(logits, self.position[target], mixed)

    def after_epoch(self, model, epoch):
        """New margins α·ρ, where the unseen compete; epoch = 1, 2, ..."""
        if self.seen_alone:
            return
        alpha = self.margin * min(1.0, epoch / max(self.warmup, 1))
        self.set_penalty(alpha * model.feasibility(self.seen, mix=self.mix))

    def set_penalty(self, margin):
        """In place, for a captured step reads it: what is taken from the logits; None: the seen
        compete alone."""
        self.has_margins = margin is not None
        self.penalty.copy_(self.scale * _full_margin(self.seen, margin, self.penalty.dtype))


@torch.no_grad()
def check_forms(model, features):
    """ValueError where training would minimise something else than `compcos_loss` of the scores.

    The faster forms of `TrainingLoss` know of no edit of that loss or of `CompCos.score`. Both are
    computed of a few images (B, F), in evaluation mode, with all margins.
    """
    one = getattr(model, "members", [model])[0]
    training_loss = one.training_loss
    was_training = one.training
    one.eval()
    training_loss.after_epoch(one, max(training_loss.warmup, 1))
    # Where the truth has the best score of the seen, losses differ most.
    unseen = ~training_loss.seen.flatten()
    target = one(features).flatten(1).masked_fill(unseen, -torch.inf).argmax(1)
    values = []
    for plain in (True, False):
        training_loss.plain = plain
        torch.manual_seed(0)  # mixes the same images; each epoch of training is seeded anew
        values.append(float(one.loss(features, target)))
    training_loss.set_penalty(None)
    one.train(was_training)
    expected, found = values
    if abs(found - expected) > 1e-4 * (1 + abs(expected)):
        raise ValueError(f"the loss of {len(features)} images is {expected:.4f} by compcos_loss, "
                         f"and {found:.4f} by its faster form, which knows of no edit of it or of "
                         "CompCos.score: train by --plain-loss")


def log_counts(seen, images):
    """(S, O): log of the training images of each seen composition, less the mean of that; 0 for the
    unseen.

    images (S, O) counts; a seen composition without an image counts as one with one.
    """
    images = train.as_tensor(images, seen.device).clamp_min(1)
    logs = images.double().log()
    return torch.where(seen, logs - logs[seen].mean(), 0.0)


def mix_batch(features, target, share_mixed):
    """Mix some images of a batch with others: features (B, F), second targets (B,), shares (B,) of
    the first.

    Each image is mixed with the chance `share_mixed`: it becomes λ times itself and 1 - λ times
    another one of the batch, drawn with replacement, λ uniform in [1/2, 1]. Else λ is 1.
    """
    batch = len(features)
    partner = torch.randint(batch, (batch,), device=features.device)
    is_mixed = torch.rand(batch, device=features.device) < share_mixed
    drawn = 1 - 0.5 * torch.rand(batch, device=features.device, dtype=features.dtype)
    share = torch.where(is_mixed, drawn, 1.0)
    features = torch.lerp(features[partner], features, share[:, None])
    return features, target[partner], share


def log_partners(seen):
    """(S, O) float64: how well connected the state and the object of a composition are, in units
    of its standard deviation over the unseen.

    log(n_s + ½) + log(n_o + ½), less its mean over the unseen; n_s and n_o count the seen
    compositions of the state and of the object. 0 for the seen.
    """
    partners_of_state = seen.sum(1, dtype=torch.float64)
    partners_of_object = seen.sum(0, dtype=torch.float64)
    logs = (partners_of_state + 0.5).log()[:, None] + (partners_of_object + 0.5).log()
    unseen = logs[~seen]
    if len(unseen) < 2 or unseen.std() == 0:
        return torch.zeros_like(logs)
    return torch.where(seen, 0.0, (logs - unseen.mean()) / unseen.std())


def choose_prior(model, training_loss, validate):
    """Set the model's prior to γ / scale times `log_partners` with the γ of PRIOR_WEIGHTS that
    `validate()` likes best, which may be 0; {"prior_weight": γ}, or {} where no prior is asked for.

    Not in the paper: a model that was trained on the seen alone has not learnt that a state seen
    with many objects is likelier to occur with a new one than a state seen with a single object.
    """
    if not training_loss.partner_prior:
        return {}
    # on the CPU, since MPS has no float64
    prior = log_partners(training_loss.seen.cpu()) / training_loss.scale
    prior = prior.to(model.states.device, model.states.dtype)
    values = []
    for weight in PRIOR_WEIGHTS:
        model.set_prior(weight * prior)
        values.append(validate())
    best = PRIOR_WEIGHTS[int(np.argmax(values))]
    model.set_prior(best * prior if best else None)
    return dict(prior_weight=best)


def load_published(state_dict):
    """A `CompCos` from parameters under the published names: a state dict, a checkpoint, or a file
    of either.

    A checkpoint may nest them, and names may begin with `module.`: see `features.unwrap`.
    Published files also hold a NumPy scalar: `data.load_tensors` admits NumPy's numbers, and
    nothing that runs code. ValueError: other parameters.
    """
    if not isinstance(state_dict, dict):
        state_dict = data.load_tensors(state_dict)
    try:
        weights = image_features.unwrap(state_dict)
        weights = {name: train.as_tensor(value) for name, value in weights.items()}
        layers = set()
        for name in weights:
            if name.startswith("image_embedder.mod."):
                layers.add(int(name.split(".")[2]))
        first, norm, last = (f"image_embedder.mod.{i}" for i in sorted(layers))
        theirs = {"projection": "projection", "image_embedder.0": first, "image_embedder.1": norm,
                  "image_embedder.4": last}
        renamed = {"states": weights["attr_embedder.weight"],
                   "objects": weights["obj_embedder.weight"]}
        for ours, name in theirs.items():
            for part in ("weight", "bias"):
                renamed[f"{ours}.{part}"] = weights[f"{name}.{part}"]
        hidden, feature_dim = weights[f"{first}.weight"].shape
        model = CompCos(renamed["states"], renamed["objects"], feature_dim, hidden=hidden)
        model.to(renamed["states"].dtype).load_state_dict(renamed)  # float64 keeps its digits
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError("not a published CompCos (Linear, LayerNorm and Linear in "
                         "image_embedder.mod; attr_embedder, obj_embedder, projection): "
                         f"{reason}") from None
    return model.eval()


# ---- prediction ----


def predict(model, features, *, k=5, candidates=None, bias=0.0):
    """The k best compositions of each image: indices s * O + o (N, k) int64 and their scores (N,
    k), best first, arrays.

    features: (N, F) array or tensor, or a list of image files where the model's checkpoint names
    its backbone. candidates: (C,) or (S, O) bool, the compositions allowed (None: all); k is at
    most their number. bias is added to the unseen to rank them, not to the scores given; it needs
    the seen mask of a loaded checkpoint. ValueError: no candidate, wrong shapes, features or a bias
    that are not finite.
    """
    indices, scores, _ = best_compositions(model, features, k=k, candidates=candidates, bias=bias)
    return indices, scores


@torch.no_grad()
def best_compositions(model, features, *, k, candidates, bias, temperature=1.0):
    """As `predict`, and the probabilities of these answers (N, k): the softmax of (score +
    bias·[unseen]) / temperature over the candidates."""
    device = model.states.device
    total = len(model.states) * len(model.objects)
    features = as_features(model, features)
    if candidates is None:
        candidates = torch.ones(total, dtype=torch.bool)
    allowed = train.as_tensor(candidates)
    shapes = [(total,), (len(model.states), len(model.objects))]
    if allowed.dtype != torch.bool or allowed.shape not in shapes or not allowed.any():
        raise ValueError(f"candidates are {allowed.dtype} {tuple(allowed.shape)} with "
                         f"{int(allowed.sum())} allowed: expected bool, (C,) {shapes[0]} or (S, O) "
                         f"{shapes[1]}, one or more allowed")
    allowed = allowed.flatten()
    if not isinstance(k, (int, np.integer)) or k < 1:
        raise ValueError(f"k {k!r}: expected the number of answers an image, 1 or more")
    if not isinstance(bias, (int, float, np.number)) or not np.isfinite(bias):
        raise ValueError(f"bias is {bias!r}: expected a finite number")
    k = min(k, int(allowed.sum()))
    offset = torch.where(allowed, 0.0, -torch.inf).to(device)  # (C,)
    if bias:
        if model.checkpoint is None:
            raise ValueError("a bias on the unseen needs to know the seen: load the model with "
                             "CompCos.load(best.pt)")
        offset = offset + bias * ~model.checkpoint["seen"].flatten().to(device)
    indices = [torch.zeros(0, k, dtype=torch.int64)]
    values = [torch.zeros(0, k)]
    shares = [torch.zeros(0, k)]
    was_training = model.training
    for _, scores in train.chunks(model.eval(), features, model.compositions()):
        ranked = scores + offset
        best = ranked.topk(k, dim=1).indices
        indices.append(best.cpu())
        values.append(scores.gather(1, best).cpu())
        shares.append((ranked / temperature).softmax(1).gather(1, best).cpu())
    model.train(was_training)
    return torch.cat(indices).numpy(), torch.cat(values).numpy(), torch.cat(shares).numpy()


def as_features(model, features):
    """(N, F) on the model's device, from an array, a tensor or image files. ValueError: other
    shapes, not finite."""
    if isinstance(features, (str, Path)):
        features = [features]
    if len(features) and isinstance(features[0], (str, Path)):
        features = experiment.features_like(model.checkpoint, list(features), model.states.device)
    features = train.as_tensor(features, model.states.device).to(model.states.dtype)
    is_table = features.ndim == 2 and features.shape[1] == model.config["feature_dim"]
    if not is_table or not features.isfinite().all():
        raise ValueError(f"features of shape {tuple(features.shape)}, "
                         f"{data.count(int((~features.isfinite()).sum()), 'number')} not "
                         "finite: the model was trained on finite (N, "
                         f"{model.config['feature_dim']})")
    return features


PREDICTION = ("image", "rank", "state", "object", "score", "probability", "seen", "feasibility")


def predict_images(model, images, features=None, *, top=5, candidates="open_masked"):
    """The best compositions of images as rows, dicts of PREDICTION: what `--predict` prints and
    writes.

    `model` of `CompCos.load`; `images` N files, or any names where `features` (N, F) are given.
    `candidates` is one of closed, open, open_masked, at the bias that was fixed on validation;
    compositions that the training folder names are never hidden by the mask. `probability` is
    that of the answer among the candidates, at a temperature under which it says how often such
    answers were right on validation (`experiment.calibrate`).
    """
    if candidates not in experiment.CANDIDATE_SETS:
        raise ValueError(f"candidates are {candidates!r}: expected one of "
                         f"{', '.join(experiment.CANDIDATE_SETS)}")
    if top < 1:
        raise ValueError(f"--top is {top}: expected the number of answers an image, 1 or more")
    if isinstance(images, (str, Path)):
        images = [images]
    if not len(images):
        raise ValueError("no images to predict: expected one or more")
    checkpoint = model.checkpoint
    indices, scores, probabilities = best_compositions(
        model, images if features is None else features, k=top,
        candidates=allowed_answers(checkpoint)[candidates], bias=checkpoint["bias"][candidates],
        temperature=checkpoint["temperature"][candidates])
    seen = checkpoint["seen"].flatten()
    rho = checkpoint["feasibility"].flatten()
    rows = []
    for image, columns, values, shares in zip(images, indices, scores, probabilities):
        for rank, (c, value, share) in enumerate(zip(columns.tolist(), values, shares), 1):
            state, object_ = divmod(c, len(checkpoint["objects"]))
            rows.append(dict(
                image=str(image), rank=rank, state=checkpoint["states"][state],
                object=checkpoint["objects"][object_], score=float(value),
                probability=float(share), seen=bool(seen[c]),
                feasibility=float(rho[c])))
    return rows


def allowed_answers(checkpoint):
    """The three masks (C,) bool of a loaded checkpoint; the hard mask hides nothing that the folder
    names."""
    seen = checkpoint["seen"].flatten()
    feasible = checkpoint["feasibility"].flatten() >= checkpoint["threshold"]
    return dict(closed=checkpoint["closed"], open=torch.ones_like(seen),
                open_masked=seen | checkpoint["named"] | feasible)


def find_images(arguments):
    """The image files that files, folders and patterns name, each once, in order. ValueError:
    nothing there. What of a folder is no photo is said."""
    found = []
    for argument in arguments:
        paths = [argument]  # a missing file is named, with all others, when it is opened
        if glob.has_magic(argument) and not Path(argument).exists():
            paths = sorted(glob.glob(argument, recursive=True))
        images = []
        for path in paths:
            images += images_at(Path(path))
        if not images:
            raise ValueError(f"no image in {argument}: expected image files, folders of them or "
                             "patterns as 'photos/*.jpg'")
        found += images
    return [str(image) for image in dict.fromkeys(found)]


def images_at(path):
    """The photos below a folder, with a note of what else is there; of any other path, itself."""
    if not path.is_dir():
        return [path]
    photos, left_out = data.photo_files(path)
    if left_out:
        print(f"note: {path}: {data.what_stayed_out(photos, left_out)}")
    return [path / photo for photo in photos]


def features_of_files(checkpoint, options):
    """(images, features (N, F)) of the image files that --predict names, without the broken ones if
    these may be skipped."""
    images = find_images(options.predict)
    features = experiment.features_like(checkpoint, images, options.device, options.weights,
                                        options.skip_broken, options.max_pixels)
    readable = np.isfinite(features).all(1)
    whole = []
    broken = []
    for image, is_readable in zip(images, readable):
        if is_readable:
            whole.append(image)
        else:
            broken.append(image)
    if broken:
        print(f"note: {data.count(len(broken), 'image')} that cannot be read, left out: "
              f"{data.some(broken)}")
    return whole, features[readable]


def features_of_table(options):
    """(images, features (N, F)) of the file --features: all of it, or what --predict names there,
    without the rows that are not finite if these may be skipped."""
    stored = data.read_features(options.features)
    rows = {name: row for row, name in enumerate(stored["files"])}
    images = list(rows)
    if not images:
        raise ValueError(f"{options.features} holds features of no image: make or fetch it again")
    if options.predict:
        images = find_names(data.without_prefix(options.predict, rows), rows, options.features)
    with np.errstate(over="ignore"):  # what is too large is then not finite
        features = stored["features"][[rows[name] for name in images]].astype(np.float32)
    is_finite = np.isfinite(features).all(1)
    broken = {name: True for name, is_good in zip(images, is_finite) if not is_good}
    if broken and (not options.skip_broken or len(broken) == len(images)):
        raise ValueError(f"{options.features}: features of {data.count(len(broken), 'image')} are "
                         f"not finite: {data.some(broken)}; --skip-broken leaves such out")
    if broken:
        print(f"note: {data.count(len(broken), 'image')} whose features are not finite, left out: "
              f"{data.some(broken)}")
    return [name for name in images if name not in broken], features[is_finite]


def find_names(arguments, names, file):
    """Those of a file's names, a dict, that names, folders and patterns mean, each once.
    ValueError: an argument that means none."""
    found = []
    lacking = []
    for argument in arguments:
        folder = argument.rstrip("/") + "/"
        meant = [argument]
        if argument not in names:
            meant = [name for name in names
                     if name.startswith(folder) or fnmatch.fnmatchcase(name, argument)]
        if not meant:
            lacking.append(argument)
        found += meant
    if lacking:
        raise ValueError(f"{file} has no features of {data.some(lacking)}; it names "
                         f"{data.some(names, 3)}")
    return list(dict.fromkeys(found))


def print_predictions(options):
    """Predict for the command line: print the best compositions of each image, or write --csv."""
    if not (options.checkpoint and (options.predict or options.features)):
        raise ValueError("--checkpoint FILE and --predict IMAGE ... (or --features FILE) go "
                         "together; "
                         "a run goes on with --resume, and a model of other primitives is trained "
                         "anew")
    if options.csv and (not options.csv.parent.is_dir() or options.csv.is_dir()):
        raise ValueError(f"--csv {options.csv} cannot be written: expected a file in a folder that "
                         "is there")
    if options.csv:
        common.check_writable(options.csv.parent, "--csv")
    model = CompCos.load(options.checkpoint, options.device)
    if options.features:
        images, features = features_of_table(options)
    else:
        images, features = features_of_files(model.checkpoint, options)
    rows = predict_images(model, images, features, top=options.top, candidates=options.candidates)
    if options.csv:
        with common.writing(options.csv) as file:
            writer = csv.DictWriter(file, PREDICTION)
            writer.writeheader()
            writer.writerows(rows)
        print(f"{data.count(len(images), 'image')}, {data.count(len(rows), 'answer')} written to "
              f"{options.csv}")
        return
    count = int(allowed_answers(model.checkpoint)[options.candidates].sum())
    bias = model.checkpoint["bias"][options.candidates]
    print(f"{options.candidates}: {data.count(count, 'candidate')}, bias {bias:.3f} on the unseen "
          "(from validation)")
    for row in rows:
        if row["rank"] == 1:
            print(row["image"])
        kind = "seen" if row["seen"] else f"unseen, feasibility {row['feasibility']:.2f}"
        print(f"  {row['score']:6.3f}  {row['probability']:4.0%}  {row['state']} {row['object']}  "
              f"({kind})")


# ---- the command line ----


# The published settings: those that all datasets share (and what the strong recipe adds, switched
# off), and those of a dataset by its name. An entry for a dataset of your own goes here, too; what
# it leaves out is as for MIT-States.
PUBLISHED = dict(
    recipe="published", members=1, epochs=300, batch_size=128, lr=5e-5, weight_decay=5e-5,
    passes=1, mix="mean", hidden=768, dropout=0.5, dim=None, unit_images=True, counts=0.0,
    mix_images=0.0, average=0.0, word_rate=1.0, partner_prior="off", patience=None, rivals="all")
OF_DATASET = {
    "mitstates": dict(scale=20.0, margin=0.4, warmup=15, vectors=["fasttext", "word2vec"]),
    "utzappos": dict(scale=50.0, margin=1.0, warmup=15, vectors=["word2vec"]),
    "cgqa": dict(scale=100.0, margin=0.4, warmup=15, vectors=["word2vec"]),
    "shapes": dict(scale=20.0, margin=0.4, warmup=15, vectors=["random"], epochs=40, lr=1e-3),
}
# A folder of one's own by the published recipe: as many steps, at a rate at which they suffice.
FOLDER = dict(epochs=None, steps=2600, warmup=None, warmup_steps=980, patience_steps=1300, lr=1e-3)
STRONG = PUBLISHED | FOLDER | dict(
    recipe="strong",
    members=4,            # 16 bring 0.3 of AUC more, at four times the cost
    scale=2.6,            # of |ω(x)| cos: the length of ω(x) carries confidence
    unit_images=False,
    dim=300,
    margin=7.2 / 2.6,     # 7.2 ρ off the logits of the unseen
    counts=0.5,
    dropout=0.85,         # of all, this carries most
    mix_images=0.5,
    average=0.998,
    weight_decay=0.0,
    lr=5e-4,
    word_rate=10.0,
    partner_prior="closed",
    rivals=None,          # chosen by experiment.choose_rivals
)
PRIOR_WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)  # γ, in logits


def defaults(recipe=None):
    """The settings of each dataset by name, and as "other" those of a folder of one's own.

    recipe: published or strong; None: published for the named datasets, strong for a folder. Of a
    dataset's own settings, the strong recipe takes the word vectors alone. ValueError: a dataset's
    entry has a setting that is none.
    """
    usual = OF_DATASET["mitstates"]
    known = PUBLISHED | usual
    table = {}
    for name, settings in OF_DATASET.items():
        unknown = [key for key in settings if key not in known]
        if unknown:
            raise ValueError(f"OF_DATASET[{name!r}] sets {', '.join(unknown)}: expected any of "
                             f"{', '.join(known)}")
        settings = known | settings
        if recipe == "strong":
            settings = STRONG | dict(vectors=settings["vectors"])
        table[name] = settings
    table["other"] = STRONG | dict(vectors=usual["vectors"])
    if recipe == "published":
        table["other"] = known | FOLDER
    return table


def add_options(parser):
    """The options of CompCos alone."""
    experiment.add_options(parser)
    add = parser.add_argument_group("CompCos").add_argument
    add("--recipe", choices=["published", "strong"],
        help="default: published for the named datasets, else strong")
    add("--members", type=int, metavar="K",
        help="models whose scores are averaged (published 1, strong 4)")
    add("--scale", type=float, metavar="1/T", help="logit scale, one over the temperature")
    add("--margin", type=float, metavar="α",
        help="greatest factor of the feasibility margins; 0: the paper's α = 0")
    add("--warmup", type=int, metavar="E", help="epochs until α is reached; 0: at once")
    add("--mix", choices=list(MIXES), help="g of Eq. 5")
    add("--plain-loss", action="store_true",
        help="train by compcos_loss as it stands, not by its fused form (on CUDA: as --eager)")
    add("--patience", type=int, metavar="E",
        help="stop after so many epochs without a better validation AUC; 0: never")
    add = parser.add_argument_group("CompCos: what the strong recipe changes").add_argument
    add("--dropout", type=float)
    add("--hidden", type=int, help="width of ω")
    add("--dim", type=int, metavar="D",
        help="numbers of the shared space (published: those of the vectors)")
    add("--cosine", action="store_const", const=True, dest="unit_images",
        help="images of unit length")
    add("--counts", type=float, metavar="W",
        help="W (log n - mean) is added to the logits of the seen")
    add("--mix-images", type=float, metavar="SHARE", help="of a batch, mixed with other images")
    add("--average", type=float, metavar="DECAY",
        help="greatest decay of the average of weights; 0: none")
    add("--word-rate", type=float, metavar="X",
        help="rate of the word embeddings over that of the rest")
    add("--partner-prior", choices=["on", "off", "closed"],
        help="after training, raise unseen compositions whose state and object have many partners,"
             " as much as validation likes; closed: only where the seen competed alone")
    add("--rivals", choices=["all", "seen"],
        help="which compositions compete with the truth in open-world training (default all; in "
             "the strong recipe seen, where these are half of all or more, and validation has "
             f"fewer than {experiment.FEW_COMPOSITIONS} unseen ones)")


@common.command
def main(argv=None):
    """Train and evaluate, or predict with a checkpoint."""
    parser = argparse.ArgumentParser(description="CompCos: train and evaluate; with --checkpoint "
                                                 "and --predict, predict.")
    add_options(parser)
    add = parser.add_argument_group("prediction").add_argument
    add("--checkpoint", metavar="FILE", help="a best.pt")
    add("--predict", nargs="+", metavar="IMAGE",
        help="image files, folders or patterns (or, with --features, names there)")
    add("--csv", type=Path, metavar="FILE", help="write a table instead of printing the answers")
    add("--candidates", default="open_masked", choices=experiment.CANDIDATE_SETS,
        help="allowed answers (default open_masked)")
    add("--top", type=int, default=5, help="answers an image (default 5)")
    options = parser.parse_args(argv)
    if options.checkpoint or options.predict or options.csv:
        if common.rank() == 0:  # others have nothing to predict
            with common.alone():
                print_predictions(options)
        return
    prepared = experiment.prepare(options, "compcos", defaults(options.recipe))
    if seen_alone(prepared.settings):
        idle = [name for name in ("margin", "warmup", "mix") if getattr(options, name) is not None]
        if idle:
            print("note: where the seen compete alone there are no margins, and "
                  f"--{', --'.join(idle)} changes nothing")
    if options.plain_loss:  # so that --resume does not go on by the other form
        prepared.settings["plain_loss"] = True
    experiment.experiment(
        lambda: make_model(prepared, plain=options.plain_loss), prepared.dataset,
        prepared.features, settings=prepared.settings, seeds=options.seed, device=prepared.device,
        out=prepared.out, resume=options.resume, save_scores=options.save_scores,
        eager=options.eager or options.plain_loss, splits=True)


def seen_alone(settings):
    """Whether only the seen compositions compete with the truth in training."""
    return settings["world"] == "closed" or settings["rivals"] == "seen"


def make_model(prepared, *, plain=False):
    """A new model on the device, with its training set as the settings say.

    A setting of your own stands in three places: its default in PUBLISHED (without which its option
    is not read), its name here, among those of the model's constructor or of `TrainingLoss`, and
    its option in `add_options`. What range it has, a tuple at the head of experiment.py may say.
    """
    settings = prepared.settings
    dataset = prepared.dataset
    config = {key: settings[key] for key in ("hidden", "dropout", "dim", "unit_images", "members")}
    config["feature_dim"] = prepared.features["train"].shape[1]
    model = build(prepared.state_vectors, prepared.object_vectors, config).to(prepared.device)
    keywords = {key: settings[key] for key in (
        "world", "rivals", "scale", "margin", "warmup", "mix", "counts", "mix_images",
        "word_rate")}
    images = np.bincount(dataset.targets["train"], minlength=dataset.seen.size)
    images = images.reshape(dataset.seen.shape)
    prior = settings["partner_prior"]
    partner_prior = prior == "on" or (prior == "closed" and seen_alone(settings))
    model.set_training(dataset.seen, images=images, plain=plain, partner_prior=partner_prior,
                       **keywords)
    if not plain:
        few = torch.as_tensor(prepared.features["train"][:8], device=prepared.device)
        check_forms(model, few)
    return model


if __name__ == "__main__":
    main()
