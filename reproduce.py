"""The paper's tables and figures: trains what is missing, writes report.md, report.json, pictures.

    python reproduce.py --dataset shapes --seeds 0 1 2 --out results/shapes
    python reproduce.py --dataset shapes --only strong changes --out results/shapes

Runs lie in OUT/runs/NAME/seedK: a finished one is used again, an interrupted one goes on, one with
other settings starts anew. Systems are compared as baselines.MODELS names them, so one added there
gets its runs and rows. Fractions in report.json, percent in report.md.
Shapes: S states, O objects, N images, F features.

A section of the report has up to three functions: `compute` gives its cells from the runs, `draw` a
picture and `write` the Markdown lines, both from the cells.
"""

import argparse
import functools
import importlib.util
import json
import math
import shlex
import sys
import traceback
import warnings
from contextlib import redirect_stdout
from itertools import product
from numbers import Real
from pathlib import Path
from typing import Callable, NamedTuple

import common

if __name__ == "__main__":
    common.wait_gently()  # before torch is imported

import numpy as np
import torch
from PIL import Image

import baselines
import compcos
import data
import experiment
from experiment import read_json
from feasibility import agreement, hard_mask, median_mask, ranked
from train import LOG, reading, sweep, value_at

HERE = Path(__file__).parent
PROTOCOLS = ("published", "exact")

PUBLISHED = "--recipe published"
STRONG = "--recipe strong --mask justified"

LABELS = {"aop": "AoP", "leplus": "LE+", "tmn": "TMN", "symnet": "SymNet",
          "apart": "Two classifiers apart"}
OURS = {"CompCos closed": "closed", "CompCos": "full"}
PAPER_RUNS = {  # options of compcos.py; `full` is first, since its feasibility masks the baselines
    "full": "--world open",
    "closed": "--world closed",
    "alpha0": "--world open --margin 0",
    "constant": "--world open --warmup 0",
    "state": "--world open --mix state",
    "object": "--world open --mix object",
    "max": "--world open --mix max",
}
RECIPES = {  # label -> run; the published recipe with 4 members shows what averaging alone gains
    "published": "full",
    "published, 4 members": "published4",
    "strong": "strong1",
    "strong, 4 members": "strong4",
    "strong, 16 members": "strong16",
    "two classifiers apart": "apart",
}
STRONG_RUNS = {
    "published4": f"{PUBLISHED} --members 4",
    "strong1": f"{STRONG} --members 1",
    "strong4": f"{STRONG} --members 4",
    "strong16": f"{STRONG} --members 16",
}
# Images of unit length need a scale again; the margin keeps 7.2 ρ off the logits.
CHANGES = {  # run -> (what is changed of `strong4`, options)
    "without-dropout": ("dropout 0.5", "--dropout 0.5"),
    "without-length": ("images of unit length (scale 20, α 0.36)",
                       "--cosine --scale 20 --margin 0.36"),
    "without-word-rate": ("word embeddings at the common rate", "--word-rate 1"),
    "without-open": ("closed loss", "--world closed"),
    "without-average": ("no average of the weights", "--average 0"),
    "without-counts": ("no log n", "--counts 0"),
    "without-dim": ("a space of 100", "--dim 100"),
    "without-mixing": ("no mixed images", "--mix-images 0"),
}
STRONG_RUNS |= {run: f"{STRONG} --members 4 {options}" for run, (_, options) in CHANGES.items()}

OWN_CHOICE = ("world", "recipe", "seed", "out", "feasibility")  # of a run's options
VERSIONS = ("python", "torch", "numpy", "pillow")
COLUMNS = {"S": "best_seen", "U": "best_unseen", "HM": "best_hm", "AUC": "auc"}
PRIMITIVES = {"Sta.": "state_accuracy", "Obj.": "object_accuracy"}
ALL_COLUMNS = COLUMNS | PRIMITIVES | {
    "Sta. unseen only": "state_accuracy_unseen_only",
    "Obj. unseen only": "object_accuracy_unseen_only"}

# Colours of Okabe and Ito, whom the colour-blind can tell.
BLUE = "#0072B2"
GREEN = "#009E73"
RED = "#D55E00"
BLACK = "#000000"
PURPLE = "#882255"
LOOKS = {"AoP": ("#E69F00", "-."), "LE+": ("#56B4E9", "--"), "TMN": (GREEN, ":"),
         "SymNet": ("#CC79A7", "--"), "Two classifiers apart": ("#888888", ":"),
         "CompCos closed": (RED, "-"), "CompCos": (BLUE, "-"), "CompCos, mask": (BLACK, "--"),
         "CompCos, strong": (PURPLE, "-"), "CompCos, strong, 16 members": (PURPLE, "--")}
RECIPE_LOOKS = {"published": (BLUE, "-"), "published, 4 members": (BLUE, "--"),
                "strong": (PURPLE, ":"), "strong, 4 members": (PURPLE, "-"),
                "strong, 16 members": (PURPLE, "--"), "two classifiers apart": ("#888888", ":")}
SHEET_COLUMNS = 5  # photos side by side on the contact sheet
PHOTO_SIDE = 240   # pixels
OTHER_LOOKS = (("#332288", "-."), ("#117733", "-."), ("#AA4499", "-."), ("#999933", "-."))


# ---- what is run ----


def methods():
    """The systems that are compared, {label: run}: those of baselines.MODELS, then CompCos."""
    return {LABELS.get(name, name): name for name in baselines.MODELS} | OURS


def paper_table(name):
    """The rows of a table of the paper, {label: (run, candidate set)}.

    The names of tables and rows are those of results/paper/tables.json.
    """
    if name == "closed":
        return {label: (run, "closed") for label, run in methods().items()}
    if name == "open":
        rows = {label: (run, "open") for label, run in methods().items()}
        rows["CompCos closed, mask"] = ("closed", "open_masked")
        rows["CompCos, mask"] = ("full", "open_masked")
        return rows
    if name == "margins":
        return {"CompCos closed": ("closed", "open"), "CompCos, α = 0": ("alpha0", "open"),
                "CompCos, α > 0": ("constant", "open"),
                "CompCos, α > 0 and warm-up": ("full", "open")}
    if name == "primitives":
        return {"state": ("state", "open"), "object": ("object", "open"), "max": ("max", "open"),
                "mean": ("full", "open")}
    rows = {}
    for label, run in methods().items():
        rows[label] = (run, "open")
        rows[f"{label}, mask"] = (run, "open_masked")
    return rows


def run_options():
    """What can be trained, {run: its options}, in the order of training."""
    runs = {name: f"{PUBLISHED} {options}" for name, options in PAPER_RUNS.items()}
    for name in baselines.MODELS:
        runs[name] = f"--world closed --model {name}"
    return runs | STRONG_RUNS


