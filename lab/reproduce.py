"""The paper's tables and figures: trains what is missing, writes report.md, report.json, pictures.

    python reproduce.py --dataset shapes --seed 0 1 2 --out results/shapes
    torchrun --nproc-per-node 3 reproduce.py --dataset DIR --only paper recipes ablation

Runs lie in OUT/runs/NAME/seedK: a finished one is used again, an interrupted one goes on, and one
with other settings is refused. Of several processes each trains runs of its own. Systems are
compared as baselines.MODELS names them: call `main` from a file that adds one of yours, and it gets
its runs and rows. Fractions in report.json, percent in report.md.

A run is an entry of RUNS or ABLATION, a table one of `tables`, a section one of SECTIONS.
Shapes: S states, O objects, C = S*O compositions, N images, K points of a curve.
"""

import argparse
import shlex
import sys
import traceback
from contextlib import redirect_stdout
from itertools import cycle
from pathlib import Path
from typing import Callable, NamedTuple

from lab import shell
from lab.files import read_json, read_rows, reading, write_json, writing
from lab.photos import open_photo

if __name__ == "__main__":
    shell.wait_gently()  # before torch is imported

import numpy as np

from lab import baselines
import compcos
from lab import run as experiment
from evaluate import PROTOCOLS
from feasibility import markdown, median_mask, ranked_tables
from train import sweep

PAPER = Path(__file__).parent / "results/paper"  # the paper's own tables and lists
CHOSEN_HERE = ("--world", "--recipe", "--model", "--mask", "--seed", "--out", "--resume",
               "--feasibility")
STYLES = ("-", "--", ":", "-.")  # of lines, so that they are told apart in grey, too

COLUMNS = {  # of a table -> key of an evaluation
    "Sta.": "state_accuracy",
    "Obj.": "object_accuracy",
    "S": "best_seen",
    "U": "best_unseen",
    "HM": "best_hm",
    "AUC": "auc",
}
SETTINGS = ("epochs", "batch_size", "lr", "weight_decay", "negatives")  # told under Training


# ---- what is trained ----

LABELS = {"aop": "AoP", "leplus": "LE+", "tmn": "TMN", "symnet": "SymNet",
          "visprod": "Two classifiers apart"}
RUNS = {  # run -> (system, options)
    "full": ("compcos", "--world open"),  # its feasibility masks the compared systems
    "closed": ("compcos", "--world closed"),
    "alpha0": ("compcos", "--margin 0"),
    "constant": ("compcos", "--warmup 0"),
    "state": ("compcos", "--mix state"),
    "object": ("compcos", "--mix object"),
    "max": ("compcos", "--mix max"),
    "paper4": ("compcos", "--members 4"),
    "strong16": ("strong", "--members 16"),
}
OURS = {"CompCos closed": "closed", "CompCos": "full"}
RECIPES = {  # label -> run; four members of the paper's model show what averaging alone gains
    "paper": "full",
    "paper, 4 members": "paper4",
    "strong, 1 member": "strong1",
    "strong, 4 members": "strong4",
    "strong, 16 members": "strong16",
    "two classifiers apart": "visprod",
}
# What is changed of the strong recipe with 4 members -> (run, options). Images of unit length need
# a scale again; its margin keeps 7.2 ρ off the logits.
ABLATION = {
    "nothing (4 members)": ("strong4", ""),
    "1 member": ("strong1", "--members 1"),
    "dropout 0.5": ("without-dropout", "--dropout 0.5"),
    "no log n": ("without-counts", "--counts 0"),
    "no average of the weights": ("without-average", "--average 0"),
    "word embeddings at the common rate": ("without-word-lr-factor", "--word-lr-factor 1"),
    "a space of 100": ("without-dim", "--dim 100"),
    "images of unit length (scale 20, α 0.36)": ("without-length",
                                                 "--cosine --scale 20 --margin 0.36"),
    "no margins (α = 0)": ("without-margins", "--margin 0"),
    "only the seen compete": ("without-train_candidates", "--train_candidates seen"),
}


def all_runs():
    """{run: (system, options)}; a system is compcos, strong or a name of baselines.MODELS."""
    runs = dict(RUNS)
    for name, options in ABLATION.values():
        runs[name] = ("strong", f"--members 4 {options}")
    for name in baselines.MODELS:
        runs[name] = (name, "")
    return runs


