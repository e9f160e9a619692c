"""Run experiments: train, choose τ and biases on validation, test, and write the results.

`python compcos.py` runs `main`. `run_seeds` runs any system, as for `python -m lab.baselines`.

Shapes: N images, F features, S states, O objects, C = S*O compositions, (s, o) at s*O + o.
"""

import argparse
import io
import math
import os
import shlex
import subprocess
import time
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import compcos
import data
from evaluate import accuracy_at, threshold_sweep
from feasibility import auroc, conformal_threshold, write_csv
from lab import answers, drawings, shell, words
from lab import features as image_features
from lab.files import (check_writable, load_tensors, lock, reading, write_json, write_rows,
                       writing)
from lab.results import (DEFAULT_CANDIDATES, LEGEND, RUNS, aggregate_seeds, candidate_sets,
                         check_joined, check_output_folder, check_record, deviation, expectation,
                         finished_seeds, folder_of, new_folder, table, table_notes, versions,
                         write_answers, write_scores)

SAVE_SECONDS = 30       # minimum seconds between checkpoints
CALIBRATION = 1 << 24   # scores that a temperature is fitted to, at most
WIDEST = 100            # times the mean deviation of an image's scores: the greatest temperature
RESAMPLES = 1000        # of an interval
DATA_OPTIONS = ("dataset", "data_root", "features", "weights", "vectors", "missing", "skip_broken")
EXAMPLES = """\
examples:
  python compcos.py                                     (train on the built-in dataset)
  python compcos.py --dataset photos --vectors random   (train on photos of your own)
  python compcos.py --checkpoint runs/photos-compcos-open --predict new_photos
"""
OTHER_VECTORS = ["fasttext", "word2vec"]
# The datasets whose default recipe is the paper's, and their word vectors by default. A dataset's
# own vectors.txt comes first.
VECTORS = {"mitstates": OTHER_VECTORS, "utzappos": ["word2vec"], "cgqa": ["word2vec"],
           "shapes": OTHER_VECTORS}


# ---- the inputs ----


class Inputs(NamedTuple):
    """The inputs that all runs on a dataset share."""

    dataset: data.Dataset
    features: dict                # phase -> (N, F) float32
    state_vectors: np.ndarray     # (S, V)
    object_vectors: np.ndarray    # (O, V)
    device: torch.device
    record: dict                  # the sources of the inputs, plain values, part of the results

    def arrays(self):
        """Return {phase: (features (N, F) on the device, targets (N,))}."""
        return {phase: (torch.as_tensor(self.features[phase], device=self.device),
                        self.dataset.targets[phase]) for phase in data.PHASES}


def load_inputs(options, vectors):
    """Return the Inputs that options name, with word vectors of these sources by default."""
    if options.resume and options.out is None:
        raise ValueError("--resume continues the run in --out: pass --out DIR, its folder")
    if options.out is not None:
        check_output_folder(options.out, options.seed, options.resume)
    # What a run to resume had stays until it is compared.
    inputs = load_data(options, replace_cache=not options.resume)
    return with_vectors(inputs, options, vectors)


def load_data(options, replace_cache=True):
    """Return the Inputs that options name, without word vectors.

    Options, folders and files are checked before features are extracted. A cache of features that
    exists stays as it is unless `replace_cache`.
    """
    for seed in options.seed:
        compcos.check_seed(seed)
    check_writable(options.out or RUNS)
    if options.dataset == "shapes" and shell.rank() == 0:
        drawings.ensure(Path(options.data_root, "shapes"))
    shell.gather(None)  # wait until the data exist, and before any process writes into --out
    dataset = data.load(options.dataset, options.data_root)
    device = compcos.pick_device(options.device)
    dataset, features, backbone, weights = image_features.load_features(
        dataset, file=options.features, weights=options.weights, device=device,
        skip_broken=options.skip_broken, fallback=RUNS, replace_cache=replace_cache)
    for note in dataset.notes:
        print(f"note: {note}")
    record = dict(dataset=dataset.name, missing=options.missing, device=str(device),
                  backbone=backbone, weights=weights)
    return Inputs(dataset, features, None, None, device, record)


