"""The four systems that the paper compares with, run as CompCos is: `baselines.py --model leplus|aop|tmn|symnet`.

B images, F features, S states, O objects, C = S*O compositions, (s, o) = s*O+o, P of them in training; D embedding
size. TMN: L layers of K modules of width w, n negatives an image, R rows (image and composition) of a training batch.
A negative is a training composition other than the truth, all with equal chances, drawn with replacement.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import common
import experiment
from feasibility import feasibility_scores
from train import primitive_vectors


def draw_other(size, skip):
    """Uniform integers in [0, size) other than `skip`, one for each entry; size: a number or a tensor like skip."""
    drawn = (torch.rand(skip.shape, device=skip.device) * (size - 1)).long()
    return drawn + (drawn >= skip)


class Negatives(nn.Module):
    """Draws training compositions other than the truth: of those that `seen` (S,O) bool marks."""

    def __init__(self, seen):
        super().__init__()
        seen = torch.as_tensor(seen, dtype=torch.bool).flatten()
        if seen.sum() < 2:
            raise ValueError(f"{int(seen.sum())} training composition(s): at least 2 are needed to draw a negative")
        self.register_buffer("compositions", seen.nonzero().squeeze(1), persistent=False)
        self.register_buffer("place", seen.cumsum(0) - 1, persistent=False)  # (C,) in that list

    def forward(self, target, count):
        """(B,) truths -> (B, count) compositions."""
        return self.compositions[draw_other(len(self.compositions), self.place[target][:, None].expand(-1, count))]


def hold(model, state_vectors, object_vectors, *, states=True, objects=True):
    """Give `model` its own `states` (S,D) and `objects` (O,D), trained or fixed; return D. Raise ValueError."""
    vectors = primitive_vectors(state_vectors, object_vectors)
    model.states, model.objects = (nn.Parameter(array) if trained else nn.Buffer(array)
                                   for array, trained in zip(vectors, (states, objects)))
    return vectors[0].shape[1]


def chunk(tensor):
    """Numbers worth holding at once: a processor works in its cache, a GPU wants large products."""
    return 1 << 20 if tensor.device.type == "cpu" else 1 << 26


def all_scores(model, features):
    """(B,F) -> (B,S,O), higher is better."""
    return model.score(features, model.compositions())


def points(embeddings):
    """(S,O,D) -> (C,D) and the squared norms (C,): what `nearness` takes."""
    embeddings = embeddings.flatten(0, 1)
    return embeddings, embeddings.square().sum(1)


def nearness(model, features, compositions):
    """(B,F) -> (B,S,O): -|v - c|^2 = 2 v.c - |c|^2 - |v|^2, one matrix product for all compositions."""
    images, (embeddings, norms) = model.images(features), compositions
    scores = torch.addmm(-norms, images, embeddings.T, alpha=2).sub_(images.square().sum(1, keepdim=True))
    return scores.view(-1, len(model.states), len(model.objects))


class LabelEmbedPlus(nn.Module):
    """LabelEmbed+: an MLP embeds [state; object] word vectors (S,D), (O,D); scores are distances to the image."""

    score, forward = nearness, all_scores

    def __init__(self, state_vectors, object_vectors, feature_dim, seen, *, margin=0.5):
        super().__init__()
        self.config = dict(feature_dim=feature_dim, margin=margin)
        dim = hold(self, state_vectors, object_vectors)
        self.images = nn.Sequential(nn.Linear(feature_dim, dim), nn.ReLU())
        self.compose = nn.Sequential(nn.Linear(2 * dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim), nn.ReLU())
        self.negatives = Negatives(seen)

    def embed(self, index):
        """(B,) compositions -> (B,D): c = ReLU(Linear(ReLU(Linear([e_s; e_o]))))."""
        size = len(self.objects)
        return self.compose(torch.cat([self.states[index // size], self.objects[index % size]], 1))

    def loss(self, features, target, negatives=None):
        """triplet(v, c(truth), c(negative)); of negatives (B,1+), drawn if not given, the first column counts."""
        negatives = self.negatives(target, 1) if negatives is None else negatives
        truth, other = self.embed(target), self.embed(negatives[:, 0])
        return F.triplet_margin_loss(self.images(features), truth, other, margin=self.config["margin"])

    def compositions(self):
        """All embeddings (C,D), their squared norms (C,); the first layer is a state's half plus an object's half."""
        first, rest = self.compose[0], self.compose[1:]
        of_states, of_objects = first.weight.chunk(2, 1)
        return points(rest(F.linear(self.states, of_states)[:, None] + F.linear(self.objects, of_objects, first.bias)))


def act(matrices, words):
    """ReLU(M e) of (B,D,D) and (B,D)."""
    return torch.relu(torch.einsum("bij,bj->bi", matrices, words))


class AttributesAsOperators(nn.Module):
    """Attributes as Operators: a state is a D x D matrix acting on the object's word vector, c = ReLU(M_s e_o)."""

    score, forward = nearness, all_scores

    def __init__(self, state_vectors, object_vectors, feature_dim, seen, *, margin=0.5, auxiliary=1.0, commutative=1.0):
        super().__init__()
        self.config = dict(feature_dim=feature_dim, margin=margin, auxiliary=auxiliary, commutative=commutative)
        dim, seen = hold(self, state_vectors, object_vectors, states=False), torch.as_tensor(seen, dtype=torch.bool)
        self.operators = nn.Parameter(torch.eye(dim).repeat(len(self.states), 1, 1))
        self.images = nn.Sequential(nn.Linear(feature_dim, dim), nn.ReLU())
        self.to_state, self.to_object = nn.Linear(dim, len(self.states)), nn.Linear(dim, len(self.objects))
        self.negatives = Negatives(seen)
        # For each object the states seen with it, listed first; a state's place (S,O) among them; how many they are.
        self.register_buffer("states_with", torch.argsort(~seen.T, dim=1, stable=True), persistent=False)
        self.register_buffer("place", seen.cumsum(0) - 1, persistent=False)
        self.register_buffer("number", seen.sum(0), persistent=False)

    def parameter_groups(self, lr):
        """The states' matrices learn at a tenth of the rate."""
        rest = [value for name, value in self.named_parameters() if name != "operators"]
        return [dict(params=rest, lr=lr), dict(params=[self.operators], lr=lr / 10)]

    def draw_third(self, state, object_):
        """k (B,) of the commutative term: a state seen with the object not i, i another than s; s if there is none."""
        number = self.number[object_]
        other = draw_other(number, self.place[state, object_])
        return self.states_with[object_, draw_other(number, other)]

    def loss(self, features, target, negatives=None, third=None):
        """Triplet, auxiliary, commutative terms; negatives (B,1+) and third (B,), the states k, drawn if not given."""
        size = len(self.objects)
        state, object_ = target // size, target % size
        negative = self.negatives(target, 1)[:, 0] if negatives is None else negatives[:, 0]
        third = self.draw_third(state, object_) if third is None else third
        first, second, word = self.operators[state], self.operators[third], self.objects[object_]
        truth, other = act(first, word), act(self.operators[negative // size], self.objects[negative % size])
        swapped = act(first, act(second, word)) - act(second, truth)
        auxiliary = F.cross_entropy(self.to_state(truth), state) + F.cross_entropy(self.to_object(truth), object_)
        return (F.triplet_margin_loss(self.images(features), truth, other, margin=self.config["margin"])
                + self.config["auxiliary"] * auxiliary
                + self.config["commutative"] * swapped.square().sum(1).mean())

    def compositions(self):
        """All embeddings (C,D) and their squared norms (C,)."""
        return points(torch.relu(self.objects @ self.operators.mT))


def mlp(inputs, hidden, outputs, dropout):
    """Linear, ReLU, Dropout, Linear."""
    layers = nn.Linear(inputs, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(hidden, outputs)
    return nn.Sequential(*layers)


class Transform(nn.Module):
    """SymNet's CoN or DeCoN: net(x, a) = MLP2([x + x * sigmoid(MLP1(a)); a])."""

    def __init__(self, dim, dropout):
        super().__init__()
        self.attention, self.combine = mlp(dim, 512, dim, dropout), mlp(2 * dim, 768, dim, dropout)

    def conditions(self, states):
        """What hangs on the states (S,D) alone: factors (S,D) of the image, summands (S,768) of the hidden layer."""
        first = self.combine[0]
        return 1 + self.attention(states).sigmoid(), F.linear(states, first.weight[:, states.shape[1]:], first.bias)

    def forward(self, images, factors, summands):
        """Images (...,D) under conditions that broadcast with them -> (...,D)."""
        hidden = F.linear(images * factors, self.combine[0].weight[:, :images.shape[-1]]).add_(summands)
        return self.combine[1:](hidden)


class SymNet(nn.Module):
    """SymNet: attaching a state that is there, or detaching one that is not, should leave the image as it is."""

    forward = all_scores

    def __init__(self, state_vectors, object_vectors, feature_dim, seen, *, state=1.0, object=1.0, triplet=0.5,
                 symmetry=0.01, axiom=0.03, dropout=0.5):
        super().__init__()
        self.config = dict(feature_dim=feature_dim, state=state, object=object, triplet=triplet, symmetry=symmetry,
                           axiom=axiom, dropout=dropout)
        dim = hold(self, state_vectors, object_vectors, states=False, objects=False)
        self.images = nn.Linear(feature_dim, dim)
        self.to_state, self.to_object = (mlp(dim, 512, len(words), dropout) for words in (self.states, self.objects))
        self.attach, self.detach = Transform(dim, dropout), Transform(dim, dropout)
        self.negatives = Negatives(seen)

    def moving(self, images, attach, detach):
        """rmd (B,S) = |DeCoN(v, a_k) - v| - |CoN(v, a_k) - v| for every state k."""
        parts = images[:, None].split(max(1, chunk(images) // attach[1].numel()))
        return torch.cat([self.detach(x, *detach).sub_(x).norm(dim=2) - self.attach(x, *attach).sub_(x).norm(dim=2)
                          for x in parts])

    def loss(self, features, target, negatives=None):
        """The five weighted sums; of negatives (B,1+), drawn if not given, the first column's state is B."""
        negative = self.negatives(target, 1)[:, 0] if negatives is None else negatives[:, 0]
        size, weight = len(self.objects), self.config
        a, b, object_ = target // size, negative // size, target % size
        v, (attach, detach) = self.images(features), self.compositions()

        def plus(x, state):
            return self.attach(x, *(part[state] for part in attach))

        def minus(x, state):
            return self.detach(x, *(part[state] for part in detach))

        plus_a, minus_a, plus_b, minus_b = plus(v, a), minus(v, a), plus(v, b), minus(v, b)
        left, moving = self.to_state(minus_a), self.moving(v, attach, detach)
        cross, mse, triplet = F.cross_entropy, F.mse_loss, F.triplet_margin_loss
        # As published: the sum over the batch in the second term, A and B crossed in the last.
        return (weight["state"] * (cross(self.to_state(v), a) + cross(left.sum(0) - left, a) + cross(moving, a))
                + weight["object"] * sum(cross(self.to_object(x), object_) for x in (v, minus_a, plus_b))
                + weight["triplet"] * (triplet(v, plus_a, minus_a) + triplet(v, minus_b, plus_b))
                + weight["symmetry"] * (mse(plus_a, v) + mse(minus_b, v))
                + weight["axiom"] * (mse(minus(plus_a, a), minus_a) + mse(plus(minus_b, b), plus_b)
                                     + mse(plus(minus_a, a), v) + mse(minus(plus_b, b), v)
                                     + mse(minus(plus_a, b), minus(minus_b, a))))

    def compositions(self):
        """The conditions of every state, for CoN and for DeCoN."""
        return self.attach.conditions(self.states), self.detach.conditions(self.states)

    def score(self, features, compositions):
        """(B,F) -> (B,S,O): softmax(rmd)_s * softmax(obj(v))_o."""
        images = self.images(features)
        states, objects = self.moving(images, *compositions).softmax(1), self.to_object(images).softmax(1)
        return states[:, :, None] * objects[:, None]


def batch_norm(norm, mean, variance, rows=None):
    """BatchNorm as factor and summand: by the (biased) moments of a batch, recorded, or without rows as recorded."""
    if rows is None:
        mean, variance = norm.running_mean.view_as(mean), norm.running_var.view_as(mean)
    else:
        with torch.no_grad():
            norm.running_mean.lerp_(mean.flatten(), norm.momentum)
            norm.running_var.lerp_(variance.flatten() * (rows / (rows - 1)), norm.momentum)
            norm.num_batches_tracked += 1
    factor = norm.weight.view_as(mean) * torch.rsqrt(variance.clamp(min=0) + norm.eps)
    return factor, norm.bias.view_as(mean) - mean * factor


class TaskLayer(nn.Module):
    """K modules of TMN side by side, each BatchNorm, Linear(w, w), BatchNorm: together one affine map a module."""

    def __init__(self, modules, width):
        super().__init__()
        bound = width**-0.5  # as PyTorch begins a Linear(w, w)
        self.weight = nn.Parameter(torch.empty(modules, width, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(modules, width).uniform_(-bound, bound))
        self.before, self.after = nn.BatchNorm1d(modules * width), nn.BatchNorm1d(modules * width)

    def affine(self, inputs=None, share=None, rows=None):
        """Weights (K,w,w), biases (K,w,1), normalised over inputs (R,K,w) with share (R,), or as recorded."""
        mean, covariance = torch.zeros_like(self.bias)[..., None], torch.zeros_like(self.weight)
        if inputs is not None:
            # The second norm's statistics follow from the first one's input: no pass over the data between the two.
            weighted = inputs * share[:, None, None]
            mean = weighted.sum(0)[..., None]
            covariance = weighted.permute(1, 2, 0) @ inputs.transpose(0, 1) - mean @ mean.mT
        factor, summand = batch_norm(self.before, mean, covariance.diagonal(dim1=1, dim2=2)[..., None], rows)
        weight, bias = self.weight * factor.mT, self.bias[..., None] + self.weight @ summand
        variance = (weight @ covariance * weight).sum(2, keepdim=True)
        factor, summand = batch_norm(self.after, weight @ mean + bias, variance, rows)
        return weight * factor, bias * factor + summand


class TMN(nn.Module):
    """Task-driven Modular Networks: small modules in layers, wired by gates that come from the composition."""

    forward = all_scores

    def __init__(self, state_vectors, object_vectors, feature_dim, seen, *, layers=3, modules=24, width=16, rank=64,
                 negatives=600, gating_lr=None, fixed_vectors=False):
        super().__init__()
        if negatives < 1:
            raise ValueError(f"negatives is {negatives}: expected at least 1")
        self.config = dict(feature_dim=feature_dim, layers=layers, modules=modules, width=width, rank=rank,
                           negatives=negatives, gating_lr=gating_lr, fixed_vectors=fixed_vectors)
        dim = hold(self, state_vectors, object_vectors, states=not fixed_vectors, objects=not fixed_vectors)
        self.first, self.first_norm = nn.Linear(feature_dim, modules * width), nn.BatchNorm1d(modules * width)
        self.layers = nn.ModuleList(TaskLayer(modules, width) for _ in range(layers - 1))
        self.last_norm, self.last = nn.BatchNorm1d(width), nn.Linear(width, 1)
        # The published gater has 1 + K more outputs, whose softmaxes over one number are always 1.
        self.gater, self.gater_norm = nn.Linear(2 * dim, rank, bias=False), nn.BatchNorm1d(rank)
        self.gates = nn.Linear(rank, ((layers - 1) * modules + 1) * modules, bias=False)
        nn.init.normal_(self.gater.weight, 0, 0.1)
        nn.init.zeros_(self.gates.weight)
        self.negatives = Negatives(seen)

    def parameter_groups(self, lr):
        """The gating network learns at its own rate."""
        gating, rest = ([value for name, value in self.named_parameters() if name.startswith("gate") == which]
                        for which in (True, False))
        return [dict(params=rest, lr=lr), dict(params=gating, lr=self.config["gating_lr"] or lr)]

    def hidden(self):
        """W1 [e_s; e_o] of every composition (C,rank), as a state's half plus an object's half."""
        of_states, of_objects = self.gater.weight.chunk(2, 1)
        return (F.linear(self.states, of_states)[:, None] + F.linear(self.objects, of_objects)).flatten(0, 1)

    def gated(self, hidden, mean, variance, rows=None):
        """(P,rank) -> gates (P, (L-1)K + 1, K): K rows for each layer after the first and one for the output."""
        factor, summand = batch_norm(self.gater_norm, mean, variance, rows)
        return self.gates(torch.relu(hidden * factor + summand)).unflatten(1, (-1, self.config["modules"])).softmax(2)

    def first_layer(self, features, rows=None):
        """(B,F) -> (B,K,w). All images have as many rows, so that means over images are those over rows."""
        inputs = self.first(features)
        factor, summand = batch_norm(self.first_norm, inputs.mean(0), inputs.var(0, unbiased=False), rows)
        return torch.relu(inputs * factor + summand).unflatten(1, (self.config["modules"], -1))

    def output(self, inputs, mean, variance, rows=None):
        """(...,w) -> (...): BatchNorm and Linear(w, 1) in one."""
        factor, summand = batch_norm(self.last_norm, mean, variance, rows)
        return inputs @ (factor * self.last.weight[0]) + (summand @ self.last.weight[0] + self.last.bias)

    def rows(self, target, negatives):
        """What to score an image with, (B,R/B) each: places in [0, P), how often they count; truth's column (B,1)."""
        places = self.negatives.place[torch.cat([target[:, None], negatives], 1)]
        counts, size = torch.ones_like(places, dtype=self.first.weight.dtype), len(self.negatives.compositions)
        if places.shape[1] <= size:
            return places, counts, torch.zeros_like(places[:, :1])
        # More draws than training compositions: each of these once, counted as often as it was drawn.
        counts = counts.new_zeros(len(target), size).scatter_add_(1, places, counts)
        return torch.arange(size, device=target.device).expand(len(target), -1), counts, places[:, :1]

    def loss(self, features, target, negatives=None):
        """Cross-entropy of the truth among itself and its negatives (B,n), drawn if not given."""
        negatives = self.negatives(target, self.config["negatives"]) if negatives is None else negatives
        places, counts, truth = self.rows(target, negatives)
        places, rows, size = places.flatten(), negatives.numel() + len(target), self.config["modules"]
        share, hidden = counts.flatten() / rows, self.hidden()[self.negatives.compositions]
        drawn = share.new_zeros(len(hidden)).index_add_(0, places, share)
        mean = drawn @ hidden
        gates = self.gated(hidden, mean, drawn @ (hidden - mean).square(), rows)
        outputs = self.first_layer(features, rows)
        for layer, gate in zip(self.layers, gates[:, :-1].split(size, 1)):
            inputs = mix(gate, places, outputs)
            weight, bias = layer.affine(inputs, share, rows)
            outputs = torch.baddbmm(bias.mT, inputs.transpose(0, 1), weight.mT).relu_().transpose(0, 1)
        inputs = mix(gates[:, -1:], places, outputs).squeeze(1)
        mean = share @ inputs
        scores = self.output(inputs, mean, share @ (inputs - mean).square(), rows).view_as(counts)
        return ((scores + counts.log()).logsumexp(1) - scores.gather(1, truth).squeeze(1)).mean()

    def compositions(self):
        """The gates (C, (L-1)K + 1, K) of every composition."""
        return (self.gated(self.hidden(), self.gater_norm.running_mean, self.gater_norm.running_var),)

    def score(self, features, compositions):
        """(B,F) -> (B,S,O), by the running statistics."""
        (gates,), size, images = compositions, self.config["modules"], len(features)
        outputs, layers = self.first_layer(features).transpose(0, 1), [layer.affine() for layer in self.layers]
        # What module j of the second layer would make of each output i alone (J,K,B*w): its gates need only mix these.
        weight, bias = layers[0]
        alone = (outputs[None] @ weight.mT[:, None]).flatten(2)
        bias = bias.mT.repeat(1, images, 1).view(size, 1, -1)
        scores, at_once = features.new_empty(len(gates), images), max(1, chunk(alone) * size // alone.numel())
        for part in (slice(i, i + at_once) for i in range(0, len(gates), at_once)):
            gate = gates[part]
            outputs = torch.baddbmm(bias, gate[:, :size].transpose(0, 1), alone).relu_().transpose(0, 1)  # (c,K,B*w)
            for row, affine in enumerate(layers[1:], 1):
                inputs = (gate[:, row * size:(row + 1) * size] @ outputs).view(len(gate) * size, images, -1)
                later, shift = (tensor.mT.repeat(len(gate), 1, 1) for tensor in affine)
                outputs = torch.baddbmm(shift, inputs, later).relu_().view(len(gate), size, -1)
            inputs = (gate[:, -1:] @ outputs).view(len(gate), images, -1)
            scores[part] = self.output(inputs, self.last_norm.running_mean, self.last_norm.running_var)
        return scores.T.reshape(images, len(self.states), len(self.objects)).contiguous()


def mix(gates, places, outputs):
    """Inputs (R,J,w) of the next layer: gates (P,J,K) at places (R,) times outputs (R,K,w), or (B,K,w) of images."""
    chosen = F.embedding(places, gates.flatten(1)).view(len(outputs), -1, gates.shape[2])
    return (chosen @ outputs).view(len(places), gates.shape[1], -1)


MODELS = dict(leplus=LabelEmbedPlus, aop=AttributesAsOperators, tmn=TMN, symnet=SymNet)
TRAINING = dict(epochs=1000, batch_size=512, lr=5e-5, weight_decay=5e-5, vectors=["glove"])
TASKS = TRAINING | dict(epochs=100, batch_size=256, lr=1e-4, gating_lr=1e-6, negatives=600, width=16,
                        fixed_vectors=False)
SHOES = TASKS | dict(width=300, fixed_vectors=True, vectors=["word2vec"])
# The published settings of each dataset; any other gets those of UT-Zappos, TMN with 50 negatives.
BUILT_IN = dict(batch_size=128, lr=1e-3)  # of the built-in dataset, for minutes on a CPU instead of hours
DEFAULTS = dict(
    leplus=dict(shapes=TRAINING | BUILT_IN | dict(epochs=250), other=TRAINING),
    aop=dict(mitstates=TRAINING | dict(auxiliary=1000.0), other=TRAINING | dict(auxiliary=1.0)),
    symnet=dict(mitstates=TRAINING | dict(batch_size=450, object=0.1), other=TRAINING | dict(object=1.0)),
    tmn=dict(mitstates=TASKS, utzappos=SHOES, other=SHOES | dict(negatives=50)),
)
DEFAULTS["aop"]["shapes"] = DEFAULTS["aop"]["other"] | BUILT_IN | dict(epochs=100)
DEFAULTS["symnet"]["shapes"] = DEFAULTS["symnet"]["other"] | BUILT_IN | dict(epochs=30)
DEFAULTS["tmn"]["shapes"] = DEFAULTS["tmn"]["other"] | BUILT_IN | dict(epochs=20, gating_lr=1e-3, width=16)


@common.command
def main(argv=None):
    """Train and evaluate one of the four. The world decides only by which validation AUC the best epoch is chosen."""
    parser = argparse.ArgumentParser(description="LabelEmbed+, Attributes as Operators, TMN, SymNet: run as CompCos.")
    parser.add_argument("--model", required=True, choices=MODELS)
    experiment.add_options(parser)
    group = parser.add_argument_group("baselines")
    group.add_argument("--feasibility", metavar="FILE", help="a CompCos run's feasibility.csv or best.pt, for the mask "
                       "(default: from the word vectors)")
    group.add_argument("--negatives", type=int, metavar="N", help="TMN: negatives an image")
    group.add_argument("--width", type=int, help="TMN: of a module")
    group.add_argument("--gating-lr", type=float, help="TMN: learning rate of the gating network")
    options = parser.parse_args(argv)
    table = DEFAULTS[options.model]
    for name in ("negatives", "width", "gating_lr"):
        value = getattr(options, name)
        if value is not None and (name not in table["other"] or not value > 0):
            raise ValueError(f"--{name.replace('_', '-')} {value}: it is for TMN, and expected above 0")
    dataset, features, states, objects, device, settings = experiment.prepare(options, options.model, table)
    keywords = {key: settings[key] for key in table["other"] if key not in TRAINING}
    settings["feasibility"] = options.feasibility or "word vectors"
    rho = (experiment.read_feasibility(options.feasibility, dataset.states, dataset.objects) if options.feasibility
           else feasibility_scores(states, objects, dataset.seen))

    def build():
        model = MODELS[options.model](states, objects, features["train"].shape[1], dataset.seen, **keywords).to(device)
        return model, dict(loss=model.loss, after_epoch=None, rho=lambda: rho)

    experiment.experiment(build, dataset, features, settings=settings, seeds=options.seed, device=device,
                          out=options.out, resume=options.resume, save_scores=options.save_scores)


if __name__ == "__main__":
    main()
