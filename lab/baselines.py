"""The four systems that the paper compares with, and two classifiers apart, run as CompCos is:
`python baselines.py --model leplus|aop|tmn|symnet|visprod`.

Each keeps the contract of a model that `train.py` states. A model of your own is one class and one
line, `baselines.MODELS["mine"] = Mine` (README shows one under "Change it"). It is made as
`Mine(state_vectors, object_vectors, feature_dim, seen, **its own settings)`. These are its
keyword-only parameters: each has its default there, other ones for a dataset in `DEFAULTS["mine"]`,
and, if it is a number, an option.

Shapes: B images, F features, S states, O objects, C = S*O compositions, (s, o) at s*O + o, P of
them in training; D embedding size. TMN: L layers of K modules of width w, n negatives an image.
A negative is a training composition other than the truth, all with equal chances, drawn with
replacement.
"""

import argparse

from lab import shell

if __name__ == "__main__":
    shell.wait_gently()  # before torch is imported

import torch
from torch import nn
from torch.nn import functional as nnf

from lab import run as experiment
from feasibility import feasibility_scores
from train import split_linear, primitive_vectors


# ---- what the systems share ----


class BaselineModel(nn.Module):
    """The part of train.py's contract that all systems here have in common.

    A model of your own, too, may begin with it: what is left is `loss`, `score` and `config`.
    `states` (S,D) and `objects` (O,D) begin as the word vectors, and are trained or fixed.
    ValueError: vectors of other shapes.
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

    def primitives(self, index):
        """State and object of compositions (...), each (...)."""
        return index // len(self.objects), index % len(self.objects)


class NegativeSampler(nn.Module):
    """Draws training compositions other than the truth, of those that `seen` (S,O) bool marks, two
    or more."""

    def __init__(self, seen):
        super().__init__()
        seen = torch.as_tensor(seen, dtype=torch.bool).flatten()
        self.compositions = nn.Buffer(seen.nonzero().squeeze(1), persistent=False)  # (P,)
        self.place = nn.Buffer(seen.cumsum(0) - 1, persistent=False)    # (C,) in that list

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


# ---- LabelEmbed+ and Attributes as Operators ----


class Triplet(BaselineModel):
    """Images v and compositions c in one space, trained on triplets; a score is -|v - c|^2.

    v = ReLU(Linear(F, D)). A subclass gives `embed_all() -> (S,O,D)`, and its loss from `triplet`.
    """

    def __init__(self, state_vectors, object_vectors, feature_dim, seen, margin, **trained):
        super().__init__(state_vectors, object_vectors, **trained)
        self.config = dict(feature_dim=feature_dim, margin=margin)
        self.images = nn.Sequential(nn.Linear(feature_dim, self.states.shape[1]), nn.ReLU())
        self.negatives = NegativeSampler(seen)

    def triplet(self, features, truth, other):
        """max(0, |v - c| - |v - c'| + margin), mean, of c and c', truth and other (B,D)."""
        images = self.images(features)
        return nnf.triplet_margin_loss(images, truth, other, margin=self.config["margin"])

    def compositions(self):
        """All embeddings (C,D) and their squared norms (C,)."""
        embeddings = self.embed_all().flatten(0, 1)
        return embeddings, embeddings.square().sum(1)

    def score(self, features, compositions):
        """(B,F) -> (B,S,O): -|v - c|^2."""
        # As 2 v.c - |c|^2 - |v|^2, so that one matrix product serves all compositions.
        embeddings, squared_norms = compositions
        images = self.images(features)
        scores = torch.addmm(-squared_norms, images, embeddings.T, alpha=2)
        scores.sub_(images.square().sum(1, keepdim=True))
        return scores.view(-1, len(self.states), len(self.objects))


class LabelEmbedPlus(Triplet):
    """LabelEmbed+: an MLP embeds [state; object]."""

    def __init__(self, state_vectors, object_vectors, feature_dim, seen, *, margin=0.5):
        super().__init__(state_vectors, object_vectors, feature_dim, seen, margin)
        dim = self.states.shape[1]
        self.compose = nn.Sequential(
            nn.Linear(2 * dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim), nn.ReLU())

    def embed(self, index):
        """(B,) compositions -> (B,D): c = ReLU(Linear(ReLU(Linear([e_s; e_o]))))."""
        state, object_ = self.primitives(index)
        return self.compose(torch.cat([self.states[state], self.objects[object_]], 1))

    def embed_all(self):
        """The same of all compositions, (S,O,D)."""
        # The first layer is linear in [e_s; e_o]: a half for each state, and one for each object.
        state_half, object_half = split_linear(self.compose[0], self.states, self.objects)
        return self.compose[1:](state_half[:, None] + object_half)

    def loss(self, features, target, negatives=None):
        """The triplet loss of v, c(truth), c(negative).

        negatives (B,1+), drawn if not given: the first column counts.
        """
        if negatives is None:
            negatives = self.negatives(target, 1)
        return self.triplet(features, self.embed(target), self.embed(negatives[:, 0]))


class AttributesAsOperators(Triplet):
    """Attributes as Operators: a state is a D x D matrix M_s on words, c = ReLU(M_s e_o)."""

    def __init__(self, state_vectors, object_vectors, feature_dim, seen, *, margin=0.5,
                 auxiliary=1.0, commutative=1.0):
        super().__init__(state_vectors, object_vectors, feature_dim, seen, margin,
                         train_states=False)
        self.config |= dict(auxiliary=auxiliary, commutative=commutative)
        dim = self.states.shape[1]
        self.operators = nn.Parameter(torch.eye(dim).repeat(len(self.states), 1, 1))  # (S,D,D)
        self.to_state = nn.Linear(dim, len(self.states))
        self.to_object = nn.Linear(dim, len(self.objects))
        seen = torch.as_tensor(seen, dtype=torch.bool)
        seen_first = torch.argsort(~seen.T, dim=1, stable=True)
        self.states_with = nn.Buffer(seen_first, persistent=False)      # (O,S) those seen with it
        self.place = nn.Buffer(seen.cumsum(0) - 1, persistent=False)    # (S,O) a state's among them
        self.number = nn.Buffer(seen.sum(0), persistent=False)          # (O,) how many they are

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

    def operate(self, state, words):
        """ReLU(M_s e) (B,D) of states (B,) and words (B,D)."""
        return torch.relu(torch.einsum("bij,bj->bi", self.operators[state], words))

    def embed_all(self):
        """The embeddings of all compositions, (S,O,D)."""
        return torch.relu(self.objects @ self.operators.mT)

    def loss(self, features, target, negatives=None, third=None):
        """triplet(v, c, c') + auxiliary * (CE(states) + CE(objects)) + commutative * |...|^2.

        The commutative term is the mean of |M_s ReLU(M_k e_o) - M_k ReLU(M_s e_o)|^2 after ReLU.
        negatives (B,1+) and third (B,), the states k, are drawn if not given.
        """
        if negatives is None:
            negatives = self.negatives(target, 1)
        state, object_ = self.primitives(target)
        other_state, other_object = self.primitives(negatives[:, 0])
        if third is None:
            third = self.draw_third(state, object_)
        word = self.objects[object_]             # (B,D)
        truth = self.operate(state, word)          # (B,D), the composition's embedding
        other = self.operate(other_state, self.objects[other_object])

        triplet = self.triplet(features, truth, other)
        auxiliary = (nnf.cross_entropy(self.to_state(truth), state)
                     + nnf.cross_entropy(self.to_object(truth), object_))
        swapped = self.operate(state, self.operate(third, word)) - self.operate(third, truth)
        commutative = swapped.square().sum(1).mean()
        return (triplet
                + self.config["auxiliary"] * auxiliary
                + self.config["commutative"] * commutative)


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


class SymNet(BaselineModel):
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
        self.negatives = NegativeSampler(seen)

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
        a, object_ = self.primitives(target)
        b, _ = self.primitives(negatives[:, 0])
        v = self.images(features)
        attach, detach = self.compositions()

        def plus(x, state):
            return self.attach(x, *(condition[state] for condition in attach))

        def minus(x, state):
            return self.detach(x, *(condition[state] for condition in detach))

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


class TaskLayer(nn.Module):
    """K modules side by side, each BatchNorm, Linear(w, w), BatchNorm, ReLU."""

    def __init__(self, modules, width):
        super().__init__()
        bound = width**-0.5  # as PyTorch begins a Linear(w, w)
        self.weight = nn.Parameter(torch.empty(modules, width, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(modules, width).uniform_(-bound, bound))
        self.before = nn.BatchNorm1d(modules * width)
        self.after = nn.BatchNorm1d(modules * width)

    def forward(self, inputs):
        """(R,K,w,B) -> (R,K,w,B)."""
        outputs = self.before(inputs.flatten(1, 2)).view_as(inputs)
        outputs = (self.weight @ outputs).add_(self.bias[..., None])
        return self.after(outputs.flatten(1, 2)).relu_().view_as(inputs)


class TMN(BaselineModel):
    """Task-driven Modular Networks: layers of small modules, wired by the composition's gates."""

    def __init__(self, state_vectors, object_vectors, feature_dim, seen, *, layers=3, modules=24,
                 width=16, rank=64, negatives=600, gating_lr=1e-6, fixed_vectors=False):
        super().__init__(state_vectors, object_vectors, train_states=not fixed_vectors,
                         train_objects=not fixed_vectors)
        self.config = dict(feature_dim=feature_dim, layers=layers, modules=modules, width=width,
                           rank=rank, negatives=negatives, gating_lr=gating_lr,
                           fixed_vectors=fixed_vectors)
        self.first = nn.Linear(feature_dim, modules * width)
        self.first_norm = nn.BatchNorm1d(modules * width)
        self.layers = nn.ModuleList(TaskLayer(modules, width) for _ in range(layers - 1))
        self.last_norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 1)
        # A softmax over the K modules for each module of the later layers, and one for the output.
        # The published gater has 1 + K more outputs, whose softmaxes over one number are always 1.
        self.gater = nn.Linear(2 * self.states.shape[1], rank, bias=False)
        self.gater_norm = nn.BatchNorm1d(rank)
        self.gates = nn.Linear(rank, ((layers - 1) * modules + 1) * modules, bias=False)
        nn.init.normal_(self.gater.weight, 0, 0.1)
        nn.init.zeros_(self.gates.weight)
        self.negatives = NegativeSampler(seen)

    def parameter_groups(self, lr):
        """The gating network learns at its own rate."""
        gating = []
        rest = []
        for name, value in self.named_parameters():
            if name.startswith("gate"):
                gating.append(value)
            else:
                rest.append(value)
        return [dict(params=rest, lr=lr), dict(params=gating, lr=self.config["gating_lr"])]

    def gated(self, index):
        """(R,) compositions -> gates (R,K,K) of each layer after the first, (R,1,K) of the output.
        """
        # W1 [e_s; e_o] is a half for each state, and one for each object.
        state, object_ = self.primitives(index)
        state_half, object_half = split_linear(self.gater, self.states, self.objects)  # (S or O,rank)
        hidden = torch.relu(self.gater_norm(state_half[state] + object_half[object_]))
        size = self.config["modules"]
        return self.gates(hidden).unflatten(1, (-1, size)).softmax(2).split(size, 1)

    def first_layer(self, features, repeats=1):
        """(B,F) -> (B*repeats,K,w), each image in so many rows, as BatchNorm counts them."""
        inputs = self.first(features)[:, None].expand(-1, repeats, -1)
        outputs = torch.relu(self.first_norm(inputs.flatten(0, 1)))
        return outputs.unflatten(1, (self.config["modules"], -1))

    def score_gated(self, outputs, gates, mix):
        """Scores (R,B) from what the first layer makes of images, (R,K,w,B), and from `gated`.

        mix: how gates mix the outputs of modules, an einsum. Gates are those of r, one composition
        for all images, or of b, where each image has a composition of its own.
        """
        *layer_gates, last_gate = gates
        for layer, gate in zip(self.layers, layer_gates):
            outputs = layer(torch.einsum(mix, gate, outputs))
        outputs = torch.einsum(mix, last_gate, outputs).squeeze(1)                # (R,w,B)
        return self.last(self.last_norm(outputs).mT).squeeze(2)

    def loss(self, features, target, negatives=None):
        """Cross-entropy of the truth among itself and its negatives (B,n), drawn if not given."""
        if negatives is None:
            negatives = self.negatives(target, self.config["negatives"])
        index = torch.cat([target[:, None], negatives], 1)                        # (B,1+n)
        outputs = self.first_layer(features, index.shape[1])                      # (R,K,w)
        outputs = outputs.permute(1, 2, 0)[None]
        scores = self.score_gated(outputs, self.gated(index.flatten()), "bjk,rkwb->rjwb")
        return nnf.cross_entropy(scores.view_as(index), torch.zeros_like(target))

    def compositions(self):
        """The gates of every composition."""
        count = len(self.states) * len(self.objects)
        return self.gated(torch.arange(count, device=self.states.device))

    def score(self, features, compositions):
        """(B,F) -> (B,S,O), in evaluation."""
        blocks = []
        for images in features.split(128):
            # The images come last, for long products, and some compositions at a time.
            first = self.first_layer(images).permute(1, 2, 0)                     # (K,w,B)
            at_once = max(1, chunk(first) // first.numel())
            scores = []
            for gates in zip(*[gate.split(at_once) for gate in compositions]):
                outputs = first.expand(len(gates[0]), -1, -1, -1)                 # (R,K,w,B)
                scores.append(self.score_gated(outputs, gates, "rjk,rkwb->rjwb"))
            blocks.append(torch.cat(scores).T)                                    # (B,C)
        return torch.cat(blocks).view(-1, len(self.states), len(self.objects))


# ---- two classifiers apart ----


class VisProd(BaselineModel):
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
        state, object_ = self.primitives(target)
        return (nnf.cross_entropy(self.to_state(features), state)
                + nnf.cross_entropy(self.to_object(features), object_))

    def score(self, features, compositions=None):
        """(B,F) -> (B,S,O): log softmax(states)_s + log softmax(objects)_o."""
        features = self.standardise(features)
        states = self.to_state(features).log_softmax(1)
        objects = self.to_object(features).log_softmax(1)
        return states[:, :, None] + objects[:, None]


# ---- the command ----

MODELS = dict(aop=AttributesAsOperators, leplus=LabelEmbedPlus, tmn=TMN, symnet=SymNet, visprod=VisProd)

# Settings of training, which no constructor takes.
TRAINING = dict(epochs=1000, batch_size=512, lr=5e-5, weight_decay=5e-5, min_epoch_steps=0,
                vectors=["glove"])
# The built-in dataset, for minutes on a CPU instead of hours.
BUILT_IN = dict(batch_size=128, lr=1e-3)
TMN_PUBLISHED = dict(epochs=100, batch_size=256, lr=1e-4)
TMN_SHOES = TMN_PUBLISHED | dict(width=300, fixed_vectors=True, vectors=["word2vec"])

# The published settings of each dataset, where they differ from TRAINING and from those of the
# model's constructor; "other" is any dataset that has no entry.
DEFAULTS = dict(
    leplus=dict(shapes=BUILT_IN | dict(epochs=250)),
    aop=dict(
        mitstates=dict(auxiliary=1000.0),
        shapes=BUILT_IN | dict(epochs=100)),
    symnet=dict(
        mitstates=dict(batch_size=450, object=0.1),
        shapes=BUILT_IN | dict(epochs=30)),
    tmn=dict(
        mitstates=TMN_PUBLISHED,
        utzappos=TMN_SHOES,
        cgqa=TMN_SHOES | dict(negatives=50),
        shapes=TMN_SHOES | BUILT_IN | dict(epochs=20, gating_lr=1e-3, width=16, negatives=50),
        # Minutes on two cores. At the published gating rate it learns nothing in so few steps.
        other=dict(epochs=30, batch_size=128, lr=1e-3, gating_lr=1e-3, negatives=20)),
    # Large batches, since the statistics of small ones blur a classifier of standardised features.
    # Of 0.001 to 0.1, this decay is never far below the one that validation would choose (open
    # world, five sets). No word is looked at, so any vectors do.
    visprod=dict(other=dict(epochs=40, min_epoch_steps=20, lr=3e-3, weight_decay=0.02,
                          vectors=["random"])),
)


def own_settings(name):
    """The settings of a model alone, {name: default}: its constructor's keyword-only parameters."""
    return MODELS[name].__init__.__kwdefaults__ or {}


def owners():
    """{setting: the names of the models that have it}."""
    found = {}
    for name in MODELS:
        for setting in own_settings(name):
            found.setdefault(setting, []).append(name)
    return found


def defaults(name):
    """All settings of a model by dataset or "other": TRAINING and its own, changed by DEFAULTS.

    ValueError: DEFAULTS has a setting that is none of either.
    """
    known = TRAINING | own_settings(name)
    return experiment.with_defaults(known, dict(other={}) | DEFAULTS.get(name, {}))


def add_options(parser):
    """The options of all systems but for the choice of one, among them their own numbers."""
    experiment.add_options(parser)
    add = parser.add_argument_group("settings of one system").add_argument
    add("--feasibility", metavar="FILE", help="a CompCos run's feasibility.csv, for the mask "
        "(default: from the word vectors)")
    for setting, names in owners().items():
        kind = type(own_settings(names[0])[setting])
        if kind in (int, float):
            least = 1 if kind is int else 0  # of sizes, and of weights and rates
            add(f"--{setting.replace('_', '-')}", type=shell.number(kind, least=least),
                help=f"of {', '.join(names)}")


@shell.command
def main(argv=None):
    """Train and evaluate one system; the world decides which AUC chooses the best epoch."""
    parser = argparse.ArgumentParser(description="The compared systems, run as CompCos is: "
                                     "LabelEmbed+, Attributes as Operators, TMN, SymNet, and two "
                                     "classifiers apart.")
    parser.add_argument("--model", required=True, choices=MODELS)
    add_options(parser)
    options = parser.parse_args(argv)
    for setting in owners().keys() - own_settings(options.model).keys():
        if getattr(options, setting, None) is not None:
            raise ValueError(f"{options.model} has no setting {setting}: leave the option out")
    prepared = experiment.prepare(options, options.model, defaults(options.model))
    prepared.settings["feasibility"] = options.feasibility or "word vectors"

    def build():
        own = {name: prepared.settings[name] for name in own_settings(options.model)}
        model = MODELS[options.model](
            prepared.state_vectors, prepared.object_vectors,
            prepared.features["train"].shape[1], prepared.dataset.seen, **own).to(prepared.device)
        if options.feasibility:
            given = experiment.read_feasibility(options.feasibility, prepared.dataset.states,
                                                prepared.dataset.objects)
            model.feasibility = lambda seen: given
        return model

    experiment.experiment(build, prepared)


if __name__ == "__main__":
    main()
