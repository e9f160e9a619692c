"""One experiment: train, choose τ and the biases on validation, test in three candidate sets, write the files.

Shapes: N images, F features, S states, O objects, C = S*O compositions, (s, o) at s * O + o. Fractions in files,
percent in print. Candidate sets: closed (the seen and the phase's own compositions), open (all), open_masked (seen or
ρ >= τ).
"""

import csv
import itertools
import json
import math
import os
import platform
import warnings
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import PIL
import torch

import common
import data
import features as image_features
import drawings
import words
from evaluate import accuracy_at, threshold_sweep
from feasibility import auroc, hard_mask, save_csv
from train import chunks, fit, index_pairs, load_file, selection, sweep

CANDIDATE_SETS = ("closed", "open", "open_masked")
RESULTS = ("metrics.json", "best.pt", "curves.npz", "predictions.csv", "compositions.csv", "feasibility.csv")
BEST = ("model", "config", "weights", "settings", "states", "objects", "seen", "feasibility", "closed", "threshold", "bias")


def best_threshold(model, features, target, seen, rho):
    """τ of the hard mask (Eq. 6) by validation AUC (exact), among 50 values between the least and greatest unseen ρ.

    Returns τ and the whole curve of `threshold_sweep`. Without images of both kinds nothing is masked.
    """
    thresholds = np.linspace(rho[~seen].min(), rho[~seen].max(), 50) if not seen.all() else np.array([-1.0])
    model.eval()
    with torch.no_grad():
        scored = chunks(model, features, model.compositions())
        blocks = ((scores.cpu().numpy(), target[part]) for part, scores in scored)
        curve = threshold_sweep(blocks, seen.ravel(), rho.ravel(), thresholds)
    return float(thresholds[np.argmax(np.nan_to_num(curve["auc"]))]), curve


def decide(kept, bias):
    """The predicted columns (N,) and their scores (N,) at a bias on the unseen, from what `sweep` kept."""
    seen_scores, seen_columns, unseen_scores, unseen_columns = kept
    unseen = unseen_scores + bias > seen_scores
    return np.where(unseen, unseen_columns, seen_columns), np.where(unseen, unseen_scores, seen_scores)


def measure(model, arrays, dataset, rho, out, *, save_scores=False):
    """All that is reported of a trained model, as in metrics.json; predictions and compositions go to files in `out`.

    arrays: phase -> (features (N, F) on the device, targets (N,)); rho (S, O) feasibility. τ and the fixed biases come
    from validation alone.
    """
    seen, tau, curve = dataset.seen, *best_threshold(model, *arrays["val"], dataset.seen, rho)
    masks = {phase: dict(closed=dataset.candidates(phase), open=np.ones(seen.size, bool),
                         open_masked=hard_mask(rho, seen, tau).ravel()) for phase in ("val", "test")}
    validation = {name: both_protocols(swept)
                  for name, (swept, _) in sweep(model, *arrays["val"], seen, masks["val"]).items()}
    bias = {name: reports["exact"]["bias"] for name, reports in validation.items()}
    bias = {name: value if math.isfinite(value) else 0.0 for name, value in bias.items()}
    target, save = arrays["test"][1], None
    if save_scores:
        save = np.lib.format.open_memmap(out / ".scores.npy.part", "w+", np.float32, (len(target), seen.size))
    swept = sweep(model, *arrays["test"], seen, masks["test"], save=save)
    if save_scores:
        os.replace(out / ".scores.npy.part", out / "scores.npy")
        for name, mask in masks["test"].items():
            with common.writing(out / f"scores_{name}.npz", "wb") as file:
                np.savez(file, target=target, seen=seen.ravel(), candidates=mask, pairs=index_pairs(seen))
    results = {name: both_protocols(one) | dict(fixed_bias=accuracy_at(one, bias[name]))
               for name, (one, _) in swept.items()}
    write_predictions(out, dataset, {name: decide(kept, bias[name]) for name, (_, kept) in swept.items()})
    curves = {name: one.curve() for name, (one, _) in swept.items()}
    with common.writing(out / "curves.npz", "wb") as file:  # to draw: accuracies as the bias grows, exact
        np.savez(file, **{f"{name}_{half}": getattr(curve, half)
                          for name, curve in curves.items() for half in ("seen", "unseen")})
    truth, known = dataset.feasible, "that are feasible"
    if truth is None:
        truth, known = occurring(dataset), "that occur"
    return dict(validation=validation, threshold=tau, bias=bias, test=results, truth=known,
                feasibility_auroc=auroc(rho, truth, ~seen),
                candidates={phase: {name: int(mask.sum()) for name, mask in masks[phase].items()} for phase in masks},
                threshold_curve={key: values.tolist() for key, values in curve.items()})


