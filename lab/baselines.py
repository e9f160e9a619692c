"""The systems that the paper compares with, trained and evaluated as CompCos is.

    python -m lab.baselines --model leplus|aop|tmn|symnet|visprod

`BaselineModel` says what a model must offer. A model of your own is one class and one line,
`baselines.MODELS["mine"] = Mine`. If it has settings of its own, it declares them in a nested
dataclass, `class Settings(BaselineModel.Settings)`; each of them is an option then.

Shapes: B images of a batch, F features of an image, S states, O objects, C = S*O compositions, D
numbers of an embedding; P seen compositions. A composition (s, o) has the index s * O + o. TMN: L
layers of K modules of width w, n negatives for each image. A negative is a seen composition other
than the truth, drawn uniformly and with replacement.
"""

import argparse
from dataclasses import dataclass

from lab import shell

if __name__ == "__main__":
    shell.wait_gently()  # before torch is imported

import torch
from torch import nn
from torch.nn import functional as nnf

from compcos import (TRAINING_SCORES, CompCos, TrainingSettings, adam_groups, as_word_vectors,
                     seen_of, setting, shape_of, split_linear)
from feasibility import feasibility_scores
from lab import run


# ---- what the systems share ----


class BaselineModel(nn.Module):
    """The contract of a model, and the part of it that all systems here share.

    Training and evaluation need no more of a model than this; CompCos and its Ensemble keep the
    same contract. A model that derives from this class has all but `loss` and `score`.

    | name | what it is |
    | --- | --- |
    | `settings` | a TrainingSettings |
    | `feature_dim` | F |
    | `seen` | mask (S, O) of the seen compositions, known after `prepare`; None before |
    | `states`, `objects` | tensors of S and O rows, of the model's type and on its device |
    | `prepare(seen, targets=None)` | receives the seen compositions; returns the model |
    | `loss(features (B, F), target (B,))` | the mean loss of a batch, a 0-dim tensor |
    | `backward(features, target)` | optional: adds the gradients of `loss` and returns the loss |
    | `after_epoch(epoch)` | changes what depends on the epoch; see below |
    | `compositions()` | what all images share in scoring, computed once for many images, or None |
    | `score(features (B, F), compositions)` | scores (B, S, O), higher is better |
    | `feasibility(seen=None)` | array (S, O), which the hard mask compares with its threshold |
    | `parameter_groups(lr)` | optional: Adam's groups, where learning rates differ |
    | `history` | a row for each epoch of training; [] at first |
    | `checkpoint` | None; of a loaded model, what else its file holds |

    All models are constructed as `Model(state_vectors, object_vectors, feature_dim, settings)` on
    the CPU, moved to their device, and prepared there.

    On CUDA a training step is captured once as a graph and replayed, unless `--eager` is given. So
    `loss` must not read a value back (`.item()`, `float(tensor)`, `if tensor:`), and its shapes
    must not change from step to step. What changes from epoch to epoch must be a tensor that
    `after_epoch` updates in place; a Python number would stay as it was captured. Where an epoch
    changes more than that, `after_epoch` returns True, and the step is captured anew.

    Args:
        state_vectors: word vectors (S, D), the first values of `states`.
        object_vectors: word vectors (O, D), the first values of `objects`.
        feature_dim: F, the numbers of an image.
        settings: a TrainingSettings, such as `settings_of` returns.

    Raises:
        ValueError: vectors of other shapes.
    """

    @dataclass(frozen=True)
    class Settings(TrainingSettings):
        """Settings of training as in the published comparison."""

        epochs: int = setting(1000, help="greatest number of epochs", least=1)
        batch_size: int = setting(512, help="images of a training step", least=1)

    def __init__(self, state_vectors, object_vectors, feature_dim, settings):
        super().__init__()
        self.settings = settings
        self.feature_dim = feature_dim
        self.history = []
        self.checkpoint = None
        self.seen = None
        self.word_vectors = as_word_vectors(state_vectors, object_vectors)  # never trained
        states, objects = self.word_vectors
        self.states = nn.Parameter(states.clone())
        self.objects = nn.Parameter(objects.clone())

    def prepare(self, seen, targets=None):
        """Configure training. Call after `.to(device)`.

        Args:
            seen: (S, O) bool, the compositions with training images.
            targets: training targets, which no system here needs.

        Returns:
            The model.

        Raises:
            ValueError: a mask of another shape or type.
        """
        self.seen = torch.as_tensor(seen_of(self, seen), device=self.states.device)
        self.seen_compositions = self.seen.flatten().nonzero().squeeze(1)  # (P,)
        return self

    forward = CompCos.forward  # (B, F) -> (B, S, O)

    def after_epoch(self, epoch):
        """Change nothing: no system here depends on the epoch.

        Args:
            epoch: the epoch that has ended, 1, 2, ...; on resuming, the last one is passed again.

        Returns:
            None; True would have the training step captured anew.
        """

    def compositions(self):
        """Return what all images share in scoring, the second argument of `score`; here None."""

    def feasibility(self, seen=None):
        """Return feasibility ρ (S, O) of the word vectors (Eq. 3 to 5).

        Only CompCos estimates feasibility from embeddings that it has learnt.

        Args:
            seen: (S, O) bool; None takes the model's own.

        Returns:
            A float64 array; seen compositions are 1.
        """
        return feasibility_scores(*self.word_vectors, seen_of(self, seen))

    def primitives(self, index):
        """Return state and object of compositions.

        Args:
            index: int64 tensor of any shape, s * O + o.

        Returns:
            Two tensors of this shape.
        """
        return index // len(self.objects), index % len(self.objects)

    def draw_negatives(self, target, count):
        """Return `count` negatives of each image. Call after `prepare`.

        Args:
            target: int64 tensor (B,), the true compositions.
            count: negatives of an image, at least 1.

        Returns:
            An int64 tensor (B, count).

        Raises:
            ValueError: `prepare` was not called.
        """
        if self.seen is None:
            raise ValueError("the model must be prepared before it is trained: call "
                             "model.prepare(seen) first")
        truth = torch.searchsorted(self.seen_compositions, target)[:, None]  # (B, 1), of P places
        return self.seen_compositions[
            draw_other(len(self.seen_compositions), truth.expand(-1, count))]