def with_vectors(inputs, options, vectors):
    """Return the inputs with word vectors of --vectors, or the dataset's own, or those given."""
    dataset = inputs.dataset
    own = dataset.folder / "vectors.txt"
    if options.vectors:
        vectors = options.vectors
    elif own.exists():
        vectors = [str(own)]
    array = words.word_vectors([*dataset.states, *dataset.objects], *vectors,
                               missing=options.missing, root=options.data_root)
    states, objects = np.split(array, [len(dataset.states)])
    record = inputs.record | dict(vectors=vectors,
                                  data_crc32=data.checksum(dataset, array, inputs.features))
    return inputs._replace(state_vectors=states, object_vectors=objects, record=record)


# ---- the threshold of the hard mask ----


@torch.no_grad()
def best_threshold(model, features, target, seen, rho, *, mask="paper"):
    """Choose τ of the hard mask (Eq. 6) among 50 values by validation AUC (exact).

    Args:
        model, features (N, F), target (N,): of validation, on the model's device.
        seen: (S, O) bool.
        rho: feasibility (S, O).
        mask: "paper" takes the best τ; "justified" only τ up to `conformal_threshold`, and only if
            it gains more than a mask is expected to lose.

    Returns:
        τ, or -1 where nothing is hidden; the curve of `evaluate.threshold_sweep`; and a text that
        says how many compositions the mask leaves, or why there is none.
    """
    thresholds = np.array([-1.0])
    if not seen.all():
        thresholds = np.linspace(rho[~seen].min(), rho[~seen].max(), 50)
    blocks = ((scores.cpu().numpy(), target[part])
              for part, scores in compcos.score_blocks(model, features))
    curve = threshold_sweep(blocks, seen.ravel(), rho.ravel(), thresholds)
    auc = np.nan_to_num(curve["auc"])
    if mask == "justified":
        unseen = compcos.shown_by(target, seen.shape) & ~seen
        count = unseen.sum()
        auc = auc[thresholds <= conformal_threshold(rho[unseen])]
        if not len(auc):
            return -1.0, curve, (f"none, since validation shows {count} unseen compositions; at "
                                 "least 19 are needed to tell what a mask hides")
        # auc[0] is that of the least threshold, which hides nothing, and the best one must be ahead
        # of it in new data. A τ that hides r of the n unseen compositions shown is expected to hide
        # (r + 1) / (n + 1) of the next ones (see conformal_threshold). So of what validation left
        # in sight, 1 - r / n, the share (1 - (r + 1) / (n + 1)) / (1 - r / n) = n / (n + 1) =
        # 1 - 1 / (n + 1) remains, whatever r is.
        if (1 - 1 / (count + 1)) * auc.max() <= auc[0]:
            return -1.0, curve, "none, since no τ gains more on validation than it may cost"
    chosen = int(np.argmax(auc))
    threshold = float(thresholds[chosen])
    left = int((seen | (rho >= threshold)).sum())
    return threshold, curve, f"τ = {threshold:.3f} leaves {left:,} of {seen.size:,} compositions"


# ---- probabilities ----


@torch.no_grad()
def calibrate(model, features, target, seen, candidates, bias):
    """Fit the temperature T of each candidate set on validation, {name: float}.

    softmax((score + bias·[unseen]) / T) over the candidates is then the probability of an answer.
    Images whose truth is no candidate do not count. With many compositions, only every n-th image
    is used.
    """
    every = math.ceil(len(features) * seen.size / CALIBRATION)
    blocks = compcos.score_blocks(model, features[::every])
    scores = torch.cat([block for _, block in blocks])  # (n, C)
    truth = target[::every]
    temperatures = {}
    for name, mask in candidates.items():
        rows = mask[truth]
        place = (np.cumsum(mask) - 1)[truth[rows]]  # of the truth among the candidates
        offset = torch.as_tensor(np.where(seen.ravel()[mask], 0.0, bias[name])).to(scores)
        temperatures[name] = fit_temperature(scores[rows][:, mask] + offset, place)
    return temperatures


def calibration(model, features, target, seen, candidates, bias, temperature):
    """Measure on test images how often answers are right, and how probable they are said to be.

    Args:
        model: on its device.
        features: tensor (N, F) on that device.
        target: array (N,).
        seen: (S, O) bool.
        candidates: (C,) bool, as `--predict` uses them.
        bias, temperature: numbers, for these candidates.

    Returns:
        A dict: `confidence`, the mean probability of the answers; what `accuracy_interval` returns;
        and under `seen` and `unseen` the same for the images whose composition has training images,
        or has none, where there are such.
    """
    answers, _, probabilities = compcos.rank_compositions(
        model, features, k=1, candidates=candidates, bias=bias, seen=seen, temperature=temperature)
    right = answers[:, 0] == target
    measured = dict(confidence=float(probabilities.mean()), **accuracy_interval(right, target))
    is_seen = seen.ravel()[target]
    for half, rows in (("seen", is_seen), ("unseen", ~is_seen)):
        if rows.any():
            measured[half] = accuracy_interval(right[rows], target[rows])
    return measured