def both_protocols(swept):
    """{"exact": report, "published": report}, nan without a warning where a half has no images."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return {protocol: swept.report(protocol) for protocol in ("exact", "published")}


def occurring(dataset):
    """(S, O) bool: the unseen compositions with a place in the validation or test lists."""
    listed = dataset.candidates("val") | dataset.candidates("test")
    return listed.reshape(dataset.seen.shape) & ~dataset.seen


def write_predictions(out, dataset, decided):
    """predictions.csv, a test image a row, and compositions.csv, the accuracy of each composition that has test images.

    decided: candidate set -> (columns (N,), scores (N,)), the answers at the bias that was fixed on validation.
    """
    names = [f"{state} {object_}" for state in dataset.states for object_ in dataset.objects]
    seen, target = dataset.seen.ravel(), dataset.targets["test"]
    with common.writing(out / "predictions.csv") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "truth", "seen"] + [f"{name}{what}" for name in decided for what in ("", "_score")])
        for i, (image, truth) in enumerate(zip(dataset.images["test"], target)):
            cells = ((names[columns[i]], f"{scores[i]:.4f}") for columns, scores in decided.values())
            rows.writerow([image, names[truth], int(seen[truth]), *(cell for pair in cells for cell in pair)])
    images = np.bincount(target, minlength=seen.size)
    right = {name: np.bincount(target[columns == target], minlength=seen.size)
             for name, (columns, _) in decided.items()}
    with common.writing(out / "compositions.csv") as file:
        rows = csv.writer(file)
        rows.writerow(["composition", "seen", "images", *right])
        for c in np.flatnonzero(images):
            accuracies = (f"{count[c] / images[c]:.4f}" for count in right.values())
            rows.writerow([names[c], int(seen[c]), images[c], *accuracies])


def write_json(path, value):
    """JSON with null for what is nan or infinite."""
    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    with common.writing(path) as file:
        json.dump(plain(value), file, indent=1)


def versions():
    """What the numbers depend on besides the settings."""
    return dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__, pillow=PIL.__version__,
                machine=f"{platform.machine()}, {torch.get_num_threads()} threads")


@contextmanager
def memory_explained(device):
    """Say what to do when memory runs out (`fit` leaves last.pt)."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "allocate memory" not in str(error):
            raise
        raise ValueError(f"out of memory on {device}: lower --batch-size, or choose --device cpu; --resume goes on "
                         f"from the last epoch ({str(error).splitlines()[0][:160]})") from None


