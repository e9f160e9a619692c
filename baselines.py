"""The four systems that the paper compares with, and two classifiers apart, run as CompCos is:
`python baselines.py --model leplus|aop|tmn|symnet|apart`.

Each keeps the contract of a model that `train.py` states. A model of your own is one class and one
line, `baselines.MODELS["mine"] = Mine` (README shows one under "Change it"). It is made as
`Mine(state_vectors, object_vectors, feature_dim, seen, **its own settings)`, these from
`DEFAULTS["mine"]` if there is such an entry.

Shapes: B images, F features, S states, O objects, C = S*O compositions, (s, o) at s*O + o, P of
them in training; D embedding size. TMN: L layers of K modules of width w, n negatives an image,
R rows (an image with a composition) of a training batch.
A negative is a training composition other than the truth, all with equal chances, drawn with
replacement.
"""

import argparse
import inspect
import tempfile
from pathlib import Path

import common

if __name__ == "__main__":
    common.wait_gently()  # before torch is imported

import torch
from torch import nn
from torch.nn import functional as nnf

import data
import experiment
from feasibility import feasibility_scores
from train import primitive_vectors


# ---- what the systems share ----


class Compared(nn.Module):
    """The part of train.py's contract that all systems here have in common.

    A model of your own, too, may begin with it: what is left is `loss`, `score` and `config`.
    `states` (S,D) and `objects` (O,D) begin as the word vectors, and are trained or fixed.
    ValueError: vectors of other shapes or not finite.
    """

    def __init__(self, state_vectors, object_vectors, *, train_states=True, train_objects=True):
        super().__init__()
        states, objects = primitive_vectors(state_vectors, object_vectors)
        self.word_vectors = (states.clone().numpy(), objects.clone().numpy())  # never trained
        self.states = nn.Parameter(states) if train_states else nn.Buffer(states)
        self.objects = nn.Parameter(objects) if train_objects else nn.Buffer(objects)

    def forward(self, features):
        """Scores (B,S,O) of images (B,F) with every composition, higher is better."""
        return self.score(features, self.compositions())

    def after_epoch(self, epoch):
        """Nothing changes from epoch to epoch."""

    def compositions(self):
        """Nothing that all images share in scoring."""

    def feasibility(self, seen):
        """ρ (S,O) of the word vectors (Eq. 3-5), a NumPy array; seen (S,O) bool.

        Only CompCos estimates feasibility from embeddings that it has learnt.
        """
        return feasibility_scores(*self.word_vectors, seen)


class Negatives(nn.Module):
    """Draws training compositions other than the truth, of those that `seen` (S,O) bool marks.

    ValueError: fewer than two are seen.
    """

    def __init__(self, seen):
        super().__init__()
        seen = torch.as_tensor(seen, dtype=torch.bool).flatten()
        if seen.sum() < 2:
            raise ValueError(f"{int(seen.sum())} training composition(s): at least 2 are needed "
                             "to draw a negative")
        compositions = seen.nonzero().squeeze(1)
        place = seen.cumsum(0) - 1
        self.register_buffer("compositions", compositions, persistent=False)  # (P,)
        self.register_buffer("place", place, persistent=False)                # (C,) in that list

    def forward(self, target, count):
        """(B,) truths -> (B,count) compositions."""
        truth = self.place[target][:, None].expand(-1, count)  # (B,count)
        return self.compositions[draw_other(len(self.compositions), truth)]


def draw_other(size, skip):
    """Uniform integers in [0, size) other than `skip`, one for each of its entries.

    size: a number, or a tensor shaped like skip. Where size is 1 the one answer is 1, past the end.
    """
    # Draw among one fewer, and step over the one to skip: no draw is thrown away.
    drawn = torch.rand(skip.shape, device=skip.device) * (size - 1)
    drawn = drawn.long()
    return drawn + (drawn >= skip)


def chunk(tensor):
    """Numbers worth holding at once: a CPU works in its cache, a GPU wants large products."""
    if tensor.device.type == "cpu":
        return 1 << 20
    return 1 << 26


def with_squared_norms(embeddings):
    """(S,O,D) -> (C,D) and the squared norms (C,): what `nearness` takes."""
    embeddings = embeddings.flatten(0, 1)
    return embeddings, embeddings.square().sum(1)


def nearness(images, embeddings, squared_norms):
    """-|v - c|^2 (B,C) of embedded images (B,D) and compositions (C,D).

    As 2 v.c - |c|^2 - |v|^2, so that one matrix product serves all compositions.
    """
    scores = torch.addmm(-squared_norms, images, embeddings.T, alpha=2)
    return scores.sub_(images.square().sum(1, keepdim=True))


# ---- LabelEmbed+ ----