def systems():
    """{system: (the module that trains it, its fixed options)}; each has an option of its own."""
    known = {"compcos": (compcos, "--recipe paper --mask paper"),
             "strong": (compcos, "--recipe strong --mask justified")}
    for name in baselines.MODELS:
        known[name] = (baselines, f"--model {name} --world closed --mask paper")
    return known


def methods():
    """The systems that the paper compares, and those added: {label: run}, CompCos last."""
    return {LABELS.get(name, name): name for name in baselines.MODELS} | OURS


class Job(NamedTuple):
    """One run of one seed."""

    name: str
    seed: int
    folder: Path
    module: object   # whose `main` trains it
    arguments: list
    key: dict        # what the results depend on: where it is the same, they are used again


def plan(name, seed, options, shared, data_crc32, out):
    """The Job of a run; shared: the options that go to all runs. ValueError where its folder holds
    one of other settings."""
    system, own_options = all_runs()[name]
    module, fixed_options = systems()[system]
    chosen = shlex.split(f"{vars(options)[system]} {own_options} {fixed_options}")
    folder = out / f"runs/{name}/seed{seed}"
    arguments = [*shared, *chosen, "--seed", str(seed), "--out", str(folder), "--resume"]
    key = dict(options=[*shared, *chosen], data=data_crc32)
    if module is baselines:
        arguments += ["--feasibility", str(out / f"runs/full/seed{seed}/feasibility.csv")]
        key["feasibility"] = options.compcos
    note = folder / "run.json"
    if note.exists() and read_json(note) != key:
        raise ValueError(f"{note} is of a run with other data or options: give another --out, or "
                         f"remove {folder}")
    return Job(name, seed, folder, module, arguments, key)


def attempt(job):
    """Train a job: what became of it. What it prints is added to output.txt in its folder."""
    job.folder.mkdir(parents=True, exist_ok=True)
    write_json(job.folder / "run.json", job.key)
    with open(job.folder / "output.txt", "a", encoding="utf-8") as file, redirect_stdout(file):
        print(f"$ {shlex.join(job.arguments)}", flush=True)
        try:
            job.module.main.__wrapped__(job.arguments)  # not the command, so that errors come here
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped: the same command goes on from here") from None
        except (Exception, SystemExit) as error:
            traceback.print_exc(file=file)
            return f"failed ({shell.reason(error)}), see {file.name}"
    return "trained"


def train_missing(jobs):
    """Train what is not there, spread over the processes."""
    missing = [job for job in jobs if not is_finished(job)]
    shell.print_status(f"{len(jobs)} runs, {len(missing)} of them to train")
    for is_first in (True, False):  # whose feasibility masks others comes first
        part = [job for job in missing if (job.name == "full") == is_first]
        for job, outcome in shell.distribute(part, attempt):
            shell.print_status(f"{job.name}, seed {job.seed}: {outcome}")


def is_finished(job):
    """Whether the job's results are there; metrics.json is written last."""
    return (job.folder / "metrics.json").exists()


# ---- what the runs found ----


def load(folder):
    """metrics.json of a run, with its `folder`, and the `epochs` and `seconds` it was trained."""
    metrics = read_json(folder / "metrics.json")
    log = read_rows(folder / "log.csv")
    seconds = sum(float(row["seconds"]) for row in log)
    return metrics | dict(folder=folder, epochs=len(log), seconds=seconds)


class Results(NamedTuple):
    """All that a report is made from."""

    out: Path
    prepared: experiment.Prepared  # by the paper's recipe
    runs: dict                     # run -> [what `load` gives of each seed]; none where all failed


def of_paper(results, kind):
    """The paper's own "tables" or "ranked" lists of this dataset; empty where it has none."""
    if results.prepared.dataset.upright:  # a folder of one's own that is called as the paper's are
        return {}
    return read_json(PAPER / f"{kind}.json").get(results.prepared.dataset.name, {})