@torch.no_grad()
def fit_temperature(scores, target):
    """Return T > 0 that gives the truths the greatest likelihood under softmax(scores / T).

    Temperature scaling with one more image, to which every answer is equally right, so that T is
    above 0 even where the truth always has the greatest score.

    Args:
        scores: (N, P).
        target: array (N,) of columns.

    Returns:
        A float; 1 without images, and where the scores of no image differ.
    """
    unit = scores.std(1, correction=0).mean() if len(scores) else 0
    if unit == 0:
        return 1.0
    # The mean of -log softmax(scores · b)[truth] is convex in b = 1 / T. Its slope, the mean score
    # that the softmax expects less that of the truths, grows with b: bisect for 0.
    of_truth = scores[np.arange(len(scores)), target].mean()
    target_mean = (len(scores) * of_truth + scores.mean()) / (len(scores) + 1)
    low = 1 / unit / WIDEST
    high = 1 / unit * WIDEST
    for _ in range(16):  # to 1.4e-4
        sharpness = (low * high).sqrt()  # b
        expected = ((sharpness * scores).softmax(1) * scores).sum(1).mean()
        if expected < target_mean:
            low = sharpness
        else:
            high = sharpness
    return float(1 / sharpness)


def accuracy_interval(right, target):
    """Return the accuracy of answers and its 95 % interval over compositions.

    Compositions are drawn with replacement, seeded, each with all its images.

    Args:
        right: (N,) bool, N of at least 1.
        target: (N,) int, the composition of each image.

    Returns:
        {accuracy, accuracy_low, accuracy_high, compositions}.
    """
    shown, place = np.unique(target, return_inverse=True)
    count = len(shown)
    rights = np.bincount(place, right)
    images = np.bincount(place)
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    low, high = np.quantile(drawn @ rights / (drawn @ images), [0.025, 0.975])
    return dict(accuracy=float(right.mean()), accuracy_low=float(low), accuracy_high=float(high),
                compositions=count)


# ---- evaluation ----


def evaluate_run(model, arrays, dataset, rho, *, mask="paper"):
    """Evaluate a trained model on validation and test images.

    τ, biases and temperatures come from validation alone.

    Args:
        model: on its device.
        arrays: {phase: (features (N, F) on the device, targets (N,))}.
        dataset: a data.Dataset.
        rho: feasibility (S, O).
        mask: how τ is chosen, see `best_threshold`.

    Returns:
        The metrics, a dict for metrics.json, and what `compcos.sweep` returns for the test.
    """
    seen = dataset.seen
    threshold, curve, mask_words = best_threshold(model, *arrays["val"], seen, rho, mask=mask)
    sets = {phase: candidate_sets(seen, dataset.candidates(phase), rho, threshold)
            for phase in ("val", "test")}
    validation = {}
    bias = {}
    for name, (swept, _) in compcos.sweep(model, *arrays["val"], seen, sets["val"]).items():
        validation[name] = both_protocols(swept)
        bias[name] = float(np.nan_to_num(validation[name]["exact"]["bias"]))  # 0 if it has none
    temperature = calibrate(model, *arrays["val"], seen, sets["val"], bias)
    test = {}
    tested = compcos.sweep(model, *arrays["test"], seen, sets["test"])
    for name, (swept, _) in tested.items():
        test[name] = both_protocols(swept, confidence=0.95)
        test[name]["fixed_bias"] = accuracy_at(swept, bias[name])
    allowed = answer_candidates(dataset, seen, rho, threshold)[DEFAULT_CANDIDATES]
    metrics = dict(
        validation=validation, threshold=threshold, mask=mask_words, bias=bias,
        temperature=temperature, test=test,
        calibration=calibration(model, *arrays["test"], seen, allowed, bias[DEFAULT_CANDIDATES],
                                temperature[DEFAULT_CANDIDATES]),
        candidates={phase: {name: int(allowed.sum()) for name, allowed in of_phase.items()}
                    for phase, of_phase in sets.items()},
        feasibility_auroc=auroc(rho, dataset.existing, ~seen),
        threshold_curve={key: row.tolist() for key, row in curve.items()})
    return metrics, tested