class LabelEmbedPlus(Compared):
    """LabelEmbed+: an MLP embeds [state; object]; a score is -|image - composition|^2."""

    def __init__(self, state_vectors, object_vectors, feature_dim, seen, *, margin=0.5):
        super().__init__(state_vectors, object_vectors)
        self.config = dict(feature_dim=feature_dim, margin=margin)
        dim = self.states.shape[1]
        self.images = nn.Sequential(nn.Linear(feature_dim, dim), nn.ReLU())
        self.compose = nn.Sequential(
            nn.Linear(2 * dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim), nn.ReLU())
        self.negatives = Negatives(seen)

    def embed(self, index):
        """(B,) compositions -> (B,D): c = ReLU(Linear(ReLU(Linear([e_s; e_o]))))."""
        state = index // len(self.objects)
        object_ = index % len(self.objects)
        return self.compose(torch.cat([self.states[state], self.objects[object_]], 1))

    def loss(self, features, target, negatives=None):
        """The triplet loss of v, c(truth), c(negative): max(0, |v - c| - |v - c'| + margin), mean.

        negatives (B,1+), drawn if not given: the first column counts.
        """
        if negatives is None:
            negatives = self.negatives(target, 1)
        images = self.images(features)
        truth = self.embed(target)
        other = self.embed(negatives[:, 0])
        return nnf.triplet_margin_loss(images, truth, other, margin=self.config["margin"])

    def compositions(self):
        """All embeddings (C,D) and their squared norms (C,)."""
        # The first layer is linear in [e_s; e_o]: a half for each state, and one for each object.
        first = self.compose[0]
        rest = self.compose[1:]
        of_states, of_objects = first.weight.chunk(2, 1)
        state_half = nnf.linear(self.states, of_states)                  # (S,2D)
        object_half = nnf.linear(self.objects, of_objects, first.bias)   # (O,2D)
        return with_squared_norms(rest(state_half[:, None] + object_half))

    def score(self, features, compositions):
        """(B,F) -> (B,S,O): -|v - c|^2."""
        scores = nearness(self.images(features), *compositions)
        return scores.view(-1, len(self.states), len(self.objects))


# ---- Attributes as Operators ----


class AttributesAsOperators(Compared):
    """Attributes as Operators: a state is a D x D matrix M_s on words, c = ReLU(M_s e_o)."""

    def __init__(self, state_vectors, object_vectors, feature_dim, seen, *, margin=0.5,
                 auxiliary=1.0, commutative=1.0):
        super().__init__(state_vectors, object_vectors, train_states=False)
        self.config = dict(feature_dim=feature_dim, margin=margin, auxiliary=auxiliary,
                           commutative=commutative)
        dim = self.states.shape[1]
        self.operators = nn.Parameter(torch.eye(dim).repeat(len(self.states), 1, 1))  # (S,D,D)
        self.images = nn.Sequential(nn.Linear(feature_dim, dim), nn.ReLU())
        self.to_state = nn.Linear(dim, len(self.states))
        self.to_object = nn.Linear(dim, len(self.objects))
        self.negatives = Negatives(seen)
        seen = torch.as_tensor(seen, dtype=torch.bool)
        states_with = torch.argsort(~seen.T, dim=1, stable=True)   # (O,S) those seen with it first
        place = seen.cumsum(0) - 1                                 # (S,O) a state's among them
        number = seen.sum(0)                                       # (O,) how many they are
        self.register_buffer("states_with", states_with, persistent=False)
        self.register_buffer("place", place, persistent=False)
        self.register_buffer("number", number, persistent=False)

    def parameter_groups(self, lr):
        """The states' matrices learn at a tenth of the rate."""
        rest = [value for name, value in self.named_parameters() if name != "operators"]
        return [dict(params=rest, lr=lr), dict(params=[self.operators], lr=lr / 10)]

    def draw_third(self, state, object_):
        """The states k (B,) of the commutative term.

        k is a state seen with the object and not i, where i is another such state than s; s itself
        if there is no other.
        """
        number = self.number[object_]
        other = draw_other(number, self.place[state, object_])
        # With one state alone `other` is 1, past the end, so the second draw gives 0: the state.
        return self.states_with[object_, draw_other(number, other)]

    def loss(self, features, target, negatives=None, third=None):
        """triplet(v, c, c') + auxiliary * (CE(states) + CE(objects)) + commutative * |...|^2.

        The commutative term is the mean of |M_s ReLU(M_k e_o) - M_k ReLU(M_s e_o)|^2 after ReLU.
        negatives (B,1+) and third (B,), the states k, are drawn if not given.
        """
        if negatives is None:
            negatives = self.negatives(target, 1)
        state = target // len(self.objects)
        object_ = target % len(self.objects)
        if third is None:
            third = self.draw_third(state, object_)
        other_state = negatives[:, 0] // len(self.objects)
        other_object = negatives[:, 0] % len(self.objects)

        word = self.objects[object_]             # (B,D)
        first = self.operators[state]            # (B,D,D)
        second = self.operators[third]           # (B,D,D)
        truth = operate(first, word)             # (B,D), the composition's embedding
        other = operate(self.operators[other_state], self.objects[other_object])

        triplet = nnf.triplet_margin_loss(self.images(features), truth, other,
                                        margin=self.config["margin"])
        auxiliary = nnf.cross_entropy(self.to_state(truth), state)
        auxiliary = auxiliary + nnf.cross_entropy(self.to_object(truth), object_)
        swapped = operate(first, operate(second, word)) - operate(second, truth)
        commutative = swapped.square().sum(1).mean()
        return (triplet
                + self.config["auxiliary"] * auxiliary
                + self.config["commutative"] * commutative)

    def compositions(self):
        """All embeddings (C,D) and their squared norms (C,)."""
        return with_squared_norms(torch.relu(self.objects @ self.operators.mT))

    def score(self, features, compositions):
        """(B,F) -> (B,S,O): -|v - c|^2."""
        scores = nearness(self.images(features), *compositions)
        return scores.view(-1, len(self.states), len(self.objects))