def draw_other(size, skip):
    """Return a uniform integer in [0, size) other than `skip`, for each of its entries.

    `size` is a number, or a tensor of the shape of `skip`. Where size is 1, the result is 1.
    """
    # Draw among one fewer, and step over the one to skip: no draw is thrown away.
    drawn = (torch.rand(skip.shape, device=skip.device) * (size - 1)).long()
    return drawn + (drawn >= skip)


def chunk_size(part):
    """Return how many results of the size of a tensor to compute at once, at least 1."""
    limit = TRAINING_SCORES.get(part.device.type, TRAINING_SCORES["cpu"])
    return max(1, limit // part.numel())


# ---- LabelEmbed+ and Attributes as Operators ----


class Triplet(BaselineModel):
    """Images v and compositions c in one space, trained on triplets; a score is -|v - c|².

    v = ReLU(Linear(F, D)). A subclass has a loss, `embed`, which returns the embeddings (B, D) of
    compositions (B,), and `embed_all`, which returns those of all, (S, O, D).
    """

    @dataclass(frozen=True)
    class Settings(BaselineModel.Settings):
        """Settings of a system that is trained on triplets."""

        margin: float = setting(0.5, help="margin of the triplet loss", least=0)

    def __init__(self, state_vectors, object_vectors, feature_dim, settings):
        super().__init__(state_vectors, object_vectors, feature_dim, settings)
        self.images = nn.Sequential(nn.Linear(feature_dim, self.states.shape[1]), nn.ReLU())

    def triplet_loss(self, features, target, truth):
        """Return the mean of max(0, |v - c| - |v - c'| + margin).

        c (B, D) is `truth`, the embedding of the targets (B,), and c' that of a negative.
        """
        other = self.embed(self.draw_negatives(target, 1).squeeze(1))
        return nnf.triplet_margin_loss(self.images(features), truth, other,
                                       margin=self.settings.margin)

    def compositions(self):
        """Return all embeddings (C, D) and their squared norms (C,)."""
        embeddings = self.embed_all().flatten(0, 1)
        return embeddings, embeddings.square().sum(1)

    def score(self, features, compositions):
        """Return scores (B, S, O) of images (B, F), -|v - c|²."""
        # As 2 v·c - |c|² - |v|², so that one matrix product serves all compositions.
        embeddings, squared_norms = compositions
        images = self.images(features)
        scores = torch.addmm(-squared_norms, images, embeddings.T, alpha=2)
        scores.sub_(images.square().sum(1, keepdim=True))
        return scores.unflatten(1, shape_of(self))


class LabelEmbedPlus(Triplet):
    """LabelEmbed+: c = ReLU(Linear(ReLU(Linear([e_s; e_o]))))."""

    def __init__(self, state_vectors, object_vectors, feature_dim, settings):
        super().__init__(state_vectors, object_vectors, feature_dim, settings)
        dim = self.states.shape[1]
        self.compose = nn.Sequential(
            nn.Linear(2 * dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim), nn.ReLU())

    def embed(self, index):
        """Return the embeddings (B, D) of compositions (B,)."""
        state, object_ = self.primitives(index)
        return self.compose(torch.cat([self.states[state], self.objects[object_]], 1))

    def embed_all(self):
        """Return the embeddings of all compositions, (S, O, D)."""
        # The first layer is linear in [e_s; e_o]: a half for each state, and one for each object.
        state_half, object_half = split_linear(self.compose[0], self.states, self.objects)
        return self.compose[1:](state_half[:, None] + object_half)

    def loss(self, features, target):
        """Return the triplet loss of images (B, F) with targets (B,)."""
        return self.triplet_loss(features, target, self.embed(target))


class AttributesAsOperators(Triplet):
    """Attributes as Operators: a state is a matrix M_s that acts on words, c = ReLU(M_s e_o)."""

    @dataclass(frozen=True)
    class Settings(Triplet.Settings):
        """Settings of Attributes as Operators."""

        auxiliary: float = setting(1.0, help="weight of the classification of state and object "
                                   "from an embedding", least=0)
        commutative: float = setting(1.0, help="weight of the commutativity of two states", least=0)

    def __init__(self, state_vectors, object_vectors, feature_dim, settings):
        super().__init__(state_vectors, object_vectors, feature_dim, settings)
        dim = self.states.shape[1]
        self.operators = nn.Parameter(torch.eye(dim).repeat(len(self.states), 1, 1))  # (S, D, D)
        self.to_state = nn.Linear(dim, len(self.states))
        self.to_object = nn.Linear(dim, len(self.objects))

    def parameter_groups(self, lr):
        """Return Adam's two groups: the states' matrices learn at a tenth of the rate."""
        return adam_groups(self, ["operators"], lr / 10, lr)

    def draw_third(self, state, object_):
        """Return the states k (B,) of the commutative term, for states and objects (B,).

        With i another state seen with the object than s, k is a state seen with it other than i.
        Where s is the only state seen with the object, k is s.
        """
        seen = self.seen.T[object_]  # (B, S), the states seen with each object
        place = seen.cumsum(1) - 1   # (B, S), a state's place among these
        number = seen.sum(1)
        other = draw_other(number, place.gather(1, state[:, None]).squeeze(1))
        # With one state alone `other` is 1, past the end, so the second draw gives 0: the state.
        third = draw_other(number, other)
        return (place == third[:, None]).int().argmax(1)  # the first such place is the state's own

    def operate(self, state, words):
        """Return ReLU(M_s e) (B, D) of states (B,) and words (B, D)."""
        return torch.relu(torch.einsum("bij,bj->bi", self.operators[state], words))

    def embed(self, index):
        """Return the embeddings (B, D) of compositions (B,)."""
        state, object_ = self.primitives(index)
        return self.operate(state, self.objects[object_])

    def embed_all(self):
        """Return the embeddings of all compositions, (S, O, D)."""
        return torch.relu(self.objects @ self.operators.mT)

    def loss(self, features, target):
        """Return triplet(v, c, c') + auxiliary · (CE(states) + CE(objects)) + commutative · |...|².

        The last term is the mean of |ReLU(M_s ReLU(M_k e_o)) - ReLU(M_k ReLU(M_s e_o))|², with
        the states k of `draw_third`.
        """
        state, object_ = self.primitives(target)
        word = self.objects[object_]       # (B, D)
        truth = self.operate(state, word)  # (B, D), the composition's embedding
        triplet = self.triplet_loss(features, target, truth)
        third = self.draw_third(state, object_)
        auxiliary = (nnf.cross_entropy(self.to_state(truth), state)
                     + nnf.cross_entropy(self.to_object(truth), object_))
        swapped = self.operate(state, self.operate(third, word)) - self.operate(third, truth)
        return (triplet
                + self.settings.auxiliary * auxiliary
                + self.settings.commutative * swapped.square().sum(1).mean())


# ---- SymNet ----


def mlp(inputs, hidden, outputs, dropout):
    """Return Linear, ReLU, Dropout, Linear."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout),
                         nn.Linear(hidden, outputs))


class Transform(nn.Module):
    """CoN or DeCoN of SymNet: net(x, a) = MLP₂([x + x · sigmoid(MLP₁(a)); a])."""

    def __init__(self, dim, dropout):
        super().__init__()
        self.attention = mlp(dim, 512, dim, dropout)
        self.combine = mlp(2 * dim, 768, dim, dropout)

    def conditions(self, states):
        """Return what depends on the states (S, D) alone.

        These are factors (S, D) of the image, and summands (S, 768) of the hidden layer of MLP₂.
        """
        first = self.combine[0]
        of_states = first.weight[:, states.shape[1]:]
        factors = 1 + self.attention(states).sigmoid()
        return factors, nnf.linear(states, of_states, first.bias)

    def forward(self, images, factors, summands):
        """Return net(x, a) (..., D) of images (..., D), with conditions of a matching shape."""
        of_images = self.combine[0].weight[:, :images.shape[-1]]
        hidden = nnf.linear(images * factors, of_images).add_(summands)
        return self.combine[1:](hidden)


class SymNet(BaselineModel):
    """SymNet: to add a state that is there, or remove one that is not, should change nothing."""

    @dataclass(frozen=True)
    class Settings(BaselineModel.Settings):
        """Settings of SymNet."""

        state: float = setting(1.0, help="weight of the classification of the state", least=0)
        object: float = setting(1.0, help="weight of the classification of the object", least=0)
        triplet: float = setting(0.5, help="weight of the triplet losses", least=0)
        symmetry: float = setting(0.01, help="weight of the symmetry", least=0)
        axiom: float = setting(0.03, help="weight of closure, inverses and commutativity", least=0)
        dropout: float = setting(0.5, help="dropout of all networks", least=0, below=1)

    def __init__(self, state_vectors, object_vectors, feature_dim, settings):
        super().__init__(state_vectors, object_vectors, feature_dim, settings)
        self.states.requires_grad_(False)
        dim = self.states.shape[1]
        dropout = settings.dropout
        self.images = nn.Linear(feature_dim, dim)
        self.to_state = mlp(dim, 512, len(self.states), dropout)
        self.to_object = mlp(dim, 512, len(self.objects), dropout)
        self.attach = Transform(dim, dropout)
        self.detach = Transform(dim, dropout)

    def moving(self, images, attach, detach):
        """Return rmd (B, S) = |DeCoN(v, a_k) - v| - |CoN(v, a_k) - v| for every state k.

        `attach` and `detach` are the conditions of all states.
        """
        distances = []
        for part in images[:, None].split(chunk_size(attach[1])):
            without = self.detach(part, *detach).sub_(part).norm(dim=2)  # (b, S) of b images
            with_it = self.attach(part, *attach).sub_(part).norm(dim=2)
            distances.append(without - with_it)
        return torch.cat(distances)

    def loss(self, features, target):
        """Return the weighted sum of SymNet's losses: state, object, triplet, symmetry, axiom.

        A is the image's state, B that of its negative; v + A is CoN(v, A) and v - A is DeCoN(v, A).
        """
        a, object_ = self.primitives(target)
        b, _ = self.primitives(self.draw_negatives(target, 1).squeeze(1))
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

        # The state is read from v, and not once removed. As published, the second term takes the
        # other images' logits: the sum over the batch without the image's own.
        detached = self.to_state(minus_a)
        state_loss = (nnf.cross_entropy(self.to_state(v), a)
                      + nnf.cross_entropy(detached.sum(0) - detached, a)
                      + nnf.cross_entropy(self.moving(v, attach, detach), a))

        # The object stays what it is, whatever happens to the state.
        object_loss = (nnf.cross_entropy(self.to_object(v), object_)
                       + nnf.cross_entropy(self.to_object(minus_a), object_)
                       + nnf.cross_entropy(self.to_object(plus_b), object_))

        # The image is nearer to what should leave it as it is than to what should change it.
        triplet = (nnf.triplet_margin_loss(v, plus_a, minus_a)
                   + nnf.triplet_margin_loss(v, minus_b, plus_b))
        symmetry = nnf.mse_loss(plus_a, v) + nnf.mse_loss(minus_b, v)

        # Closure: (v + A) - A = v - A, (v - B) + B = v + B. Inverses: (v - A) + A = v, and so on.
        closure = nnf.mse_loss(minus(plus_a, a), minus_a) + nnf.mse_loss(plus(minus_b, b), plus_b)
        inverse = nnf.mse_loss(plus(minus_a, a), v) + nnf.mse_loss(minus(plus_b, b), v)
        # Commutativity, as published with A and B crossed: (v + A) - B = (v - B) - A.
        commutative = nnf.mse_loss(minus(plus_a, b), minus(minus_b, a))

        return (self.settings.state * state_loss
                + self.settings.object * object_loss
                + self.settings.triplet * triplet
                + self.settings.symmetry * symmetry
                + self.settings.axiom * (closure + inverse + commutative))

    def compositions(self):
        """Return the conditions of every state, for CoN and for DeCoN."""
        return self.attach.conditions(self.states), self.detach.conditions(self.states)

    def score(self, features, compositions):
        """Return scores (B, S, O) of images (B, F), softmax(rmd)_s · softmax(obj(v))_o."""
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
        """Return outputs of the shape of the inputs, (R, K, w, B)."""
        outputs = self.before(inputs.flatten(1, 2)).view_as(inputs)
        outputs = (self.weight @ outputs).add_(self.bias[..., None])
        return self.after(outputs.flatten(1, 2)).relu_().view_as(inputs)


class TMN(BaselineModel):
    """Task-driven Modular Networks: layers of small modules, wired by the composition's gates."""

    @dataclass(frozen=True)
    class Settings(BaselineModel.Settings):
        """Settings of TMN."""

        layers: int = setting(3, help="layers of modules", least=1)
        modules: int = setting(24, help="modules of a layer", least=1)
        width: int = setting(16, help="width of a module", least=1)
        rank: int = setting(64, help="width of the gating network", least=1)
        negatives: int = setting(600, help="negatives of an image", least=1)
        gating_lr: float = setting(1e-6, help="learning rate of the gating network", least=0)
        fixed_vectors: bool = setting(False, help="keep the word vectors as they are")

    def __init__(self, state_vectors, object_vectors, feature_dim, settings):
        super().__init__(state_vectors, object_vectors, feature_dim, settings)
        if settings.fixed_vectors:
            self.states.requires_grad_(False)
            self.objects.requires_grad_(False)
        modules = settings.modules
        width = settings.width
        later = settings.layers - 1
        self.first = nn.Linear(feature_dim, modules * width)
        self.first_norm = nn.BatchNorm1d(modules * width)
        self.layers = nn.ModuleList(TaskLayer(modules, width) for _ in range(later))
        self.last_norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 1)
        # A softmax over the K modules for each module of the later layers, and one for the output.
        # The published gater has 1 + K more outputs, whose softmaxes over one number are always 1.
        self.gater = nn.Linear(2 * self.states.shape[1], settings.rank, bias=False)
        self.gater_norm = nn.BatchNorm1d(settings.rank)
        self.gates = nn.Linear(settings.rank, (later * modules + 1) * modules, bias=False)
        nn.init.normal_(self.gater.weight, 0, 0.1)
        nn.init.zeros_(self.gates.weight)

    def parameter_groups(self, lr):
        """Return Adam's two groups: the gating network learns at its own rate."""
        return adam_groups(self, ["gater", "gater_norm", "gates"], self.settings.gating_lr, lr)

    def gated(self, index):
        """Return the gates of compositions (R,): (R, K, K) of each later layer, (R, 1, K) at last.
        """
        # W₁ [e_s; e_o] is a half for each state, and one for each object, (S or O, rank).
        state, object_ = self.primitives(index)
        state_half, object_half = split_linear(self.gater, self.states, self.objects)
        hidden = torch.relu(self.gater_norm(state_half[state] + object_half[object_]))
        size = self.settings.modules
        return self.gates(hidden).unflatten(1, (-1, size)).softmax(2).split(size, 1)

    def first_layer(self, features, repeats=1):
        """Return the first layer's outputs (1, K, w, B * repeats) of images (B, F).

        Each image has so many rows, as BatchNorm counts them. The rows come last, for long
        products.
        """
        inputs = self.first(features)[:, None].expand(-1, repeats, -1)
        outputs = torch.relu(self.first_norm(inputs.flatten(0, 1)))
        return outputs.unflatten(1, (self.settings.modules, -1)).permute(1, 2, 0)[None]

    def score_gated(self, outputs, gates, mix):
        """Return scores (R, B) of outputs of the first layer (R, K, w, B) under gates.

        `mix` is the einsum by which gates mix the outputs of modules. A gate belongs to r, one
        composition for all images, or to b, where each image has a composition of its own.
        """
        for layer, gate in zip(self.layers, gates):
            outputs = layer(torch.einsum(mix, gate, outputs))
        outputs = torch.einsum(mix, gates[-1], outputs).squeeze(1)                # (R, w, B)
        return self.last(self.last_norm(outputs).mT).squeeze(2)

    def loss(self, features, target):
        """Return the cross-entropy of the truth among itself and its n negatives."""
        negatives = self.draw_negatives(target, self.settings.negatives)
        index = torch.cat([target[:, None], negatives], 1)                        # (B, 1 + n)
        outputs = self.first_layer(features, index.shape[1])
        scores = self.score_gated(outputs, self.gated(index.flatten()), "bjk,rkwb->rjwb")
        return nnf.cross_entropy(scores.view_as(index), torch.zeros_like(target))

    def compositions(self):
        """Return the gates of every composition."""
        return self.gated(torch.arange(len(self.states) * len(self.objects),
                                       device=self.states.device))

    def score(self, features, compositions):
        """Return scores (B, S, O) of images (B, F), in evaluation mode."""
        blocks = []
        for images in features.split(128):
            # Some compositions at a time share the contiguous outputs; others would be copied for
            # each of them.
            outputs = self.first_layer(images).contiguous()
            scores = []
            for gates in zip(*[gate.split(chunk_size(outputs)) for gate in compositions]):
                scores.append(self.score_gated(outputs, gates, "rjk,rkwb->rjwb"))
            blocks.append(torch.cat(scores).T)                                    # (B, C)
        return torch.cat(blocks).unflatten(1, shape_of(self))


