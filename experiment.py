"""One experiment: train, choose τ and biases on validation, test in three candidate sets, write.

It has no command line: `python compcos.py` and `python baselines.py` run experiments.

Shapes: N images, F features, S states, O objects, C = S*O compositions, (s, o) at s * O + o.
Fractions in files, percent in print. Candidate sets: closed (the seen and the phase's own
compositions), open (all), open_masked (seen or ρ >= τ).
"""

import csv
import functools
import io
import itertools
import json
import math
import os
import platform
import re
import shlex
import warnings
import zlib
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
import torch

import common
import data
import drawings
import features as image_features
import words
from evaluate import accuracy_at, threshold_sweep
from feasibility import auroc, hard_mask, write_csv
from train import (check_model, chunks, fit, index_pairs, load_file, reading, selection, sweep,
                   value_at)

CANDIDATE_SETS = ("closed", "open", "open_masked")
RESULTS = ("metrics.json", "best.pt", "curves.npz", "predictions.csv", "compositions.csv",
           "feasibility.csv")
BEST = dict(model=str, config=dict, weights=dict, settings=dict, states=list, objects=list,
            seen=torch.Tensor, named=torch.Tensor, feasibility=torch.Tensor, closed=torch.Tensor,
            threshold=float, bias=dict, temperature=dict)  # what best.pt holds
HIDDEN_SHARE = 0.05      # of the unseen that can exist: what the mask may be expected to hide
FEW_COMPOSITIONS = 20    # below so many unseen compositions a figure rests on little
LEAST_EPOCHS = 40        # of a recipe whose length is counted in steps
LEAST_PATIENCE = 10      # epochs, likewise
LEAST_STEPS = 20         # an epoch, likewise: small data are passed over several times in one
CALIBRATION = 1 << 24    # scores of validation that a temperature is fitted to, and
LEAST_CALIBRATION = 20   # of so many images at least
# What is expected of settings, other than that they are finite.
POSITIVE = ("epochs", "batch_size", "lr", "members", "scale", "hidden", "dim", "word_rate",
            "negatives", "width", "gating_lr")
NOT_NEGATIVE = ("weight_decay", "margin", "warmup", "counts", "patience")
BELOW_ONE = ("dropout", "average")
SHARES = ("mix_images",)
WORTH_SPLITTING = 1 << 28  # logits of a batch: with fewer, a step on several GPUs takes longer


# ---- computing ----


def greatest_threshold(unseen_feasibility):
    """The greatest τ expected to hide at most 5 % of what can exist; None: too little to tell.

    unseen_feasibility (n,): ρ of the unseen compositions that validation shows. τ is at most the
    k-th smallest of these, k = ⌊0.05 (n + 1)⌋, and below n = 19 there is none. This is a conformal
    bound: if another composition that exists is drawn as these were, its rank among the n + 1 is
    uniform, so it lies below the k-th smallest of the n with a chance of at most k / (n + 1) <=
    0.05.
    """
    rank = math.floor(HIDDEN_SHARE * (len(unseen_feasibility) + 1) + 1e-9)
    if rank < 1:
        return None
    return float(np.sort(unseen_feasibility)[rank - 1])


def expected_loss(n):
    """The share of its AUC that a mask is expected to lose, from n compositions to the next ones.

    A τ that hides r of the n unseen compositions of validation is expected to hide
    (r + 1) / (n + 1) of the next, by the rank argument of `greatest_threshold`. So of what
    validation left in sight, 1 - r/n, the share (1 - (r + 1)/(n + 1)) / (1 - r/n) = n / (n + 1)
    remains, whatever r is.
    """
    return 1 / (n + 1)


def best_threshold(model, features, target, seen, rho, *, mask="published"):
    """τ of the hard mask (Eq. 6): of 50 over the range of unseen ρ, by validation AUC (exact).

    mask: "published", the paper's rule, or "justified", in which τ is at most `greatest_threshold`
    and must gain more than `expected_loss`; -1, which hides nothing, where there is no such τ.
    Returns τ and the whole curve of `threshold_sweep`. Without images of both kinds nothing is
    masked.
    """
    if mask not in ("justified", "published"):
        raise ValueError(f"mask is {mask!r}: expected justified or published")
    thresholds = np.array([-1.0])
    if not seen.all():
        thresholds = np.linspace(rho[~seen].min(), rho[~seen].max(), 50)
    model.eval()
    with torch.no_grad():
        share = common.share(len(features))  # of the images, this process's
        target_of_share = target[share]
        scored = chunks(model, features[share], model.compositions())
        blocks = ((scores.cpu().numpy(), target_of_share[part]) for part, scores in scored)
        curve = threshold_sweep(blocks, seen.ravel(), rho.ravel(), thresholds,
                                gather=common.gather)
    auc = np.nan_to_num(curve["auc"])
    if mask == "justified":
        shown = unseen_shown(target, seen)
        greatest = greatest_threshold(rho.ravel()[shown])
        if greatest is None:
            return -1.0, curve
        auc = np.where(thresholds <= greatest, auc, -1.0)
        # auc[0] is that of the least threshold, which hides nothing. The best one must still be
        # ahead of it after what a mask loses on new compositions.
        if (1 - expected_loss(len(shown))) * auc.max() <= auc[0]:
            return -1.0, curve
    return float(thresholds[np.argmax(auc)]), curve


def calibrate(model, features, target, seen, candidates, bias):
    """The temperature T of each candidate set, name -> float: softmax((score + bias·[unseen]) / T)
    over the candidates is then an answer's probability.

    Validation images (N, F), their targets (N,); candidates: name -> (C,) bool; bias: name -> the
    bias on the unseen.
    """
    scores, target = some_scores(model, features, target, seen)
    temperatures = {}
    for name, mask in candidates.items():
        images = np.flatnonzero(mask[target])  # those whose truth is a candidate
        place = np.cumsum(mask) - 1            # of a candidate among the candidates
        truths = torch.as_tensor(place[target[images]], device=scores.device)
        ranked = candidate_scores(scores, seen, mask, bias[name])
        temperatures[name] = fit_temperature(ranked[torch.as_tensor(images)], truths)
    return temperatures


