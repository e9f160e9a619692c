"""Make the paper's tables and figures: train what is missing, write report.md and report.json.

    python -m lab.reproduce --dataset shapes --seed 0 1 2 --out results/shapes
    torchrun --nproc-per-node 3 -m lab.reproduce --dataset DIR --only paper recipes ablation

Runs lie in OUT/runs/NAME/seedK. A finished run is used again, an interrupted one is continued, and
one with other settings is refused. With several processes, each trains runs of its own. The
compared systems are those of baselines.MODELS: call `main` from a file that adds one of yours, and
it gets runs and rows. A metric of lab.results.COLUMNS gets a column. report.json holds fractions,
report.md percent. The pictures of a report need matplotlib.

A run is an entry of RUNS or ABLATION, a table one of `tables`, a section one of SECTIONS.
N test images, S states, O objects; a composition (s, o) has the index s * O + o.
"""

import argparse
import shlex
import sys
import traceback
from collections import defaultdict
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import cache
from itertools import product
from pathlib import Path
from typing import Callable, Iterable, NamedTuple

from lab import shell

if __name__ == "__main__":
    shell.wait_gently()  # before torch is imported

import numpy as np

import compcos
from evaluate import PROTOCOLS
from feasibility import markdown, median_mask, ranked_tables
from lab import baselines
from lab.figures import answers_of, draw_curves, draw_photos, draw_threshold
from lab.files import read_json, write_json, writing
from lab.results import COLUMNS, check_record, deviation
from lab.run import (OTHER_VECTORS, VECTORS, Inputs, add_settings, add_shared_options,
                     both_protocols, compcos_settings, load_data, run_seeds, settings_changes,
                     with_vectors)

PAPER = Path(__file__).parent.parent / "results/paper"  # the paper's own tables and lists
LISTED = 25      # rows of a ranked list that the paper does not have
MASKED = {"": "open", ", mask": "open_masked"}  # what is added to a label -> candidate set


# ---- what is trained ----

LABELS = {"aop": "AoP", "leplus": "LE+", "tmn": "TMN", "symnet": "SymNet",
          "visprod": "VisProd (two logistic regressions)"}
RECIPE_OF = {"compcos": "paper", "strong": "strong"}  # systems that are CompCos
RUNS = {  # run -> (system, changes of its settings)
    "full": ("compcos", {}),  # its feasibility masks the compared systems
    "closed": ("compcos", dict(world="closed")),
    "alpha0": ("compcos", dict(margin=0.0)),
    "constant": ("compcos", dict(warmup=0)),
    "state": ("compcos", dict(mix="state")),
    "object": ("compcos", dict(mix="object")),
    "max": ("compcos", dict(mix="max")),
    "paper4": ("compcos", dict(members=4)),
    "strong16": ("strong", dict(members=16)),
}
OURS = {"CompCos closed": "closed", "CompCos": "full"}
RECIPES = {  # label -> run; four members of the paper's model show what averaging alone gains
    "CompCos": "full",
    "CompCos, 4 members": "paper4",
    "strong, 1 member": "strong1",
    "strong, 4 members": "strong4",
    "strong, 16 members": "strong16",
    LABELS["visprod"]: "visprod",
}
# Changes of the strong recipe with 4 members: label -> (run, settings). Image embeddings of unit
# length need a scale again; its margin keeps 7.2 ρ off the logits.
ABLATION = {
    "strong, 4 members": ("strong4", {}),
    "strong, 1 member": ("strong1", dict(members=1)),
    "dropout 0.5": ("without-dropout", dict(dropout=0.5)),
    "no logit adjustment": ("without-adjustment", dict(logit_adjustment=0.0)),
    "no moving average of the weights": ("without-average", dict(ema_decay=0.0)),
    "word embeddings at the common rate": ("without-rate", dict(word_lr_factor=1.0)),
    "a space of 100": ("without-dim", dict(dim=100)),
    "image embeddings of unit length (scale 20, α 0.36)": (
        "without-length", dict(normalize_image_embeddings=True, scale=20.0, margin=0.36)),
    "no margins (α = 0)": ("without-margins", dict(margin=0.0)),
    "only the seen compete": ("without-unseen", dict(train_candidates="seen")),
}


