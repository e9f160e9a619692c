"""CompCos: the model, its losses, prediction, and the command that trains and evaluates it (paper,
Sec. 3).

Shapes: N images, B images of a batch, S states, O objects, C = S*O compositions, P chosen pairs, D
shared space, F features, K members. A composition (s, o) has the index s * O + o.
"""

import argparse
import math
from pathlib import Path

from lab import shell
from lab.files import check_writable, load_tensors, reading, write_rows

if __name__ == "__main__":
    shell.wait_gently()  # before torch is imported

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as nnf

from lab import run as experiment
from lab import features as image_features
import train
from feasibility import MIXES, feasibility_scores

# Scores that training holds at once: on a CPU they stay in the cache, a GPU wants large kernels.
CHUNK = {"cpu": 1 << 19, "cuda": 1 << 26}


class CompCos(nn.Module):
    """Images and compositions in one space, compared by cosine (Eq. 1).

    `state_vectors` (S, V) and `object_vectors` (O, V) initialise φ's primitive embeddings, which
    are trained; ω is Linear(F, hidden), LayerNorm, ReLU, Dropout, Linear(hidden, D). `dim` is D;
    None, as published: that of the vectors. `normalize_image_embeddings=False` leaves ω(x) its length, which then
    carries confidence: `score` gives |ω(x)| times the cosine. ValueError: vectors of other shapes.

    Training computes `compositions()` and `products` once a batch. From these `compare` makes the
    scores and `compcos_loss` the loss, of some images at a time: an edit of any of them trains, and
    so does an `nn.Parameter` that is made here and used in any of them.
    """

    def __init__(self, state_vectors, object_vectors, feature_dim, *, hidden=768, dropout=0.5,
                 dim=None, normalize_image_embeddings=True):
        super().__init__()
        states, objects = train.primitive_vectors(state_vectors, object_vectors)
        vector_dim = states.shape[1]
        dim = dim or vector_dim
        self.config = dict(feature_dim=feature_dim, hidden=hidden, dropout=dropout, dim=dim,
                           normalize_image_embeddings=normalize_image_embeddings)
        self.checkpoint = None  # of a loaded model: vocabulary, seen, feasibility, bias, settings
        self.states = nn.Parameter(states)    # φ of the primitives, (S, V)
        self.objects = nn.Parameter(objects)  # (O, V)
        self.projection = nn.Linear(2 * vector_dim, dim)  # W: [φ(s); φ(o)] -> φ(s, o)
        self.image_embedder = nn.Sequential(  # ω
            nn.Linear(feature_dim, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(hidden, dim))

    @classmethod
    def load(cls, path, device="cpu"):
        """The model of a `best.pt`, in evaluation mode; no data is needed. Its `checkpoint` is what
        else the file holds.

        A file of several members gives `Ensemble`, which score and predict as one model does.
        ValueError names a file that is none, or of another version.
        """
        checkpoint = experiment.load_best(path)
        with reading(path, "train anew, or restore the file"):
            weights = checkpoint.pop("weights")
            first = "members.0." if "members.0.states" in weights else ""
            model = build(weights[f"{first}states"], weights[f"{first}objects"],
                          **checkpoint["config"])
            model.load_state_dict(weights)
        model.checkpoint = checkpoint
        return model.to(image_features.pick_device(device)).eval()

    # ---- scoring ----

    def forward(self, features):
        """Cosines (B, S, O) of images (B, F) with every composition, factorised: no (C, D) matrix
        is made.

        For images of unit length they lie in [-1, 1] in evaluation mode. Where the halves of φ(s,
        o) are nearly opposite, ε = |a_s + b_o| / |a_s| being small, float32 leaves an error of
        about 2e-7 / ε, so 0.2 at ε = 1e-6: as much as that of the plain form, whose sum cancels
        alike. In training mode a cosine may lie outside [-1, 1] by this error.
        """
        return self.score(features, self.compositions())

    def cosines(self, features, pairs):
        """Cosines (B, P) of images (B, F) with chosen compositions, pairs (P, 2) int."""
        return self.score(features, self.compositions(), pairs)

    def score(self, features, compositions, pairs=None):
        """Scores (B, S, O) of images (B, F), from `compositions()`; or (B, P), those of pairs
        (P, 2) int."""
        return self.compare(*self.products(self.embed_images(features), compositions), pairs)

    def embed_images(self, features):
        """ω: (B, F) -> (B, D), of unit length unless the model was made with
        `normalize_image_embeddings=False`."""
        embedded = self.image_embedder(features)
        if self.config["normalize_image_embeddings"]:
            embedded = nnf.normalize(embedded)
        return embedded

    def compositions(self):
        """What all images share: φ(s, o) = a_s + b_o, without a matrix of them, as a (S, D), b
        (O, D) and 1 / |a_s + b_o| (S, O)."""
        a, b = train.split_linear(self.projection, self.states, self.objects)
        # |a_s + b_o|² = |a_s|² + |b_o|² + 2 a_s·b_o, in float64: where a_s is nearly -b_o the sum
        # cancels, and float32 has no digits left (MPS has no float64).
        wide = torch.float32 if a.device.type == "mps" else torch.float64
        x = a.to(wide)
        y = b.to(wide)
        squared = x.square().sum(1, keepdim=True) + y.square().sum(1) + 2 * x @ y.T  # (S, O)
        return a, b, squared.clamp_min(1e-24).rsqrt().to(a.dtype)

    def products(self, embedded, compositions):
        """What `compare` takes, of embedded images x (B, D) and `compositions()`: x·a_s (B, S),
        x·b_o (B, O), and 1 / |a_s + b_o| (S, O)."""
        a, b, inverse_length = compositions
        return embedded @ a.T, embedded @ b.T, inverse_length

    def compare(self, by_state, by_object, inverse_length, pairs=None):
        """Scores (x·a_s + x·b_o) / |a_s + b_o| from what `products` gives: (B, S, O) of all
        compositions, or (B, P) of pairs (P, 2) int.

        All scores come from here, in training as in evaluation.
        """
        if pairs is None:
            scores = (by_state[:, :, None] + by_object[:, None, :]) * inverse_length  # (B, S, O)
        else:
            state, object_ = train.as_tensor(pairs, by_state.device).T
            place = state * by_object.shape[1] + object_
            # Unlike by_state[:, state], an embedding look-up has a deterministic gradient on GPUs.
            sums = nnf.embedding(state, by_state.T) + nnf.embedding(object_, by_object.T)
            scores = (sums * nnf.embedding(place, inverse_length.view(-1, 1))).T      # (B, P)
        if self.config["normalize_image_embeddings"] and not self.training:
            scores.clamp_(-1, 1)  # rounding may lead beyond, see forward
        return scores

    def embed_compositions(self, pairs):
        """φ in the plain form W [φ(s); φ(o)]: pairs (P, 2) int -> (P, D), unit length."""
        state, object_ = train.as_tensor(pairs, self.states.device).T
        words = [nnf.embedding(state, self.states), nnf.embedding(object_, self.objects)]
        return nnf.normalize(self.projection(torch.cat(words, dim=1)))

    def feasibility(self, seen, *, mix="mean"):
        """ρ (S, O) in [-1, 1] of Eq. 3-5 from the present primitive embeddings, a NumPy array; seen
        (S, O) bool."""
        return feasibility_scores(self.states, self.objects, seen, mix=mix)

    # ---- training ----

    def prepare(self, seen, *, world="open", train_candidates="all", scale=20.0, margin=0.4, warmup=15,
                     mix="mean", counts=0.0, images=1, word_lr_factor=1.0):
        """Say what training minimises; the model is on its device. seen (S, O) bool. Returns the
        model.

        closed world: Eq. 2. open world: Eq. 7, in the first epoch over the seen compositions alone,
        as the published code does. After each epoch ρ comes from the present embeddings by Eq. 5's
        `mix`, and α grows linearly to `margin` at epoch `warmup` (0: at once; margin 0: the paper's
        α = 0). scale = 1 / T. `train_candidates` "seen": the seen alone compete in the open world, too, in
        all epochs.

        Of the strong recipe, and not in the paper: `counts` times (log n - its mean over the seen)
        is added to the logits of the seen, n (S, O) = `images` of a composition in training (0
        counts as 1); `word_lr_factor` multiplies the rate of the word embeddings. ValueError: another
        shape or kind of seen, another world or train_candidates, a scale or margin outside its range.
        """
        seen = train.as_tensor(seen, self.states.device)
        shape = (len(self.states), len(self.objects))
        if seen.dtype != torch.bool or seen.shape != shape or not seen.any():
            raise ValueError(f"seen is {seen.dtype} {tuple(seen.shape)}: expected bool {shape}, "
                             "states by objects, one or more of them True")
        if world not in ("open", "closed") or train_candidates not in ("all", "seen"):
            raise ValueError(f"world {world!r}, train_candidates {train_candidates!r}: expected open or closed, all "
                             "or seen")
        self.seen = seen
        self.seen_alone = world == "closed" or train_candidates == "seen"
        shell.check_number("scale", scale, above=0)
        self.greatest_margin = shell.check_number("margin", margin, least=0)
        self.warmup = warmup
        self.mix = mix
        self.word_lr_factor = word_lr_factor
        logs = np.log(np.maximum(np.broadcast_to(images, shape), 1))
        logs -= logs[seen.cpu().numpy()].mean()
        self.counts = torch.as_tensor(counts * logs, dtype=self.states.dtype, device=seen.device)
        # At first the P seen compete alone, and the scores are (B, P). `column` says where each
        # composition stands among them; P, past the end, stands for those that are unseen.
        self.pairs = seen.nonzero()                                        # (P, 2)
        place = seen.flatten().cumsum(0) - 1
        self.column = torch.where(seen.flatten(), place, len(self.pairs))  # (C,)
        # What `compcos_loss` takes besides cosines and targets.
        self.loss_arguments = dict(scale=scale, seen=seen[seen], counts=self.counts[seen],
                                   margin=self.counts.new_zeros(()))
        return self

    def loss(self, features, target):
        """What training minimises, of features (B, F) and targets (B,): a 0-dim tensor."""
        computed = self.products(self.embed_images(features), self.compositions())
        scores = len(target) * self.seen.numel()
        count = math.ceil(scores / CHUNK.get(features.device.type, CHUNK["cpu"]))
        if count == 1 or self.pairs is not None:  # few scores, or few columns
            return self.loss_of(*computed, target)
        parameters = [weight for weight in self.parameters() if weight.requires_grad]
        return LossInChunks.apply(self, count, target, *computed, *parameters)

    def loss_of(self, by_state, by_object, inverse_length, target):
        """The mean loss of images (B,), from what `compare` takes: a 0-dim tensor."""
        scores = self.compare(by_state, by_object, inverse_length, self.pairs)
        return compcos_loss(scores, self.column[target], **self.loss_arguments)

    def after_epoch(self, epoch):
        """Take the feasibility ρ of the present embeddings for the margins α·ρ (Eq. 8) of the
        epochs to come; α = margin · min(1, epoch / warmup), epoch = 1, 2, ... Returns whether the
        step is another one from now on."""
        if self.seen_alone:
            return False
        alpha = self.greatest_margin * min(1.0, epoch / max(self.warmup, 1))
        rho = feasibility_scores(self.states, self.objects, self.seen, mix=self.mix)
        is_first = self.pairs is not None
        if is_first:  # from now on all compete
            self.pairs = None
            self.column = torch.arange(self.seen.numel(), device=self.seen.device)
            self.loss_arguments |= dict(seen=self.seen, counts=self.counts,
                                        margin=torch.empty_like(self.counts))
        # In place: a captured step reads this tensor.
        self.loss_arguments["margin"].copy_(alpha * torch.as_tensor(rho))
        return is_first

    def parameter_groups(self, lr):
        """Adam's groups, one a rate, since each takes a kernel of its own: the word embeddings
        learn at `word_lr_factor` times the rate of the rest."""
        groups = {lr: [], lr * self.word_lr_factor: []}
        for name, weight in self.named_parameters():
            rate = lr
            if name.endswith(("states", "objects")):
                rate *= self.word_lr_factor
            groups[rate].append(weight)
        return [dict(params=weights, lr=rate) for rate, weights in groups.items()]


class LossInChunks(torch.autograd.Function):
    """`CompCos.loss_of`, the mean over a batch, of some images at a time: no (B, S, O) tensor
    outlives its chunk.

    The gradients of a chunk are made while its scores are in the cache, by the plain code, and kept
    for `backward`. So each image has a loss of its own: a loss that compares the images of a batch
    would change with the chunk.
    """

    @staticmethod
    def forward(ctx, model, count, target, by_state, by_object, inverse_length, *parameters):
        """The loss of images (B,), in up to `count` parts.

        The parameters are inputs so that those that only the scores or the loss use get gradients.
        """
        # Inputs are detached: what was computed once a batch gets its gradients in `backward`.
        shared = [inverse_length.detach().requires_grad_(), *parameters]
        sums = [None for _ in shared]  # their gradients; None: neither scores nor loss use it
        of_states = []                 # the gradients of by_state and by_object, chunk by chunk
        of_objects = []
        total = 0
        parts = zip(by_state.chunk(count), by_object.chunk(count), target.chunk(count))
        for states, objects, truth in parts:
            inputs = [states.detach().requires_grad_(), objects.detach().requires_grad_(), *shared]
            with torch.enable_grad():
                loss = model.loss_of(*inputs[:3], truth)
                loss = loss * (len(truth) / len(target))  # its share of the mean
            # Not `backward`, which would leave gradients in the parameters.
            gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
            of_states.append(gradients[0])
            of_objects.append(gradients[1])
            for i, gradient in enumerate(gradients[2:]):
                if gradient is not None:
                    sums[i] = gradient if sums[i] is None else sums[i] + gradient
            total += loss.detach()
        ctx.save_for_backward(torch.cat(of_states), torch.cat(of_objects), *sums)
        return total

    @staticmethod
    def backward(ctx, gradient):
        """The saved gradients, times that of the loss."""
        found = [saved if saved is None else gradient * saved for saved in ctx.saved_tensors]
        return None, None, None, *found


class Ensemble(nn.Module):
    """Several CompCos, trained apart, whose scores are averaged: the same contract as one.

    Each has its own initial weights and its own draws; they share the order of the images.
    """

    def __init__(self, members):
        super().__init__()
        self.members = nn.ModuleList(members)
        self.config = members[0].config | dict(members=len(members))
        self.checkpoint = None

    forward = CompCos.forward              # (B, F) -> (B, S, O)
    cosines = CompCos.cosines              # (B, F), (P, 2) -> (B, P)
    parameter_groups = CompCos.parameter_groups

    @property
    def states(self):
        """(S, V), the first member's own."""
        return self.members[0].states

    @property
    def objects(self):
        """(O, V), the first member's own."""
        return self.members[0].objects

    def compositions(self):
        """What all images share, of each member."""
        return [member.compositions() for member in self.members]

    def score(self, features, compositions, pairs=None):
        """As that of CompCos, the mean over the members."""
        scores = (member.score(features, shared, pairs)
                  for member, shared in zip(self.members, compositions))
        return sum(scores) / len(self.members)

    def feasibility(self, seen, *, mix="mean"):
        """(S, O), the mean over the members."""
        return np.mean([member.feasibility(seen, mix=mix) for member in self.members], axis=0)

    def prepare(self, seen, **settings):
        """As that of CompCos, for every member."""
        for member in self.members:
            member.prepare(seen, **settings)
        self.word_lr_factor = self.members[0].word_lr_factor
        return self

    def loss(self, features, target):
        """The sum of the members' losses, which log.csv shows: the gradient of each is what it
        would be alone."""
        if features.device.type != "cuda":
            return sum(member.loss(features, target) for member in self.members)
        # On streams of their own the members' small kernels share the GPU.
        main = torch.cuda.current_stream()
        losses = []
        for member in self.members:
            stream = torch.cuda.Stream()
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                loss = member.loss(features, target)
            losses.append((stream, loss))
        for stream, loss in losses:
            main.wait_stream(stream)
            loss.record_stream(main)  # else its memory may be used again while it is read here
        return sum(loss for _, loss in losses)

    def after_epoch(self, epoch):
        """Each member's margins come from its own embeddings."""
        for member in self.members:
            is_another_step = member.after_epoch(epoch)
        return is_another_step  # the same for all


def build(state_vectors, object_vectors, *, members=1, **config):
    """A CompCos of these settings, or `Ensemble` of several."""
    if members == 1:
        return CompCos(state_vectors, object_vectors, **config)
    return Ensemble([CompCos(state_vectors, object_vectors, **config) for _ in range(members)])


# ---- the loss ----


def compcos_loss(cosines, target, *, scale, seen, margin=None, counts=0.0):
    """Cross-entropy over compositions with feasibility margins on the unseen ones (Eq. 2, 7 and 8):
    a 0-dim tensor.

    cosines (B, S, O), target (B,) int in s * O + o and seen (S, O) bool; or, of P chosen
    compositions, cosines (B, P), target (B,) columns and seen (P,). All are tensors, or but for the
    cosines arrays. scale = 1 / T > 0, a number or, to be learnt, a 0-dim tensor. margin, of seen's
    shape or a number, = α·ρ lowers the cosines of unseen compositions and is ignored where seen;
    None: only the seen compete. counts, a number or a tensor of seen's shape and not in the paper,
    is added to the logits of the seen: how often each is met in training. ValueError: other shapes,
    or an unseen target where only the seen compete.

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
    target = train.as_tensor(target, cosines.device)
    seen = train.as_tensor(seen, cosines.device)
    margins = train.as_tensor(0.0 if margin is None else margin, seen.device)
    if cosines.shape[1:] != seen.shape or margins.shape not in (seen.shape, ()):
        raise ValueError(f"cosines {tuple(cosines.shape)}, seen {tuple(seen.shape)}, margin "
                         f"{tuple(margins.shape)}: expected (B, S, O), (S, O), (S, O), or (B, P), "
                         "(P,), (P,)")
    # What is added to the logits scale·cos: counts where seen, -scale·margin elsewhere (Eq. 8).
    offset = torch.where(seen, counts, -scale * margins).to(cosines.dtype)
    logits = (scale * cosines + offset).flatten(1)
    target = target.long()
    if margin is None:  # the unseen have no logit: an infinite one is more than some losses bear
        seen = seen.flatten()
        if not seen[target].all():
            raise ValueError("a target is an unseen composition, and without a margin only the "
                             "seen compete: expected seen targets, or a margin")
        logits = logits[:, seen]
        target = (seen.cumsum(0) - 1)[target]  # its column among the seen
    return image_losses(logits, target).mean()


def image_losses(logits, target):
    """The loss of each image (B,), here the cross-entropy of Eq. 2 and 7.

    logits (B, P) of the P compositions that compete, all finite: all C, or the seen alone (in the
    closed world, with `train_candidates` "seen", and in the first epoch of the open world). target (B,) int:
    the column of the truth, whose logit should be the greatest.
    """
    return nnf.cross_entropy(logits, target, reduction="none")


def load_published(state_dict):
    """A `CompCos` from parameters under the published names: a state dict, a checkpoint, or a file
    of either.

    A checkpoint may nest them, and names may begin with `module.`: see `features.unwrap`.
    Published files also hold a NumPy scalar: `load_tensors` admits NumPy's numbers, and
    nothing that runs code. ValueError: other parameters.
    """
    path = "the state dict"
    if not isinstance(state_dict, dict):
        path = state_dict
        state_dict = load_tensors(path)
    ours = {"attr_embedder.weight": "states", "obj_embedder.weight": "objects"}
    weights = {}
    with reading(path, "expected a published CompCos: Linear, LayerNorm and Linear in "
                              "image_embedder.mod; attr_embedder, obj_embedder, projection"):
        for name, value in image_features.unwrap(state_dict).items():
            # The last layer is the fourth, or the fifth where dropout counts, as it does here.
            name = name.replace("embedder.mod.", "embedder.").replace("embedder.3.", "embedder.4.")
            weights[ours.get(name, name)] = train.as_tensor(value)
        hidden, feature_dim = weights["image_embedder.0.weight"].shape
        model = CompCos(weights["states"], weights["objects"], feature_dim, hidden=hidden)
        model.to(weights["states"].dtype).load_state_dict(weights)  # float64 keeps its digits
    return model.eval()


# ---- prediction ----


def predict(model, features, *, k=5, candidates=None, bias=0.0):
    """The k best compositions of each image: indices s * O + o (N, k) int64 and their scores (N,
    k), best first, arrays.

    features: (N, F) array or tensor, or a list of image files where the model's checkpoint names
    its backbone. candidates: (C,) or (S, O) bool, the compositions allowed (None: all); k is at
    most their number. bias is added to the unseen to rank them, not to the scores given; it needs
    the seen mask of a loaded checkpoint. The model is left in evaluation mode. ValueError: features
    or candidates of another shape, not finite, no candidate, a bias without that mask.
    """
    return best_compositions(model, features, k=k, candidates=candidates, bias=bias)[:2]


@torch.no_grad()
def best_compositions(model, features, *, k, candidates, bias, temperature=1.0):
    """As `predict`, and the probabilities of these answers (N, k): the softmax of (score +
    bias·[unseen]) / temperature over the candidates."""
    features = as_features(model, features)
    shape = (len(model.states), len(model.objects))
    if candidates is None:
        candidates = np.ones(shape, bool)
    allowed = train.as_tensor(candidates, features.device)
    if allowed.shape not in (shape, (shape[0] * shape[1],)) or not allowed.any():
        raise ValueError(f"candidates {tuple(allowed.shape)}, {int(allowed.sum())} of them True: "
                         f"expected (S, O) {shape} or (C,), one or more True")
    offset = torch.where(allowed.flatten(), 0.0, -torch.inf)
    if bias:
        if model.checkpoint is None:
            raise ValueError("a bias on the unseen needs to know the seen: load the model with "
                             "CompCos.load(best.pt)")
        offset += bias * ~model.checkpoint["seen"].flatten().to(offset.device)
    k = min(k, int(allowed.sum()))
    blocks = []
    for _, scores in train.chunks(model.eval(), features, model.compositions()):
        ranked = scores + offset
        indices = ranked.topk(k, dim=1).indices
        probabilities = (ranked / temperature).softmax(1)
        blocks.append((indices, scores.gather(1, indices), probabilities.gather(1, indices)))
    return tuple(torch.cat(parts).cpu().numpy() for parts in zip(*blocks))


def as_features(model, features):
    """(N, F) on the model's device, from an array, a tensor or image files. ValueError: other
    shapes, not finite."""
    checkpoint = model.checkpoint
    device = model.states.device
    if checkpoint and len(features) and isinstance(features[0], (str, Path)):
        features = image_features.features_like(checkpoint["settings"], features, device)
    features = train.as_tensor(features, device).to(model.states.dtype)
    expected = model.config["feature_dim"]
    if features.shape[1:] != (expected,) or not len(features) or not features.isfinite().all():
        raise ValueError(f"features {tuple(features.shape)}: expected (N, {expected}), all finite")
    return features


def predict_images(model, images, features=None, *, top=5, candidates="open_masked"):
    """The best compositions of images as rows, dicts: what `--predict` prints and writes.

    `model` of `CompCos.load`; `images` N files, or any names where `features` (N, F) are given.
    `candidates` is one of experiment.CANDIDATE_SETS; compositions that the training folder names
    are never hidden by the mask. `score` ranks the answers: it includes the bias on the unseen
    that was fixed on validation. `probability` is that of the answer among the candidates, at a
    temperature under which it says how often such answers were right on validation.
    """
    checkpoint = model.checkpoint
    seen, closed, feasibility, named = [
        checkpoint[name].numpy() for name in ("seen", "closed", "feasibility", "named")]
    allowed = experiment.candidate_sets(seen, closed, feasibility, checkpoint["threshold"],
                                        named=named)
    bias = checkpoint["bias"][candidates]
    indices, scores, probabilities = best_compositions(
        model, images if features is None else features, k=top, candidates=allowed[candidates],
        bias=bias, temperature=checkpoint["temperature"][candidates])
    seen = seen.ravel()
    scores = scores + np.float32(bias) * ~seen[indices]
    rows = []
    for (i, place), c in np.ndenumerate(indices):
        state, object_ = divmod(int(c), len(checkpoint["objects"]))
        rows.append(dict(
            image=str(images[i]), rank=place + 1, state=checkpoint["states"][state],
            object=checkpoint["objects"][object_], score=float(scores[i, place]),
            probability=float(probabilities[i, place]), seen=bool(seen[c]),
            feasibility=float(feasibility.flat[c])))
    return rows


def print_predictions(options):
    """Predict for the command line: print the best compositions of each image, or write --csv."""
    if not options.checkpoint or bool(options.predict) == bool(options.features):
        raise ValueError("to predict give --checkpoint FILE and either --predict IMAGE ... or "
                         "--features FILE")
    if options.csv:
        check_writable(options.csv.parent, "--csv")
    model = CompCos.load(options.checkpoint, options.device)
    images, features = image_features.images_and_features(
        model.checkpoint["settings"], options.predict, options.features, device=options.device,
        weights=options.weights, skip_broken=options.skip_broken)
    rows = predict_images(model, images, features, top=options.top, candidates=options.candidates)
    if options.csv:
        write_rows(options.csv, rows[0].keys(), [row.values() for row in rows])
        print(f"answers written to {options.csv}")
        return
    print(f"answers: {options.candidates}; scores with the bias that validation chose")
    for row in rows:
        if row["rank"] == 1:
            print(row["image"])
        kind = "seen" if row["seen"] else "unseen"
        print(f"  {row['score']:6.3f}  {row['probability']:4.0%}  {row['state']} {row['object']}  "
              f"({kind})")


# ---- the command line ----


# The paper's settings: those that all datasets share (and what the strong recipe adds, switched
# off), and those of a dataset by its name. An entry for a dataset of your own goes here, too; what
# it leaves out is as for MIT-States.
PAPER = dict(
    recipe="paper", members=1, epochs=300, min_epoch_steps=0, warmup=15, batch_size=128, lr=5e-5,
    weight_decay=5e-5, mix="mean", hidden=768, dropout=0.5, dim=None, normalize_image_embeddings=True, counts=0.0,
    average=0.0, word_lr_factor=1.0, patience=0, train_candidates="all")
DATASET_SETTINGS = {
    "mitstates": dict(scale=20.0, margin=0.4, vectors=["fasttext", "word2vec"]),
    "utzappos": dict(scale=50.0, margin=1.0, vectors=["word2vec"]),
    "cgqa": dict(scale=100.0, margin=0.4, vectors=["word2vec"]),
    "shapes": dict(scale=20.0, margin=0.4, vectors=["random"], epochs=40, lr=1e-3),
}
# A folder of one's own by the paper's recipe: as many steps as the strong one, at a rate at which
# they suffice. An epoch of small data is several passes, of `min_epoch_steps` in all.
FOLDER = dict(epochs=40, min_epoch_steps=65, warmup=15, patience=20, lr=1e-3)
STRONG = PAPER | FOLDER | dict(
    recipe="strong",
    members=4,            # 16 bring 0.3 of AUC more, at four times the cost
    scale=2.6,            # of |ω(x)| cos: the length of ω(x) carries confidence
    normalize_image_embeddings=False,
    dim=300,
    margin=7.2 / 2.6,     # 7.2 ρ off the logits of the unseen
    counts=0.5,
    dropout=0.85,         # of all, this carries most
    average=0.998,
    weight_decay=0.0,
    lr=5e-4,
    word_lr_factor=10.0,
    train_candidates=None,          # chosen by experiment.choose_train_candidates
)


def defaults(recipe=None):
    """The settings of each dataset by name, and as "other" those of a folder of one's own.

    recipe: paper or strong; None: paper for the named datasets, strong for a folder. Of a dataset's
    own settings, the strong recipe takes the word vectors alone. ValueError: a dataset's entry has
    a setting that is none.
    """
    known = PAPER | DATASET_SETTINGS["mitstates"]
    table = experiment.with_defaults(known, DATASET_SETTINGS | dict(other=FOLDER))
    for name, settings in table.items():
        if recipe == "strong" or (recipe is None and name == "other"):
            settings |= STRONG
    return table


def add_options(parser):
    """The options of CompCos alone."""
    experiment.add_options(parser)
    number = shell.number
    add = parser.add_argument_group("CompCos").add_argument
    add("--recipe", choices=["paper", "strong"],
        help="default: paper for the named datasets, else strong")
    add("--members", type=number(int, least=1),
        help="models whose scores are averaged (paper 1, strong 4)")
    add("--scale", type=number(above=0), metavar="1/T",
        help="logit scale, one over the temperature")
    add("--margin", type=number(least=0), metavar="α",
        help="greatest factor of the feasibility margins; 0: the paper's α = 0")
    add("--warmup", type=number(int, least=0),
        help="epochs until α is reached; 0: at once")
    add("--mix", choices=list(MIXES), help="g of Eq. 5")
    add("--patience", type=number(int, least=0),
        help="stop after so many epochs without a better validation AUC; 0: never")
    add("--train_candidates", choices=["all", "seen"],
        help="which compositions compete with the truth in open-world training (default all; in "
             "the strong recipe seen, where these are most and validation has few others)")
    add("--dropout", type=number(least=0, below=1))
    add("--hidden", type=number(int, least=1), help="width of ω")
    add("--dim", type=number(int, least=1),
        help="numbers of the shared space (paper: those of the vectors)")
    add("--cosine", action="store_const", const=True, dest="normalize_image_embeddings",
        help="images of unit length")
    add("--counts", type=number(least=0), metavar="W",
        help="W (log n - mean) is added to the logits of the seen")
    add("--average", type=number(least=0, below=1), metavar="DECAY",
        help="greatest decay of the average of weights; 0: none")
    add("--word-lr-factor", type=number(above=0),
        help="rate of the word embeddings over that of the rest")


@shell.command
def main(argv=None):
    """Train and evaluate, or predict with a checkpoint."""
    parser = argparse.ArgumentParser(description="CompCos: train and evaluate; with --checkpoint "
                                                 "and --predict, predict.")
    add_options(parser)
    add = parser.add_argument_group("prediction").add_argument
    add("--checkpoint", metavar="FILE", help="a best.pt")
    add("--predict", nargs="+", metavar="IMAGE",
        help="image files or folders; or give --features FILE")
    add("--csv", type=Path, metavar="FILE", help="write a table instead of printing the answers")
    add("--candidates", default="open_masked", choices=experiment.CANDIDATE_SETS,
        help="allowed answers (default open_masked)")
    add("--top", type=shell.number(int, least=1), default=5, help="answers an image (default 5)")
    options = parser.parse_args(argv)
    if options.checkpoint or options.predict or options.csv:
        if shell.rank() == 0:  # others have nothing to predict
            with shell.single_process():
                print_predictions(options)
        return
    prepared = experiment.prepare(options, "compcos", defaults(options.recipe))
    experiment.experiment(lambda: make_model(prepared), prepared)


def make_model(prepared):
    """A new model on the device, with its training set as the settings say.

    A setting of your own needs its default in PAPER, without which it is not read, its option in
    `add_options`, and a keyword of `prepare` (one of the loss is put into `loss_arguments`
    there, from where `compcos_loss` gets it), or one of the constructor, whose names stand here.
    """
    settings = prepared.settings
    dataset = prepared.dataset
    names = ("hidden", "dropout", "dim", "normalize_image_embeddings", "members")
    config = {name: settings[name] for name in names}
    config["feature_dim"] = prepared.features["train"].shape[1]
    model = build(prepared.state_vectors, prepared.object_vectors, **config).to(prepared.device)
    names = CompCos.prepare.__kwdefaults__.keys() & settings.keys()
    keywords = {name: settings[name] for name in names}
    images = np.bincount(dataset.targets["train"], minlength=dataset.seen.size)
    images = images.reshape(dataset.seen.shape)
    return model.prepare(dataset.seen, images=images, **keywords)


if __name__ == "__main__":
    main()