class Job(NamedTuple):
    """One training, and what its results depend on."""

    name: str
    seed: int
    folder: Path
    command: Callable  # main of compcos or baselines
    arguments: list
    key: dict          # a run is used again where this is the same


def plan(name, seed, options, shared, settings, out):
    """The Job of a run. `shared`: the options that go to all; `settings`: what they mean."""
    folder = out / "runs" / name / f"seed{seed}"
    run_arguments = run_options()[name]
    mask_from = []
    if name in baselines.MODELS:
        system = name
        command = baselines.main
        defaults = baselines.defaults(name)
        mask_from = ["--feasibility", str(out / "runs" / "full" / f"seed{seed}" / "best.pt")]
    else:
        system = "strong" if run_arguments.startswith(STRONG) else "compcos"
        command = compcos.main
        defaults = compcos.defaults("strong" if system == "strong" else "published")
    defaults = defaults.get(settings["dataset"], defaults["other"])
    run_arguments = f"{vars(options)[system]} {run_arguments}"
    if options.quick:
        run_arguments += " --epochs 3"
        if name == "tmn":
            run_arguments += " --width 16"
    arguments = [*shared, *shlex.split(run_arguments), "--seed", str(seed), "--out", str(folder),
                 *mask_from]
    key = dict(options=run_arguments, defaults=defaults, settings=settings, mask=options.compcos)
    return Job(name, seed, folder, command, arguments, json.loads(json.dumps(key)))


def same_settings(job):
    """Whether what lies in the job's folder was made with the same settings."""
    note = job.folder / "run.json"
    return note.exists() and read_json(note).get("key") == job.key


def is_finished(job):
    """Whether the job's results are there."""
    return same_settings(job) and (job.folder / "metrics.json").exists()


def do(job):
    """Train. What that prints goes to output.txt in the job's folder, also a traceback."""
    job.folder.mkdir(parents=True, exist_ok=True)
    arguments = list(job.arguments)
    if same_settings(job):
        arguments.append("--resume")
    else:
        for name in ("metrics.json", "last.pt"):
            (job.folder / name).unlink(missing_ok=True)
    experiment.write_json(job.folder / "run.json", dict(key=job.key))
    train = getattr(job.command, "__wrapped__", job.command)  # errors come here, not to stderr
    with open(log_file(job), "w", encoding="utf-8") as file, redirect_stdout(file):
        try:
            train(arguments)
        except (Exception, SystemExit):
            traceback.print_exc(file=file)
            raise


def log_file(job):
    """Where the output of a job goes."""
    return job.folder / "output.txt"


def train_missing(jobs):
    """Train what is not there: ({run: {seed: what `load` gives}}, [jobs that failed]).

    Of several processes each takes the next job when it is free, and works alone. The runs whose
    feasibility masks the compared systems come first.
    """
    lacking = []
    for job in jobs:
        if is_finished(job):
            report(job, "kept")
        else:
            lacking.append(job)
    progress = common.Progress("runs", len(lacking), together=True)
    begun = 0
    for is_first in (True, False):
        waiting = [job for job in lacking if (job.name == "full") == is_first]
        done_here = {}
        for i in common.take_turns(len(waiting)):
            with common.alone():
                done_here[i] = attempt(waiting[i])
            progress.advance(1)
            report(waiting[i], f"{done_here[i]} ({progress.done} of {len(lacking)} have ended)")
        begun += len(waiting)
        common.show_until(progress, progress.add, begun)
        for done in common.gather(done_here):
            for i in done.keys() - done_here.keys():
                report(waiting[i], done[i])
    runs = {}
    failed = []
    for job in jobs:
        if is_finished(job):
            runs.setdefault(job.name, {})[job.seed] = load(job.folder)
        else:
            failed.append(job)
    return runs, failed


def attempt(job):
    """Do a job; what became of it, in words. After a failure the others go on."""
    try:
        do(job)
    except KeyboardInterrupt:
        print("what is done is kept: the same reproduce.py command goes on from here",
              file=sys.stderr)
        raise
    except (Exception, SystemExit) as error:
        why = str(error).splitlines() or [type(error).__name__]
        return f"failed ({why[0]}), see {log_file(job)}"
    return "trained"


def report(job, done):
    """A line on what became of a job."""
    print(f"{job.name}, seed {job.seed}: {done}", flush=True,
          file=sys.stdout if is_finished(job) else sys.stderr)


def result(path):
    """`train.reading` of a result of a run; gives what to do where it is damaged."""
    return reading(path, f"remove {path.with_name('metrics.json')}, and the same command makes the "
                   "results of this run anew")


def load(folder):
    """metrics.json of a run, with its `folder`, `log` and `seconds` of training.

    log: arrays (epochs,) by name. ValueError names the file that is not as the run left it.
    """
    run = read_json(folder / "metrics.json")
    with result(folder / "metrics.json"):
        check_metrics(run)
    with result(folder / "log.csv") as path:
        log = read_log(path)
        if len(log["epoch"]) < run["best_epoch"]:
            raise ValueError(f"{data.count(len(log['epoch']), 'epoch')}, the best is "
                             f"{run['best_epoch']}")
    run["folder"] = folder
    run["log"] = log
    run["seconds"] = float(log["seconds"].sum())
    return run


def check_metrics(metrics):
    """Read all that sections read of metrics.json. ValueError: a figure is missing, or is none."""
    sets = experiment.CANDIDATE_SETS
    for path in product(("validation", "test"), sets, PROTOCOLS, ALL_COLUMNS.values()):
        number(metrics, *path)
    for path in product(("val", "test"), sets):
        value_at(metrics, int, "candidates", *path)
    number(metrics, "feasibility_auroc")
    value_at(metrics, (int, float), "threshold")
    value_at(metrics, int, "best_epoch")
    thresholds = value_at(metrics, list, "threshold_curve", "threshold")
    for name in ("threshold", "auc", "removed"):
        row = value_at(metrics, list, "threshold_curve", name)
        if len(row) != len(thresholds):
            raise ValueError(f"threshold_curve: {len(row)} {name}, {len(thresholds)} threshold")
        for place in range(len(row)):
            number(metrics, "threshold_curve", name, place)
    for name in (*VERSIONS, "machine"):
        value_at(metrics, str, "versions", name)
    value_at(metrics, str, "truth")
    if value_at(metrics, str, "settings", "model") == "tmn":
        value_at(metrics, int, "settings", "negatives")


def number(content, *path):
    """The number at a path of keys; null, as figures that do not exist are written, is nan.
    ValueError: there is none.

    >>> number({"a": [1, None]}, "a", 0), number({"a": [1, None]}, "a", 1)
    (1.0, nan)
    """
    value = value_at(content, (Real, type(None)), *path)
    return math.nan if value is None else float(value)