@torch.no_grad()
def some_scores(model, features, target, seen):
    """Scores (n, C) and targets (n,) of images (N, F): one number needs few of them, so of many
    every so-manyth is scored."""
    count = min(len(features), max(LEAST_CALIBRATION, CALIBRATION // seen.size))
    chosen = np.linspace(0, len(features) - 1, count).astype(int)
    model.eval()
    blocks = chunks(model, features[torch.as_tensor(chosen)], model.compositions())
    return torch.cat([block for _, block in blocks]), target[chosen]


def candidate_scores(scores, seen, mask, bias):
    """Of scores (n, C), those of the P candidates in the mask (C,) as they are ranked, with the
    bias on the unseen: (n, P)."""
    columns = np.flatnonzero(mask)
    offset = torch.as_tensor(np.where(seen.ravel()[columns], 0.0, bias), dtype=scores.dtype)
    return scores[:, torch.as_tensor(columns)] + offset.to(scores.device)


def certainty(model, features, target, seen, candidates, bias, temperature):
    """How far the probabilities of `calibrate` can be trusted: of each candidate set, name -> the
    mean `probability` of the answers to these images and the share that is `right`.

    Test images (N, F), their targets (N,); candidates, bias and temperature by name.
    """
    scores, target = some_scores(model, features, target, seen)
    found = {}
    for name, mask in candidates.items():
        ranked = candidate_scores(scores, seen, mask, bias[name])
        probability, place = (ranked / temperature[name]).softmax(1).max(1)
        right = np.flatnonzero(mask)[place.cpu().numpy()] == target
        found[name] = dict(probability=float(probability.mean()), right=float(right.mean()))
    return found


@torch.no_grad()
def fit_temperature(scores, target):
    """T > 0 with which softmax(scores / T) gives the truths the greatest likelihood (temperature
    scaling), a float; 1 where the scores of no image differ.

    scores (N, P), target (N,) columns. One more image is counted to which every answer is equally
    right, so that T is above 0 even where the truth always has the greatest score.
    """
    if not len(scores) or not (scores.std(1, correction=0) > 0).any():
        return 1.0
    # The mean of -log softmax(scores · b)[truth] is convex in b = 1 / T. Its slope is the mean
    # score that the softmax expects, less that of the truths; its curvature, the mean variance.
    of_truth = scores.gather(1, target[:, None]).mean()
    wanted = (len(scores) * of_truth + scores.mean()) / (len(scores) + 1)
    sharpness = 1 / scores.std(1, correction=0).mean()  # b
    for _ in range(40):
        shares = (sharpness * scores).softmax(1)
        expected = (shares * scores).sum(1, keepdim=True)
        variance = (shares * (scores - expected).square()).sum(1).mean()
        newton = sharpness - (expected.mean() - wanted) / variance.clamp_min(1e-30)
        # Far from the end a step of Newton's may lead astray: at most to half or to the double.
        better = newton.clamp(sharpness / 2, sharpness * 2)
        change = float(better / sharpness - 1)
        sharpness = better
        if abs(change) < 1e-3:
            break
    return float(1 / sharpness)


def unseen_shown(target, seen):
    """The unseen compositions that targets (N,) show, ascending indices."""
    shown = np.unique(target)
    return shown[~seen.ravel()[shown]]


def decide(kept, bias):
    """Predicted columns (N,) and their scores (N,) at a bias on the unseen, of what `sweep` kept.

    In float64, as `evaluate.accuracy_at` compares, so that files and metrics agree.
    """
    seen_scores, seen_columns, unseen_scores, unseen_columns = kept
    is_unseen = bias > seen_scores.astype(float) - unseen_scores.astype(float)
    columns = np.where(is_unseen, unseen_columns, seen_columns)
    scores = np.where(is_unseen, unseen_scores, seen_scores)
    return columns, scores


def both_protocols(swept):
    """{"exact": report, "published": report}, nan without a warning where a half has no images."""
    return {protocol: quiet_report(swept, protocol) for protocol in ("exact", "published")}


def quiet_report(swept, protocol="exact", **options):
    """`BiasSweep.report` without the warning that a half has no images."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return swept.report(protocol, **options)


def occurring(dataset):
    """(S, O) bool: the unseen compositions with a place in the validation or test lists."""
    listed = dataset.candidates("val") | dataset.candidates("test")
    return listed.reshape(dataset.seen.shape) & ~dataset.seen


def candidate_sets(dataset, phase, rho, threshold):
    """The three masks (C,) bool of a phase, by name."""
    seen = dataset.seen
    return dict(closed=dataset.candidates(phase), open=np.ones(seen.size, bool),
                open_masked=hard_mask(rho, seen, threshold).ravel())


class Measured(NamedTuple):
    """What `measure` finds: metrics.json's content, and what the other files are written from."""

    metrics: dict
    decided: dict  # candidate set -> (columns (N,), scores (N,)) at the bias fixed on validation
    curves: dict   # candidate set -> exact Curve of the test
    masks: dict    # candidate set -> (C,) bool of the test


def measure(model, arrays, dataset, rho, *, mask="published", save=None):
    """All that is reported of a trained model: Measured.

    arrays: phase -> (features (N, F) on the device, targets (N,)); rho (S, O) feasibility; `save`
    takes the test scores. τ and the fixed biases come from validation alone.
    """
    seen = dataset.seen
    threshold, threshold_curve = best_threshold(model, *arrays["val"], seen, rho, mask=mask)
    masks = {phase: candidate_sets(dataset, phase, rho, threshold) for phase in ("val", "test")}
    validation = {}
    bias = {}
    for name, (swept, _) in sweep(model, *arrays["val"], seen, masks["val"]).items():
        validation[name] = both_protocols(swept)
        bias[name] = validation[name]["exact"]["bias"]
        if not math.isfinite(bias[name]):
            bias[name] = 0.0
    temperature = calibrate(model, *arrays["val"], seen, masks["val"], bias)
    test = {}
    decided = {}
    curves = {}
    tested = sweep(model, *arrays["test"], seen, masks["test"], save=save)
    for name, (swept, kept) in tested.items():
        test[name] = both_protocols(swept)
        test[name]["fixed_bias"] = accuracy_at(swept, bias[name])
        decided[name] = decide(kept, bias[name])
        curves[name] = swept.curve()
    sure = certainty(model, *arrays["test"], seen, masks["test"], bias, temperature)
    # how many unseen compositions τ rests on, the test shows, and of the latter τ hides
    unseen_val = unseen_shown(arrays["val"][1], seen)
    unseen_test = unseen_shown(arrays["test"][1], seen)
    hidden = int((rho.ravel()[unseen_test] < threshold).sum())
    basis = dict(unseen_val=len(unseen_val), unseen_test=len(unseen_test), hidden_test=hidden)
    interval = None
    if 0 < len(unseen_test) < FEW_COMPOSITIONS:
        report = quiet_report(tested["open"][0], confidence=0.95, unit="composition")
        interval = [report["auc_low"], report["auc_high"]]
    truth = dataset.feasible
    known = "that are feasible"
    if truth is None:
        truth = occurring(dataset)
        known = "that occur"
    sizes = {}
    for phase in masks:
        sizes[phase] = {name: int(allowed.sum()) for name, allowed in masks[phase].items()}
    metrics = dict(validation=validation, threshold=threshold, bias=bias,
                   temperature=temperature, certainty=sure, test=test, mask_basis=basis,
                   open_auc_interval=interval, truth=known,
                   feasibility_auroc=auroc(rho, truth, ~seen), candidates=sizes,
                   threshold_curve={key: row.tolist() for key, row in threshold_curve.items()})
    return Measured(metrics, decided, curves, masks["test"])


# ---- writing ----


def write_predictions(out, dataset, decided):
    """predictions.csv, a test image a row: the truth, and of each candidate set answer and score.

    decided: candidate set -> (columns (N,), scores (N,)), the answers at the bias that was fixed on
    validation.
    """
    names = composition_names(dataset)
    seen = dataset.seen.ravel()
    header = ["image", "truth", "seen"]
    for name in decided:
        header += [name, f"{name}_score"]
    with common.writing(out / "predictions.csv") as file:
        rows = csv.writer(file)
        rows.writerow(header)
        for i, (image, truth) in enumerate(zip(dataset.images["test"], dataset.targets["test"])):
            row = [image, names[truth], int(seen[truth])]
            for columns, scores in decided.values():
                row += [names[columns[i]], f"{scores[i]:.4f}"]
            rows.writerow(row)


def write_compositions(out, dataset, decided):
    """compositions.csv: each tested composition's accuracy, at the bias fixed on validation."""
    names = composition_names(dataset)
    seen = dataset.seen.ravel()
    target = dataset.targets["test"]
    images = np.bincount(target, minlength=seen.size)
    right = {}
    for name, (columns, _) in decided.items():
        right[name] = np.bincount(target[columns == target], minlength=seen.size)
    with common.writing(out / "compositions.csv") as file:
        rows = csv.writer(file)
        rows.writerow(["composition", "seen", "images", *right])
        for c in np.flatnonzero(images):
            accuracies = [f"{count[c] / images[c]:.4f}" for count in right.values()]
            rows.writerow([names[c], int(seen[c]), images[c], *accuracies])


def composition_names(dataset):
    """`state object` of every composition, in the order s * O + o."""
    return [f"{state} {object_}" for state in dataset.states for object_ in dataset.objects]


def write_curves(out, curves):
    """curves.npz, to draw: accuracies as the bias grows, exact."""
    arrays = {}
    for name, curve in curves.items():
        arrays[f"{name}_seen"] = curve.seen
        arrays[f"{name}_unseen"] = curve.unseen
    with common.writing(out / "curves.npz", "wb") as file:
        np.savez(file, **arrays)


def write_scores(out, dataset, masks):
    """Beside scores.npy, a file of each candidate set for evaluate.py, with its checksum."""
    seen = dataset.seen
    checksum = zlib.crc32(np.load(out / "scores.npy", mmap_mode="r"))
    for name, mask in masks.items():
        with common.writing(out / f"scores_{name}.npz", "wb") as file:
            np.savez(file, target=dataset.targets["test"], seen=seen.ravel(), candidates=mask,
                     pairs=index_pairs(seen), scores_crc32=checksum)


def write_best(path, model, settings, dataset, rho, metrics):
    """best.pt: all that prediction needs, without the data."""
    named = dataset.candidates("val") | dataset.candidates("test")  # both have the seen ones
    contents = dict(
        model=type(model).__name__, config=model.config, weights=model.state_dict(),
        settings=settings, states=dataset.states, objects=dataset.objects,
        seen=torch.as_tensor(dataset.seen), named=torch.as_tensor(named),
        feasibility=torch.as_tensor(rho),
        closed=torch.as_tensor(dataset.candidates("test")), threshold=metrics["threshold"],
        bias=metrics["bias"], temperature=metrics["temperature"])
    if contents["model"] == "Members":
        contents["model"] = "CompCos"
    with common.writing(path, "wb") as file:
        torch.save(contents, file)


def write_json(path, value):
    """JSON with null for what is nan or infinite."""
    value = json.loads(json.dumps(value), parse_constant=lambda name: None)
    with common.writing(path) as file:
        json.dump(value, file, indent=1)


def read_json(path):
    """The dictionary in a JSON file. ValueError names a file that holds none."""
    with reading(path, "remove it, and its run is made anew"):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__}, expected a dictionary")
    return content


def versions():
    """What the numbers depend on besides the settings."""
    machine = platform.machine()
    about = Path("/proc/cpuinfo")
    if about.exists():
        machine = re.search("model name\\s*: (.*)|$", about.read_text())[1] or machine
    machine += f", {data.count(torch.get_num_threads(), 'thread')}"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    return dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__,
                pillow=PIL.__version__, processes=common.processes(), machine=machine)


