"""Prediction for photos with a trained model, and the authors' published checkpoints.

N photos, F features of a photo, S states, O objects, C = S*O compositions, (s, o) at s*O + o.
"""

from pathlib import Path

import numpy as np
import torch

from compcos import CompCos, Settings, as_tensor, check_value, load, rank_compositions
from lab import features as image_features
from lab import shell
from lab.files import check_writable, load_tensors, reading, write_rows
from lab.results import CANDIDATE_SETS, DEFAULT_CANDIDATES

UNLIKE = 0.05       # a photo of at most this typicality is marked
FEW_PHOTOS = 20     # with fewer, nothing is said about the kind of their features
MOST_RATIO = 2.0    # of the median length of features to that in training, or the inverse


# ---- unknown content ----


def training_profile(features, targets, validation):
    """Return the statistics of the data that `typicality` compares photos with.

    Args:
        features: training features (N, F).
        targets: training targets (N,).
        validation: validation features (n, F).

    Returns:
        A dict of tensors: `means`, the unit mean features (P, F) of the seen compositions;
        `distances` (n,) of the validation photos, ascending; `length`, the median length of
        training features.
    """
    features = torch.as_tensor(features)
    shown, place = torch.as_tensor(targets).unique(return_inverse=True)
    sums = torch.zeros(len(shown), features.shape[1]).index_add_(0, place, features)
    profile = dict(means=torch.nn.functional.normalize(sums),
                   length=features.norm(dim=1).median())
    profile["distances"] = distances(torch.as_tensor(validation), profile).sort().values
    return profile


def distances(features, profile):
    """Return one minus the greatest cosine of photos (N, F) to the mean of a seen composition."""
    return 1 - (torch.nn.functional.normalize(features) @ profile["means"].T).amax(1)


def typicality(features, profile):
    """Return how typical photos (N, F) are of the training photos, (N,) in (0, 1].

    It is (1 + n') / (n + 1), where n' of the n validation photos are at least as far from training
    (a conformal p-value). About 1 in 20 photos like those of validation has at most 5 %.
    """
    known = profile["distances"]
    nearer = torch.searchsorted(known, distances(features, profile))  # n - n'
    return (1 + len(known) - nearer.numpy()) / (len(known) + 1)


def is_shifted(features, profile, typical):
    """Tell if photos' features (N, F), of typicality (N,), are of another kind than in training.

    Then more than half of the photos are marked, or the median length of their features differs,
    which a cosine does not show.
    """
    if len(features) < FEW_PHOTOS:
        return False
    ratio = float(features.norm(dim=1).median() / profile["length"])
    return np.mean(typical <= UNLIKE) > 0.5 or not 1 / MOST_RATIO < ratio < MOST_RATIO


# ---- prediction ----


