"""The results of a run: candidate sets, folders, files and tables.

N test images, S states, O objects, C = S*O compositions, (s, o) at s*O + o. Fractions in files,
percent in print.
"""

import itertools
import math
import platform
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import PIL
import torch

from compcos import index_pairs, score_blocks
from feasibility import hard_mask
from lab import shell
from lab.files import load_tensors, read_json, read_rows, reading, write_rows, writing

RUNS = Path("runs")  # where results go without --out
RUN_FILES = ("last.pt", "log.csv", "best.pt", "metrics.json")  # a folder with one holds a run
TOO_FEW = 10  # fewer unseen test compositions give no interval
FEW = 20      # fewer give a rough one


# ---- candidates ----


def candidate_sets(seen, listed, feasibility, threshold):
    """Return the sets of compositions that may be answered, {name: (C,) bool}.

    A further set is one more entry here. Each set must hold all seen compositions.

    Args:
        seen: (S, O) bool.
        listed: (C,) bool, the compositions of training and of the phase's own list.
        feasibility: (S, O).
        threshold: τ of the hard mask (Eq. 6).
    """
    return {
        "closed": listed,
        "open": np.ones(seen.size, bool),
        "open_masked": hard_mask(feasibility, seen, threshold).ravel(),
    }


# The names in order, as a single composition gives them.
CANDIDATE_SETS = tuple(candidate_sets(np.ones((1, 1), bool), np.ones(1, bool), np.ones((1, 1)), 0))
DEFAULT_CANDIDATES = "open_masked"  # of prediction


# ---- the folder of a run ----


def run_folders(record):
    """Return the folders of runs with such a record when --out is not given, in order."""
    name = f"{record['dataset']}-{record['model']}-{record['world']}"
    return [RUNS / name] + [RUNS / f"{name}-{number}" for number in range(2, 1000)]


def new_folder(record):
    """Make and return the first of `run_folders` that does not exist."""
    for folder in run_folders(record):
        with suppress(FileExistsError):  # mkdir decides between two that start at once
            folder.mkdir(parents=True)
            return folder


def last_folder(record):
    """Return the last of `run_folders` that exists, or the first of all."""
    folders = run_folders(record)
    existing = [folder for folder in folders if folder.exists()]
    return existing[-1] if existing else folders[0]


def check_output_folder(out, seeds, resume):
    """Raise ValueError where these seeds would replace or mix with a run in the folder `out`."""
    is_single = not has_seeds(out) and any((out / name).exists() for name in RUN_FILES)
    if (is_single or has_seeds(out)) and not resume:
        raise ValueError(f"{out} already contains a run: pass --resume to continue it, or another "
                         "--out")
    if is_single and len(seeds) > 1:
        raise ValueError(f"{out} contains the run of a single seed, which further seeds cannot "
                         "join: pass another --out")


def check_joined(out, seeds, record):
    """Raise ValueError where seeds that are already in `out` have other settings."""
    for recorded in recorded_settings(out):
        if recorded["seed"] not in seeds:  # the others are checked when their training goes on
            check_record(out, recorded, record, free=["device"])


def check_record(path, recorded, record, free):
    """Raise ValueError where a run's record differs from this one in a setting that is not free."""
    for name, value in record.items():
        if name not in free and recorded.get(name) != value:
            raise ValueError(f"Cannot resume {path}: it was trained with {name}="
                             f"{recorded.get(name)!r}, this command has {name}={value!r}")


def finished_seeds(out):
    """Return what metrics.json holds for each finished seed below a folder, by seed."""
    found = [read_json(path) for path in out.glob("seed[0-9]*/metrics.json")]
    return sorted(found, key=lambda metrics: metrics["settings"]["seed"])


def recorded_settings(out):
    """Yield the settings of each run in a folder, finished or not."""
    for metrics in finished_seeds(out):
        yield metrics["settings"]
    for path in out.glob("**/last.pt"):
        with reading(path, "restore the file, or pass another --out"):
            settings = load_tensors(path)["settings"]
            if not isinstance(settings, dict) or "seed" not in settings:
                raise ValueError("its settings are not those of a run")
        yield settings


def folder_of(out, seed, seeds):
    """Return the folder of a seed: `out`, or its `seedK/` with several seeds."""
    if len(seeds) > 1 or has_seeds(out):
        return out / f"seed{seed}"
    return out


def has_seeds(out):
    """Tell if a folder holds the folders of several seeds."""
    return any(out.glob("seed[0-9]*"))


# ---- the files of a run ----