# ---- running ----


def one_seed(build, dataset, features, *, settings, device, out, resume, save_scores, eager=False,
             job=None):
    """Train and test one seed, write all into the folder `out`; what metrics.json holds.

    Several processes do it together, and the first one writes. job: as `fit` takes it.
    """
    writes = common.rank() == 0
    out.mkdir(parents=True, exist_ok=True)
    if writes:
        common.clear_parts(out)
    torch.manual_seed(settings["seed"])
    model = build()
    arrays = {}
    for phase in data.PHASES:
        on_device = torch.as_tensor(features[phase], device=device)
        arrays[phase] = (on_device, dataset.targets[phase])
    check_model(model, arrays["train"][0], dataset.seen)
    if not resume and writes:
        if (out / "last.pt").exists() and not (out / "metrics.json").exists():
            print(f"note: {out / 'last.pt'} of an unfinished run is replaced, since --resume was "
                  "not given")
        remove_results(out)
    history, chosen = train_model(model, arrays, dataset, settings=settings, out=out,
                                  resume=resume, eager=eager, job=job)
    rho = model.feasibility(dataset.seen)
    # A file of scores needs those of all images in one process: with --save-scores each process
    # scores all images for itself, and the first one writes.
    with (scores_file(out, dataset, save_scores and writes) as save,
          common.alone() if save_scores else nullcontext()):
        measured = measure(model, arrays, dataset, rho, mask=settings["mask"], save=save)
    best = max(history, key=lambda row: row["validation"])
    metrics = dict(settings=settings, versions=versions(), best_epoch=best["epoch"], **chosen,
                   **measured.metrics)
    if writes:
        if save_scores:
            write_scores(out, dataset, measured.masks)
        elif earlier_best_epoch(out) != metrics["best_epoch"]:
            remove_scores(out)  # those of an earlier start are of another epoch's weights
        write_results(out, model, dataset, settings, rho, measured, metrics)
    return metrics