def cell(values):
    """Mean and sample standard deviation over the seeds.

    >>> cell([1.0, 3.0, 5.0])
    {'mean': 3.0, 'std': 2.0, 'seeds': 3}
    """
    values = np.array(values, float)  # None, of a half without images, becomes NaN
    return dict(mean=float(values.mean()), std=float(experiment.deviation(values)),
                seeds=len(values))


def show(value, digits=1, scale=100):
    """A cell as people read it, in percent.

    >>> show(dict(mean=0.5, std=0.01, seeds=3))
    '50.0 ± 1.0'
    """
    text = f"{scale * value['mean']:.{digits}f}"
    if value["seeds"] > 1:
        text += f" ± {scale * value['std']:.{digits}f}"
    return text


# ---- the tables of accuracies ----


class Table(NamedTuple):
    """Rows of accuracies: each run with each of some candidate sets.

    The paper's figures, where tables.json has them under the same names, stand below ours.
    """

    section: str
    title: str
    runs: dict                    # label -> run
    candidates: dict              # what is added to the label -> candidate set or appendix's mask
    phase: str = "validation"
    protocol: str = "published"
    columns: tuple = ("S", "U", "HM", "AUC")

    @property
    def rows(self):
        """{label: (run, candidates)}."""
        rows = {}
        for label, run in self.runs.items():
            for addition, candidates in self.candidates.items():
                rows[label + addition] = (run, candidates)
        return rows


def tables():
    """{name: Table}."""
    unmasked = {"": "open"}
    both = {"": "open", ", mask": "open_masked"}
    masks = {", no mask": "open", ", median": "median", ", inverse median": "inverse median",
             ", best": "open_masked"}
    margins = {"CompCos closed": "closed", "CompCos, α = 0": "alpha0", "CompCos, α > 0": "constant",
               "CompCos, α > 0 and warm-up": "full"}
    primitives = {"state": "state", "object": "object", "max": "max", "mean": "full"}
    changed = {label: run for label, (run, _) in ABLATION.items()}
    ablated = ("ablation", "Open world, no mask; changed:", changed, unmasked)
    every = tuple(COLUMNS)
    return {
        "closed": Table("table1", "Closed world", methods(), {"": "closed"}, "test", columns=every),
        "open": Table("table1", "Open world", methods(), both, "test", columns=every),
        "margins": Table("margins", "Open world, no mask", margins, unmasked),
        "primitives": Table("primitives", "Open world, no mask", primitives, unmasked),
        "masking": Table("masking", "Open world", methods(), both),
        "strategies": Table("strategies", "Open world", OURS, masks),
        "recipes_closed": Table("recipes", "Closed world, though trained for the open one",
                                RECIPES, {"": "closed"}, "test", "exact"),
        "recipes_open": Table("recipes", "Open world", RECIPES, both, "test", "exact"),
        "ablation_validation": Table(*ablated, "validation", "exact"),
        "ablation_test": Table(*ablated, "test", "exact"),
    }


def accuracies(results, name, table):
    """The cells of a table, {label: {protocol: {column: cell}}}, without the rows of failed runs.

    Beside these a row may have the "paper" figures by column, and "rejected", the number of seeds
    for which validation chose no τ that hides anything.
    """
    paper = of_paper(results, "tables").get(name)
    cells = {}
    for label, (run, candidates) in table.rows.items():
        found = results.runs[run]
        if not found:
            continue
        reports = [evaluation(results, metrics, table.phase, candidates) for metrics in found]
        row = {}
        for protocol in PROTOCOLS:
            row[protocol] = {}
            for column, key in COLUMNS.items():
                row[protocol][column] = cell([report[protocol][key] for report in reports])
        if candidates == "open_masked":
            row["rejected"] = sum(hides_nothing(metrics) for metrics in found)
        if paper and label in paper["rows"]:
            row["paper"] = dict(zip(paper["columns"], np.array(paper["rows"][label]) / 100))
        cells[label] = row
    return cells


def hides_nothing(metrics):
    """Whether validation rejected every τ that hides a composition."""
    sizes = metrics["candidates"]["val"]
    return sizes["open_masked"] == sizes["open"]