def all_runs():
    """Return {run: (system, changes)}; a system is compcos, strong or a name of MODELS."""
    return (RUNS
            | {run: ("strong", dict(members=4) | changes) for run, changes in ABLATION.values()}
            | {name: (name, dict(world="closed")) for name in baselines.MODELS})


def methods():
    """Return the systems that the paper compares and those added, {label: run}, CompCos last."""
    return {LABELS.get(name, name): name for name in baselines.MODELS} | OURS


def settings_of(system, dataset, changes):
    """Return the settings of a system for a dataset with changes, {name: value}."""
    if system in RECIPE_OF:
        return compcos_settings(RECIPE_OF[system], dataset, changes)
    return baselines.settings_of(system, dataset, **changes)


def vectors_of(system, dataset):
    """Return the sources of word vectors of a system for a dataset."""
    if system in RECIPE_OF:
        return VECTORS.get(dataset, OTHER_VECTORS)
    return baselines.vectors_of(system, dataset)


class Job(NamedTuple):
    """One run of one seed."""

    name: str
    system: str
    settings: compcos.TrainingSettings
    inputs: Inputs
    options: argparse.Namespace  # as `run_seeds` takes them
    rests_on: dict               # what decides the results: where it is the same, they are reused


def plan(options, changes):
    """Read and check all that the runs need; return their Jobs, those of CompCos first.

    Raises:
        ValueError: a setting or a file is wrong, or a folder holds a run with other settings.
    """
    runs = {}
    for name, (system, own) in needed_runs(options.only).items():  # before the long work
        runs[name] = system, settings_of(system, options.dataset, changes[system] | own)
    data = load_data(options)
    inputs_with = cache(lambda *vectors: with_vectors(data, options, list(vectors)))
    options.out = options.out or Path("runs", f"reproduce-{data.dataset.name}")
    jobs = []
    for name, (system, settings) in runs.items():
        inputs = inputs_with(*vectors_of(system, options.dataset))
        mask = "justified" if system == "strong" else "paper"
        rests_on = dict(data_crc32=inputs.record["data_crc32"], **asdict(settings))
        if system in baselines.MODELS:
            rests_on["feasibility"] = changes["compcos"]
        for seed in dict.fromkeys(options.seed):
            out = options.out / f"runs/{name}/seed{seed}"
            if (out / "run.json").exists():
                check_record(out, read_json(out / "run.json"), rests_on, free=[])
            own = dict(out=out, seed=[seed], resume=True, mask=mask, save_scores=False)
            jobs.append(Job(name, system, settings, inputs,
                            argparse.Namespace(**vars(options) | own), rests_on))
    return jobs


def attempt(job):
    """Train a job and return the outcome in words; add what it prints to its output.txt.

    The compared systems are masked by the feasibility of `full`.
    """
    out = job.options.out
    write_json(out / "run.json", job.rests_on)
    make = baselines.MODELS.get(job.system, compcos.build)
    feasibility = None
    with open(out / "output.txt", "a", encoding="utf-8") as file, redirect_stdout(file):
        try:
            if job.system in baselines.MODELS:
                full = compcos.load(out.parents[1] / "full" / out.name / "best.pt")
                feasibility = full.checkpoint["feasibility"].numpy()
            run_seeds(job.system, make, job.inputs, job.settings, job.options, feasibility)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped: run the same command again to continue") from None
        except Exception as error:
            traceback.print_exc(file=file)
            return f"failed ({shell.reason(error)}), see {file.name}"
    return "trained"