def both_protocols(swept, confidence=None):
    """Return {protocol: report} of a BiasSweep, the exact one with intervals over compositions."""
    return dict(exact=swept.report("exact", confidence, "composition"),
                published=swept.report("published"))


def answer_candidates(dataset, seen, rho, threshold):
    """Return the compositions that `--predict` may answer, {name: (C,) bool}.

    They are the candidate sets of the test, but the hard mask hides no composition that the lists
    of validation and test name.
    """
    listed = dataset.candidates("val") | dataset.candidates("test")
    rho = np.where(listed.reshape(seen.shape), 1.0, rho)  # the greatest feasibility
    return candidate_sets(seen, dataset.candidates("test") | seen.ravel(), rho, threshold)


# ---- running ----


def run_seeds(system, make, inputs, settings, options, feasibility=None, more={}):
    """Train and evaluate once for each seed, and print tables.

    A single seed writes to the folder itself. With several seeds, each run writes to `seedK/`, and
    metrics.json beside these holds mean and sample deviation of all finished seeds. Several
    processes train as many seeds at a time.

    Args:
        system: the name of the system, which is recorded.
        make: `make(state_vectors, object_vectors, feature_dim, settings)` returns a new model that
            keeps the contract of `lab.baselines.BaselineModel`.
        inputs: the Inputs.
        settings: a TrainingSettings.
        options: out, seed (a list), resume, save_scores, eager, mask, as parsed by `add_options`.
        feasibility: (S, O) for the hard mask; None: the model's own.
        more: further settings to record.

    Returns:
        The metrics of each given seed, a list of dicts.

    Raises:
        ValueError: the folder contains a run that this one would replace.
    """
    dataset = inputs.dataset
    shown = compcos.shown_by(dataset.targets["val"], dataset.seen.shape)
    resolved = compcos.resolve_candidates(settings, dataset.seen, shown)
    if resolved != settings:
        print("note: compositions that compete in training, by train_candidates auto: "
              f"{resolved.train_candidates}")
    record = dict(model=system, mask=options.mask, **inputs.record, **asdict(resolved), **more)
    seeds = list(dict.fromkeys(options.seed))
    is_first = shell.rank() == 0
    out = options.out
    if out is None and is_first:
        out = new_folder(record)
    out = shell.gather(out)[0]
    with lock(out) if is_first else nullcontext():
        check_output_folder(out, seeds, options.resume)
        check_joined(out, seeds, record)
        shell.check_shared(out)

        def run(seed):
            return run_seed(make, inputs, resolved, options, dict(record, seed=seed),
                            folder_of(out, seed, seeds), feasibility)

        results = []
        for seed, metrics in shell.distribute(seeds, run):
            results.append(metrics)
            print(table([metrics], f"seed {seed}", [metrics["test"]]))
            print("\n".join(table_notes(metrics)), flush=True)
        finished = finished_seeds(out)
        if len(finished) > 1:
            report_seeds(out, finished, record)
    print(LEGEND)
    written = f"written to {out}"
    if system == "compcos":
        print(expectation(results[0]["calibration"]))
        written += f"; next: {prediction_command(inputs, folder_of(out, seeds[0], seeds))}"
    print(written)
    return results


def report_seeds(out, finished, record):
    """Print mean and deviation of finished seeds, and write them into the folder `out`."""
    mean = aggregate_seeds(finished, np.mean)
    std = aggregate_seeds(finished, deviation)
    print(table(finished, f"mean ± std of {len(finished)} seeds", [mean["test"], std["test"]]))
    seeds = [metrics["settings"]["seed"] for metrics in finished]
    if shell.rank() == 0:
        write_json(out / "metrics.json", dict(settings=dict(record, seeds=seeds),
                                              versions=versions(), mean=mean, std=std))