def evaluation(results, metrics, phase, candidates):
    """{protocol: report} of a run: what it recorded, or of a mask of the appendix on validation."""
    if candidates in metrics[phase]:
        return metrics[phase][candidates]
    features, target = experiment.arrays_of(results.prepared)["val"]
    seen = results.prepared.dataset.seen
    mask = median_mask(feasibility_of(metrics), seen, inverse=candidates == "inverse median")
    model = compcos.CompCos.load(metrics["folder"] / "best.pt", features.device)
    swept, _ = sweep(model, features, target, seen, dict(mask=mask.ravel()))["mask"]
    return experiment.both_protocols(swept)


def feasibility_of(metrics):
    """ρ (S, O) of a run of CompCos."""
    return experiment.load_best(metrics["folder"] / "best.pt")["feasibility"].numpy()


def table_lines(table, cells):
    """A table in Markdown."""
    rows = []
    for label, row in cells.items():
        shown = row[table.protocol]
        figures = [show(shown[column], 2 if column == "AUC" else 1) for column in table.columns]
        seeds = shown["AUC"]["seeds"]
        rejected = row.get("rejected", 0)
        if rejected:
            label += f" (τ rejected in {rejected} of {seeds})"
        if rejected == seeds:
            figures = ["as without"]  # what is missing at a row's end Markdown leaves empty
        rows.append([label, *figures])
        if "paper" in row:
            theirs = [row["paper"].get(column, np.nan) for column in table.columns]
            rows.append(["the paper", *(f"{100 * value:.1f}" for value in theirs)])
    title = f"**{table.title}** ({table.phase}, {table.protocol} protocol)"
    return [title, "", *markdown(["", *table.columns], rows)]


# ---- further sections: results -> (cells for report.json, Markdown lines) ----


def feasibility_text(results):
    """The paper's ranked lists from the first seed, those of the paper below."""
    dataset = results.prepared.dataset
    runs = results.runs["full"]
    lists = of_paper(results, "ranked")
    cells = {}
    lines = ["Of objects and of states those that the paper shows; elsewhere the first 25.", ""]
    found = ranked_tables(feasibility_of(runs[0]), dataset.seen, dataset.states, dataset.objects,
                          top=5)
    for kind, ranks in found.items():
        paper = lists.get(kind)
        rows = []
        for name, *ends in ranks:
            if paper and name in paper:
                rows.append([name, *ends])
                rows.append(["the paper", *(", ".join(end) for end in paper[name])])
            elif not paper and len(rows) < 25:
                rows.append([name, *ends])
        lines += markdown([kind, "most feasible", "least feasible"], rows)
        cells[kind] = rows
    cells["AUROC"] = cell([metrics["feasibility_auroc"] for metrics in runs])
    lines += [f"Unseen compositions {runs[0]['truth']} rank above the others with AUROC "
              f"{show(cells['AUROC'], 3, 1)} (0.5: chance).", ""]
    return cells, lines


def answers_of(metrics):
    """Columns of predictions.csv, (N,) str by name."""
    rows = read_rows(metrics["folder"] / "predictions.csv")
    return {name: np.array([row[name] for row in rows], str)
            for name in ("image", "truth", "open", "open_masked")}


def who_is_right(closed, full):
    """{kind: (N,) bool}: of the answers of both models, the full one with its mask."""
    closed = closed["open"] == closed["truth"]
    full = full["open_masked"] == full["truth"]
    return {
        "only the full model is right": full & ~closed,
        "both are wrong": ~closed & ~full,
    }


def qualitative_text(results):
    """Whom distractors mislead: shares of all test images."""
    dataset = results.prepared.dataset
    exist = dataset.candidates("val") | dataset.candidates("test")
    others = "in no list"
    if dataset.feasible is not None:
        exist = (dataset.feasible | dataset.seen).ravel()
        others = "impossible"
    existing = np.array(dataset.compositions)[exist]
    shares = []
    for runs in zip(results.runs["closed"], results.runs["full"]):
        closed, full = map(answers_of, runs)
        share = {kind: which.mean() for kind, which in who_is_right(closed, full).items()}
        for model, answers in (("closed model", closed["open"]), ("full model", full["open"]),
                               ("full model with mask", full["open_masked"])):
            share[f"{others}: answers of the {model}"] = 1 - np.isin(answers, existing).mean()
        shares.append(share)
    cells = {kind: cell([share[kind] for share in shares]) for kind in shares[0]}
    rows = [[kind, show(value)] for kind, value in cells.items()]
    return cells, markdown(["test images (full model: with mask)", "%"], rows)