def read_log(path):
    """log.csv as arrays (epochs,) by name. KeyError, TypeError, ValueError: it is none."""
    rows = experiment.read_rows(path)
    return {name: np.array([float(row[name]) for row in rows]) for name in LOG}


def model_of(run, device="cpu"):
    """The trained CompCos of a run. ValueError names its file, and what to do."""
    with result(run["folder"] / "best.pt") as path:
        return compcos.CompCos.load(path, device)


# ---- computing ----


class Results(NamedTuple):
    """What the sections are made from."""

    out: Path
    dataset: object
    names: np.ndarray   # (S*O,) of the compositions
    validation: tuple   # features (N, F) on the device, targets (N,)
    runs: dict          # run -> {seed: what `load` gives}
    paper: dict         # the paper's figures on this dataset

    def of(self, run):
        """The runs of that name, one a seed; none if they failed."""
        return list(self.runs.get(run, {}).values())

    def first(self, run):
        """The run of the first seed."""
        return self.of(run)[0]

    def seeds_of(self, *names):
        """The seeds for which all these runs are there."""
        seeds = [self.runs.get(name, {}).keys() for name in names]
        return [seed for seed in seeds[0] if all(seed in others for others in seeds)]


def cell(runs, *path):
    """Mean and standard deviation over seeds, of the number at a path of keys in each.

    >>> cell([{"a": 1.0}, {"a": 3.0}], "a")
    {'mean': 2.0, 'std': 1.0, 'seeds': 2}
    """
    values = np.array([number(run, *path) for run in runs])
    return dict(mean=float(values.mean()), std=float(values.std()), seeds=len(values))


def accuracy_cells(results, table, reports, columns=COLUMNS):
    """{label: {protocol: {column: cell}}} of {label: reports of each seed}, [{protocol: report}].

    Beside them, where the paper's table has that row: its figures, and ours (published protocol)
    less these.
    """
    paper = results.paper.get(table, {})
    cells = {}
    for label, of_seeds in reports.items():
        row = {}
        for protocol in PROTOCOLS:
            row[protocol] = {}
            for column, key in ALL_COLUMNS.items():
                row[protocol][column] = cell(of_seeds, protocol, key)
        if label in paper:
            row["paper"] = {}
            row["difference"] = {}
            for column, percent in zip(columns, paper[label]):
                row["paper"][column] = percent / 100
                row["difference"][column] = row["published"][column]["mean"] - percent / 100
        cells[label] = row
    return cells


def reports_of(results, rows, phase):
    """{label: reports of each seed} for rows {label: (run, candidate set)}, without failed runs."""
    reports = {}
    for label, (run, candidate_set) in rows.items():
        if results.of(run):
            reports[label] = [metrics[phase][candidate_set] for metrics in results.of(run)]
    return reports


def compute_table(name, results):
    """A table of the paper on validation."""
    return accuracy_cells(results, name, reports_of(results, paper_table(name), "validation"))


def compute_table1(results):
    """Test accuracies in both worlds; the open one also with the hard mask, CompCos's predictor."""
    cells = {}
    for world in ("closed", "open"):
        reports = reports_of(results, paper_table(world), "test")
        cells[world] = accuracy_cells(results, world, reports, PRIMITIVES | COLUMNS)
    return cells


def compute_strategies(results):
    """The appendix's masks on the closed and the full model: validation, open world."""
    features, target = results.validation
    seen = results.dataset.seen
    reports = {}
    for label, run_name in OURS.items():
        for run in results.of(run_name):
            model = model_of(run, features.device)
            rho = model.checkpoint["feasibility"].numpy()
            masks = {
                "no mask": np.ones(seen.size, bool),
                "median": median_mask(rho, seen).ravel(),
                "inverse median": median_mask(rho, seen, inverse=True).ravel(),
                "best": hard_mask(rho, seen, run["threshold"]).ravel(),
            }
            for mask, (swept, _) in sweep(model, features, target, seen, masks).items():
                of_seeds = reports.setdefault(f"{label}, {mask}", [])
                of_seeds.append(experiment.both_protocols(swept))
    return accuracy_cells(results, "strategies", reports)


def compute_threshold(results):
    """The chosen threshold of the hard mask, and the share of all compositions it removes."""
    runs = results.of("full")
    removed = []
    for run in runs:
        sizes = run["candidates"]["val"]
        removed.append(1 - sizes["open_masked"] / sizes["open"])
    return {"threshold": cell(runs, "threshold"), "removed": cell(removed)}


def paper_ranking(results):
    """The paper's ranked tables on this dataset, {kind: {name: [most, least feasible]}}."""
    ranking = results.paper.get("ranked", {})
    if not ranking:
        return {}
    more = read_json(HERE / "results/paper/ranked.json")
    return ranking | {kind: ranking.get(kind, {}) | rows for kind, rows in more.items()}


def partners_of(scores, ends, partners, top):
    """[[name, score] of the most feasible partners, of the least], `top` each.

    scores: those of one row of the table; ends: their indices, from both ends.
    """
    result = []
    for end in ends:
        result.append([[str(partners[k]), float(scores[k])] for k in end[:top]])
    return result


def compute_feasibility(results):
    """The paper's ranked tables from the first seed, and how all seeds' scores fit what is known.
    """
    dataset = results.dataset
    seen = dataset.seen
    states = list(dataset.states)
    objects = list(dataset.objects)
    models = [model_of(run) for run in results.of("full")]
    scores_of_seeds = [model.checkpoint["feasibility"].numpy() for model in models]
    rho = scores_of_seeds[0]
    ranking = ranked(rho, seen, top=5)
    paper = paper_ranking(results)
    cells = {"overall": {"all": partners_of(rho.ravel(), ranking.overall, results.names, 5)},
             "objects": {}, "states": {}}
    for name in paper.get("objects") or drawn_names(objects):
        i = objects.index(name)
        cells["objects"][name] = partners_of(rho[:, i], ranking.objects[i], states, 3)
    for name in paper.get("states") or drawn_names(states):
        i = states.index(name)
        cells["states"][name] = partners_of(rho[i], ranking.states[i], objects, 3)
    cells["AUROC"] = cell(results.of("full"), "feasibility_auroc")
    if paper:
        tables = {kind: paper[kind] for kind in ("objects", "states") if kind in paper}
        shared = [agreement(scores, seen, states, objects, tables=tables)
                  for scores in scores_of_seeds]
        cells["shared"] = {figure: cell(shared, figure) for figure in shared[0]}
    return cells


def drawn_names(names, count=25):
    """At most `count` names, drawn by lot, the same each time."""
    shuffled = np.random.default_rng(0).permutation(names)
    return sorted(shuffled[:count].tolist())