def one_seed(build, dataset, features, *, settings, device, out, resume, save_scores):
    """Train, test and write everything of one seed into the folder `out`; returns what metrics.json holds."""
    out.mkdir(parents=True, exist_ok=True)
    for path in () if resume else (*out.glob("scores*.np[yz]"), *(out / name for name in RESULTS)):
        path.unlink(missing_ok=True)  # of an earlier run, whose last.pt is about to go too
    torch.manual_seed(settings["seed"])
    world = dict(world=dataset.candidates("val") if settings["world"] == "closed" else np.ones(dataset.seen.size, bool))
    keywords = {key: settings[key] for key in ("epochs", "batch_size", "lr", "weight_decay", "seed")}

    def validate():
        return selection(both_protocols(sweep(model, *arrays["val"], dataset.seen, world)["world"][0])["exact"])

    with memory_explained(device):
        model, parts = build()
        arrays = {phase: (torch.as_tensor(features[phase], device=device), dataset.targets[phase])
                  for phase in data.PHASES}
        targets = torch.as_tensor(dataset.targets["train"], device=device)
        history = fit(model, parts["loss"], arrays["train"][0], targets, validate, out=out, resume=resume,
                      settings=settings, after_epoch=parts["after_epoch"], **keywords)
        rho = parts["rho"]()
        metrics = measure(model, arrays, dataset, rho, out, save_scores=save_scores)
    best = max(history, key=lambda row: row["validation"])
    metrics = dict(settings=settings, versions=versions(), best_epoch=best["epoch"], **metrics)
    save_csv(out / "feasibility.csv", rho, dataset.seen, dataset.states, dataset.objects)
    with common.writing(out / "best.pt", "wb") as file:
        values = (type(model).__name__, model.config, model.state_dict(), settings, dataset.states, dataset.objects,
                  torch.as_tensor(dataset.seen), torch.as_tensor(rho), torch.as_tensor(dataset.candidates("test")),
                  metrics["threshold"], metrics["bias"])
        torch.save(dict(zip(BEST, values)), file)
    write_json(out / "metrics.json", metrics)
    return metrics


def experiment(build, dataset, features, *, settings, seeds, device, out, resume=False, save_scores=False):
    """Train and test once a seed, printing tables: one seed fills the folder `out`; of several, each fills out/seedK
    and out/metrics.json holds mean and standard deviation.

    `build()` gives a model on `device` and a dict of `loss`, `after_epoch` (see `fit`) and `rho`, a function that gives
    (S, O) feasibility. features: phase -> (N, F). settings: plain values, all recorded; of them `world`, `epochs`,
    `batch_size`, `lr` and `weight_decay` are used here. Returns [metrics of each seed].
    """
    if len(set(seeds)) < len(seeds) or not all(0 <= seed < 1 << 40 for seed in seeds):
        raise ValueError(f"seeds {seeds}: expected different numbers of 0 to {(1 << 40) - 1}")
    results = []
    for seed in seeds:
        folder = out if len(seeds) == 1 else out / f"seed{seed}"
        results.append(one_seed(build, dataset, features, settings=dict(settings, seed=seed), device=device,
                                out=folder, resume=resume, save_scores=save_scores))
        title = f"{dataset.name}, {settings['model']}, {settings['world']} world, seed {seed}"
        print(table(results[-1], title), flush=True)
    if len(seeds) > 1:
        means, deviations = (combine(results, function) for function in (np.mean, np.std))
        write_json(out / "metrics.json", dict(settings=dict(settings, seeds=seeds), versions=versions(), mean=means,
                                              std=deviations))
        print(table(means, f"mean ± std of {len(seeds)} seeds", deviations))
    print(f"written to {out}")
    return results


def combine(results, function):
    """The metrics of several runs as one nested dict, `function` (mean, std) taken of each number; words stay."""
    first = results[0]
    if isinstance(first, dict):
        return {key: combine([result[key] for result in results], function) for key in first
                if key not in ("settings", "versions", "threshold_curve")}
    return first if isinstance(first, str) else float(function(results))


def load_best(path, model):
    """What a best.pt holds, as `one_seed` wrote it. ValueError if it is none, or of another model than named."""
    held = load_file(path, BEST)
    if held["model"] != model:
        raise ValueError(f"{path} holds a {held['model']}, not a {model}")
    return held