def train_missing(jobs):
    """Train what is missing, spread over the processes."""
    missing = [job for job in jobs if not is_finished(job)]
    shell.print_status(f"{len(jobs)} runs, {len(missing)} of them to train")
    for is_first in (True, False):  # the run whose feasibility masks others comes first
        part = [job for job in missing if (job.name == "full") == is_first]
        for job, outcome in shell.distribute(part, attempt):
            shell.print_status(f"{job.name}, {job.options.out.name}: {outcome}")


def is_finished(job):
    """Tell if a job's results are there; metrics.json is written last."""
    return (job.options.out / "metrics.json").exists()


# ---- the results of the runs ----


class Results(NamedTuple):
    """All that a report is made from."""

    inputs: Inputs  # with the word vectors of CompCos
    runs: dict      # run -> metrics.json of each seed with its `folder`, [] by default


def of_paper(results, kind):
    """Return the paper's own "tables" or "ranked" lists of this dataset, or an empty dict."""
    dataset = results.inputs.dataset
    if dataset.upright:  # a folder of one's own that is called as the paper's are
        return {}
    return read_json(PAPER / f"{kind}.json").get(dataset.name, {})


def cell(values):
    """Return mean and sample standard deviation over the seeds.

    >>> cell([1.0, 3.0, 5.0])
    {'mean': 3.0, 'std': 2.0, 'seeds': 3, 'values': [1.0, 3.0, 5.0]}
    """
    values = np.array(values, float)  # None, of a half without images, becomes NaN
    return dict(mean=float(values.mean()), std=float(deviation(values)), seeds=len(values),
                values=values.tolist())


def show(value, digits=1):
    """Return a cell as text, in percent.

    >>> show(dict(mean=0.5, std=0.01, seeds=3))
    '50.0 ± 1.0'
    """
    text = f"{100 * value['mean']:.{digits}f}"
    if value["seeds"] > 1:
        text += f" ± {100 * value['std']:.{digits}f}"
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
    protocols: tuple = ("published",)
    columns: Iterable = ("S", "U", "HM", "AUC")


def tables():
    """Return {name: Table}."""
    unmasked = {"": "open"}
    changed = {label: run for label, (run, _) in ABLATION.items()}
    return {
        "closed": Table("table1", "Closed world", methods(), {"": "closed"}, "test",
                        columns=COLUMNS),
        "open": Table("table1", "Open world", methods(), MASKED, "test", columns=COLUMNS),
        "margins": Table(
            "margins", "Open world, no mask",
            {"CompCos closed": "closed", "CompCos, α = 0": "alpha0", "CompCos, α > 0": "constant",
             "CompCos, α > 0 and warm-up": "full"}, unmasked),
        "primitives": Table(
            "primitives", "Open world, no mask",
            {"state": "state", "object": "object", "max": "max", "mean": "full"}, unmasked),
        "masking": Table("masking", "Open world", methods(), MASKED),
        "strategies": Table(
            "strategies", "Open world", OURS,
            {", no mask": "open", ", median": "median", ", inverse median": "inverse median",
             ", best": "open_masked"}),
        "recipes_closed": Table("recipes", "Closed world, though trained for the open one",
                                RECIPES, {"": "closed"}, "test", PROTOCOLS),
        "recipes_open": Table("recipes", "Open world", RECIPES, MASKED, "test", PROTOCOLS),
        "ablation_validation": Table("ablation", "Open world, no mask", changed, unmasked,
                                     "validation", ("exact",)),
        "ablation_test": Table("ablation", "Open world, no mask", changed, unmasked, "test",
                               ("exact",)),
    }