def training_text(results):
    """How each run was trained, and how its epoch was chosen."""
    columns = {"epochs trained": "epochs", "best": "best_epoch", "seconds": "seconds",
               "τ": "threshold"}
    cells = {}
    rows = []
    for name, runs in results.runs.items():
        if not runs:
            continue
        settings = runs[0]["settings"]
        chosen = [f"{key} {settings[key]}" for key in SETTINGS if key in settings]
        row = [name, ", ".join(chosen)]
        cells[name] = {}
        for column, key in columns.items():
            found = cell([metrics[key] for metrics in runs])
            cells[name][column] = found
            row.append(show(found, 2 if column == "τ" else 0, scale=1))
        rows.append(row)
    lines = ["Of the epochs trained the one with the best validation AUC (exact) is taken, of "
             "CompCos in the open world, of all else in the closed one. The setting `epochs` is a "
             "bound, set by hand: a default of compcos.py or baselines.py, or an option of the "
             "command above. Where the best epoch is far below, it plays no part; where it is "
             "among the last, longer training may help. TMN was published with 600 negatives. τ of "
             "-1 hides nothing.", ""]
    return cells, lines + markdown(["run", "settings", *columns], rows)


# ---- pictures: results -> a figure of matplotlib ----


def figure(x_label, y_label, lines):
    """Lines (label, (K,) x, (K,) y, indices of the points that are marked) with a legend."""
    from matplotlib.figure import Figure

    result = Figure(figsize=(8, 5), layout="constrained")
    ax = result.add_subplot()
    for (label, x, y, marked), style in zip(lines, cycle(STYLES)):
        ax.plot(x, y, style, label=label, marker="o" if marked else "", markevery=marked)
    ax.set(xlabel=x_label, ylabel=y_label)
    ax.set_ylim(0)
    result.legend(loc="outside lower center", ncols=3)
    return result


def curves(results, runs):
    """Seen against unseen accuracy as the bias grows, of runs by label: test, first seed."""
    lines = []
    for label, run in runs.items():
        for metrics in results.runs[run][:1]:
            path = metrics["folder"] / "curves.npz"
            with reading(path, f"remove {path.parent}"), np.load(path) as file:
                lines.append((label, 100 * file["open_unseen"], 100 * file["open_seen"], []))
    return figure("accuracy on unseen compositions (%)", "accuracy on seen compositions (%)", lines)


def draw_threshold(results):
    """AUC against the share that the hard mask removes: validation, a line a seed."""
    lines = []
    for metrics in results.runs["full"]:
        curve = metrics["threshold_curve"]
        chosen = int(np.searchsorted(curve["threshold"], metrics["threshold"]))
        removed = 100 * np.array(curve["removed"])
        auc = 100 * np.array(curve["auc"], float)  # None, where there is none, becomes NaN
        lines.append((f"seed {metrics['settings']['seed']}", removed, auc, [chosen]))
    return figure("compositions removed (%)", "validation AUC (%), exact", lines)


def draw_photos(results):
    """A grid of photos with the answers of both models, first seed. FileNotFoundError without."""
    from matplotlib.figure import Figure

    dataset = results.prepared.dataset
    closed, full = [answers_of(results.runs[run][0]) for run in ("closed", "full")]
    shown = dict(closed=closed["open"], full=full["open_masked"], truth=full["truth"])
    images = []
    for which in who_is_right(closed, full).values():
        images += np.random.default_rng(0).permutation(np.flatnonzero(which))[:10].tolist()
    result = Figure(figsize=(10, 11), layout="constrained")
    for place, i in enumerate(images, 1):
        path = dataset.path(full["image"][i])
        if not path.exists():
            raise FileNotFoundError("there are no photos here, only features")
        ax = result.add_subplot(4, 5, place)
        ax.axis("off")
        ax.imshow(open_photo(path, dataset.upright))
        lines = [f"{who}: {answers[i]}" for who, answers in shown.items()]
        ax.set_title("\n".join(lines), size=8, loc="left", parse_math=False)
    return result