# ---- VisProd ----


class VisProd(BaselineModel):
    """Two logistic regressions on standardised features, one for states and one for objects.

    The score is log p(s | image) + log p(o | image). No word and no composition has a part in it.
    """

    def __init__(self, state_vectors, object_vectors, feature_dim, settings):
        super().__init__(state_vectors, object_vectors, feature_dim, settings)
        self.standardise = nn.BatchNorm1d(feature_dim, affine=False)
        self.to_state = nn.Linear(feature_dim, len(self.states))
        self.to_object = nn.Linear(feature_dim, len(self.objects))

    def loss(self, features, target):
        """Return the cross-entropy of states plus that of objects."""
        features = self.standardise(features)
        state, object_ = self.primitives(target)
        return (nnf.cross_entropy(self.to_state(features), state)
                + nnf.cross_entropy(self.to_object(features), object_))

    def score(self, features, compositions):
        """Return scores (B, S, O) of images (B, F), log softmax(states) + log softmax(objects)."""
        features = self.standardise(features)
        states = self.to_state(features).log_softmax(1)
        objects = self.to_object(features).log_softmax(1)
        return states[:, :, None] + objects[:, None]


# ---- the command ----

MODELS = dict(aop=AttributesAsOperators, leplus=LabelEmbedPlus, tmn=TMN, symnet=SymNet,
              visprod=VisProd)