def load_run(path, device="cpu"):
    """Return the model of a run's best.pt or final.pt, or of the best.pt in a folder.

    Raises:
        OSError: no such file.
        ValueError: a folder without best.pt, or a file that lacks what prediction needs, such as
            the names.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "best.pt"
        if not path.exists():
            raise ValueError(f"{path.parent} must be the folder of a finished run, with best.pt; "
                             "with several seeds pass one of its seedK")
    load_tensors(path, "the best.pt or final.pt of a run")  # says what a foreign file is
    model = load(path, device)
    if "run" not in model.checkpoint:  # a file of `compcos.save` alone
        raise ValueError(f"{path} must be the best.pt or final.pt of a run of `python compcos.py`, "
                         "but has no names of states and objects: pass such a file")
    return model


def predict_images(model, images, features=None, *, top=5, candidates="open_masked", **how):
    """Predict the best compositions of photos.

    Args:
        model: from `load_run`.
        images: N image files, or any N names if features are given.
        features: numbers (N, F) of the same kind as in training; None extracts them from the files.
        top: answers for each photo, at least 1.
        candidates: "closed", "open" or "open_masked". The hard mask of the last hides no
            composition that the lists of the dataset name.
        how: device, weights and skip_broken, see `lab.features.features_like`.

    Returns:
        A dict for each answer, best first: `image, rank, state, object`; `score`, by which answers
        are ranked, with the bias on the unseen that validation chose; `probability` among the
        candidates; `seen`; `feasibility`; `typicality` of the photo, in (0, 1].

    Raises:
        ValueError: features of another shape, or an unknown candidate set.
    """
    checkpoint = model.checkpoint
    if candidates not in checkpoint["candidates"]:
        raise ValueError(f"candidates must be one of {', '.join(checkpoint['candidates'])}, which "
                         f"the run was tested with, got {candidates!r}: train anew for another set")
    if features is None:
        features = image_features.features_like(checkpoint["run"], images, **how)
    bias = checkpoint["bias"][candidates]
    indices, scores, probabilities = rank_compositions(
        model, features, k=top, candidates=checkpoint["candidates"][candidates], bias=bias,
        temperature=checkpoint["temperature"][candidates])
    seen = model.seen.numpy(force=True).ravel()
    feasibility = checkpoint["feasibility"].numpy().ravel()
    scores = scores + np.float32(bias) * ~seen[indices]
    features = as_tensor(features, "cpu").float()
    typical = typicality(features, checkpoint["profile"])
    if is_shifted(features, checkpoint["profile"], typical):
        shell.print_status(
            "warning: most of these photos are unlike the training photos, or their features have "
            "another length, so answers and probabilities may be wrong: check that the features "
            "come from the same backbone")
    rows = []
    for (i, place), c in np.ndenumerate(indices):
        state, object_ = divmod(int(c), len(checkpoint["objects"]))
        rows.append(dict(
            image=str(images[i]), rank=place + 1, state=checkpoint["states"][state],
            object=checkpoint["objects"][object_], score=float(scores[i, place]),
            probability=float(probabilities[i, place]), seen=bool(seen[c]),
            feasibility=float(feasibility[c]), typicality=float(typical[i])))
    return rows


def add_options(parser):
    """Add the options of prediction to a parser."""
    add = parser.add_argument_group("prediction").add_argument
    add("--checkpoint", metavar="FILE",
        help="a run's best.pt or final.pt; a folder means its best.pt")
    add("--predict", nargs="+", metavar="IMAGE",
        help="image files, patterns or folders; or pass --features FILE for their features")
    add("--csv", type=Path, metavar="FILE", help="write the answers into this table")
    add("--candidates", default=DEFAULT_CANDIDATES, choices=CANDIDATE_SETS,
        help="compositions that may be answered: those that the dataset lists (closed), all "
             "(open), or those listed or feasible enough (open_masked, the default)")
    add("--top", type=int, default=5, metavar="K",
        help="answers for each photo (default 5)")


def print_predictions(options):
    """Print the best compositions of each photo, or write them to --csv, as options say."""
    if not options.checkpoint or bool(options.predict) == bool(options.features):
        raise ValueError("prediction needs --checkpoint FILE and either --predict IMAGE ... or "
                         "--features FILE")
    check_value("--top", options.top, int, least=1)
    if options.csv:
        check_writable(options.csv.parent, "--csv")
    model = load_run(options.checkpoint, options.device)
    images, features = image_features.images_and_features(
        model.checkpoint["run"], options.predict, options.features, device=options.device,
        weights=options.weights, skip_broken=options.skip_broken)
    rows = predict_images(model, images, features, top=options.top, candidates=options.candidates)
    if options.candidates == DEFAULT_CANDIDATES:
        print(model.checkpoint["expectation"])
    if options.csv:
        write_rows(options.csv, rows[0].keys(), [row.values() for row in rows])
        print(f"answers written to {options.csv}")
        return
    for row in rows:
        if row["rank"] == 1:
            mark = ""
            if row["typicality"] <= UNLIKE:
                mark = f"  unlike the training photos (typicality {row['typicality']:.1%})"
            print(f"{row['image']}{mark}")
        kind = "seen" if row["seen"] else "unseen"
        print(f"  {row['score']:6.3f}  {row['probability']:4.0%}  {row['state']} {row['object']}  "
              f"({kind})")


# ---- published checkpoints ----


def load_published(state_dict):
    """Return a CompCos with the parameters of the authors' code, in evaluation mode.

    Args:
        state_dict: a state dict under the published names, a checkpoint that holds one (see
            `lab.features.unwrap`), or a file of either, from which no code is run.

    Raises:
        ValueError: other parameters.
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
            weights[ours.get(name, name)] = as_tensor(value)
        hidden, feature_dim = weights["image_embedder.0.weight"].shape
        model = CompCos(weights["states"], weights["objects"], feature_dim,
                        Settings(hidden=hidden))
        model.to(weights["states"].dtype).load_state_dict(weights)  # float64 keeps its digits
    return model.eval()