def write_answers(out, dataset, tested, bias):
    """Write what the test shows: predictions.csv, compositions.csv and curves.npz.

    Args:
        out: the folder.
        dataset: a data.Dataset.
        tested: {name: (BiasSweep, best)} of `compcos.sweep`.
        bias: {name: bias on the unseen, fixed on validation}, at which answers are given.
    """
    seen = dataset.seen.ravel()
    target = dataset.targets["test"]
    shown, count = np.unique(target, return_counts=True)
    predictions = dict(image=dataset.images["test"], **named_columns(dataset, target),
                       seen=seen[target].astype(int))
    compositions = dict(**named_columns(dataset, shown), seen=seen[shown].astype(int),
                        images=count)
    curves = {}
    for name, (swept, best) in tested.items():
        answers, scores = answers_at(best, bias[name])
        for key, column in named_columns(dataset, answers).items():
            predictions[f"{name}_{key}"] = column
        predictions[f"{name}_score"] = [f"{score:.4f}" for score in scores]
        right = np.bincount(target[answers == target], minlength=seen.size)[shown]
        compositions[name] = [f"{share:.4f}" for share in right / count]
        curve = swept.curve()
        curves[f"{name}_seen"] = curve.seen
        curves[f"{name}_unseen"] = curve.unseen
    write_rows(out / "predictions.csv", predictions, zip(*predictions.values()))
    write_rows(out / "compositions.csv", compositions, zip(*compositions.values()))
    with writing(out / "curves.npz", "wb") as file:
        np.savez(file, **curves)


def named_columns(dataset, indices):
    """Return the state and the object names of compositions (N,), as columns of a table."""
    states, objects = np.divmod(indices, len(dataset.objects))
    return dict(state=np.array(dataset.states)[states], object=np.array(dataset.objects)[objects])


def answers_at(best, bias):
    """Return answers (N,) and their scores (N,) at a bias, from what `compcos.sweep` kept."""
    seen_scores, seen_columns, unseen_scores, unseen_columns = [kept[:, 0] for kept in best]
    # In float64, as `evaluate.accuracy_at` compares, so that files and metrics agree.
    is_unseen = bias > seen_scores.astype(float) - unseen_scores
    answers = np.where(is_unseen, unseen_columns, seen_columns)
    return answers, np.where(is_unseen, unseen_scores, seen_scores)


@torch.no_grad()
def write_scores(out, model, features, dataset, tested):
    """Write the test scores for evaluate.py: scores.npy and a file for each candidate set.

    scores.npy is float32 (N, C), written block by block. The files beside it hold its check sum.
    """
    about = dict(descr="<f4", fortran_order=False, shape=(len(features), dataset.seen.size))
    with writing(out / "scores.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, about)
        for _, scores in score_blocks(model, features):
            file.write(np.ascontiguousarray(scores.cpu(), "<f4"))
    checksum = zlib.crc32(np.memmap(out / "scores.npy", mode="r"))
    for name, (swept, _) in tested.items():
        with writing(out / f"scores_{name}.npz", "wb") as file:
            np.savez(file, target=dataset.targets["test"], seen=dataset.seen.ravel(),
                     candidates=swept.candidates, pairs=index_pairs(dataset.seen.shape),
                     scores_crc32=checksum)


def read_feasibility(path, states, objects):
    """Return (S, O) from a feasibility.csv; ValueError unless it has all compositions."""
    with reading(path, "expected columns state, object, feasibility, and a row for each "
                 "composition of this data"):
        found = {(row["state"], row["object"]): float(row["feasibility"])
                 for row in read_rows(path)}
        scores = np.array([found[pair] for pair in itertools.product(states, objects)])
    return scores.reshape(len(states), len(objects))


def versions():
    """Return what the numbers depend on besides the settings."""
    machine = f"{platform.machine()}, threads {torch.get_num_threads()}"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    return dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__,
                pillow=PIL.__version__, processes=shell.processes(), machine=machine)


# ---- several seeds ----


def aggregate_seeds(results, function):
    """Return the metrics of several runs as one, `function` of the values of each number.

    Words stay. Intervals are left out, since they are not averaged. None, as JSON has it, is nan.
    """
    first = results[0]
    if isinstance(first, dict):
        combined = {}
        for key in first:
            if not key.endswith(("settings", "versions", "threshold_curve", "_low", "_high")):
                combined[key] = aggregate_seeds([result[key] for result in results], function)
        return combined
    if isinstance(first, str):
        return first
    return function(np.array(results, float))