def curve_rows(results):
    """What the first picture shows, {label: (run, candidate set)}."""
    rows = dict(paper_table("open"))
    del rows["CompCos closed, mask"]
    rows["CompCos, strong"] = ("strong1", "open")
    rows["CompCos, strong, 16 members"] = ("strong16", "open")
    return {label: row for label, row in rows.items() if results.of(row[0])}


def compute_curves(results):
    """Test AUC (exact) of what the first picture shows, first seed."""
    return areas_of(results, curve_rows(results))


def areas_of(results, rows):
    """{label: test AUC (exact), first seed} of {label: (run, candidate set)}."""
    areas = {}
    for label, (run, candidate_set) in rows.items():
        areas[label] = number(results.first(run), "test", candidate_set, "exact", "auc")
    return areas


def compute_training(results):
    """How long each system was trained, and when its best epoch was."""
    cells = {}
    for label, name in methods().items():
        runs = results.of(name)
        if runs:
            cells[label] = {
                "epochs": cell([len(run["log"]["epoch"]) for run in runs]),
                "best_epoch": cell(runs, "best_epoch"),
                "seconds": cell(runs, "seconds"),
            }
    return cells


def read_answers(closed_run, full_run, images):
    """What the models answer for the test images, with and without mask: (N,) str by name."""
    closed = answers_of(closed_run, images)
    full = answers_of(full_run, images)
    return dict(image=closed["image"], truth=closed["truth"], closed=closed["open"],
                full=full["open"], masked=full["open_masked"])


def answers_of(run, images):
    """Columns of predictions.csv, (N,) str by name. ValueError names a file of other images."""
    columns = {}
    with result(run["folder"] / "predictions.csv") as path:
        rows = experiment.read_rows(path)
        for name in ("image", "truth", "open", "open_masked"):
            columns[name] = np.array([row[name] for row in rows], str)
        if columns["image"].tolist() != list(images):
            raise ValueError(f"{data.count(len(rows), 'row')}, expected one for each of "
                             f"{data.count(len(images), 'image')}")
    return columns


def who_is_right(answers):
    """{kind: (N,) bool}: which of the closed and the full model (with mask) is right."""
    closed = answers["closed"] == answers["truth"]
    full = answers["masked"] == answers["truth"]
    return {
        "only the full model is right": full & ~closed,
        "both are wrong": ~closed & ~full,
        "only the closed model is right": closed & ~full,
        "both are right": closed & full,
    }


def compute_qualitative(results):
    """Whom distractors mislead: shares of all test images."""
    dataset = results.dataset
    real = dataset.feasible
    if real is None:
        real = dataset.seen | experiment.occurring(dataset)
    possible = results.names[real.ravel()]
    models = {"closed model": "closed", "full model": "full", "full model with mask": "masked"}
    shares = []
    for seed in results.seeds_of("full", "closed"):
        answers = read_answers(results.runs["closed"][seed], results.runs["full"][seed],
                               dataset.images["test"])
        share = {kind: which.mean() for kind, which in who_is_right(answers).items()}
        for who, name in models.items():
            impossible = ~np.isin(answers[name], possible)
            share[f"impossible answers of the {who}"] = impossible.mean()
        shares.append(share)
    return {kind: cell(shares, kind) for kind in shares[0]}


def compute_strong(results):
    """Both recipes on the test, in both worlds."""
    cells = {}
    for candidate_set in ("closed", "open", "open_masked"):
        rows = {label: (run, candidate_set) for label, run in RECIPES.items()}
        cells[candidate_set] = accuracy_cells(results, "", reports_of(results, rows, "test"))
    return cells


def compute_changes(results):
    """What one change of the strong recipe costs."""
    cells = {}
    whole = ("nothing (4 members)", "strong4")
    changes = [whole] + [(label, run) for run, (label, _) in CHANGES.items()]
    for label, run in changes:
        runs = results.of(run)
        if runs:
            cells[label] = {
                "validation": cell(runs, "validation", "open", "exact", "auc"),
                "test": cell(runs, "test", "open", "exact", "auc")}
    return cells


# ---- writing Markdown ----


def show(value, digits=1, scale=100):
    """A cell as people read it, in percent.

    >>> show(dict(mean=0.5, std=0.01, seeds=3))
    '50.0 ± 1.0'
    """
    text = f"{scale * value['mean']:.{digits}f}"
    if value["seeds"] > 1:
        text += f" ± {scale * value['std']:.{digits}f}"
    return text


def grid(head, rows):
    """Lines of a Markdown table."""
    lines = []
    for row in (head, ["---" for _ in head], *rows):
        lines.append("| " + " | ".join(str(entry) for entry in row) + " |")
    lines.append("")
    return lines


def digits_of(column):
    """AUC is small and has one more digit."""
    return 2 if column == "AUC" else 1


def accuracy_lines(cells, columns=COLUMNS):
    """A table of `accuracy_cells`; the paper's rows, if any, stand below ours."""
    rows = []
    for label, of_row in cells.items():
        for protocol in PROTOCOLS:
            numbers = [show(of_row[protocol][column], digits_of(column)) for column in columns]
            rows.append([label, protocol, *numbers])
        if "paper" in of_row:
            paper = [f"{100 * value:.1f}" for value in of_row["paper"].values()]
            rows.append(["", "the paper", *paper])
            differences = []
            for column, value in of_row["difference"].items():
                differences.append(f"{100 * value:+.{digits_of(column)}f}")
            rows.append(["", "ours − paper", *differences])
    return grid(["", "protocol", *columns], rows)


def write_table(results, cells):
    """A table with S, U, HM and AUC."""
    return accuracy_lines(cells)


def write_table1(results, cells):
    """The tables of both worlds."""
    columns = PRIMITIVES | COLUMNS
    lines = []
    for world in ("closed", "open"):
        lines += [f"**{world.capitalize()} world**", "", *accuracy_lines(cells[world], columns)]
    return lines


def write_threshold(results, cells):
    """The threshold that was chosen."""
    return [f"The chosen threshold, {show(cells['threshold'], 2, 1)}, removes "
            f"{show(cells['removed'])} % of all compositions.", ""]


def write_feasibility(results, cells):
    """The ranked tables, the paper's lists below ours."""
    paper = paper_ranking(results)
    lines = []
    for kind in ("overall", "objects", "states"):
        rows = []
        for name, ends in cells[kind].items():
            row = [name]
            for end in ends:
                row.append(", ".join(f"{partner} {score:.2f}" for partner, score in end))
            rows.append(row)
            if name in paper.get(kind, {}):
                rows.append(["the paper", *(", ".join(end) for end in paper[kind][name])])
        lines += grid([kind, "most feasible", "least feasible"], rows)
    lines += [f"Unseen compositions {results.first('full')['truth']} rank above the others with "
              f"AUROC {show(cells['AUROC'], 3, 1)} (0.5: chance).", ""]
    if "shared" in cells:
        rows = [[figure, show(value, 1, 1)] for figure, value in cells["shared"].items()]
        lines += grid(["entries shared with the paper", "number"], rows)
    return lines