def write_results(out, model, dataset, settings, rho, measured, metrics):
    """What a finished run leaves. OSError names the file, and says that the training is kept.

    metrics.json goes first and comes last: where it is, all other files are of the same run.
    """
    try:
        (out / "metrics.json").unlink(missing_ok=True)
        write_predictions(out, dataset, measured.decided)
        write_compositions(out, dataset, measured.decided)
        write_curves(out, measured.curves)
        with common.writing(out / "feasibility.csv") as file:
            write_csv(file, rho, dataset.seen, dataset.states, dataset.objects)
        write_best(out / "best.pt", model, settings, dataset, rho, metrics)
        write_json(out / "metrics.json", metrics)
    except OSError as error:
        raise OSError(f"{error}; the training is kept in {out / 'last.pt'}: --resume writes the "
                      "rest") from None


def earlier_best_epoch(out):
    """The best epoch of the results in a folder, of which saved scores are; None: no results."""
    try:
        return read_json(out / "metrics.json").get("best_epoch")
    except (OSError, ValueError):
        return None


def remove_scores(out):
    """Remove what --save-scores left in a folder."""
    for path in out.glob("scores*.np[yz]"):
        path.unlink()


def remove_results(out):
    """Remove what an earlier run left in its folder: its last.pt is about to be replaced."""
    remove_scores(out)
    for name in RESULTS:
        (out / name).unlink(missing_ok=True)


@contextmanager
def scores_file(out, dataset, wanted):
    """A file on disk that takes the test scores (N, C) float32, or None if it is not wanted.

    Its room is reserved first, and it becomes scores.npy only once it is whole.
    """
    if not wanted:
        yield None
        return
    path = out / "scores.npy"
    part = common.part_of(path)
    shape = (len(dataset.targets["test"]), dataset.seen.size)
    try:
        scores = np.lib.format.open_memmap(part, "w+", np.float32, shape)
        common.reserve(part, part.stat().st_size, path)
        yield scores
        scores.flush()
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def train_model(model, arrays, dataset, *, settings, out, resume, eager, job=None):
    """`fit`, with validation AUC (exact) in the world the model is trained for.

    Returns the history, and what the model chose `after_training` by validation AUC (open world).
    """
    open_world = np.ones(dataset.seen.size, bool)
    features, targets = arrays["train"]
    targets = torch.as_tensor(targets, device=features.device)

    def validate(world=open_world):
        swept, _ = sweep(model, *arrays["val"], dataset.seen, dict(world=world),
                         primitives=False)["world"]
        return selection(quiet_report(swept))

    validate_epoch = validate
    if settings["world"] == "closed":
        validate_epoch = functools.partial(validate, dataset.candidates("val"))

    names = ("epochs", "batch_size", "lr", "weight_decay", "seed")
    keywords = {name: settings[name] for name in names}
    history = fit(model, features, targets, validate_epoch, out=out, resume=resume,
                  settings=settings, eager=eager, average=settings.get("average", 0.0),
                  patience=settings.get("patience"), passes=settings.get("passes", 1),
                  job=job, **keywords)
    chosen = {}
    if hasattr(model, "after_training"):
        chosen = model.after_training(validate)
    return history, chosen