# What datasets change of a system's settings; "other" is any dataset that is not named.
BUILT_IN = dict(batch_size=128, lr=1e-3)  # minutes on a CPU instead of hours
TMN_PUBLISHED = dict(epochs=100, batch_size=256, lr=1e-4)
TMN_SHOES = dict(TMN_PUBLISHED, width=300, fixed_vectors=True)
DATASET_SETTINGS = dict(
    leplus=dict(shapes=dict(BUILT_IN, epochs=250)),
    aop=dict(
        mitstates=dict(auxiliary=1000.0),
        shapes=dict(BUILT_IN, epochs=100)),
    symnet=dict(
        mitstates=dict(batch_size=450, object=0.1),
        shapes=dict(BUILT_IN, epochs=30)),
    tmn=dict(
        mitstates=TMN_PUBLISHED,
        utzappos=TMN_SHOES,
        cgqa=dict(TMN_SHOES, negatives=50),
        shapes=dict(BUILT_IN, epochs=20, gating_lr=1e-3, negatives=50, fixed_vectors=True),
        # Minutes on two cores. At the published gating_lr nothing is learnt in so few steps.
        other=dict(BUILT_IN, epochs=30, gating_lr=1e-3, negatives=20)),
    # Batches are large, since the statistics of small ones blur a classifier of standardised
    # features. Of 0.001 to 0.1, this decay is never far below the one that validation would choose
    # (open world, five sets).
    visprod=dict(other=dict(epochs=40, min_epoch_steps=20, lr=3e-3, weight_decay=0.02)))