def accuracies(results, name, table):
    """Return the cells of a table, {label: row}, without the rows of failed runs.

    A row is {protocol: {column: cell}} with the `run`. It may have the "paper" figures by column,
    and "rejected", the number of seeds in which the mask hides nothing.
    """
    paper = of_paper(results, "tables").get(name, dict(rows={}))
    cells = {}
    both = product(table.runs.items(), table.candidates.items())
    for (label, run), (addition, candidates) in both:
        label += addition
        runs = results.runs[run]
        if not runs:
            continue
        reports = [evaluation(results, metrics, table.phase, candidates) for metrics in runs]
        row = defaultdict(dict)
        for protocol, (column, key) in product(PROTOCOLS, COLUMNS.items()):
            values = [report[protocol].get(f"best_{key}", report[protocol].get(key))
                      for report in reports]
            row[protocol][column] = cell(values)
        if candidates == "open_masked":
            sizes = [metrics["candidates"]["val"] for metrics in runs]
            row["rejected"] = sum(size["open_masked"] == size["open"] for size in sizes)
        if label in paper["rows"]:
            columns = [column.rstrip(".") for column in paper["columns"]]  # Sta. and Obj.
            row["paper"] = dict(zip(columns, np.array(paper["rows"][label]) / 100))
        cells[label] = dict(row, run=run)
    return cells


def evaluation(results, metrics, phase, candidates):
    """Return {protocol: report} as a run recorded it, or of a mask of the appendix."""
    if candidates in metrics[phase]:
        return metrics[phase][candidates]
    features, target = results.inputs.arrays()["val"]
    seen = results.inputs.dataset.seen
    model = compcos.load(metrics["folder"] / "best.pt", features.device)
    mask = median_mask(model.feasibility(), seen, inverse=candidates == "inverse median")
    swept, _ = compcos.sweep(model, features, target, seen, dict(mask=mask))["mask"]
    return both_protocols(swept)


def table_lines(table, cells, protocol):
    """Return a table in Markdown."""
    rows = []
    for label, row in cells.items():
        figures = [show(row[protocol][column], 2 if column == "AUC" else 1)
                   for column in table.columns]
        if row.get("rejected"):
            label += f" (hides nothing in {row['rejected']} of {row[protocol]['AUC']['seeds']})"
        rows.append([label, row["run"], *figures])
        if "paper" in row:
            theirs = [row["paper"].get(column, np.nan) for column in table.columns]
            rows.append(["the paper", "", *(f"{100 * value:.1f}" for value in theirs)])
    title = f"**{table.title}** ({table.phase}, {protocol} protocol)"
    return [title, "", *markdown(["", "run", *table.columns], rows)]


# ---- findings ----

EFFECTS = {  # what changes CompCos -> the rows with it and without it
    "with its hard mask": ("CompCos, mask", "CompCos"),
    "with its margins": ("CompCos", "CompCos, α = 0"),
    "with 4 members": ("CompCos, 4 members", "CompCos"),
    "with the strong recipe and 4 members": ("strong, 4 members", "CompCos"),
}


def findings(results):
    """Return the findings on the test in the open world: (cells, Markdown lines)."""
    runs = RECIPES | methods() | {"CompCos, α = 0": "alpha0"}
    rows = accuracies(results, "", Table("", "", runs, MASKED, "test"))
    aucs = {label: row["published"]["AUC"] for label, row in rows.items()}
    best = max(aucs, key=lambda label: aucs[label]["mean"])
    cells = {}
    for change, labels in EFFECTS.items():
        values = [aucs[label]["values"] for label in labels if label in aucs]
        seeds = len(results.runs["full"])
        if len(values) == 2 and all(len(value) == seeds for value in values):  # none failed
            cells[change] = cell(np.subtract(*values))
    gains = [f"{show(gain, 2)} {change}" for change, gain in cells.items()]
    return cells, [
        f"On the test in the open world, **{best}** has the greatest AUC, {show(aucs[best], 2)} % "
        "(published protocol). Compared seed by seed, the AUC of CompCos changes by "
        f"{', by '.join(gains)} (in percentage points). A change that is smaller than its "
        "deviation may come from the seeds alone.", ""]


