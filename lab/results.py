"""The results of a run: candidate sets, folders, files and tables.

N test images, S states, O objects, C = S*O compositions, (s, o) at s*O + o. Fractions in files,
percent in print.
"""

import itertools
import math
import platform
import zlib
from pathlib import Path

import numpy as np
import PIL
import torch

from compcos import index_pairs, score_blocks
from feasibility import hard_mask
from lab import shell
from lab.files import read_json, write_rows, writing

RUNS = Path("runs")  # where results go without --out
RUN_FILES = ("last.pt", "log.csv", "best.pt", "metrics.json")  # a folder with one holds a run
TOO_FEW = 10  # fewer unseen test compositions give no interval
FEW = 20      # fewer give a rough one


# ---- candidates ----


def candidate_sets(seen, listed, feasibility, threshold):
    """Return the sets of compositions that may be answered, {name: (C,) bool}.

    A further set is one more entry here.

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


def new_folder(record):
    """Make and return the first of runs/DATASET-MODEL-WORLD, -2, -3, ... that does not exist."""
    name = f"{record['dataset']}-{record['model']}-{record['world']}"
    folder = RUNS / name
    for number in itertools.count(2):
        try:  # mkdir decides between two that start at once
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            folder = RUNS / f"{name}-{number}"


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
    """Raise ValueError where finished seeds in `out`, which the mean is of, have other settings."""
    for metrics in finished_seeds(out):
        recorded = metrics["settings"]
        if recorded["seed"] not in seeds:  # the others are checked when their training goes on
            check_record(out, recorded, record, free=["device"])


def check_record(path, recorded, record, free):
    """Raise ValueError where a run's record differs from this one in a setting that is not free."""
    for name, value in record.items():
        if name not in free and recorded.get(name) != value:
            raise ValueError(f"Cannot resume {path}: it was trained with {name}="
                             f"{recorded.get(name)!r}, this command has {name}={value!r}")


def finished_seeds(out):
    """Return what metrics.json holds for each finished seed below a folder."""
    return [read_json(path) for path in sorted(out.glob("seed[0-9]*/metrics.json"))]


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
        for key in min(results, key=len):  # an older version may have recorded more
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
exact: every bias. published: about 20 biases, as in papers. fixed_bias: one bias for all columns,
which validation chose; it is 0 if validation shows no seen or no unseen compositions
closed: the compositions of training and of the test list may be answered. open: all compositions.
open_masked: seen compositions and those of a feasibility of at least τ"""


def table(results, which, tests):
    """Return test results as text, in percent.

    Args:
        results: what metrics.json holds for each seed.
        which: the seeds in words.
        tests: the `test` of metrics.json, alone or as mean and deviation of several seeds.
    """
    settings = results[0]["settings"]
    best = ", ".join(str(metrics["best_epoch"]) for metrics in results)
    width = 7 * len(tests)
    names = "".join(f"{name:>{width}}" for name in COLUMNS)
    lines = [f"{settings['dataset']}, {settings['model']}, {settings['world']} world, {which} "
             "(test, %)",
             f"{settings['backbone']}; vectors {', '.join(settings['vectors'])}; best epoch {best} "
             f"of {settings['epochs']}; {settings['device']}",
             f"{'candidates':<15}{'protocol':<12}{names}"]
    for candidates, reports in tests[0].items():
        for protocol in reports:
            line = f"{candidates:<15}{protocol:<12}"
            for key in COLUMNS.values():
                cells = []
                for test in tests:
                    report = test[candidates][protocol]
                    value = report.get(f"best_{key}", report.get(key))
                    if value is not None:  # at a fixed bias there is no AUC
                        cells.append(f"{100 * value:.1f}")
                line += f"{' ± '.join(cells):>{width}}"
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
    answers = metrics["calibration"]
    areas = []
    for name, reports in metrics["test"].items():
        report = reports["exact"]
        if math.isfinite(report["auc"]):  # so there are images of unseen compositions
            unseen = answers["unseen"]["compositions"]
            areas.append(f"{name} {report['auc']:.1%} ({interval(report, 'auc', unseen)})")
    lines = []
    if areas:
        lines.append(f"exact AUC and its 95 % interval over compositions: {'; '.join(areas)}")
    lines.append(f"hard mask: {metrics['mask']}")
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