def read_feasibility(path, states, objects):
    """(S, O) from the feasibility.csv or best.pt of a CompCos run. ValueError: compositions are missing, or no numbers."""
    try:
        if str(path).endswith(".pt"):
            held = load_best(path, "CompCos")
            rows = dict(zip(itertools.product(held["states"], held["objects"]), held["feasibility"].flatten().tolist()))
        else:
            with open(path, encoding="utf-8-sig", newline="") as file:
                rows = {(row["state"], row["object"]): float(row["feasibility"]) for row in csv.DictReader(file)}
        scores = np.array([[rows[state, object_] for object_ in objects] for state in states])
    except (KeyError, TypeError) as missing:
        raise ValueError(f"{path} has no {missing}: expected columns state, object, feasibility with a row for each "
                         "composition of this data") from None
    if not np.isfinite(scores).all():
        raise ValueError(f"{path}: {int((~np.isfinite(scores)).sum())} scores are not finite")
    return scores


def features_like(checkpoint, paths, device, weights=None):
    """Features (N, F) of image files, made as those of the loaded checkpoint; `weights` if its file has moved."""
    backbone = checkpoint["settings"]["backbone"] if checkpoint else "unknown features"
    if backbone.startswith(drawings.FEATURE):
        return image_features.extract(paths, backbone="pixels", device="cpu")
    if not backbone.startswith("ResNet-18"):
        raise ValueError(f"the model was trained on {backbone}: hand predict() an array of such features, not images")
    weights, upright = weights or checkpoint["settings"]["weights"], "upright" in backbone
    network = image_features.load_backbone(weights)
    if not backbone.startswith(here := image_features.describe(weights, upright)):
        raise ValueError(f"the model was trained on features of {backbone}, here are {here}: give --weights FILE")
    return image_features.extract(paths, backbone=network, device=device, respect_orientation=upright)


FIXED = dict(S="seen", U="unseen", HM="hm", Sta="state_accuracy", Obj="object_accuracy")
COLUMNS = dict(S="best_seen", U="best_unseen", HM="best_hm", AUC="auc", Sta="state_accuracy", Obj="object_accuracy")


def table(metrics, title, deviations=None):
    """The test results as text, in percent: for each candidate set both protocols, and the bias fixed on validation."""
    width = 14 if deviations else 7
    names = "".join(f"{name:>{width}}" for name in COLUMNS)
    lines = [f"{title} (test, %)", f"{'candidates':<22}{'protocol':<12}{names}"]
    for setting in CANDIDATE_SETS:
        size = f"{setting} ({metrics['candidates']['test'][setting]:,.0f})"
        for protocol, report in metrics["test"][setting].items():
            keys, cells = FIXED if protocol == "fixed_bias" else COLUMNS, ""
            for name in COLUMNS:
                cell = f"{100 * report[keys[name]]:.1f}" if name in keys else ""
                if cell and deviations:
                    cell += f" ± {100 * deviations['test'][setting][protocol][keys[name]]:.1f}"
                cells += f"{cell:>{width}}"
            lines.append(f"{size:<22}{protocol.replace('_', ' '):<12}{cells}")
            size = ""
    lines.append(f"hard mask: τ = {metrics['threshold']:.3f}, chosen on validation, as is the fixed bias")
    if math.isfinite(metrics["feasibility_auroc"]):
        lines.append(f"feasibility ranks the unseen compositions {metrics['truth']} above the others with AUROC "
                     f"{metrics['feasibility_auroc']:.3f}")
    return "\n".join(lines)