# ---- further sections: results -> (cells for report.json, Markdown lines) ----


def feasibility_text(results):
    """Return the ranked lists of the first seed, with the paper's below."""
    dataset = results.inputs.dataset
    runs = results.runs["full"]
    rho = compcos.load(runs[0]["folder"] / "best.pt").feasibility()
    cells = {}
    lines = []
    ranks_of = ranked_tables(rho, dataset.seen, dataset.states, dataset.objects, top=5)
    for kind, ranks in ranks_of.items():
        paper = of_paper(results, "ranked").get(kind, {})
        rows = []
        for row in [row for row in ranks if row[0] in paper] or ranks[:LISTED]:
            rows.append(row)
            if paper:
                rows.append(["the paper", *map(", ".join, paper[row[0]])])
        lines += markdown([kind, "most feasible", "least feasible"], rows)
        cells[kind] = rows
    cells["AUROC"] = cell([metrics["feasibility_auroc"] for metrics in runs])
    lines += ["Feasibility ranks unseen compositions that exist above the others with an AUROC of "
              f"{show(cells['AUROC'])} % (chance: 50 %).", ""]
    return cells, lines


def qualitative_text(results):
    """Return the shares of test images that distractors mislead."""
    dataset = results.inputs.dataset
    implausible = ~dataset.existing.ravel()
    shares = []
    for closed_run, full_run in zip(results.runs["closed"], results.runs["full"]):
        truth, closed, _ = answers_of(dataset, closed_run)
        _, unmasked, full = answers_of(dataset, full_run)
        shares.append({
            "only the full model is right": (full == truth) & (closed != truth),
            "both are wrong": (full != truth) & (closed != truth),
            "implausible answers of the closed model": implausible[closed],
            "implausible answers of the full model, no mask": implausible[unmasked]})
    cells = {kind: cell([share[kind].mean() for share in shares]) for kind in shares[0]}
    return cells, markdown(["share of the test images", "%"],
                           [[kind, show(value)] for kind, value in cells.items()])


# ---- the sections ----


class Section(NamedTuple):
    """A section of the report: a note, a picture, the tables that name it, a text."""

    title: str
    note: str               # explains the words of the section
    text: Callable = None   # results -> (cells, Markdown lines)
    draw: Callable = None   # results -> a figure of matplotlib


SECTIONS = {
    "table1": Section(
        "Table 1, expanded: all methods in both worlds",
        "CompCos closed is trained for the closed world, CompCos for the open one.",
        draw=lambda results: draw_curves(results, methods())),
    "margins": Section(
        "Effect of the margins",
        "α is the greatest factor of the feasibility margins. During the warm-up it grows from 0."),
    "primitives": Section(
        "Effect of the primitives",
        "Feasibility is the similarity of the state alone, of the object alone, the greater of "
        "both, or their mean, as CompCos has it."),
    "masking": Section("Effect of the hard mask", "Each system without its mask and with it."),
    "strategies": Section(
        "Other masks",
        "*median*: the less feasible half of the unseen compositions is hidden. *inverse median*: "
        "the other half is hidden, which should be much worse. *best*: the hard mask with the "
        "threshold τ that validation chose. Where no unseen answer is right (U is 0), the "
        "published protocol tries no bias, and its S says nothing."),
    "threshold": Section(
        "The threshold of the hard mask",
        "CompCos on validation (open world, exact protocol), as its mask hides more compositions. "
        "A marker shows the threshold τ that was chosen for a seed.", draw=draw_threshold),
    "feasibility": Section(
        "The most and least feasible unseen compositions",
        "First seed. The lists are those that the paper shows, or else the first "
        f"{LISTED} objects and states.", feasibility_text),
    "qualitative": Section(
        "Who is misled (test, open world)",
        "The full model is CompCos, the closed model CompCos closed, each at the bias fixed on "
        "validation, the full one with its mask. *implausible*: the data say that the composition "
        "cannot exist, or, if they say nothing, neither training nor validation nor test lists it. "
        "The photos are drawn by lot (first seed): above at most ten where only the full model is "
        "right, below at most ten where both are wrong.", qualitative_text, draw_photos),
    "recipes": Section(
        "The paper's recipe and the strong one",
        "CompCos is trained by the paper's recipe, *strong* by the strong one; the scores of "
        "several members are averaged.",
        draw=lambda results: draw_curves(results, RECIPES)),
    "ablation": Section(
        "What carries the strong recipe",
        "Each row below the first changes one thing of the strong recipe with 4 members."),
}
PAPER_SECTIONS = list(SECTIONS)[:-2]