def experiment(build, dataset, features, *, settings, seeds, device, out, resume=False,
               save_scores=False, eager=False, splits=False):
    """Train and test once a seed, printing tables: one seed fills the folder `out`; of several,
    each fills out/seedK and out/metrics.json holds mean and standard deviation.

    Several processes train as many seeds at a time, each one alone. A single seed they train
    together if the model's loss is a mean over the batch, which `splits` says; else one does.

    `build()` gives a model on `device` that keeps the contract of train.py. features: phase -> (N,
    F). settings: plain values, all recorded; of them `world`, `epochs`, `batch_size`, `lr`,
    `weight_decay` and `mask` are used here, and `average` and `patience` if they are there. Returns
    [metrics of each seed].
    """
    check_seeds(seeds)
    is_first = common.rank() == 0
    with common.lock(out) if is_first else nullcontext():
        if is_first:
            remove_other_runs(out, seeds, resume)
        common.check_shared(out)
        together = splits and len(seeds) == 1
        say_how_spread(dataset, settings, seeds, device, together)
        job = None
        if len(seeds) > 1:
            job = common.Progress(f"all {len(seeds)} seeds", len(seeds) * settings["epochs"],
                                  "epochs", together=True)

        def train_seed(seed):
            folder = out if len(seeds) == 1 else out / f"seed{seed}"
            return one_seed(build, dataset, features, settings=dict(settings, seed=seed),
                            device=device, out=folder, resume=resume, save_scores=save_scores,
                            eager=eager, job=job)

        return run_seeds(train_seed, dataset, settings, seeds, out, together, job)


def check_seeds(seeds):
    """ValueError unless each is another number that training can use."""
    if len(set(seeds)) < len(seeds) or not all(0 <= seed < 1 << 40 for seed in seeds):
        raise ValueError(f"seeds {seeds}: expected different numbers of 0 to {(1 << 40) - 1}")


def other_runs(out, seeds):
    """The folders in `out` that hold a run which is not one of these seeds, or of another form.

    Several seeds go to out/seedK, a single one to `out` itself.
    """
    folders = sorted(out.glob("seed[0-9]*"))
    if len(seeds) > 1:
        expected = {out / f"seed{seed}" for seed in seeds}
        folders = [out, *(folder for folder in folders if folder not in expected)]
    return [folder for folder in folders
            if (folder / "last.pt").exists() or (folder / "best.pt").exists()]


def remove_other_runs(out, seeds, resume):
    """Remove the runs that would mix with those to come; ValueError where --resume asks to keep.

    The means of several seeds go, too: those to come may be of more epochs.
    """
    others = other_runs(out, seeds)
    if resume and others:
        raise ValueError(f"--resume, but {data.some(others)} holds a run that is not one of seeds "
                         f"{seeds}: give the same --seed as then, or another --out")
    for folder in others:
        if not (folder / "metrics.json").exists():
            print(f"note: the unfinished run in {folder} is removed, since --resume was not given")
        remove_results(folder)
        common.clear_parts(folder)
        for name in ("last.pt", "log.csv"):
            (folder / name).unlink(missing_ok=True)
    if len(seeds) > 1:
        (out / "metrics.json").unlink(missing_ok=True)


def say_how_spread(dataset, settings, seeds, device, together):
    """A line on stderr where some of several processes are of little use."""
    processes = common.processes()
    logits = settings["batch_size"] * dataset.seen.size
    if processes > 1 and together and device.type == "cuda" and logits < WORTH_SPLITTING:
        common.say(f"note: {processes} processes share each step of {settings['batch_size']} "
                   f"images and {dataset.seen.size:,} compositions, so few that one process alone "
                   "is likely faster; several seeds are where more processes help")
    if processes > len(seeds) and not together:
        common.say(f"note: {processes} processes for {data.count(len(seeds), 'seed')}, "
                   f"with nothing to train for {processes - len(seeds)} of them")


def run_seeds(train_seed, dataset, settings, seeds, out, together, job):
    """What `experiment` does once the folder is its own. `train_seed(seed)` gives what metrics.json
    holds; job: the progress of all seeds."""
    if together:
        trained = ((seed, train_seed(seed)) for seed in seeds)
    else:
        trained = common.spread(seeds, train_seed, job)
    results = []
    for seed, result in trained:
        results.append(result)
        name = describe_model(settings)
        title = f"{dataset.name}, {name}, {settings['world']} world, seed {seed}"
        print(table(result, title), flush=True)
    if len(seeds) > 1:
        means = combine(results, np.mean)
        deviations = combine(results, np.std)
        if common.rank() == 0:
            summary = dict(settings=dict(settings, seeds=seeds), versions=versions(), mean=means,
                           std=deviations)
            write_json(out / "metrics.json", summary)
        print(table(means, f"mean ± std of {len(seeds)} seeds", deviations))
    print(LEGEND)
    print(f"written to {out}")
    run = out if len(seeds) == 1 else out / f"seed{seeds[0]}"
    print("\n".join(next_steps(dataset, settings, run)))
    return results


def next_steps(dataset, settings, run):
    """Lines that say what can be done with the folder `run` of a finished run."""
    lines = ["what next:"]
    if settings["model"] == "compcos":
        command = f"python compcos.py --checkpoint {shlex.quote(str(run / 'best.pt'))}"
        photo = dataset.path(dataset.images["test"][0])
        # the backbones whose features of further photos `features_like` can make
        backbone = settings.get("backbone", "unknown")
        from_photos = backbone.startswith(("ResNet-18", drawings.FEATURE))
        if from_photos and photo.exists():
            lines.append(f"  predict:  {command} --predict {shlex.quote(str(photo))}")
        else:
            lines.append(f"  predict:  {command} --features FILE")
    scores = shlex.quote(str(run / "scores_open.npz"))
    draw = f"  a curve:  python evaluate.py {scores} --plot curve.png"
    if not (run / "scores.npy").exists():
        draw += "  (after the same command with --resume --save-scores)"
    lines.append(draw)
    return lines


def describe_model(settings):
    """The model's name, and its recipe where it has one."""
    name = settings["model"]
    if "recipe" in settings:
        name += f" ({settings['recipe']} recipe"
        if settings["members"] > 1:
            name += f", {settings['members']} members"
        name += ")"
    return name


def combine(results, function):
    """The metrics of several runs as one, `function` (mean, std) of each number; words stay."""
    first = results[0]
    if isinstance(first, dict):
        combined = {}
        for key in first:
            if key not in ("settings", "versions", "threshold_curve", "open_auc_interval"):
                combined[key] = combine([result[key] for result in results], function)
        return combined
    if isinstance(first, str):
        return first
    return float(function(results))