def operate(matrices, words):
    """ReLU(M e) (B,D) of matrices (B,D,D) and words (B,D)."""
    return torch.relu(torch.einsum("bij,bj->bi", matrices, words))


# ---- SymNet ----


def mlp(inputs, hidden, outputs, dropout):
    """Linear, ReLU, Dropout, Linear."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout),
                         nn.Linear(hidden, outputs))


class Transform(nn.Module):
    """SymNet's CoN or DeCoN: net(x, a) = MLP2([x + x * sigmoid(MLP1(a)); a])."""

    def __init__(self, dim, dropout):
        super().__init__()
        self.attention = mlp(dim, 512, dim, dropout)
        self.combine = mlp(2 * dim, 768, dim, dropout)

    def conditions(self, states):
        """What hangs on the states (S,D) alone.

        Returns factors (S,D) of the image and summands (S,768) of MLP2's hidden layer.
        """
        first = self.combine[0]
        of_states = first.weight[:, states.shape[1]:]
        factors = 1 + self.attention(states).sigmoid()
        summands = nnf.linear(states, of_states, first.bias)
        return factors, summands

    def forward(self, images, factors, summands):
        """Images (...,D) under conditions that broadcast with them -> (...,D)."""
        of_images = self.combine[0].weight[:, :images.shape[-1]]
        hidden = nnf.linear(images * factors, of_images).add_(summands)
        return self.combine[1:](hidden)

    def under(self, images, conditions, state):
        """Images (B,D), each under its own state (B,) -> (B,D)."""
        factors, summands = conditions
        return self(images, factors[state], summands[state])