def write_training(results, cells):
    """The table of epochs."""
    rows = []
    for label, row in cells.items():
        numbers = [show(row[column], 0, 1) for column in ("epochs", "best_epoch", "seconds")]
        rows.append([label, *numbers])
    return grid(["", "epochs", "best epoch", "seconds"], rows)


def write_qualitative(results, cells):
    """The shares of the test images."""
    rows = [[kind, show(share)] for kind, share in cells.items()]
    return grid(["test images (full model: with mask)", "%"], rows)


def write_strong(results, cells):
    """Both recipes side by side."""
    titles = {"closed": "Closed world (models trained for the open one)", "open": "Open world",
              "open_masked": "Open world, hard mask (each recipe's own way to choose τ)"}
    lines = []
    for candidate_set, title in titles.items():
        lines += [f"**{title}**, test", "", *accuracy_lines(cells[candidate_set])]
    return lines


def write_changes(results, cells):
    """What each change of the strong recipe costs."""
    rows = []
    whole = None
    for label, row in cells.items():
        if whole is None:
            whole = row["test"]["mean"]
        rows.append([label, show(row["validation"], 2), show(row["test"], 2),
                     f"{100 * (row['test']['mean'] - whole):+.2f}"])
    lines = ["The strong recipe with 4 members, one thing changed; AUC (exact), open world without "
             "mask. The last column is against the first row.", ""]
    return lines + grid(["changed", "validation", "test", "test, difference"], rows)


# ---- drawing ----