def add_options(parser):
    """The options that every system shares."""
    add = parser.add_argument_group("data").add_argument
    add("--dataset", default="shapes", help="shapes (built in, the default), utzappos, mitstates, cgqa, or a folder")
    add("--data-root", default="data", metavar="DIR", help="where datasets and word vectors are (default data)")
    add("--features", metavar="FILE", help="features by file name (.npz: files, features (N, F)), from CLIP say")
    add("--weights", metavar="FILE", help="ResNet-18 weights for the extraction (default: torch hub's)")
    add("--vectors", nargs="+", metavar="NAME|FILE",
        help="word vectors, concatenated: word2vec, fasttext, glove, random, or files")
    add("--missing", default="error", choices=["error", "random", "mean"], help="for words without vectors")
    add("--skip-broken", action="store_true", help="leave out images that cannot be read")
    add("--respect-orientation", action="store_true", help="turn photos as their EXIF tag says")
    add = parser.add_argument_group("training (defaults: the published ones of the dataset)").add_argument
    add("--world", default="open", choices=["open", "closed"])
    add("--epochs", type=int)
    add("--batch-size", type=int)
    add("--lr", type=float, help="learning rate")
    add("--weight-decay", type=float)
    add("--seed", type=int, nargs="+", default=[0], metavar="K", help="one run each (default 0)")
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, metavar="DIR", help="default runs/DATASET-MODEL-WORLD")
    add("--resume", action="store_true", help="go on from last.pt in --out")
    add("--save-scores", action="store_true", help="leave the test scores (N, C) for evaluate.py")


def prepare(options, model, defaults):
    """What the shared options mean: (dataset, features by phase, state vectors, object vectors, device, settings).

    defaults: dataset name or "other" -> settings. `settings` holds every choice as plain values and becomes part of
    the results. What can be wrong is looked at before the long work.
    """
    if options.dataset == "shapes":
        drawings.ensure(Path(options.data_root, "shapes"))
    dataset, device = data.load(options.dataset, options.data_root), image_features.pick_device(options.device)
    check(dataset)
    chosen = dict(defaults.get(dataset.name, defaults["other"]))
    chosen |= {key: value for key, value in vars(options).items() if key in chosen and value is not None}
    for name in ("epochs", "batch_size", "lr"):
        if not chosen[name] > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {chosen[name]}: expected a positive number")
    own, sources = dataset.folder / "vectors.txt", chosen.pop("vectors")
    if own.exists() and not options.vectors:
        sources = [str(own)]
    vectors = words.word_vectors([*dataset.states, *dataset.objects], *sources, missing=options.missing,
                                 root=options.data_root)
    dataset, features, backbone = image_features.load_features(
        dataset, file=options.features, weights=options.weights, device=device, skip_broken=options.skip_broken,
        respect_orientation=options.respect_orientation)
    if empty := [phase for phase in data.PHASES if not len(dataset.targets[phase])]:
        raise ValueError(f"--skip-broken leaves no image in {' and '.join(empty)}")
    for note in dataset.notes:
        print(f"note: {note}")
    weights = str(Path(options.weights).resolve()) if options.weights and backbone.startswith("ResNet-18") else None
    content = zlib.crc32(repr((dataset.states, dataset.objects, np.argwhere(dataset.seen).tolist())).encode())
    for array in (vectors, *features.values(), *(dataset.targets[phase] for phase in data.PHASES)):
        content = zlib.crc32(np.ascontiguousarray(array), content)
    settings = dict(model=model, dataset=dataset.name, data_crc32=content, world=options.world,
                    vectors=list(sources), missing=options.missing, backbone=backbone, weights=weights,
                    states=len(dataset.states), objects=len(dataset.objects), seen=int(dataset.seen.sum()),
                    images={phase: len(dataset.targets[phase]) for phase in data.PHASES}, device=str(device), **chosen)
    options.out = options.out or Path("runs", f"{dataset.name}-{model}-{options.world}")
    return dataset, features, *np.split(vectors, [len(dataset.states)]), device, settings


def check(dataset):
    """ValueError if an image shows what its phase's closed world does not hold: its truth could never be answered."""
    for phase in ("val", "test"):
        outside = np.unique(dataset.targets[phase][~dataset.candidates(phase)[dataset.targets[phase]]])
        if len(outside):
            s, o = divmod(int(outside[0]), len(dataset.objects))
            raise ValueError(f"{dataset.folder}: images of {phase} show {len(outside)} compositions that "
                             f"{phase}_pairs.txt lacks (first: {dataset.states[s]} {dataset.objects[o]}): add them, so "
                             "that the closed world holds them")