class SymNet(Compared):
    """SymNet: to attach a state that is there, or detach one that is not, should change nothing."""

    def __init__(self, state_vectors, object_vectors, feature_dim, seen, *, state=1.0, object=1.0,
                 triplet=0.5, symmetry=0.01, axiom=0.03, dropout=0.5):
        super().__init__(state_vectors, object_vectors, train_states=False, train_objects=False)
        self.config = dict(feature_dim=feature_dim, state=state, object=object, triplet=triplet,
                           symmetry=symmetry, axiom=axiom, dropout=dropout)
        dim = self.states.shape[1]
        self.images = nn.Linear(feature_dim, dim)
        self.to_state = mlp(dim, 512, len(self.states), dropout)
        self.to_object = mlp(dim, 512, len(self.objects), dropout)
        self.attach = Transform(dim, dropout)
        self.detach = Transform(dim, dropout)
        self.negatives = Negatives(seen)

    def moving(self, images, attach, detach):
        """rmd (B,S) = |DeCoN(v, a_k) - v| - |CoN(v, a_k) - v| for every state k.

        attach and detach: the conditions of all states.
        """
        at_once = max(1, chunk(images) // attach[1].numel())
        distances = []
        for part in images[:, None].split(at_once):                      # (b,1,D)
            without = self.detach(part, *detach).sub_(part).norm(dim=2)  # (b,S)
            with_it = self.attach(part, *attach).sub_(part).norm(dim=2)
            distances.append(without - with_it)
        return torch.cat(distances)

    def state_loss(self, v, minus_a, a):
        """The states a (B,) are read from images v (B,D), and not once they are detached.

        As published, the second term takes the other images' logits: the sum over the batch
        without the image's own.
        """
        detached = self.to_state(minus_a)
        read = nnf.cross_entropy(self.to_state(v), a)
        return read + nnf.cross_entropy(detached.sum(0) - detached, a)

    def loss(self, features, target, negatives=None):
        """The five weighted sums of SymNet: state, object, triplet, symmetry, axiom.

        A is the image's state, B that of its negative; negatives (B,1+), drawn if not given: the
        first column counts. v + A is CoN(v, A) and v - A is DeCoN(v, A).
        """
        if negatives is None:
            negatives = self.negatives(target, 1)
        a = target // len(self.objects)
        b = negatives[:, 0] // len(self.objects)
        object_ = target % len(self.objects)
        v = self.images(features)
        attach, detach = self.compositions()

        def plus(x, state):
            return self.attach.under(x, attach, state)

        def minus(x, state):
            return self.detach.under(x, detach, state)

        plus_a = plus(v, a)
        minus_a = minus(v, a)
        plus_b = plus(v, b)
        minus_b = minus(v, b)

        state = self.state_loss(v, minus_a, a)
        state = state + nnf.cross_entropy(self.moving(v, attach, detach), a)

        # The object stays what it is, whatever happens to the state.
        object_loss = (nnf.cross_entropy(self.to_object(v), object_)
                       + nnf.cross_entropy(self.to_object(minus_a), object_)
                       + nnf.cross_entropy(self.to_object(plus_b), object_))

        # The image is nearer to what should leave it as it is than to what should change it.
        triplet = nnf.triplet_margin_loss(v, plus_a, minus_a)
        triplet = triplet + nnf.triplet_margin_loss(v, minus_b, plus_b)
        symmetry = nnf.mse_loss(plus_a, v) + nnf.mse_loss(minus_b, v)

        # Closure: (v + A) - A = v - A, (v - B) + B = v + B. Inverses: (v - A) + A = v, and so on.
        closure = nnf.mse_loss(minus(plus_a, a), minus_a) + nnf.mse_loss(plus(minus_b, b), plus_b)
        inverse = nnf.mse_loss(plus(minus_a, a), v) + nnf.mse_loss(minus(plus_b, b), v)
        # Commutativity, as published with A and B crossed: (v + A) - B = (v - B) - A.
        commutative = nnf.mse_loss(minus(plus_a, b), minus(minus_b, a))
        axiom = closure + inverse + commutative

        return (self.config["state"] * state
                + self.config["object"] * object_loss
                + self.config["triplet"] * triplet
                + self.config["symmetry"] * symmetry
                + self.config["axiom"] * axiom)

    def compositions(self):
        """The conditions of every state, for CoN and for DeCoN."""
        return self.attach.conditions(self.states), self.detach.conditions(self.states)

    def score(self, features, compositions):
        """(B,F) -> (B,S,O): softmax(rmd)_s * softmax(obj(v))_o."""
        images = self.images(features)
        states = self.moving(images, *compositions).softmax(1)
        objects = self.to_object(images).softmax(1)
        return states[:, :, None] * objects[:, None]


# ---- TMN ----


def batch_norm(norm, mean, variance, rows=None):
    """BatchNorm as a factor and a summand, shaped like mean: norm(x) = x * factor + summand.

    With `rows`, by these (biased) moments of a batch of so many, which are recorded as running
    statistics; without, by the running statistics, and mean gives only the shape.
    """
    if rows is None:
        mean = norm.running_mean.view_as(mean)
        variance = norm.running_var.view_as(mean)
    else:
        unbiased = variance.flatten() * (rows / (rows - 1))
        with torch.no_grad():
            norm.running_mean.lerp_(mean.flatten(), norm.momentum)
            norm.running_var.lerp_(unbiased, norm.momentum)
            norm.num_batches_tracked += 1
    factor = norm.weight.view_as(mean) * torch.rsqrt(variance.clamp(min=0) + norm.eps)
    summand = norm.bias.view_as(mean) - mean * factor
    return factor, summand


class TaskLayer(nn.Module):
    """K modules side by side, each BatchNorm, Linear(w, w), BatchNorm: each one affine map."""

    def __init__(self, modules, width):
        super().__init__()
        bound = width**-0.5  # as PyTorch begins a Linear(w, w)
        weight = torch.empty(modules, width, width).uniform_(-bound, bound)
        bias = torch.empty(modules, width).uniform_(-bound, bound)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)
        self.before = nn.BatchNorm1d(modules * width)
        self.after = nn.BatchNorm1d(modules * width)

    def recorded(self):
        """Weights (K,w,w) and biases (K,w,1) of the affine maps, by the running statistics."""
        return self.fold(torch.zeros_like(self.bias)[..., None], torch.zeros_like(self.weight))

    def affine(self, inputs, share, rows):
        """Weights (K,w,w) and biases (K,w,1) of the affine maps, normalised over a batch.

        inputs (R,K,w) with weights share (R,) that sum to 1, which stand for `rows` rows.
        """
        weighted = inputs * share[:, None, None]
        mean = weighted.sum(0)[..., None]                                         # (K,w,1)
        second_moments = weighted.permute(1, 2, 0) @ inputs.transpose(0, 1)       # (K,w,w)
        return self.fold(mean, second_moments - mean @ mean.mT, rows)

    def fold(self, mean, covariance, rows=None):
        """The affine maps from the moments of their input, (K,w,1) and (K,w,w); see `batch_norm`.

        The first norm is x f + g, so Linear after it has the weight W f and the bias b + W g. What
        the second norm normalises is that affine map of x: its mean is W f m + b + W g and its
        variance the diagonal of (W f) cov (W f)^T. So no pass over the data is made between them.
        """
        input_variance = covariance.diagonal(dim1=1, dim2=2)[..., None]           # (K,w,1)
        factor, summand = batch_norm(self.before, mean, input_variance, rows)
        weight = self.weight * factor.mT
        bias = self.bias[..., None] + self.weight @ summand

        output_variance = (weight @ covariance * weight).sum(2, keepdim=True)     # (K,w,1)
        factor, summand = batch_norm(self.after, weight @ mean + bias, output_variance, rows)
        return weight * factor, bias * factor + summand