def deviation(values):
    """Return the sample standard deviation, over n - 1; nan of one value."""
    return np.std(values, ddof=1) if len(values) > 1 else np.nan


# ---- what is printed ----


COLUMNS = dict(S="seen", U="unseen", HM="hm", AUC="auc", Sta="state_accuracy",
               Obj="object_accuracy")
LEGEND = """\
S, U: best accuracy on seen and on unseen compositions; HM: best harmonic mean; AUC: area under the
curve of seen against unseen accuracy, as the bias on unseen compositions grows. Sta, Obj: accuracy
of the state and of the object at bias 0. ±: sample standard deviation (n - 1)
exact: every bias. published: about 20 biases, as in papers. fixed_bias: the bias chosen on
validation, for all columns
closed: the compositions of training and of the test list may be answered. open: all compositions.
open_masked: seen compositions and those of a feasibility of at least τ"""


def describe_run(results):
    """Return a line on what the results of some seeds depend on."""
    settings = results[0]["settings"]
    best = ", ".join(str(metrics["best_epoch"]) for metrics in results)
    recipe = "".join(f"{name} {settings[name]}; " for name in ("recipe", "members")
                     if name in settings)
    return (f"{settings['backbone']}; vectors {', '.join(settings['vectors'])}; {recipe}best epoch "
            f"{best} of {settings['epochs']}; {settings['device']}")


def table(results, which, test, std=None):
    """Return test results as text, in percent.

    Args:
        results: what metrics.json holds for each seed.
        which: the seeds in words.
        test: as in metrics.json, of one seed or the mean of several.
        std: the deviation of several, of the same form.
    """
    settings = results[0]["settings"]
    width = 14 if std else 7
    names = "".join(f"{name:>{width}}" for name in COLUMNS)
    lines = [f"{settings['dataset']}, {settings['model']}, {settings['world']} world, {which} "
             "(test, %)", describe_run(results), f"{'candidates':<15}{'protocol':<12}{names}"]
    for candidates, reports in test.items():
        for protocol, report in reports.items():
            line = f"{candidates:<15}{protocol:<12}"
            for key in COLUMNS.values():
                cell = ""
                if f"best_{key}" in report:
                    key = f"best_{key}"
                if key in report:  # at a fixed bias there is no AUC
                    cell = f"{100 * report[key]:.1f}"
                    if std:
                        cell += f" ± {100 * std[candidates][protocol][key]:.1f}"
                line += f"{cell:>{width}}"
            lines.append(line)
    return "\n".join(lines)


def interval(values, name, count):
    """Return the 95 % interval of a metric in words, or why there is none.

    Args:
        values: a dict with `<name>_low` and `<name>_high`, fractions.
        name: the metric.
        count: the number of compositions that it comes from.
    """
    if count < TOO_FEW:
        return f"{count} compositions: too few for an interval"
    text = f"{values[f'{name}_low']:.0%} to {values[f'{name}_high']:.0%}"
    if count < FEW:
        text += f", rough: {count} compositions"
    return text


def table_notes(metrics):
    """Return the lines that stand under the table of a seed."""
    unseen = metrics["unseen_compositions"]
    areas = []
    for name, reports in metrics["test"].items():
        report = reports["exact"]
        if math.isfinite(report["auc"]):
            areas.append(f"{name} {report['auc']:.1%} ({interval(report, 'auc', unseen)})")
    lines = []
    if areas:
        lines.append(f"exact AUC and its 95 % interval over compositions: {'; '.join(areas)}")
    lines.append(f"hard mask: {metrics['mask']}")
    answers = metrics["calibration"]
    lines.append(f"calibration ({DEFAULT_CANDIDATES}): mean confidence "
                 f"{answers['confidence']:.0%}, accuracy {accuracy(answers)}")
    auroc = metrics["feasibility_auroc"]
    if math.isfinite(auroc):
        lines.append("feasibility ranks unseen compositions that exist above the others with "
                     f"AUROC {auroc:.3f}")
    return lines


def accuracy(values):
    """Return an accuracy and its interval in words, from `lab.run.accuracy_interval`."""
    return f"{values['accuracy']:.0%} ({interval(values, 'accuracy', values['compositions'])})"


def expectation(calibration):
    """Return a sentence on the accuracy of predictions, from what `lab.run.calibration` returns."""
    clauses = []
    for half, training in (("seen", "training photos"), ("unseen", "none")):
        if half in calibration:
            clauses.append(f"of about {accuracy(calibration[half])} where the composition had "
                           f"{training}")
    return f"On new photos expect an accuracy {', and '.join(clauses)}."