def needed_runs(sections):
    """Return the part of `all_runs` that sections need, with both models of the paper."""
    needed = {"full", "closed"}
    for table in tables().values():
        if table.section in sections:
            needed.update(table.runs.values())
    return {name: run for name, run in all_runs().items() if name in needed}


def picture_lines(draw, results, path):
    """Draw a picture into a file, and return the Markdown lines that show it."""
    try:
        draw(results).savefig(path)
    except Exception as error:  # matplotlib or a photo may be missing
        return [f"No picture could be drawn: {error}.", ""]
    return [f"![{path.stem}]({path.name})", ""]


# ---- the report ----

ABOUT = """\
* *Rows*. CompCos closed and CompCos: trained for the closed and for the open world by the paper's
  recipe. strong: trained by the stronger recipe. 4 members: four models, trained apart, whose
  scores are averaged. mask: with the hard mask, see below.
* *Curves*: accuracy on seen against unseen compositions as the bias on the unseen grows (test, open
  world, no mask, first seed).
* *Columns*, in percent. S, U, HM: best accuracy on seen and on unseen compositions, and best
  harmonic mean, over the biases on the unseen. AUC: area under the curve of seen against unseen
  accuracy. Sta, Obj: accuracy of state and object at bias 0. *run*: the folder in `runs/`.
* *Protocols*. published: about 20 biases, by the field's evaluator, as papers do. exact: every
  bias. report.json has both.
* *Epoch*: the one with the best validation AUC (exact), of CompCos in the open world, of the
  compared systems and CompCos closed in the closed world.
* *mask*: unseen compositions less feasible than τ are hidden. τ is the best of 50 by validation
  AUC, as in the paper; the strong recipe hides at most 5 % of what exists, as far as validation can
  tell. Where validation rejects every τ, nothing is hidden, and the row is the one without mask.
  CompCos closed and CompCos have their own feasibility, the others that of CompCos with the same
  seed. The paper's CompCos of the open world is the row with mask.
"""


def about(results, argv, options, failed):
    """Return how the report was made and what its numbers mean, as Markdown lines."""
    dataset = results.inputs.dataset
    record = results.inputs.record
    late = [run for run, found in results.runs.items() if any(
        metrics["best_epoch"] == metrics["settings"]["epochs"] for metrics in found)]
    return [
        f"Data: {dataset.name}, {dataset.seen.sum()} seen compositions of {len(dataset.states)} "
        f"states and {len(dataset.objects)} objects, {len(dataset.targets['test']):,} test images. "
        f"{options.data_note}",
        f"Features: {options.backbone or record['backbone']}. Word vectors of CompCos: "
        f"{', '.join(record['vectors'])}.", "",
        f"Made by `python -m lab.reproduce {shlex.join(argv)}`. ± is the sample standard deviation "
        f"(n − 1) of n = {len(results.runs['full'])} seeds. Failed, and left out of the numbers: "
        f"{'; '.join(failed) or 'none'}. Runs whose best epoch is the last one allowed, so that "
        f"longer training may help: {', '.join(late) or 'none'}.", "", ABOUT]