# ---- the sections ----


class Section(NamedTuple):
    """A section of the report: a picture, the tables of `tables` that name it, a text."""

    title: str
    text: Callable = None   # results -> (cells, Markdown lines)
    draw: Callable = None   # results -> a figure
    caption: str = ""


SECTIONS = {
    "table1": Section(
        "Table 1, expanded: all methods in both worlds",
        draw=lambda results: curves(results, methods()),
        caption="Test, open world, first seed: accuracy on seen against unseen compositions as the "
                "bias grows."),
    "margins": Section("Effect of the margins"),
    "primitives": Section("Effect of the primitives"),
    "masking": Section("Effect of the hard mask"),
    "strategies": Section("Other masks"),
    "threshold": Section(
        "The threshold of the hard mask", draw=draw_threshold,
        caption="Validation: AUC as CompCos's mask removes more compositions; a dot marks the "
                "threshold τ that was chosen (its number: under Training)."),
    "feasibility": Section("The most and least feasible unseen compositions (first seed)",
                           feasibility_text),
    "qualitative": Section(
        "Who is misled (test, open world)", qualitative_text, draw_photos,
        caption="Test images, drawn by lot, with the answers of the closed model and of the full "
                "one with its mask (first seed, at the bias fixed on validation): at most ten "
                "where only the full model is right, then ten where both are wrong."),
    "training": Section("Training", training_text),
    "recipes": Section(
        "The paper's recipe and the strong one",
        draw=lambda results: curves(results, RECIPES),
        caption="Test, open world, first seed: accuracy on seen against unseen compositions as the "
                "bias grows."),
    "ablation": Section("What carries the strong recipe"),
}
PAPER_SECTIONS = list(SECTIONS)[:-2]


def needed_runs(sections):
    """The names of the runs that sections are made of, and of both models of the paper."""
    needed = {"full", "closed"}
    for table in tables().values():
        if table.section in sections:
            needed.update(table.runs.values())
    return [name for name in all_runs() if name in needed]


def picture_lines(results, name, section):
    """Draw the picture of a section; the lines that show it, or say why it is left out."""
    try:
        drawn = section.draw(results)
    except (ImportError, FileNotFoundError) as error:  # no matplotlib, or no photos
        return [f"No picture: {error}.", ""]
    with writing(results.out / f"{name}.png", "wb") as file:
        drawn.savefig(file, dpi=130, format="png")
    return [f"![{section.title}]({name}.png)", "", section.caption, ""]


# ---- the report ----

ABOUT = """\
* *Columns*, in percent. S, U, HM: best accuracy on seen and on unseen compositions, best harmonic
  mean over the biases on the unseen; AUC: area under the curve of the first two. Sta., Obj.:
  accuracy of state and object at bias 0.
* *Protocols*. The paper's tables are given by the published one, as papers do: about 20 biases, by
  the field's evaluator. All others are exact: every bias. report.json has both.
* *Epoch*: the one with the best validation AUC (exact); more in the section Training.
* *mask*: unseen compositions less feasible than τ are hidden. τ is the best of 50 by validation
  AUC, as in the paper; the strong recipe hides at most 5 % of what exists, as far as validation can
  tell. *τ rejected in 2 of 3*: in that many seeds validation is best without a mask. CompCos closed
  and CompCos have their own feasibility, the others that of CompCos with the same seed. The paper's
  CompCos of the open world is the row with mask.
* *paper*, *strong*: the two recipes; of several members the scores are averaged.
"""


def about(results, argv, options, failed):
    """What was run, how it was chosen and what the numbers mean: Markdown lines."""
    settings = results.prepared.settings
    dataset = results.prepared.dataset
    runs = sum(results.runs.values(), [])
    seconds = sum(metrics["seconds"] for metrics in runs)
    versions = runs[0]["versions"]
    return [
        f"Made by `python reproduce.py {shlex.join(argv)}` on {versions['machine']}, torch "
        f"{versions['torch']}: {len(runs)} runs, {shell.duration(seconds)} hours of training. "
        f"Failed, and left out of the numbers: {'; '.join(failed) or 'none'}.", "",
        f"Data: {dataset.name}, {len(dataset.states)} states, {len(dataset.objects)} objects, "
        f"{dataset.seen.sum()} seen compositions, {len(dataset.targets['test']):,} test images.",
        f"Features: {options.backbone or settings['backbone']}. Word vectors (CompCos): "
        f"{', '.join(settings['vectors'])}.",
        f"± is the sample standard deviation (n − 1), n = {len(results.prepared.seeds)} seeds.", "",
        ABOUT]