def run_seed(make, inputs, settings, options, record, out, feasibility=None):
    """Train and evaluate one seed; write its files into the folder `out`; return the metrics."""
    dataset = inputs.dataset
    seed = record["seed"]
    arrays = inputs.arrays()
    with compcos.reproducible(inputs.device, seed):
        model = make(inputs.state_vectors, inputs.object_vectors, arrays["train"][0].shape[1],
                     settings).to(inputs.device)
        model.prepare(dataset.seen, dataset.targets["train"])
        check_model(model, arrays["train"][0])
        model = train_model(model, arrays, dataset, record, options, out)
        rho = model.feasibility() if feasibility is None else feasibility
        metrics, tested = evaluate_run(model, arrays, dataset, rho, mask=options.mask)
    best = max(model.history, key=lambda row: row["validation"])["epoch"]
    metrics |= dict(settings=record, versions=versions(), best_epoch=best)
    # Existing scores may be of an earlier epoch, so they are written anew.
    if options.save_scores or (out / "scores.npy").exists():
        write_scores(out, model, arrays["test"][0], dataset, tested)
    write_answers(out, dataset, tested, metrics["bias"])
    with writing(out / "feasibility.csv") as file:
        write_csv(file, rho, dataset.seen, dataset.states, dataset.objects)
    with writing(out / "best.pt", "wb") as file:
        compcos.save(model, file, **answer_contents(inputs, options, rho, metrics))
    write_json(out / "metrics.json", metrics)  # last: it marks a finished run
    return metrics


@torch.no_grad()
def check_model(model, features):
    """Raise ValueError unless a prepared model scores images (N, F) with compositions (S, O)."""
    features = features[:2]
    expected = (len(features), *compcos.shape_of(model))
    scores = model.eval().score(features, model.compositions())
    if scores.shape != expected:
        raise ValueError(f"{type(model).__name__}.score must return (B, S, O), here {expected}, "
                         f"got {tuple(scores.shape)}: mend it")


def train_model(model, arrays, dataset, record, options, out):
    """Train a prepared model, from last.pt in the folder `out` with --resume; return it."""
    world = dataset.candidates("val") if record["world"] == "closed" else None
    validate = compcos.validator(model, *arrays["val"], world)
    state = None
    path = out / "last.pt"
    # One of them is there only with --resume, see check_output_folder. A run whose last.pt is lost
    # ends in an error, since it would be trained anew.
    if path.exists() or (out / "metrics.json").exists():
        with reading(path, "give the same options and data, or another --out"):
            state = load_tensors(path)
            check_record(path, state.pop("settings"), record, free=["epochs", "device"])
    epochs = compcos.train_epochs(model, *arrays["train"], validate, seed=record["seed"],
                                  state=state, eager=options.eager)
    return compcos.finish(model, save_epochs(epochs, state, record, out))


def save_epochs(epochs, state, record, out):
    """Run through the epochs of a training and save its states to last.pt; return the last one.

    last.pt holds the last whole epoch also after an error or a signal.

    Args:
        epochs: iterator of states.
        state: the state that last.pt holds already, or None.
        record: the settings to save beside a state.
        out: the folder of last.pt.
    """
    saved = state
    saved_at = time.monotonic()
    try:
        with shell.Progress("training", record["epochs"], "epochs") as progress:
            for state in epochs:
                row = state["history"][-1]
                progress.total = progress.done + 1 + record["epochs"] - state["epoch"]
                progress.update(note=f"loss {row['loss']:.4f}, validation {row['validation']:.2%}")
                if time.monotonic() - saved_at > SAVE_SECONDS:
                    save_state(out, state, record)
                    saved = state
                    saved_at = time.monotonic()
        save_state(out, state, record)
        saved = state
    except ValueError as error:  # of what last.pt holds, or of a training that diverged
        raise ValueError(f"{out}: {error}") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped: pass --out {out} --resume to continue from the last "
                                "whole epoch") from None
    finally:
        if state is not saved:
            save_state(out, state, record)
    return state


def save_state(out, state, record):
    """Write last.pt, from which training continues, and log.csv, a row for each epoch."""
    buffer = io.BytesIO()  # torch.save itself turns errors of a file into others
    torch.save(dict(state, settings=record), buffer)
    with writing(out / "last.pt", "wb") as file:
        file.write(buffer.getbuffer())
    rows = state["history"]
    write_rows(out / "log.csv", rows[0].keys(), [row.values() for row in rows])


def answer_contents(inputs, options, rho, metrics):
    """Return the contents of best.pt besides the model, which prediction and --final need."""
    dataset = inputs.dataset
    profile = answers.training_profile(inputs.features["train"], dataset.targets["train"],
                                       inputs.features["val"])
    kept = {name: metrics[name] for name in ("best_epoch", "threshold", "bias", "temperature")}
    return dict(
        run=metrics["settings"], options={name: getattr(options, name) for name in DATA_OPTIONS},
        states=dataset.states, objects=dataset.objects, profile=profile, **kept,
        expectation=expectation(metrics["calibration"]),
        **mask_contents(dataset, dataset.seen, rho, metrics["threshold"]))