# Word vectors of the systems that do not begin with GloVe, by dataset. VisProd looks at no word, so
# any vectors do.
WORD_VECTORS = dict(
    tmn=dict(utzappos=["word2vec"], cgqa=["word2vec"], shapes=["word2vec"]),
    visprod=dict(other=["random"]))

DESCRIPTION = """\
Train and evaluate one of the systems that the paper compares with, as CompCos is.

  leplus   LabelEmbed+: a network embeds the word vectors of state and object
  aop      Attributes as Operators: a state is a matrix that acts on the object's word vector
  tmn      Task-driven Modular Networks (TMN): the composition wires small networks
  symnet   SymNet: states are added to images and removed from them
  visprod  VisProd (two logistic regressions): state and object are classified separately

`--model SYSTEM --help` lists the settings of a system. DATASET_SETTINGS in lab/baselines.py lists
the defaults that a dataset changes; metrics.json records the settings of a run."""


def for_dataset(table, name, dataset, default):
    """Return the entry of a system for a dataset, for all other datasets, or else the default."""
    entries = table.get(name, {})
    return entries.get(dataset, entries.get("other", default))


def settings_of(name, dataset, **changes):
    """Return the settings of a system for a dataset.

    Args:
        name: one of MODELS.
        dataset: "shapes", "mitstates", "utzappos", "cgqa", or any other name.
        changes: settings that replace those of the system and the dataset.

    Returns:
        An instance of the system's Settings.

    Raises:
        ValueError: a setting of a wrong type or out of its range.
    """
    return MODELS[name].Settings(**for_dataset(DATASET_SETTINGS, name, dataset, {}) | changes)


def vectors_of(name, dataset):
    """Return the sources of word vectors of a system for a dataset, a list of names.

    Args:
        name: one of MODELS.
        dataset: as for `settings_of`.
    """
    return for_dataset(WORD_VECTORS, name, dataset, ["glove"])


@shell.command
def main(argv=None):
    """Train and evaluate one system."""
    chooser = argparse.ArgumentParser(add_help=False)
    chooser.add_argument("--model")
    name = chooser.parse_known_args(argv)[0].model
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m lab.baselines --model leplus --dataset utzappos")
    parser.add_argument("--model", required=True, choices=MODELS, help="the system")
    system = MODELS.get(name, BaselineModel)
    run.add_options(parser, system.Settings)
    options = parser.parse_args(argv)
    settings = settings_of(name, options.dataset,
                           **run.settings_changes(options, system.Settings))
    inputs = run.load_inputs(options, vectors_of(name, options.dataset))
    run.run_seeds(name, system, inputs, settings, options, more=dict(feasibility="word vectors"))


if __name__ == "__main__":
    main()