# ---- reading what a run left ----


def load_best(path, model):
    """What a best.pt holds, as `write_best` wrote it. ValueError: it is none, or of another model.
    """
    contents = load_file(path, BEST)
    if contents["model"] != model:
        raise ValueError(f"{path} holds a {contents['model']}, not a {model}")
    with reading(path, "train anew, or restore the file"):
        check_best(contents)
    return contents


def check_best(contents):
    """ValueError: what of the dictionary in a best.pt cannot be used."""
    for word in contents["states"] + contents["objects"]:
        if not isinstance(word, str):
            raise ValueError(f"a state or object is a {type(word).__name__}, expected its name")
    primitives = (len(contents["states"]), len(contents["objects"]))
    compositions = (math.prod(primitives),)
    shapes = dict(seen=primitives, named=compositions, feasibility=primitives, closed=compositions)
    for name, shape in shapes.items():
        tensor = contents[name]
        kind = torch.bool
        if name == "feasibility" and tensor.is_floating_point():
            kind = tensor.dtype
        if tensor.dtype != kind or tuple(tensor.shape) != shape:
            raise ValueError(f"its {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                             f"expected {kind} {shape}")
    for candidates in CANDIDATE_SETS:
        value_at(contents, float, "bias", candidates)
        value_at(contents, float, "temperature", candidates)
    numbers = [("feasibility", contents["feasibility"]), ("threshold", contents["threshold"])]
    for part in ("weights", "config", "settings", "bias", "temperature"):
        numbers += contents[part].items()
    for name, value in numbers:
        if isinstance(value, (float, torch.Tensor)) and not torch.as_tensor(value).isfinite().all():
            raise ValueError(f"its {name} is not finite")


def read_rows(path):
    """The rows of a .csv file, dictionaries. ValueError names a file that is none, or whose last
    row is cut off: what is left of its last number would pass for another one."""
    with reading(path, "expected a .csv in UTF-8; make it anew, or restore it"):
        content = Path(path).read_bytes()
        if not content.endswith(b"\n"):
            raise ValueError("its last line has no line end, as where a file is cut off: end the "
                             "line if all is there")
        return list(csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline="")))


def read_feasibility(path, states, objects):
    """(S, O) from a CompCos run's feasibility.csv or best.pt. ValueError: without all the numbers.
    """
    if str(path).endswith(".pt"):
        contents = load_best(path, "CompCos")
        pairs = itertools.product(contents["states"], contents["objects"])
        found = dict(zip(pairs, contents["feasibility"].flatten().tolist()))
    else:
        found = {}
        for row in read_rows(path):
            found[row.get("state"), row.get("object")] = row.get("feasibility")
    scores = np.zeros((len(states), len(objects)))
    for s, o in np.ndindex(scores.shape):
        try:
            scores[s, o] = float(found[states[s], objects[o]])
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path} has no number for {states[s]} {objects[o]}: expected columns "
                             "state, object, feasibility with a row for each composition of this "
                             "data") from None
    if not np.isfinite(scores).all():
        raise ValueError(f"{path}: scores that are not finite: "
                         f"{int((~np.isfinite(scores)).sum()):,}")
    return scores


def features_like(checkpoint, paths, device, weights=None, skip_broken=False, max_pixels=None):
    """Features (N, F) of image files, made as those of the loaded checkpoint.

    weights: their file, if it has moved.
    skip_broken: rows of files that cannot be read are NaN. max_pixels: as of `extract`. ValueError:
    other weights than the model's, or features that no backbone here makes.
    """
    backbone = checkpoint["settings"]["backbone"] if checkpoint else "unknown features"
    if backbone.startswith(drawings.FEATURE):
        return image_features.extract(paths, backbone="pixels", device="cpu",
                                      skip_broken=skip_broken, max_pixels=max_pixels)
    if not backbone.startswith("ResNet-18"):
        raise ValueError(f"the model was trained on {backbone}: hand predict() an array of such "
                         "features, not images, or give --features FILE")
    weights = weights or checkpoint["settings"].get("weights")
    if weights and not Path(weights).is_file():
        raise FileNotFoundError(f"no weights file {weights}: the model was trained on {backbone}; "
                                "--weights FILE says where its weights are now")
    # Compared first: what has other weights need not be loaded, let alone fetched.
    upright = "upright" in backbone
    here = image_features.describe(weights, upright)
    if not backbone.startswith(here):
        raise ValueError(f"the model was trained on features of {backbone}, here are {here}: give "
                         "--weights FILE (the digits begin the file's SHA-256)")
    network = image_features.load_backbone(weights)
    return image_features.extract(paths, backbone=network, device=device,
                                  respect_orientation=upright, skip_broken=skip_broken,
                                  max_pixels=max_pixels)


# ---- the table ----


FIXED = dict(S="seen", U="unseen", HM="hm", Sta="state_accuracy", Obj="object_accuracy")
LEGEND = """\
S, U, HM, AUC: best accuracy on seen and on unseen compositions, best harmonic mean, area under \
their curve, as the bias on unseen grows; Sta, Obj: accuracy of the state, of the object
closed: the answers are what training or test shows; open: all; fixed bias: chosen on \
validation, before the test"""
COLUMNS = dict(S="best_seen", U="best_unseen", HM="best_hm", AUC="auc", Sta="state_accuracy",
               Obj="object_accuracy")


def table(metrics, title, deviations=None):
    """The test results as text, in percent: of each candidate set both protocols and fixed bias."""
    width = 14 if deviations else 7
    names = "".join(f"{name:>{width}}" for name in COLUMNS)
    lines = [f"{title} (test, %)", f"{'candidates':<22}{'protocol':<12}{names}"]
    for candidates in CANDIDATE_SETS:
        size = f"{candidates} ({metrics['candidates']['test'][candidates]:,.0f})"
        if candidates == "open_masked" and metrics["threshold"] <= -1:
            lines.append(f"{size:<22}as open: no mask")
            continue
        for protocol, report in metrics["test"][candidates].items():
            spread = deviations["test"][candidates][protocol] if deviations else None
            keys = FIXED if protocol == "fixed_bias" else COLUMNS
            cells = table_cells(report, keys, width, spread)
            lines.append(f"{size:<22}{protocol.replace('_', ' '):<12}{cells}")
            size = ""
    lines += table_notes(metrics, of_seeds=deviations is not None)
    return "\n".join(lines)