def write_report(results, argv, options, failed):
    """Make the sections and write report.md and report.json."""
    lines = [f"# The paper's tables and figures on {results.prepared.dataset.name}", ""]
    lines += about(results, argv, options, failed)
    report = dict(command=argv, settings=results.prepared.settings, seeds=results.prepared.seeds,
                  failed=failed)
    for name, section in SECTIONS.items():
        if name not in options.only:
            continue
        cells = {}
        lines += [f"## {section.title}", ""]
        if section.draw:
            lines += picture_lines(results, name, section)
        for table_name, table in tables().items():
            if table.section == name:
                cells[table_name] = accuracies(results, table_name, table)
                lines += table_lines(table, cells[table_name])
        if section.text:
            found, further = section.text(results)
            cells |= found
            lines += further
        report[name] = cells
    with writing(results.out / "report.md") as file:
        file.write("\n".join(lines))
    write_json(results.out / "report.json", report)
    print(f"written to {results.out / 'report.md'}")


# ---- the command ----


def own_options():
    """The parser of the options that are not passed on to the runs."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description="The paper's tables and figures: trains what is missing and writes a report.",
        epilog="Options of compcos.py on data and training (--dataset, --data-root, --vectors, "
               "...) go to all runs.")
    add = parser.add_argument
    add("--seed", type=shell.number(int, least=0), nargs="+", default=[0, 1, 2], metavar="K",
        help="default 0 1 2")
    add("--only", nargs="+", choices=["paper", *SECTIONS], default=["paper"],
        help="sections of the report; paper, the default, is all but the last two")
    add("--out", type=Path, metavar="DIR", help="default runs/reproduce-DATASET")
    add("--backbone", metavar="WORDS", help="what made the features of a file, for the report")
    for name in systems():
        add(f"--{name}", dest=name, default="", metavar="'OPTIONS'",
            help="for its runs alone, as '--epochs 100'")
    return parser


def parse(where, words, module):
    """Options for runs of a module, a list of words, parsed. SystemExit: one that this script
    chooses itself, so that it would change nothing."""
    parser = argparse.ArgumentParser(where, allow_abbrev=False)
    module.add_options(parser)
    for word in words:
        if word.split("=")[0] in CHOSEN_HERE:
            parser.error(f"{word} is chosen for each run by reproduce.py: leave it out")
    return parser.parse_args(words)


@shell.command
def main(argv=None):
    """Train what is missing and write the report. Exit status 1 if a run failed."""
    argv = sys.argv[1:] if argv is None else argv
    options, shared = own_options().parse_known_args(argv)
    if "paper" in options.only:
        options.only += PAPER_SECTIONS
    for name, (module, _) in systems().items():  # before the long work
        parse(f"reproduce.py --{name}", shlex.split(vars(options)[name]), module)
    parsed = parse("reproduce.py", shared, experiment)
    parsed.seed = options.seed
    parsed.out = options.out
    prepared = experiment.prepare(parsed, "compcos", compcos.defaults("paper"))
    out = options.out or Path("runs", f"reproduce-{prepared.dataset.name}")
    shell.check_shared(out)
    jobs = [plan(name, seed, options, shared, prepared.settings["data_crc32"], out)
            for name in needed_runs(options.only) for seed in prepared.seeds]
    train_missing(jobs)
    if shell.rank() > 0:
        return
    runs = {name: [] for name in all_runs()}
    failed = []
    for job in jobs:
        if is_finished(job):
            runs[job.name].append(load(job.folder))
        elif job.name in OURS.values():
            raise ValueError("a run of the paper's own models failed, as said above: without it "
                             "there is no report")
        else:
            failed.append(f"{job.name}, seed {job.seed}")
    with shell.single_process():
        write_report(Results(out, prepared, runs), argv, options, failed)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