def panels(*labels):
    """Axes side by side in a new figure, one a pair of labels (x, y)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots(1, len(labels), squeeze=False)[0]
    for ax, (x, y) in zip(axes, labels):
        ax.set(xlabel=x, ylabel=y)
        ax.grid(alpha=.25)
        ax.spines[["top", "right"]].set_visible(False)
    return axes


def save_picture(path, axes, **legend):
    """Save the figure that holds `axes`, with one legend for all."""
    options = dict(loc="outside lower center", ncols=3) | legend
    figure = axes[0].figure
    figure.legend(*axes[0].get_legend_handles_labels(), **options)
    for ax in axes:
        ax.set_ylim(0)
    with common.writing(path, "wb") as file:
        figure.savefig(file, dpi=130, format="png")


def look(label):
    """(colour, line style) of a row; a system without a look of its own gets one of the others."""
    if label in LOOKS:
        return LOOKS[label]
    others = [name for name in methods() if name not in LOOKS]
    return OTHER_LOOKS[others.index(label) % len(OTHER_LOOKS)]


def draw_curves(results, cells, path):
    """Seen against unseen accuracy as the bias grows: test, open world, first seed."""
    rows = curve_rows(results)
    draw_bias_curves(results, rows, {label: look(label) for label in rows}, path)


def draw_recipes(results, cells, path):
    """The curves of both recipes: test, open world, first seed."""
    rows = {label: (run, "open") for label, run in RECIPES.items() if results.of(run)}
    draw_bias_curves(results, rows, RECIPE_LOOKS, path)


def draw_bias_curves(results, rows, looks, path):
    """Curves of {label: (run, candidate set)}, that of the greatest AUC first."""
    axes = panels(("accuracy on unseen compositions (%)", "accuracy on seen compositions (%)"))
    areas = areas_of(results, rows)
    for label in sorted(areas, key=areas.get, reverse=True):
        run, candidate_set = rows[label]
        colour, style = looks[label]
        unseen, seen = read_curve(results.first(run), candidate_set)
        axes[0].plot(100 * unseen, 100 * seen, style, color=colour,
                     label=f"{label}: {100 * areas[label]:.1f}")
    axes[0].set_xlim(0)
    save_picture(path, axes, title="AUC (%), exact", loc="outside right center", ncols=1)


def read_curve(run, candidate_set):
    """Accuracies (K,) on unseen and seen as the bias grows. ValueError names a file without them.
    """
    with result(run["folder"] / "curves.npz") as path:
        data.check_archive(path)
        with np.load(path) as file:
            unseen = file[f"{candidate_set}_unseen"]
            seen = file[f"{candidate_set}_seen"]
        if unseen.ndim != 1 or unseen.shape != seen.shape or unseen.dtype.kind != "f":
            raise ValueError(f"curves are {unseen.dtype} {unseen.shape} and {seen.shape}")
    return unseen, seen


def draw_threshold(results, cells, path):
    """AUC and share removed against the threshold of the hard mask: validation, a line a seed."""
    runs = results.of("full")
    x = "threshold on feasibility"
    axes = panels((x, "validation AUC (%), exact"), (x, "compositions removed (%)"))
    for run in reversed(runs):
        curve = run["threshold_curve"]
        style = dict(alpha=.35, linewidth=1)
        if run is runs[0]:
            style = dict(linewidth=2)
        auc = 100 * np.array(curve["auc"], float)
        removed = 100 * np.array(curve["removed"])
        axes[0].plot(curve["threshold"], auc, color=RED, **style)
        axes[1].plot(curve["threshold"], removed, color=GREEN, **style)
    unmasked = 100 * number(runs[0], "validation", "open", "exact", "auc")
    axes[0].axhline(unmasked, color=BLACK, linestyle=":", label="no mask")
    for ax in axes:
        ax.axvline(runs[0]["threshold"], color=BLUE, linestyle="--", label="threshold chosen")
    save_picture(path, axes)


def draw_training(results, cells, path):
    """Loss and validation AUC by epoch, first seed; a dot marks the best epoch."""
    x = "epochs passed (%)"
    axes = panels((x, "training loss / that of the first epoch"), (x, "validation AUC (%), exact"))
    for label in cells:
        run = results.first(methods()[label])
        log = run["log"]
        share = 100 * log["epoch"] / len(log["epoch"])
        colour, style = look(label)
        axes[0].plot(share, log["loss"] / log["loss"][0], style, color=colour, label=label)
        axes[1].plot(share, 100 * log["validation"], style, color=colour, marker="o",
                     markevery=[run["best_epoch"] - 1])
    save_picture(path, axes)


def draw_qualitative(results, cells, path):
    """A contact sheet of the first seed: whom distractors mislead, drawn by lot."""
    random = np.random.default_rng(0)
    seed = results.seeds_of("full", "closed")[0]
    answers = read_answers(results.runs["closed"][seed], results.runs["full"][seed],
                           results.dataset.images["test"])
    shown = np.stack([answers[name] for name in ("image", "closed", "masked", "truth")], 1)
    kinds = who_is_right(answers)
    blocks = {}
    for kind in ("only the full model is right", "both are wrong"):
        blocks[kind] = random.permutation(shown[kinds[kind]])[:10]
    contact_sheet(path, results.dataset.folder / "images", blocks)


def contact_sheet(path, images, blocks):
    """Draw {title: [(image, closed model's answer, full model's, truth)]} as one picture.

    images: the folder of the photos. ValueError names one that is none.
    """
    from matplotlib.figure import Figure

    data.register_plugins()  # of HEIC and AVIF
    rows = [math.ceil(len(items) / SHEET_COLUMNS) for items in blocks.values()]
    heights = [0.4 + 2.7 * count for count in rows]  # inches; a column is 2 wide
    figure = Figure(figsize=(2 * SHEET_COLUMNS, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(blocks), 1, height_ratios=heights, squeeze=False)[:, 0]
    with warnings.catch_warnings(record=True) as unwritten:
        warnings.simplefilter("ignore")  # of large photos, say
        warnings.filterwarnings("always", "Glyph")
        for part, count, (title, items) in zip(parts, rows, blocks.items()):
            if count == 0:
                part.suptitle(f"{title.capitalize()}: no image")
                continue
            part.suptitle(title.capitalize())
            cells = part.subplots(count, SHEET_COLUMNS, squeeze=False).ravel()
            for cell in cells:
                cell.axis("off")
            for cell, (image, *answers) in zip(cells, items):
                show_photo(cell, images / image)
                show_answers(cell, *answers)
        with common.writing(path, "wb") as file:
            figure.savefig(file, dpi=130, format="png")
    if unwritten:  # matplotlib warns once for each character that its font lacks
        warnings.warn(f"{path}: {unwritten[0].message} A matplotlibrc chooses another font "
                      "(font.family)", stacklevel=2)


def show_photo(cell, path):
    """Show a photo on axes, with room for three lines below it. ValueError names one that is none.
    """
    with reading(path, "restore the photo"), Image.open(path) as photo:
        photo = data.rgb(photo)
    photo.thumbnail((PHOTO_SIDE, PHOTO_SIDE))
    scale = PHOTO_SIDE / max(photo.size)
    cell.imshow(photo, extent=(0, scale * photo.width, 0, scale * photo.height))
    cell.set(xlim=(0, PHOTO_SIDE), ylim=(-0.36 * PHOTO_SIDE, PHOTO_SIDE))


def show_answers(cell, closed, full, truth):
    """Write the answers of both models and the truth below a photo, wrong answers in red."""
    room = 0.9 * cell.figure.bbox.width / SHEET_COLUMNS
    for i, (who, answer) in enumerate(dict(closed=closed, full=full, truth=truth).items()):
        colour = BLUE if answer == truth else RED
        if who == "truth":
            colour = BLACK
        line = cell.text(0, -(0.03 + 0.11 * i) * PHOTO_SIDE, f"{who}: {answer}", va="top",
                         size=10, color=colour, clip_on=True, parse_math=False)
        line.set_size(10 * min(1, room / line.get_window_extent().width))


# ---- the sections ----


class Section(NamedTuple):
    """A section of the report.

    compute(results) -> cells for report.json; write(results, cells) -> Markdown lines;
    draw(results, cells, path): the picture of the section's name, of which `caption` is printed.
    needs: runs without which there is no section. also: further runs, whose rows are left out where
    they failed; "methods" for all compared systems.
    """

    title: str
    compute: Callable
    write: Callable = None
    needs: tuple = ("full",)
    also: tuple = ()
    draw: Callable = None
    caption: str = ""


SECTIONS = {
    "table1": Section("Table 1, expanded: all methods in both worlds", compute_table1,
                      write_table1, also=("methods",)),
    "curves": Section(
        "Seen against unseen accuracy (test, open world, first seed)", compute_curves,
        also=("methods",), draw=draw_curves,
        caption="Accuracy on seen against unseen compositions of each method."),
    "margins": Section("Effect of the margins (validation, open world, no mask)",
                       functools.partial(compute_table, "margins"), write_table,
                       also=("closed", "alpha0", "constant")),
    "primitives": Section("Effect of the primitives (validation, open world, no mask)",
                          functools.partial(compute_table, "primitives"), write_table,
                          also=("state", "object", "max")),
    "masking": Section("Effect of the hard mask (validation, open world)",
                       functools.partial(compute_table, "masking"), write_table,
                       also=("methods",)),
    "strategies": Section("Other masks (validation, open world)", compute_strategies, write_table,
                          also=("closed",)),
    "threshold": Section(
        "AUC against the threshold of the hard mask (validation)", compute_threshold,
        write_threshold, draw=draw_threshold,
        caption="AUC and share of compositions removed by CompCos's mask, the first seed bold."),
    "feasibility": Section("The most and least feasible unseen compositions (first seed)",
                           compute_feasibility, write_feasibility),
    "qualitative": Section(
        "Who is misled (test, open world)", compute_qualitative, write_qualitative,
        needs=("full", "closed"), draw=draw_qualitative,
        caption="Test images, drawn by lot, with the answers of both models (first seed, at the "
                "bias fixed on validation) and the truth. Wrong answers are red."),
    "training": Section(
        "Training", compute_training, write_training, also=("methods",), draw=draw_training,
        caption="First seed; dot: best epoch. The losses are of different kinds, so each is "
                "relative to its first epoch. CompCos is validated in the open world, where AUC is "
                "lower, the others in the closed one."),
    "strong": Section(
        "The published recipe against the strong one (test)", compute_strong, write_strong,
        also=tuple(RECIPES.values()), draw=draw_recipes,
        caption="Accuracy on seen against unseen compositions of each recipe, first seed."),
    "changes": Section("What carries the strong recipe (test)", compute_changes, write_changes,
                       also=("strong4", *CHANGES)),
}
PAPER_SECTIONS = [name for name in SECTIONS if name not in ("strong", "changes")]


def needed_runs(sections):
    """The names of the runs that sections are made of, in the order of training."""
    needed = {"full"}
    for name in sections:
        needed.update(SECTIONS[name].needs)
        needed.update(SECTIONS[name].also)
    if "methods" in needed:
        needed.update(methods().values())
    return [name for name in run_options() if name in needed]


def missing_for(results, name):
    """The runs that a section cannot do without and that are not there for any seed."""
    needs = SECTIONS[name].needs
    missing = [run for run in needs if not results.of(run)]
    if not missing and not results.seeds_of(*needs):  # they are compared seed by seed
        return list(needs)
    return missing


def make_sections(results, sections):
    """(Markdown lines, {section: cells}) of the sections; pictures go to results.out."""
    lines = []
    cells = {}
    for name in sections:
        section = SECTIONS[name]
        lines += [f"## {section.title}", ""]
        missing = missing_for(results, name)
        if missing:
            lines += [f"Left out: {' and '.join(missing)} failed.", ""]
            continue
        cells[name] = section.compute(results)
        if section.draw:
            lines += picture_lines(results, name, cells[name])
        if section.write:
            lines += section.write(results, cells[name])
    return lines, cells


def picture_lines(results, name, cells):
    """Draw the picture of a section; the lines that show it, or say why it is left out."""
    section = SECTIONS[name]
    folder = results.dataset.folder / "images"
    images = [folder / image for image in results.dataset.images["test"]]
    why = ""
    if not has_matplotlib():
        why = "it needs matplotlib (`pip install matplotlib`)"
    elif name == "qualitative" and not all(image.exists() for image in images):
        why = f"{results.dataset.name} has no images here, only features"
    if why:
        return [f"The picture is left out: {why}.", ""]
    section.draw(results, cells, results.out / f"{name}.png")
    return [f"![{section.title}]({name}.png)", "", section.caption, ""]


def has_matplotlib():
    """Whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