class TMN(Compared):
    """Task-driven Modular Networks: layers of small modules, wired by the composition's gates."""

    def __init__(self, state_vectors, object_vectors, feature_dim, seen, *, layers=3, modules=24,
                 width=16, rank=64, negatives=600, gating_lr=None, fixed_vectors=False):
        for name, value in dict(layers=layers, modules=modules, width=width, rank=rank,
                                negatives=negatives).items():
            if value < 1:
                raise ValueError(f"TMN's {name} is {value}: expected at least 1")
        super().__init__(state_vectors, object_vectors, train_states=not fixed_vectors,
                         train_objects=not fixed_vectors)
        self.config = dict(feature_dim=feature_dim, layers=layers, modules=modules, width=width,
                           rank=rank, negatives=negatives, gating_lr=gating_lr,
                           fixed_vectors=fixed_vectors)
        dim = self.states.shape[1]
        self.first = nn.Linear(feature_dim, modules * width)
        self.first_norm = nn.BatchNorm1d(modules * width)
        self.layers = nn.ModuleList(TaskLayer(modules, width) for _ in range(layers - 1))
        self.last_norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 1)
        # A softmax over the K modules for each module of the later layers, and one for the output.
        # The published gater has 1 + K more outputs, whose softmaxes over one number are always 1.
        self.gater = nn.Linear(2 * dim, rank, bias=False)
        self.gater_norm = nn.BatchNorm1d(rank)
        self.gates = nn.Linear(rank, ((layers - 1) * modules + 1) * modules, bias=False)
        nn.init.normal_(self.gater.weight, 0, 0.1)
        nn.init.zeros_(self.gates.weight)
        self.negatives = Negatives(seen)

    def parameter_groups(self, lr):
        """The gating network learns at its own rate."""
        gating = []
        rest = []
        for name, value in self.named_parameters():
            group = gating if name.startswith("gate") else rest
            group.append(value)
        gating_lr = self.config["gating_lr"] or lr
        return [dict(params=rest, lr=lr), dict(params=gating, lr=gating_lr)]

    def hidden(self):
        """W1 [e_s; e_o] of every composition (C,rank): a state's half plus an object's half."""
        of_states, of_objects = self.gater.weight.chunk(2, 1)
        state_half = nnf.linear(self.states, of_states)
        object_half = nnf.linear(self.objects, of_objects)
        return (state_half[:, None] + object_half).flatten(0, 1)

    def gated(self, hidden, mean, variance, rows=None):
        """(P,rank) -> gates (P,(L-1)K + 1,K): K for each layer after the first, one for the end."""
        factor, summand = batch_norm(self.gater_norm, mean, variance, rows)
        logits = self.gates(torch.relu(hidden * factor + summand))
        return logits.unflatten(1, (-1, self.config["modules"])).softmax(2)

    def first_layer(self, features, rows=None):
        """(B,F) -> (B,K,w). All images have as many rows, so moments over images are theirs."""
        inputs = self.first(features)
        mean = inputs.mean(0)
        variance = inputs.var(0, unbiased=False)
        factor, summand = batch_norm(self.first_norm, mean, variance, rows)
        outputs = torch.relu(inputs * factor + summand)
        return outputs.unflatten(1, (self.config["modules"], -1))

    def output(self, inputs, mean, variance, rows=None):
        """(...,w) -> (...): BatchNorm and Linear(w, 1) in one."""
        factor, summand = batch_norm(self.last_norm, mean, variance, rows)
        weight = self.last.weight[0]
        return inputs @ (factor * weight) + (summand @ weight + self.last.bias)

    def rows(self, target, negatives):
        """The compositions to score each image with, R/B of them.

        Returns their places (B,R/B) in the list of training compositions, how often each counts
        (B,R/B), and the truth's column (B,1).
        """
        drawn = torch.cat([target[:, None], negatives], 1)
        places = self.negatives.place[drawn]
        size = len(self.negatives.compositions)
        once = torch.ones_like(places, dtype=self.first.weight.dtype)
        if places.shape[1] <= size:
            return places, once, torch.zeros_like(places[:, :1])
        # More draws than training compositions: score each of these once, and count it as often as
        # it was drawn.
        counts = once.new_zeros(len(target), size).scatter_add_(1, places, once)
        every = torch.arange(size, device=target.device).expand(len(target), -1)
        return every, counts, places[:, :1]

    def loss(self, features, target, negatives=None):
        """Cross-entropy of the truth among itself and its negatives (B,n), drawn if not given."""
        if negatives is None:
            negatives = self.negatives(target, self.config["negatives"])
        places, counts, truth = self.rows(target, negatives)
        rows = negatives.numel() + len(target)  # as published, also where draws repeat
        places = places.flatten()               # (R,)
        share = counts.flatten() / rows         # (R,) sums to 1: the weights of all batch moments

        gates = self.training_gates(places, share, rows)
        inputs = self.last_inputs(features, gates, places, share, rows)           # (R,w)
        mean = share @ inputs
        variance = share @ (inputs - mean).square()
        scores = self.output(inputs, mean, variance, rows).view_as(counts)

        # A composition drawn m times stands m times in the softmax's sum: exp(z + log m).
        total = (scores + counts.log()).logsumexp(1)
        return (total - scores.gather(1, truth).squeeze(1)).mean()

    def training_gates(self, places, share, rows):
        """Gates (P,(L-1)K + 1,K) of the training compositions, normalised over the batch's rows."""
        hidden = self.hidden()[self.negatives.compositions]                       # (P,rank)
        # A composition's gates are the same in all its rows: its weight is the sum of theirs.
        drawn = share.new_zeros(len(hidden)).index_add_(0, places, share)         # (P,)
        mean = drawn @ hidden
        variance = drawn @ (hidden - mean).square()
        return self.gated(hidden, mean, variance, rows)

    def last_inputs(self, features, gates, places, share, rows):
        """(B,F) -> (R,w): through all layers to what the last gate mixes, a row at each place."""
        outputs = self.first_layer(features, rows)                                # (B,K,w)
        layer_gates = gates[:, :-1].split(self.config["modules"], 1)
        for layer, gate in zip(self.layers, layer_gates):
            inputs = mix(gate, places, outputs)                                   # (R,K,w)
            weight, bias = layer.affine(inputs, share, rows)
            outputs = torch.baddbmm(bias.mT, inputs.transpose(0, 1), weight.mT)   # (K,R,w)
            outputs = outputs.relu_().transpose(0, 1)                             # (R,K,w)
        return mix(gates[:, -1:], places, outputs).squeeze(1)

    def compositions(self):
        """The gates (C,(L-1)K + 1,K) of every composition, and the layers' affine maps."""
        statistics = self.gater_norm.running_mean, self.gater_norm.running_var
        gates = self.gated(self.hidden(), *statistics)
        return gates, [layer.recorded() for layer in self.layers]

    def score(self, features, compositions):
        """(B,F) -> (B,S,O), by the running statistics."""
        gates, affine_maps = compositions
        images = len(features)
        first = self.first_layer(features).transpose(0, 1)                        # (K,B,w)
        second = self.second_layer_parts(first, affine_maps)
        statistics = self.last_norm.running_mean, self.last_norm.running_var
        scores = features.new_empty(len(gates), images)                           # (C,B)
        at_once = max(1, chunk(first) // first.numel())  # compositions
        for start in range(0, len(gates), at_once):
            gate = gates[start:start + at_once]                                   # (c,…,K)
            outputs = self.last_layer(gate, first, second, affine_maps)           # (c,K,B*w)
            inputs = (gate[:, -1:] @ outputs).view(len(gate), images, -1)         # (c,B,w)
            scores[start:start + at_once] = self.output(inputs, *statistics)
        return scores.T.reshape(images, len(self.states), len(self.objects)).contiguous()

    def second_layer_parts(self, first, affine_maps):
        """What each module j of the second layer would make of each output i alone.

        first (K,B,w) -> parts (J,K,B*w) and biases (J,1,B*w): the map is linear, so a composition's
        gates need only mix the parts. None where there is one layer.
        """
        if not affine_maps:
            return None
        weight, bias = affine_maps[0]
        parts = first[None] @ weight.mT[:, None]                                  # (J,K,B,w)
        repeated = bias.mT.repeat(1, first.shape[1], 1)                           # (J,B,w)
        return parts.flatten(2), repeated.view(len(bias), 1, -1)

    def last_layer(self, gate, first, second, affine_maps):
        """Outputs (c,K,B*w) of the last layer for c compositions with the gates (c,(L-1)K + 1,K).

        first, second: the first layer's outputs, and `second_layer_parts` of them.
        """
        if second is None:
            return first.flatten(1)[None]  # the same for all compositions
        size = self.config["modules"]
        images = first.shape[1]
        parts, bias = second
        outputs = torch.baddbmm(bias, gate[:, :size].transpose(0, 1), parts)      # (J,c,B*w)
        outputs = outputs.relu_().transpose(0, 1)                                 # (c,J,B*w)
        for row, (weight, bias) in enumerate(affine_maps[1:], 1):
            layer_gate = gate[:, row * size:(row + 1) * size]                     # (c,J,K)
            inputs = (layer_gate @ outputs).view(len(gate) * size, images, -1)    # (c*J,B,w)
            weights = weight.mT.repeat(len(gate), 1, 1)
            biases = bias.mT.repeat(len(gate), 1, 1)
            outputs = torch.baddbmm(biases, inputs, weights).relu_().view(len(gate), size, -1)
        return outputs


def mix(gates, places, outputs):
    """Inputs (R,J,w) of the next layer: each is a mixture of the outputs of this one.

    gates (P,J,K) at places (R,), times outputs (R,K,w), or (B,K,w) where all rows of an image
    share theirs.
    """
    chosen = nnf.embedding(places, gates.flatten(1))                # (R,J*K)
    chosen = chosen.view(len(outputs), -1, gates.shape[2])        # (R,J,K), or (B,R/B*J,K)
    return (chosen @ outputs).view(len(places), gates.shape[1], -1)


# ---- two classifiers apart ----


class Apart(Compared):
    """The floor: two logistic regressions on standardised features, states and objects apart.

    score(s, o) = log p(s | image) + log p(o | image); it knows no word and no composition.
    """

    def __init__(self, state_vectors, object_vectors, feature_dim, seen):
        super().__init__(state_vectors, object_vectors, train_states=False, train_objects=False)
        self.config = dict(feature_dim=feature_dim)
        self.standardise = nn.BatchNorm1d(feature_dim, affine=False)
        self.to_state = nn.Linear(feature_dim, len(self.states))
        self.to_object = nn.Linear(feature_dim, len(self.objects))

    def loss(self, features, target):
        """CE(states) + CE(objects)."""
        features = self.standardise(features)
        state = target // len(self.objects)
        object_ = target % len(self.objects)
        return (nnf.cross_entropy(self.to_state(features), state)
                + nnf.cross_entropy(self.to_object(features), object_))

    def score(self, features, compositions=None):
        """(B,F) -> (B,S,O): log softmax(states)_s + log softmax(objects)_o."""
        features = self.standardise(features)
        states = self.to_state(features).log_softmax(1)
        objects = self.to_object(features).log_softmax(1)
        return states[:, :, None] + objects[:, None]


WEIGHT_DECAYS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


def choose_weight_decay(build, prepared):
    """The weight decay of WEIGHT_DECAYS with the best validation AUC, each trained once.

    `build()` gives a model on the device; prepared: what `experiment.prepare` returned.
    """
    arrays = {}
    for phase in data.PHASES:
        features = torch.as_tensor(prepared.features[phase], device=prepared.device)
        arrays[phase] = features, prepared.dataset.targets[phase]
    epochs = len(WEIGHT_DECAYS) * prepared.settings["epochs"]
    job = common.Progress("all weight decays", epochs, "epochs", together=True)

    def validation(weight_decay):
        settings = dict(prepared.settings, weight_decay=weight_decay, seed=0)
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            history, _ = experiment.train_model(build(), arrays, prepared.dataset,
                                                settings=settings, out=Path(folder), resume=False,
                                                eager=False, job=job)
        return max(row["validation"] for row in history)

    best = dict(common.spread(WEIGHT_DECAYS, validation, job))
    return max(best, key=best.get)


# ---- the command ----

ARGUMENTS = ("state_vectors", "object_vectors", "feature_dim", "seen")  # of every constructor
MODELS = dict(aop=AttributesAsOperators, leplus=LabelEmbedPlus, tmn=TMN, symnet=SymNet, apart=Apart)

# Settings of training, which no constructor takes: those that all models have, and further ones.
TRAINING = dict(epochs=1000, batch_size=512, lr=5e-5, weight_decay=5e-5, vectors=["glove"])
FURTHER_TRAINING = ("steps", "patience", "patience_steps", "average")
# The built-in dataset, for minutes on a CPU instead of hours.
BUILT_IN = dict(batch_size=128, lr=1e-3)
TMN_PUBLISHED = TRAINING | dict(epochs=100, batch_size=256, lr=1e-4, gating_lr=1e-6, negatives=600,
                                width=16, fixed_vectors=False)
TMN_SHOES = TMN_PUBLISHED | dict(width=300, fixed_vectors=True, vectors=["word2vec"])
# TMN on data of one's own, in minutes on two cores: at the published gating rate it learns nothing
# in so few steps, and modules of 300 numbers take hours.
TMN_OWN = TMN_PUBLISHED | dict(epochs=30, batch_size=128, lr=1e-3, gating_lr=1e-3, negatives=50)
# Large batches, since the statistics of small ones blur a classifier of standardised features.
# 800 steps, or the least epochs that experiment.py takes; the weight decay by validation.
APART = TRAINING | dict(epochs=None, steps=800, lr=3e-3, weight_decay=None)

# The published settings of each dataset; "other" is any that has no entry.
DEFAULTS = dict(
    leplus=dict(
        shapes=TRAINING | BUILT_IN | dict(epochs=250),
        other=TRAINING),
    aop=dict(
        mitstates=TRAINING | dict(auxiliary=1000.0),
        shapes=TRAINING | BUILT_IN | dict(epochs=100, auxiliary=1.0),
        other=TRAINING | dict(auxiliary=1.0)),
    symnet=dict(
        mitstates=TRAINING | dict(batch_size=450, object=0.1),
        shapes=TRAINING | BUILT_IN | dict(epochs=30, object=1.0),
        other=TRAINING | dict(object=1.0)),
    tmn=dict(
        mitstates=TMN_PUBLISHED,
        utzappos=TMN_SHOES,
        cgqa=TMN_SHOES | dict(negatives=50),
        shapes=TMN_SHOES | BUILT_IN | dict(epochs=20, gating_lr=1e-3, width=16, negatives=50),
        other=TMN_OWN),
    apart=dict(other=APART),
)


def defaults(name):
    """The settings of a model by dataset or "other": TRAINING, changed by its entry in DEFAULTS.

    ValueError: a setting that is none of training's and that the model's constructor does not take.
    """
    table = {}
    for dataset, settings in (dict(other={}) | DEFAULTS.get(name, {})).items():
        try:
            table[dataset] = TRAINING | settings
            inspect.signature(MODELS[name]).bind(*ARGUMENTS, **settings_of_model(table[dataset]))
        except TypeError as error:
            known = ", ".join([*TRAINING, *FURTHER_TRAINING])
            raise ValueError(
                f"baselines.DEFAULTS[{name!r}][{dataset!r}]: {error}; expected a dictionary of "
                f"settings of training ({known}) and of {MODELS[name].__name__}, which takes its "
                f"own after {', '.join(ARGUMENTS)}") from None
    return table


def settings_of_model(settings):
    """Those that are none of training's: the model's constructor takes them."""
    return {name: value for name, value in settings.items()
            if name not in TRAINING and name not in FURTHER_TRAINING}


def add_options(parser):
    """The options of all the compared systems, but for the choice of one."""
    experiment.add_options(parser)
    add = parser.add_argument_group("baselines").add_argument
    add("--feasibility", metavar="FILE", help="a CompCos run's feasibility.csv or best.pt, for the "
        "mask (default: from the word vectors)")
    add("--negatives", type=int, metavar="N", help="TMN: negatives an image")
    add("--width", type=int, help="TMN: of a module")
    add("--gating-lr", type=float, help="TMN: learning rate of the gating network")


@common.command
def main(argv=None):
    """Train and evaluate one system; the world decides which AUC chooses the best epoch."""
    parser = argparse.ArgumentParser(description="The compared systems, run as CompCos is: "
                                     "LabelEmbed+, Attributes as Operators, TMN, SymNet, and two "
                                     "classifiers apart.")
    parser.add_argument("--model", required=True, choices=MODELS)
    add_options(parser)
    options = parser.parse_args(argv)
    table = defaults(options.model)
    check_own_options(options, set().union(*table.values()))
    prepared = experiment.prepare(options, options.model, table)
    settings = prepared.settings
    settings["feasibility"] = options.feasibility or "word vectors"
    given = None
    if options.feasibility:
        given = experiment.read_feasibility(options.feasibility, prepared.dataset.states,
                                            prepared.dataset.objects)

    def build():
        model = make_model(options.model, prepared)
        if given is not None:
            model.feasibility = lambda seen: given  # the scores it is masked with, read from a file
        return model

    if settings["weight_decay"] is None:
        settings["weight_decay"] = choose_weight_decay(build, prepared)
    experiment.experiment(
        build, prepared.dataset, prepared.features, settings=settings, seeds=options.seed,
        device=prepared.device, out=prepared.out, resume=options.resume,
        save_scores=options.save_scores, eager=options.eager)


def make_model(name, prepared):
    """A new model on the device, with the settings that are its own and not of training."""
    table = defaults(name)
    own = settings_of_model(table.get(prepared.dataset.name, table["other"]))
    settings = {name: prepared.settings[name] for name in own}
    model = MODELS[name](prepared.state_vectors, prepared.object_vectors,
                         prepared.features["train"].shape[1], prepared.dataset.seen, **settings)
    return model.to(prepared.device)


def check_own_options(options, settings):
    """ValueError: an option of TMN for a model without such a setting. FileNotFoundError: no such
    --feasibility."""
    if options.feasibility and not Path(options.feasibility).exists():
        raise FileNotFoundError(f"no file --feasibility {options.feasibility}: expected a CompCos "
                                "run's feasibility.csv or best.pt")
    for name in ("negatives", "width", "gating_lr"):
        value = getattr(options, name)
        if value is not None and name not in settings:
            raise ValueError(f"--{name.replace('_', '-')} {value}: {options.model} has no such "
                             "setting; leave it out")


if __name__ == "__main__":
    main()
