"""CompCos: the model, its losses, prediction, and the command that trains and evaluates it (paper, Sec. 3).

Shapes: N images, B images of a batch, S states, O objects, C = S*O compositions, P chosen pairs, D shared space,
F features. A composition (s, o) has the index s * O + o.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as nnf

import common
import data
import experiment
import features as image_features
import train
from feasibility import feasibility_scores


class CompCos(nn.Module):
    """Images and compositions in one space, compared by cosine (Eq. 1).

    `state_vectors` (S, D) and `object_vectors` (O, D) initialise φ's primitive embeddings, which are trained; ω is
    Linear(F, hidden), LayerNorm, ReLU, Dropout, Linear(hidden, D). ValueError: vectors of other shapes or not finite.
    """

    def __init__(self, state_vectors, object_vectors, feature_dim, *, hidden=768, dropout=0.5):
        super().__init__()
        vectors = train.primitive_vectors(state_vectors, object_vectors)
        dim = vectors[0].shape[1]
        self.config = dict(feature_dim=feature_dim, hidden=hidden, dropout=dropout)
        self.checkpoint = None  # of a loaded model: vocabulary, seen, feasibility, threshold, bias, settings
        self.states, self.objects = map(nn.Parameter, vectors)  # φ of the primitives, (S, D) and (O, D)
        self.projection = nn.Linear(2 * dim, dim)               # W: [φ(s); φ(o)] -> φ(s, o)
        self.image_embedder = nn.Sequential(nn.Linear(feature_dim, hidden), nn.LayerNorm(hidden), nn.ReLU(),
                                            nn.Dropout(dropout), nn.Linear(hidden, dim))  # ω

    @classmethod
    def load(cls, path, device="cpu"):
        """The model of a `best.pt`, in evaluation mode; no data is needed. Its `checkpoint` is what else the file holds."""
        checkpoint = experiment.load_best(path, cls.__name__)
        weights = checkpoint.pop("weights")
        model = cls(weights["states"], weights["objects"], **checkpoint["config"])
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"{path}: its weights do not fit its config ({str(error).splitlines()[-1].strip()})") from None
        model.checkpoint = checkpoint
        return model.to(image_features.pick_device(device)).eval()

    def forward(self, features):
        """Cosines (B, S, O) of images (B, F) with every composition, factorised: no (C, D) matrix is made."""
        return self.score(features, self.compositions())

    def compositions(self):
        """What all images share: the halves a (S, D), b (O, D) of φ(s, o) = a_s + b_o, and 1 / |a_s + b_o| (S, O)."""
        of_state, of_object = self.projection.weight.chunk(2, dim=1)
        a, b = nnf.linear(self.states, of_state, self.projection.bias), nnf.linear(self.objects, of_object)
        # Float64, since where a_s is nearly -b_o the sum of squares cancels and float32 has no digits left (MPS has none).
        x, y = (half.to(torch.float32 if half.device.type == "mps" else torch.float64) for half in (a, b))
        squared = x.square().sum(1, keepdim=True) + y.square().sum(1) + 2 * x @ y.T
        return a, b, squared.clamp_min(1e-24).rsqrt().to(a.dtype)

    def score(self, features, compositions):
        """Cosines (B, S, O) = (x·a_s + x·b_o) / |a_s + b_o| for unit x = ω(image), from `compositions()`."""
        by_state, by_object = self.halves(features, compositions)
        return (by_state[:, :, None] + by_object[:, None, :]) * compositions[2]

    def halves(self, features, compositions):
        """x·a_s (B, S) and x·b_o (B, O) for unit x = ω(image)."""
        x = self.embed_images(features)
        return x @ compositions[0].T, x @ compositions[1].T

    def cosines(self, features, pairs):
        """Cosines (B, P) of images (B, F) with chosen compositions, pairs (P, 2) int."""
        a, b, _ = self.compositions()
        pairs = torch.as_tensor(pairs, device=features.device)
        chosen = nnf.embedding(pairs[:, 0], a) + nnf.embedding(pairs[:, 1], b)  # unlike a[...], deterministic on GPUs
        return self.embed_images(features) @ nnf.normalize(chosen).T

    def embed_images(self, features):
        """ω: (B, F) -> (B, D), unit length."""
        return nnf.normalize(self.image_embedder(features))

    def embed_compositions(self, pairs):
        """φ in the plain form W [φ(s); φ(o)]: pairs (P, 2) int -> (P, D), unit length."""
        state, object_ = torch.as_tensor(pairs, device=self.states.device).T
        return nnf.normalize(self.projection(torch.cat([self.states[state], self.objects[object_]], dim=1)))

    def feasibility(self, seen, *, mix="mean"):
        """ρ (S, O) in [-1, 1] of Eq. 3-5 from the present primitive embeddings, a NumPy array; seen (S, O) bool."""
        states, objects = (vectors.detach().cpu().numpy() for vectors in (self.states, self.objects))
        return feasibility_scores(states, objects, np.asarray(torch.as_tensor(seen).cpu()), mix=mix)


def compcos_loss(cosines, target, *, scale, seen, margin=None):
    """Cross-entropy over compositions with feasibility margins on the unseen ones (Eq. 2, 7 and 8): a 0-dim tensor.

    cosines (B, S, O); target (B,) int64 in s * O + o; scale = 1 / T > 0; seen (S, O) bool.
    margin (S, O) = α·ρ lowers the cosines of unseen compositions and is ignored where seen; None: only the seen compete.

    The sign confuses people: a feasible composition has the LARGER margin, and a lowered logit is one that the
    softmax already takes for beaten, so training pushes it away LESS. With scale 1, α = 1 and cosine 0.5 for all of
    the true `wet dog`, the feasible `wet cat` (ρ = 0.8) and the infeasible `ripe dog` (ρ = -0.2), the logits are
    0.5, 0.5 - 0.8 = -0.3 and 0.5 + 0.2 = 0.7; the gradients on the two unseen cosines are their softmax shares:

    >>> cosines = torch.full((1, 1, 3), 0.5, requires_grad=True)
    >>> seen, margin = torch.tensor([[True, False, False]]), torch.tensor([[1.0, 0.8, -0.2]])
    >>> compcos_loss(cosines, torch.tensor([0]), scale=1.0, seen=seen, margin=margin).backward()
    >>> [round(share, 2) for share in cosines.grad.flatten().tolist()]
    [-0.63, 0.17, 0.46]
    """
    if not scale > 0:
        raise ValueError(f"scale = 1 / T is {scale}: expected a positive number")
    penalty = _penalty(torch.as_tensor(seen, device=cosines.device), margin, cosines.dtype)
    return nnf.cross_entropy(scale * (cosines - penalty).flatten(1), target)


def _penalty(seen, margin, dtype):
    """What Eq. 8 takes from each cosine: nothing where seen, else the margin, or everything where there is none yet."""
    margin = torch.inf if margin is None else torch.as_tensor(margin, device=seen.device, dtype=dtype)
    return torch.where(seen, 0.0, margin).to(dtype)


class FusedLoss(torch.autograd.Function):
    """`compcos_loss` of the factorised cosines, with its gradients: no (B, S, O) tensor outlives a chunk of images.

    The softmax of a chunk is known as soon as its logits are, so its gradients are made while it is in the cache.
    Memory: two chunks of max(1, ELEMENTS // C) images, whatever the batch. Equal to the plain form in the tests.
    """

    ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}  # numbers a chunk: they stay in the cache; a GPU wants large kernels

    @staticmethod
    def forward(ctx, by_state, by_object, factor, penalty, target):
        """(B, S), (B, O), (S, O) scale / |a_s + b_o|, (S, O) scale * margin, (B,) -> mean cross-entropy."""
        (batch, S), O = by_state.shape, by_object.shape[1]
        step = max(1, FusedLoss.ELEMENTS.get(by_state.device.type, 1 << 20) // (S * O))
        grad_state, grad_object = torch.empty_like(by_state), torch.empty_like(by_object)
        grad_factor, loss, offset = factor.new_zeros(S * O), factor.new_zeros(()), -penalty
        sums, logits = (factor.new_empty(min(step, batch), S, O) for _ in range(2))
        for part in (slice(i, i + step) for i in range(0, batch, step)):
            x, y = by_state[part, :, None], by_object[part, None, :]
            plus, z = sums[:len(x)], logits[:len(x)]
            torch.add(x, y, out=plus)
            flat = torch.addcmul(offset, plus, factor, out=z).flatten(1)
            truth = target[part, None]
            logit, top = flat.gather(1, truth), flat.amax(1, keepdim=True)
            total = flat.sub_(top).exp_().sum(1, keepdim=True)
            loss += (total.log() + top - logit).sum()
            flat.scatter_add_(1, truth, -total)                  # now (softmax - one-hot) * total
            share = (total * batch).reciprocal_()
            z.mul_(factor)
            grad_state[part], grad_object[part] = z.sum(2) * share, z.sum(1) * share
            grad_factor.addmv_(z.mul_(plus).flatten(1).T, share[:, 0])
        ctx.save_for_backward(grad_state, grad_object, grad_factor.view(S, O).div_(factor))
        return loss / batch

    @staticmethod
    def backward(ctx, grad):
        """The saved gradients, scaled."""
        return *(grad * saved for saved in ctx.saved_tensors), None, None


def objective(model, seen, *, world="open", scale=20.0, margin=0.4, warmup=15, mix="mean"):
    """What training minimises: `loss(features (B, F), target (B,))` and `after_epoch(epoch)`, epoch = 1, 2, …

    closed: Eq. 2. open: Eq. 7, over the seen compositions alone in the first epoch; after each epoch ρ comes from the
    present embeddings and α grows linearly to `margin` at epoch `warmup` (0: at once; margin 0: the paper's α = 0).
    """
    if not (scale > 0 and margin >= 0 and warmup >= 0 and np.isfinite([scale, margin, warmup]).all()):
        raise ValueError(f"scale (1/T) is {scale}, margin (α) {margin}, warmup {warmup}: expected finite numbers, the "
                         "first above 0, the others 0 or more")
    if world not in ("open", "closed") or mix not in ("mean", "max", "state", "object"):
        raise ValueError(f"world {world!r}, mix {mix!r}: expected open or closed; mean, max, state or object")
    device = model.states.device
    seen = torch.as_tensor(seen, device=device)
    if world == "closed":
        pairs = seen.nonzero()
        position = torch.full((seen.numel(),), -1, device=device)
        position[pairs[:, 0] * seen.shape[1] + pairs[:, 1]] = torch.arange(len(pairs), device=device)
        return (lambda x, target: nnf.cross_entropy(scale * model.cosines(x, pairs), position[target])), None

    dtype = model.states.dtype
    penalty = scale * _penalty(seen, None, dtype)

    def loss(features, target):
        compositions = model.compositions()
        return FusedLoss.apply(*model.halves(features, compositions), scale * compositions[2], penalty, target)

    def after_epoch(epoch):
        alpha = margin * min(1.0, epoch / max(warmup, 1))
        penalty.copy_(scale * _penalty(seen, alpha * model.feasibility(seen, mix=mix), dtype))

    return loss, after_epoch


def load_published(state_dict):
    """A `CompCos` from parameters under the published names: a state dict, a checkpoint (its `net`), or a file of either.

    Published files also hold a NumPy scalar: `data.load_tensors` admits NumPy's numbers, and nothing that runs code.
    """
    if not isinstance(state_dict, dict):
        state_dict = data.load_tensors(state_dict)
    weights = state_dict.get("net", state_dict)
    try:
        weights = {name: torch.as_tensor(value) for name, value in weights.items()}
        layers = sorted({int(name.split(".")[2]) for name in weights if name.startswith("image_embedder.mod.")})
        first, norm, last = (f"image_embedder.mod.{i}" for i in layers)
        states, objects = weights["attr_embedder.weight"], weights["obj_embedder.weight"]
        hidden, feature_dim = weights[f"{first}.weight"].shape
        model = CompCos(states, objects, feature_dim, hidden=hidden)
        ours = {"projection": "projection", "image_embedder.0": first, "image_embedder.1": norm, "image_embedder.4": last}
        model.load_state_dict({"states": states, "objects": objects} | {
            f"{name}.{part}": weights[f"{theirs}.{part}"] for name, theirs in ours.items() for part in ("weight", "bias")})
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError("not a published CompCos (Linear, LayerNorm and Linear in image_embedder.mod; attr_embedder, "
                         f"obj_embedder, projection): {error}") from None
    return model.to(states.dtype).eval()


@torch.no_grad()
def predict(model, features, *, k=5, candidates=None, bias=0.0):
    """The k best compositions of each image: indices s * O + o (N, k) int64 and their scores (N, k), best first, arrays.

    features: (N, F) array or tensor, or a list of image files where the model's checkpoint names its backbone.
    candidates: (C,) or (S, O) bool, the compositions allowed (None: all); k is at most their number. bias is added to
    the unseen to rank them, not to the scores given; it needs the seen mask of a loaded checkpoint. ValueError: no
    candidate, wrong shapes, features or a bias that are not finite.
    """
    device, total = model.states.device, len(model.states) * len(model.objects)
    features = [features] if isinstance(features, (str, Path)) else features
    if len(features) and isinstance(features[0], (str, Path)):
        features = experiment.features_like(model.checkpoint, list(features), device)
    features = torch.as_tensor(features, device=device).to(model.states.dtype)
    if features.ndim != 2 or features.shape[1] != model.config["feature_dim"] or not features.isfinite().all():
        raise ValueError(f"features of shape {tuple(features.shape)}, {int((~features.isfinite()).sum())} numbers not "
                         f"finite: the model was trained on finite (N, {model.config['feature_dim']})")
    allowed = torch.ones(total, dtype=torch.bool) if candidates is None else torch.as_tensor(candidates).flatten()
    if allowed.dtype != torch.bool or len(allowed) != total or not allowed.any() or k < 1 or not np.isfinite(bias):
        raise ValueError(f"candidates are {allowed.dtype} of {len(allowed)} with {int(allowed.sum())} allowed, k {k}, bias "
                         f"{bias}: expected bool of {total}, one or more allowed, k of 1 or more, a finite bias")
    offset = torch.where(allowed, 0.0, -torch.inf).to(device)
    if bias:
        if model.checkpoint is None:
            raise ValueError("a bias on the unseen needs to know the seen: load the model with CompCos.load(best.pt)")
        offset += bias * ~model.checkpoint["seen"].flatten().to(device)
    k, was_training = min(k, int(allowed.sum())), model.training
    indices, values = [torch.zeros(0, k, dtype=torch.int64)], [torch.zeros(0, k)]
    for _, scores in train.chunks(model.eval(), features, model.compositions()):
        best = (scores + offset).topk(k, dim=1).indices
        indices.append(best.cpu())
        values.append(scores.gather(1, best).cpu())
    model.train(was_training)
    return torch.cat(indices).numpy(), torch.cat(values).numpy()


# The published settings (DESIGN.md); a folder of one's own gets those of MIT-States.
DEFAULTS = {
    "mitstates": dict(scale=20.0, margin=0.4, warmup=15, vectors=["fasttext", "word2vec"]),
    "utzappos": dict(scale=50.0, margin=1.0, warmup=15, vectors=["word2vec"]),
    "cgqa": dict(scale=100.0, margin=0.4, warmup=15, vectors=["word2vec"]),
    "shapes": dict(scale=20.0, margin=0.4, warmup=15, vectors=["random"], epochs=40, lr=1e-3),
}
DEFAULTS["other"] = DEFAULTS["mitstates"]
COMMON = dict(epochs=300, batch_size=128, lr=5e-5, weight_decay=5e-5, mix="mean", hidden=768, dropout=0.5)
DEFAULTS = {name: COMMON | own for name, own in DEFAULTS.items()}


@common.command
def main(argv=None):
    """Train and evaluate, or predict with a checkpoint."""
    parser = argparse.ArgumentParser(description="CompCos: train and evaluate; with --checkpoint and --predict, predict.")
    experiment.add_options(parser)
    add = parser.add_argument_group("CompCos").add_argument
    add("--scale", type=float, metavar="1/T", help="logit scale, one over the temperature")
    add("--margin", type=float, metavar="α", help="greatest factor of the feasibility margins; 0: the paper's α = 0")
    add("--warmup", type=int, metavar="E", help="epochs until α is reached; 0: at once")
    add("--mix", choices=["mean", "max", "state", "object"], help="g of Eq. 5")
    add = parser.add_argument_group("prediction").add_argument
    add("--checkpoint", metavar="FILE", help="a best.pt")
    add("--predict", nargs="+", metavar="IMAGE", help="image files")
    add("--candidates", default="open_masked", choices=experiment.CANDIDATE_SETS, help="allowed answers (default open_masked)")
    add("--top", type=int, default=5, help="answers an image (default 5)")
    options = parser.parse_args(argv)
    if options.checkpoint or options.predict:
        return print_predictions(options)
    dataset, features, states, objects, device, settings = experiment.prepare(options, "compcos", DEFAULTS)

    def build():
        model = CompCos(states, objects, features["train"].shape[1], hidden=settings["hidden"],
                        dropout=settings["dropout"]).to(device)
        keywords = {key: settings[key] for key in ("world", "scale", "margin", "warmup", "mix")}
        loss, after_epoch = objective(model, dataset.seen, **keywords)
        return model, dict(loss=loss, after_epoch=after_epoch,
                           rho=lambda: model.feasibility(dataset.seen, mix=settings["mix"]))

    experiment.experiment(build, dataset, features, settings=settings, seeds=options.seed, device=device, out=options.out,
                          resume=options.resume, save_scores=options.save_scores)


def print_predictions(options):
    """The best compositions of some image files, with score and feasibility, a line each."""
    if not (options.checkpoint and options.predict):
        raise ValueError("--checkpoint FILE and --predict IMAGE ... go together (a run goes on with --resume; a model of "
                         "other primitives is trained anew)")
    model = CompCos.load(options.checkpoint, options.device)
    held = model.checkpoint
    seen, rho = held["seen"].flatten(), held["feasibility"].flatten()
    allowed = dict(closed=held["closed"], open=torch.ones_like(seen), open_masked=seen | (rho >= held["threshold"]))
    bias = held["bias"][options.candidates]
    features = experiment.features_like(held, options.predict, options.device, options.weights)
    indices, scores = predict(model, features, k=options.top, candidates=allowed[options.candidates], bias=bias)
    print(f"{options.candidates}: {int(allowed[options.candidates].sum()):,} candidates, bias {bias:.3f} on the unseen "
          "(from validation)")
    for image, columns, values in zip(options.predict, indices, scores):
        print(image)
        for c, value in zip(columns.tolist(), values):
            s, o = divmod(c, len(held["objects"]))
            kind = "seen" if seen[c] else f"unseen, feasibility {rho[c]:.2f}"
            print(f"  {value:6.3f}  {held['states'][s]} {held['objects'][o]}  ({kind})")


if __name__ == "__main__":
    main()