def mask_contents(dataset, seen, rho, threshold):
    """Return the contents of best.pt that depend on feasibility (S, O)."""
    allowed = answer_candidates(dataset, seen, rho, threshold)
    return dict(feasibility=torch.as_tensor(rho),
                candidates={name: torch.as_tensor(mask) for name, mask in allowed.items()})


def prediction_command(inputs, run):
    """Return the command that predicts with the run in a folder, quoted for this system."""
    command = ["python", "compcos.py", "--checkpoint", str(run)]
    if inputs.record["backbone"].startswith(("ResNet-18", drawings.FEATURE)):
        # features of further photos can be extracted with these backbones
        command += ["--predict", str(inputs.dataset.path(inputs.dataset.images["test"][0]))]
    else:
        command += ["--features", "FILE"]
    return subprocess.list2cmdline(command) if os.name == "nt" else shlex.join(command)


# ---- a final model ----


def train_final(run, device="auto", eager=False):
    """Train a final model on the train, validation and test photos of a run; write RUN/final.pt.

    Settings and seed are the run's, and the number of epochs is that of its best one. Compositions
    of validation and test photos count as seen. Prediction uses the run's bias, τ, temperature and
    typicality.

    Relative paths among the run's options are of the present folder.

    Args:
        run: the folder of a finished run of a single seed.
        device: "auto", "cpu", "cuda", "mps".
        eager: on CUDA, do not capture the training step.

    Raises:
        ValueError: the run is not finished, or its data have changed.
    """
    run = Path(run)
    if not (run / "metrics.json").exists():
        raise ValueError(f"{run} must be the folder of a finished run, with metrics.json")
    model = answers.load_run(run)
    contents = model.checkpoint
    record = contents["run"]
    options = argparse.Namespace(**contents["options"], device=device, out=run, seed=[])
    inputs = with_vectors(load_data(options, replace_cache=False), options, record["vectors"])
    if inputs.record["data_crc32"] != record["data_crc32"]:
        raise ValueError(f"the data of {run} have changed since it was trained: restore them, or "
                         "train anew before --final")
    settings = replace(model.settings, epochs=contents["best_epoch"], patience=0)
    dataset = inputs.dataset
    features = np.concatenate([inputs.features[phase] for phase in data.PHASES])
    targets = np.concatenate([dataset.targets[phase] for phase in data.PHASES])
    seen = dataset.seen | compcos.shown_by(targets, dataset.seen.shape)
    with shell.Progress("training", settings.epochs, "epochs") as progress:
        model = compcos.fit(features, targets, inputs.state_vectors, inputs.object_vectors,
                            seen=seen, settings=settings, seed=record["seed"], device=device,
                            on_epoch=lambda row: progress.update(), eager=eager)
    contents |= mask_contents(dataset, seen, model.feasibility(), contents["threshold"])
    contents["expectation"] += (" This is a guide, measured with best.pt: the accuracy of final.pt "
                                "is not measured.")
    with writing(run / "final.pt", "wb") as file:
        compcos.save(model, file, **contents)
    print(f"written to {run / 'final.pt'}. {contents['expectation']}")


# ---- options ----


def add_options(parser, settings_class):
    """Add the options that `run_seeds` takes, and one for each setting."""
    add_shared_options(parser, settings_class)
    add = parser.add_argument_group("evaluation and output").add_argument
    add("--mask", default="justified", choices=["justified", "paper"],
        help="choice of the threshold of the hard mask: the best one by validation AUC (paper), or "
             "that only if it gains more than a mask is expected to lose and hides at most 5 %% of "
             "the compositions that exist (justified, the default)")
    add("--out", type=Path, metavar="DIR",
        help="folder without a run (default: a new runs/DATASET-MODEL-WORLD)")
    add("--resume", action="store_true",
        help="continue the run in --out; further seeds join it")
    add("--save-scores", action="store_true", help="write the test scores (N, C) for evaluate.py")