def table_cells(report, keys, width, spread):
    """A line of the table: the report's numbers under COLUMNS, each ± its deviation if known."""
    cells = ""
    for name in COLUMNS:
        cell = ""
        if name in keys:
            cell = f"{100 * report[keys[name]]:.1f}"
            if spread:
                cell += f" ± {100 * spread[keys[name]]:.1f}"
        cells += f"{cell:>{width}}"
    return cells


def table_notes(metrics, of_seeds=False):
    """What stands under the table; `of_seeds`, a mean, has no τ of its own."""
    basis = metrics["mask_basis"]
    lines = []
    if of_seeds:
        lines.append("hard mask: as said of each seed above")
    elif metrics["threshold"] <= -1:
        why = "no threshold gains enough on validation"
        needed = math.ceil(1 / HIDDEN_SHARE) - 1  # as in `greatest_threshold`
        if metrics["settings"]["mask"] == "published":
            why = "no threshold gains anything on validation"
        elif basis["unseen_val"] < needed:
            why = (f"validation has {basis['unseen_val']:.0f} of the {needed} unseen compositions "
                   "needed")
        lines.append(f"hard mask: none, since {why}")
        if metrics["settings"]["mask"] == "justified":
            lines[-1] += " (--mask published masks all the same)"
    else:
        unseen = data.count(round(basis["unseen_val"]), "unseen composition")
        lines.append(f"hard mask: τ = {metrics['threshold']:.3f}, chosen on validation, as is the "
                     f"fixed bias; it rests on {unseen} and hides "
                     f"{basis['hidden_test']:.0f} of the test's {basis['unseen_test']:.0f}")
    few = []
    for phase, what in (("val", "best epoch and bias"), ("test", "the test")):
        count = basis[f"unseen_{phase}"]
        if 0 < count < FEW_COMPOSITIONS:
            few.append(f"{count:.0f} for {what}")
    if few:
        lines.append(f"note: few unseen compositions: {', '.join(few)}")
    interval = metrics.get("open_auc_interval")
    several = basis["unseen_test"] > 1  # of one alone all resamples are alike
    if several and interval is not None and math.isfinite(interval[0]):
        low, high = interval
        lines.append("95 % interval over compositions of the AUC (open, exact): "
                     f"{100 * low:.1f} to {100 * high:.1f}")
    sure = metrics["certainty"]["open_masked"]
    lines.append(f"probability of an answer: {100 * sure['probability']:.0f} % in the mean over "
                 f"the test, where {100 * sure['right']:.0f} % of the answers are right")
    if math.isfinite(metrics["feasibility_auroc"]):
        lines.append(f"feasibility ranks the unseen compositions {metrics['truth']} above the "
                     f"others with AUROC {metrics['feasibility_auroc']:.3f}")
    return lines


# ---- options ----