# ---- the head of the report ----

ABOUT = """\
Numbers are percent, mean ± standard deviation over the seeds. Protocols: *exact* tries every bias
on the unseen compositions, *published* the about 20 of the field's evaluator. S, U, HM: best
accuracy on seen and on unseen compositions, best harmonic mean over the biases; AUC: area under
the curve of the first two. Sta., Obj.: accuracy of state and object of the predicted composition
at bias 0 (among the unseen alone: in report.json).

Selection: the epoch with the best validation AUC (exact), of CompCos in the open world, of all
else in the closed one; the mask's threshold: the best of 50 by validation AUC (of the strong
recipe, such that at most 5 % of what exists is expected to be hidden). CompCos closed and CompCos
mask by their own feasibility, the others by that of CompCos with the same seed. The paper's
CompCos of the open world is the row with *mask*.
"""


def about(results, argv, settings, options, failed):
    """What was run, how it was chosen and what the numbers mean: Markdown."""
    runs = []
    for of_seeds in results.runs.values():
        runs += of_seeds.values()
    made_by = set()
    for run in runs:
        versions = [f"{name} {run['versions'][name]}" for name in VERSIONS]
        made_by.add(", ".join([run["versions"]["machine"], *versions]))
    duration = common.duration(sum(run["seconds"] for run in runs))
    images = ", ".join(f"{count:,} {phase}" for phase, count in settings["images"].items())
    lines = [
        f"Made by `python reproduce.py {shlex.join(argv)}` on {'; '.join(sorted(made_by))}.",
        f"{data.count(len(runs), 'run')} of {data.count(len(options.seeds), 'seed')}, trained in "
        f"{duration}.", "",
        f"Data: {settings['dataset']}, {settings['states']} states, {settings['objects']} objects, "
        f"{settings['seen']} seen compositions, images: {images}.",
        f"Features: {settings['backbone']}. Word vectors (CompCos): "
        f"{', '.join(settings['vectors'])}.",
        "Candidates (validation and test; masked: by CompCos, first seed): "
        f"{candidate_sizes(results)}.", "", ABOUT]
    if failed:
        names = ", ".join(f"{job.name} (seed {job.seed})" for job in failed)
        lines.insert(2, f"**Failed, and left out of the numbers: {names}.**")
    if options.quick:
        lines = ["**Quick form of 3 epochs: the numbers mean nothing.**", "", *lines]
    return "\n".join(lines)


def candidate_sizes(results):
    """How many compositions may win, in words."""
    if not results.of("full"):
        return "unknown, since CompCos failed"
    sizes = results.first("full")["candidates"]
    return "; ".join(f"{world} {sizes['val'][world]:,} and {sizes['test'][world]:,}"
                     for world in experiment.CANDIDATE_SETS)


def findings(results, cells):
    """Sentences on the paper's claims, each from the numbers of the sections made."""
    sentences = []
    phases = phases_without_auc(results)
    if phases:
        sentences.append(f"No image of seen or none of unseen compositions in {phases}: no AUC, "
                         "and nothing found that rests on it.")
        cells = {name: cells[name] for name in cells if name == "training"}
    if "table1" in cells:
        sentences += find_drops(cells["table1"])
        sentences += find_leaders(cells["table1"])
    if "masking" in cells:
        sentences += find_gains_of_mask(cells["masking"])
    if "training" in cells:
        sentences += find_unfinished(cells["training"])
    if "strong" in cells:
        sentences += find_recipes(cells["strong"]["open"])
    if results.of("tmn"):
        negatives = results.first("tmn")["settings"]["negatives"]
        sentences.append(f"TMN had {data.count(negatives, 'negative')} an image (published: 600).")
    return sentences


def phases_without_auc(results):
    """The phases whose images give no AUC, in words; "" where both do."""
    run = results.first(next(iter(results.runs)))  # all runs are of the same images
    phases = []
    for phase in ("validation", "test"):
        if math.isnan(number(run, phase, "open", "exact", "auc")):
            phases.append(phase)
    return " and ".join(phases)


def auc_of(rows, label):
    """The exact AUC's cell of a row."""
    return rows[label]["exact"]["AUC"]


def find_drops(table1):
    """How much every method loses in the open world."""
    falls = {}
    for label in methods():
        if label in table1["open"]:
            closed = auc_of(table1["closed"], label)["mean"]
            falls[label] = 1 - auc_of(table1["open"], label)["mean"] / max(closed, 1e-9)
    least = min(falls, key=falls.get)
    most = max(falls, key=falls.get)
    losers = [label for label, fall in falls.items() if fall > 0]
    return [f"Does every method drop in the open world? {len(losers)} of {len(falls)} lose test "
            f"AUC, from {100 * falls[least]:.0f} % ({least}) to {100 * falls[most]:.0f} % ({most}) "
            "of that in the closed world."]


def find_leaders(table1):
    """Whether CompCos leads, world by world."""
    sentences = []
    for world, ours in (("closed", "CompCos closed"), ("open", "CompCos"),
                        ("open", "CompCos, mask")):
        rows = table1[world]
        rivals = {label: auc_of(rows, label)["mean"] for label in rows if "CompCos" not in label}
        if not rivals or ours not in rows:
            continue
        best = max(rivals, key=rivals.get)
        leads = "Yes" if auc_of(rows, ours)["mean"] > rivals[best] else "No"
        sentences.append(
            f"Does {ours} lead in the {world} world? {leads}: test AUC "
            f"{show(auc_of(rows, ours), 2)} against {show(auc_of(rows, best), 2)} of {best}, the "
            "best other system.")
    return sentences