def write_report(results, argv, options, failed):
    """Make the sections and write report.md, its pictures and report.json."""
    cells, lines = findings(results)
    lines = [f"# The paper's tables on {results.inputs.dataset.name}", "", *lines,
             *about(results, argv, options, failed)]
    report = dict(command=argv, settings=results.runs["full"][0]["settings"], seeds=options.seed,
                  failed=failed, findings=cells)
    for name, section in SECTIONS.items():
        if name not in options.only:
            continue
        cells = {}
        lines += [f"## {section.title}", "", section.note, ""]
        if section.draw:
            lines += picture_lines(section.draw, results, options.out / f"{name}.png")
        for table_name, table in tables().items():
            if table.section == name:
                cells[table_name] = accuracies(results, table_name, table)
                for protocol in table.protocols:
                    lines += table_lines(table, cells[table_name], protocol)
        if section.text:
            further, text = section.text(results)
            cells |= further
            lines += text
        report[name] = cells
    with writing(options.out / "report.md") as file:
        file.write("\n".join(lines))
    write_json(options.out / "report.json", report)
    print(f"written to {options.out / 'report.md'}")


# ---- the command ----


def parse(argv):
    """Return the options, and {system: changes of its settings} that they make."""
    parser = argparse.ArgumentParser(
        "python -m lab.reproduce", allow_abbrev=False,
        description="Make the paper's tables and figures: train what is missing and write a "
                    "report. Figures need matplotlib. Options on data and training go to all runs; "
                    "the world and the mask are chosen for each run.",
        epilog="example: python -m lab.reproduce --dataset shapes --only paper recipes "
               "'--tmn=--epochs 10 --negatives 20'")
    add_shared_options(parser, compcos.TrainingSettings, without=["world"])
    parser.set_defaults(seed=[0, 1, 2])
    add = parser.add_argument_group("report").add_argument
    add("--out", type=Path, metavar="DIR",
        help="the folder of the report and its runs (default runs/reproduce-DATASET)")
    add("--only", nargs="+", choices=["paper", *SECTIONS], default=["paper"],
        help="sections of the report; paper, the default, is all but the last two")
    add("--backbone", metavar="TEXT", help="for the report: what made the features")
    add("--data-note", default="", metavar="TEXT",
        help="for the report: what the data are, and how to replace them")
    systems = [*RECIPE_OF, *baselines.MODELS]
    for system in systems:
        add(f"--{system}", dest=system, default="", metavar="'OPTIONS'",
            help=f"settings of the runs of {system} alone, such as '--epochs 100'")
    options = parser.parse_args(argv)
    if "paper" in options.only:
        options.only += PAPER_SECTIONS
    shared = settings_changes(options, compcos.TrainingSettings)
    return options, {system: shared | changes_of(system, vars(options)[system])
                     for system in systems}


def changes_of(system, text):
    """Return the changes of a system's settings that options in a text make, {name: value}."""
    kind = type(settings_of(system, "folder", {}))
    parser = argparse.ArgumentParser(f"python -m lab.reproduce --{system}", allow_abbrev=False)
    add_settings(parser, kind, without=["world"])
    return settings_changes(parser.parse_args(shlex.split(text)), kind)


@shell.command
def main(argv=None):
    """Train what is missing and write the report. Exit status 1 if a run failed."""
    argv = sys.argv[1:] if argv is None else argv
    options, changes = parse(argv)
    jobs = plan(options, changes)
    shell.check_shared(options.out)
    train_missing(jobs)
    if shell.rank() > 0:
        return
    runs = defaultdict(list)
    failed = []
    for job in jobs:
        out = job.options.out
        if is_finished(job):
            runs[job.name].append(read_json(out / "metrics.json") | dict(folder=out))
        elif job.name in OURS.values():
            raise ValueError("a run of the paper's own models failed, as said above: without it "
                             "there is no report")
        else:
            failed.append(f"{job.name}, {out.name}")
    write_report(Results(jobs[0].inputs, runs), argv, options, failed)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