def add_options(parser):
    """The options that every system shares."""
    add = parser.add_argument_group("data").add_argument
    add("--dataset", default="shapes",
        help="shapes (built in, the default), utzappos, mitstates, cgqa, or a folder")
    add("--data-root", default="data", metavar="DIR",
        help="where datasets and word vectors are (default data)")
    add("--features", metavar="FILE",
        help="features by file name (.npz: files, features (N, F)), from CLIP say")
    add("--weights", metavar="FILE",
        help="ResNet-18 weights for the extraction (default: torch hub's)")
    add("--vectors", nargs="+", metavar="NAME|FILE",
        help="word vectors, concatenated: word2vec, fasttext, glove, random, or files")
    add("--missing", default="error", choices=["error", "random", "mean"],
        help="for words without vectors")
    add("--skip-broken", action="store_true", help="leave out images that cannot be read")
    add("--cache", metavar="DIR",
        help="where extracted features are kept (default: in the dataset's folder; beside --out if"
             " that is read-only)")
    add("--max-pixels", type=int, metavar="N",
        help="read larger photos than 179 million pixels, up to N")
    add("--respect-orientation", action="store_true", help="turn photos as their EXIF tag says")
    group = parser.add_argument_group("training (defaults: those of the dataset's recipe)")
    add = group.add_argument
    add("--world", default="open", choices=["open", "closed"])
    add("--epochs", type=int)
    add("--batch-size", type=int)
    add("--lr", type=float, help="learning rate")
    add("--weight-decay", type=float)
    add("--seed", type=int, nargs="+", default=[0], metavar="K", help="one run each (default 0)")
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add("--eager", action="store_true", help="on CUDA, do not capture the training step as a graph")
    add("--mask", default="justified", choices=["justified", "published"],
        help="how τ of the hard mask is chosen: at most so high that 5 %% of what exists is "
             "expected to be hidden, or by validation AUC alone, as in the paper (default "
             "justified)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, metavar="DIR", help="default runs/DATASET-MODEL-WORLD")
    add("--resume", action="store_true", help="go on from last.pt in --out")
    add("--save-scores", action="store_true", help="leave the test scores (N, C) for evaluate.py")


class Prepared(NamedTuple):
    """What the shared options mean, read and checked by `prepare`."""

    dataset: data.Dataset
    features: dict                # phase -> (N, F) float32
    state_vectors: np.ndarray     # (S, V)
    object_vectors: np.ndarray    # (O, V)
    device: torch.device
    settings: dict                # every choice as plain values, part of the results
    out: Path                     # where the results go


def prepare(options, model, defaults):
    """What the shared options mean: Prepared.

    defaults: dataset name or "other" -> settings; where its `epochs` is None, `steps` (and
    `warmup_steps`) say how long to train, and `patience_steps` when to stop. What can be wrong is
    looked at before the long work.
    """
    check_seeds(options.seed)
    if options.dataset == "shapes" and common.rank() == 0:
        drawings.ensure(Path(options.data_root, "shapes"))
    common.gather("the built-in data are there")
    dataset = data.load(options.dataset, options.data_root)
    out = options.out or Path("runs", f"{dataset.name}-{model}-{options.world}")
    common.check_writable(out)
    device = image_features.pick_device(options.device)
    chosen = choose_settings(options, defaults.get(dataset.name, defaults["other"]))
    sources = chosen.pop("vectors")
    own_vectors = dataset.folder / "vectors.txt"
    if own_vectors.exists() and not options.vectors:
        sources = [str(own_vectors)]
    places = dict(cache=options.cache, fallback=out.parent)
    source = dict(file=options.features, weights=options.weights, skip_broken=options.skip_broken)
    obstacles, fetched = image_features.lacking(dataset, **source, **places)
    obstacles = words.lacking(*sources, root=options.data_root) + obstacles
    if obstacles:  # all at once, before anything is fetched
        raise FileNotFoundError("; ".join(obstacles + fetched))
    vectors = words.word_vectors([*dataset.states, *dataset.objects], *sources,
                                 missing=options.missing, root=options.data_root)
    dataset, features, backbone = image_features.load_features(
        dataset, **source, **places, device=device, max_pixels=options.max_pixels,
        respect_orientation=options.respect_orientation)
    empty = [phase for phase in data.PHASES if not len(dataset.targets[phase])]
    if empty:
        raise ValueError(f"--skip-broken leaves no image in {' and '.join(empty)}")
    for note in dataset.notes:
        print(f"note: {note}")
    steps_to_epochs(chosen, len(dataset.targets["train"]))
    if "rivals" in chosen and chosen["rivals"] is None:
        chosen["rivals"] = choose_rivals(dataset, options.world)
    weights = image_features.weights_behind(dataset, backbone, **places)
    if options.weights and backbone.startswith("ResNet-18"):
        weights = str(Path(options.weights).resolve())
    images = {phase: len(dataset.targets[phase]) for phase in data.PHASES}
    settings = dict(model=model, dataset=dataset.name,
                    data_crc32=checksum(dataset, vectors, features), world=options.world,
                    vectors=list(sources), missing=options.missing, backbone=backbone,
                    weights=weights, states=len(dataset.states), objects=len(dataset.objects),
                    seen=int(dataset.seen.sum()), images=images,
                    device=str(device), mask=options.mask, **chosen)
    states, objects = np.split(vectors, [len(dataset.states)])
    return Prepared(dataset, features, states, objects, device, settings, out)


def choose_settings(options, defaults):
    """The defaults, with the options that were given in their place."""
    chosen = dict(defaults)
    for key, value in vars(options).items():
        if key in chosen and value is not None:
            chosen[key] = value
    for name, value in chosen.items():
        expected = unfulfilled(name, value)
        if expected:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: expected {expected}")
    return chosen


def unfulfilled(name, value):
    """What is expected of a setting, in words, where its value is not so; else ""."""
    if value is None:
        return ""
    if name in POSITIVE and not 0 < value < math.inf:
        return "a positive number"
    if name in NOT_NEGATIVE and not 0 <= value < math.inf:
        return "0 or more"
    if name in BELOW_ONE and not 0 <= value < 1:
        return "0 or more, less than 1"
    if name in SHARES and not 0 <= value <= 1:
        return "a share of 0 to 1"
    return ""


def choose_rivals(dataset, world):
    """Which compositions compete with the truth in training: "all", or the "seen" alone.

    The seen alone where they are at least half of all, and validation has few unseen ones. Most of
    the unseen then exist, and as rivals they would be taught to be wrong; how wrong, by the
    margins, so few cannot tell.
    """
    count = len(unseen_shown(dataset.targets["val"], dataset.seen))
    share = dataset.seen.mean()
    if count >= FEW_COMPOSITIONS or share < 0.5:
        return "all"
    if world == "open":
        print(f"note: {share:.0%} of all compositions are seen in training, and validation has "
              f"{data.count(count, 'unseen one')}, fewer than {FEW_COMPOSITIONS}: the seen alone "
              "compete in training (--rivals all: the unseen, too)")
    return "seen"


def steps_to_epochs(chosen, images):
    """Put epochs and warm-up where a recipe counts in steps, so that all sizes of data train alike.

    An epoch of its is several passes over small data, also where --epochs says how many.
    """
    steps = chosen.pop("steps", None)
    warmup_steps = chosen.pop("warmup_steps", None)
    patience_steps = chosen.pop("patience_steps", None)
    batch = min(chosen["batch_size"], images)
    steps_an_epoch = math.ceil(images / batch)
    if steps is not None:
        chosen["passes"] = math.ceil(LEAST_STEPS * batch / images)
        steps_an_epoch = math.ceil(images * chosen["passes"] / batch)
    if chosen["epochs"] is None:
        chosen["epochs"] = max(LEAST_EPOCHS, math.ceil(steps / steps_an_epoch))
        if patience_steps and chosen.get("patience") is None:
            chosen["patience"] = max(LEAST_PATIENCE, math.ceil(patience_steps / steps_an_epoch))
    if "warmup" in chosen and chosen["warmup"] is None:
        chosen["warmup"] = max(1, round(warmup_steps / steps_an_epoch))


def checksum(dataset, vectors, features):
    """A number by which --resume notices that the data changed."""
    vocabulary = (dataset.states, dataset.objects, np.argwhere(dataset.seen).tolist())
    content = zlib.crc32(repr(vocabulary).encode())
    arrays = [vectors, *features.values(), *(dataset.targets[phase] for phase in data.PHASES)]
    for array in arrays:
        content = zlib.crc32(np.ascontiguousarray(array), content)
    return content


if __name__ == "__main__":
    print("experiment.py makes one experiment of options, training and tests; run "
          "`python compcos.py` for one.")