def find_gains_of_mask(masking):
    """Who gains most from the hard mask."""
    gains = {}
    for label in methods():
        if label in masking:
            masked = auc_of(masking, f"{label}, mask")["mean"]
            gains[label] = 100 * (masked - auc_of(masking, label)["mean"])
    order = sorted(gains, key=gains.get, reverse=True)
    listed = ", ".join(f"{label} {gains[label]:+.2f}" for label in order)
    return [f"Who gains most from the mask? Validation AUC: {listed}."]


def find_unfinished(training):
    """Who may gain from longer training."""
    late = [label for label, row in training.items()
            if row["best_epoch"]["mean"] > 0.9 * row["epochs"]["mean"]]
    return ["Whose best epoch is in the last tenth, so that longer training may help? "
            f"{', '.join(late) or 'None'}."]


def find_recipes(rows):
    """What the strong recipe brings."""
    listed = [f"{label} {show(auc_of(rows, label), 2)}" for label in rows]
    return [f"What does the strong recipe bring? Test AUC, open world: {', '.join(listed)}."]


# ---- the command ----


def own_options():
    """The parser of the options that are not passed on to the runs."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description="The paper's tables and figures: trains what is missing and writes a report.",
        epilog="Options of compcos.py on data and training (--dataset, --data-root, --vectors, "
               "...) go to all runs.")
    add = parser.add_argument
    add("--seeds", "--seed", type=int, nargs="+", default=[0, 1, 2], metavar="K",
        help="default 0 1 2")
    add("--only", nargs="+", choices=SECTIONS, default=PAPER_SECTIONS, metavar="NAME",
        help=f"of {', '.join(SECTIONS)} (default: all but strong and changes)")
    add("--out", type=Path, metavar="DIR", help="default runs/reproduce-DATASET")
    add("--quick", action="store_true", help="3 epochs a run: all is there, nothing means anything")
    for name in ("compcos", "strong", *baselines.MODELS):
        add(f"--{name}", default="", metavar="'OPTIONS'",
            help="for its runs alone, as '--epochs 100'")
    return parser


def parse(where, words, module):
    """Options for runs of a module, a list of words after `where`, parsed. ValueError: one that
    this script chooses itself, so that it would change nothing, or a value out of its range."""
    parser = argparse.ArgumentParser(where, allow_abbrev=False)
    module.add_options(parser)
    parsed = parser.parse_args(words)
    for name in OWN_CHOICE:
        if hasattr(parsed, name) and getattr(parsed, name) != parser.get_default(name):
            raise ValueError(f"{where}: --{name} is chosen for each run by reproduce.py (--seeds, "
                             "--out and --only are its own options): leave it out")
    for name, value in vars(parsed).items():
        expected = experiment.unfulfilled(name, value)
        if expected:
            raise ValueError(f"{where}: --{name.replace('_', '-')} is {value}: expected {expected}")
    return parsed


def check_options(options):
    """What can be wrong in this script's own options is said before the long work. ValueError,
    SystemExit."""
    experiment.check_seeds(options.seeds)
    for name in ("compcos", "strong", *baselines.MODELS):
        module = baselines if name in baselines.MODELS else compcos
        text = vars(options)[name]
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ValueError(f"reproduce.py --{name} {text!r}: {error}") from None
        parse(f"reproduce.py --{name}", words, module)


def plan_all(options, shared, settings, out):
    """The jobs of what is asked for; also done ones of the strong recipe, for the first picture."""
    names = needed_runs(options.only)
    jobs = []
    for name in run_options():
        of_seeds = [plan(name, seed, options, shared, settings, out) for seed in options.seeds]
        if name in names or (name in STRONG_RUNS and all(is_finished(job) for job in of_seeds)):
            jobs += of_seeds
    return jobs


@common.command
def main(argv=None):
    """Train what is missing and write the report. Exit status 1 if a run failed."""
    argv = [str(word) for word in (sys.argv[1:] if argv is None else argv)]
    options, shared = own_options().parse_known_args(argv)
    shared = ["--mask", "published", *shared]  # as in the paper; the strong recipe has its own
    if not has_matplotlib() and any(SECTIONS[name].draw for name in options.only):
        print("note: the report has no pictures, for these need matplotlib (pip install "
              "matplotlib); the same command adds them later")
    check_options(options)
    parsed = parse("reproduce.py", shared, experiment)
    parsed.out = options.out  # which must be writable
    prepared = experiment.prepare(parsed, "compcos", compcos.defaults("published"))
    settings = dict(prepared.settings)
    for name in ("model", "world", "device"):
        del settings[name]
    out = options.out or Path("runs", f"reproduce-{prepared.dataset.name}")
    jobs = plan_all(options, shared, settings, out)
    papers = read_json(HERE / "results/paper/tables.json")
    common.check_shared(out)
    for job in jobs:
        if is_finished(job):
            load(job.folder)  # says now, and not after the training, what is damaged
    runs, failed = train_missing(jobs)
    if common.rank() > 0:
        return
    if not runs:
        raise ValueError(f"no run of {len(failed)} came to its end: see {log_file(failed[0])}")
    with common.alone():
        write_report(collect(prepared, out, runs, papers), argv, settings, options, failed)
    if failed:
        print(f"{data.count(len(failed), 'run')} failed:", file=sys.stderr)
        for job in failed:
            print(f"  {job.name}, seed {job.seed}: {log_file(job)}", file=sys.stderr)
        raise SystemExit(1)


def collect(prepared, out, runs, papers):
    """The Results of what was trained, {run: {seed: what `load` gives}}, beside the paper's tables,
    {dataset: tables}."""
    dataset = prepared.dataset
    validation = torch.as_tensor(prepared.features["val"], device=prepared.device)
    return Results(
        out=out, dataset=dataset, runs=runs, names=np.array(experiment.composition_names(dataset)),
        validation=(validation, dataset.targets["val"]),
        paper=papers.get(dataset.name, {}))


def write_report(results, argv, settings, options, failed):
    """Make the sections and write report.md and report.json."""
    sections = [name for name in SECTIONS if name in options.only]
    lines, cells = make_sections(results, sections)
    head = [f"# The paper's tables and figures on {results.dataset.name}", "",
            about(results, argv, settings, options, failed), "## Findings", ""]
    head += [f"- {sentence}" for sentence in findings(results, cells)]
    head.append("")
    with common.writing(results.out / "report.md") as file:
        file.write("\n".join(head + lines))
    report = dict(command=argv, settings=settings, seeds=options.seeds, quick=options.quick,
                  failed=[f"{job.name}, seed {job.seed}" for job in failed], **cells)
    experiment.write_json(results.out / "report.json", report)
    print(f"written to {results.out / 'report.md'}")


if __name__ == "__main__":
    main()