def add_shared_options(parser, settings_class, without=()):
    """Add the options on data and training, and one for each setting but those named `without`."""
    add = parser.add_argument_group("data").add_argument
    add("--dataset", default="shapes", metavar="NAME|FOLDER",
        help="shapes (built in, the default), utzappos, mitstates, cgqa, or a folder of your own")
    add("--data-root", default="data", metavar="DIR",
        help="folder of datasets and word vectors (default data)")
    add("--features", metavar="FILE",
        help="features by file name (.npz with files, features (N, F)), for instance from CLIP; "
             "'pixels' takes 16 x 16 pixels of each photo (default: the dataset's features.npz, "
             "else ResNet-18 features of the photos)")
    add("--weights", metavar="FILE",
        help="ResNet-18 weights for these (default: downloaded by torch hub)")
    add("--vectors", nargs="+", metavar="NAME|FILE",
        help="word vectors, concatenated: word2vec, fasttext, glove, random, or files (default: "
             "the dataset's vectors.txt, else those of the paper)")
    add("--missing", default="error", choices=["error", "random", "mean"],
        help="vectors of words that have none: an error (default), random ones, or the mean of all")
    add("--skip-broken", action="store_true", help="leave out images that cannot be read")
    group = parser.add_argument_group(
        "training", "The recipe sets what is not given; 'paper' is the value for MIT-States, and "
        "the paper's recipe changes some for other datasets.")
    add_settings(group, settings_class, without)
    add = group.add_argument
    add("--seed", type=int, nargs="+", default=[0], metavar="K",
        help="seeds, one run each (default %(default)s)")
    add("--device", default="auto", help="auto (default), cpu, cuda or mps")
    add("--eager", action="store_true", help="on CUDA, do not capture the training step as a graph")


def add_settings(parser, settings_class, without=()):
    """Add an option for each setting but those named `without`; None means that it is not given."""
    for field in fields(settings_class):
        if field.name in without:
            continue
        rule = field.metadata
        default = f"default {short(field.default)}"
        if settings_class is compcos.Settings and rule["strong"] != field.default:
            default = f"paper {short(field.default)}, strong {short(rule['strong'])}"
        option = dict(help=f"{rule['help']} ({default})".replace("%", "%%"))
        if field.type is bool:
            option["action"] = argparse.BooleanOptionalAction
        elif rule["choices"]:
            option["choices"] = rule["choices"]
        else:
            option["type"] = field.type
            option["metavar"] = "X"
        parser.add_argument(f"--{field.name.replace('_', '-')}", **option)


def short(value):
    """Return a value as text, a float with at most six digits."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings_changes(options, settings_class):
    """Return the settings that options give, {name: value}."""
    given = {field.name: getattr(options, field.name, None) for field in fields(settings_class)}
    return {name: value for name, value in given.items() if value is not None}


def compcos_settings(recipe, dataset, changes):
    """Return the Settings of a recipe, "paper" or "strong", for a dataset, with changes."""
    if recipe == "paper":
        name = dataset if dataset in compcos.DATASET_SETTINGS else "folder"
        return compcos.Settings.paper(name, **changes)
    return compcos.Settings.strong(**changes)


@shell.command
def main(argv=None):
    """Train and evaluate CompCos, predict with a checkpoint, or train a final model."""
    parser = argparse.ArgumentParser(
        description="Train and evaluate CompCos on a dataset, or predict compositions of photos.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=["paper", "strong"],
                        help="values of the training options: the paper's (default for shapes, "
                             "utzappos, mitstates, cgqa) or stronger ones (default for a folder)")
    parser.add_argument("--final", metavar="RUN",
                        help="train the model of a finished run anew, by its own settings, on its "
                             "train, validation and test photos together, and write RUN/final.pt")
    add_options(parser, compcos.Settings)
    answers.add_options(parser)
    options = parser.parse_args(argv)
    if options.checkpoint or options.predict or options.csv or options.final:
        if shell.rank() == 0:  # other processes have nothing to do
            with shell.single_process():
                if options.final:
                    train_final(options.final, options.device, options.eager)
                else:
                    answers.print_predictions(options)
        return
    recipe = options.recipe or ("paper" if options.dataset in VECTORS else "strong")
    settings = compcos_settings(recipe, options.dataset,
                                settings_changes(options, compcos.Settings))
    inputs = load_inputs(options, VECTORS.get(options.dataset, OTHER_VECTORS))
    run_seeds("compcos", compcos.build, inputs, settings, options, more=dict(recipe=recipe))
