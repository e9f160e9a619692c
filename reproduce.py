"""The paper's tables and figures from one command: trains what is missing, writes report.md, report.json and pictures.

    python reproduce.py --dataset shapes --seeds 0 1 2 --out results/shapes

Runs lie in OUT/runs/NAME/seedK: a finished one is used again, an interrupted one goes on, one with other settings
starts anew. Fractions in report.json, percent in report.md. S states, O objects, N images, F features.
"""

import argparse
import csv
import functools
import json
import operator
import platform
import re
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

import baselines
import common
import compcos
import experiment
from feasibility import agreement, hard_mask, median_mask, ranked
from train import sweep

HERE = Path(__file__).parent
PROTOCOLS = ("published", "exact")
METHODS = {"AoP": "aop", "LE+": "leplus", "TMN": "tmn", "SymNet": "symnet", "CompCos closed": "closed", "CompCos": "full"}
RUNS = {  # options of each run of METHODS and more; `full` is first, since its feasibility masks the baselines
    "full": "--world open", "closed": "--world closed", "alpha0": "--world open --margin 0",
    "constant": "--world open --warmup 0", **{mix: f"--world open --mix {mix}" for mix in ("state", "object", "max")},
    **{name: f"--world closed --model {name}" for name in baselines.MODELS},
}
TABLES = {  # label -> (run, candidate set); the labels are those of results/paper/tables.json
    "closed": {label: (run, "closed") for label, run in METHODS.items()},
    "open": {label: (run, "open") for label, run in METHODS.items()}
    | {"CompCos closed, mask": ("closed", "open_masked"), "CompCos, mask": ("full", "open_masked")},
    "margins": {"CompCos closed": ("closed", "open"), "CompCos, α = 0": ("alpha0", "open"),
                "CompCos, α > 0": ("constant", "open"), "CompCos, α > 0 and warm-up": ("full", "open")},
    "primitives": {mix: ("full" if mix == "mean" else mix, "open") for mix in ("state", "object", "max", "mean")},
    "masking": {label + mask: (run, world) for label, run in METHODS.items()
                for mask, world in (("", "open"), (", mask", "open_masked"))},
}
COLUMNS = dict(S="best_seen", U="best_unseen", HM="best_hm", AUC="auc")
PRIMITIVES = {"Sta.": "state_accuracy", "Obj.": "object_accuracy"}
ALL = COLUMNS | PRIMITIVES | {f"{name} unseen only": f"{key}_unseen_only" for name, key in PRIMITIVES.items()}
BLUE, GREEN, RED, BLACK = "#0072B2", "#009E73", "#D55E00", "#000000"  # of Okabe and Ito, whom the colour-blind can tell
LOOKS = {"AoP": ("#E69F00", "-."), "LE+": ("#56B4E9", "--"), "TMN": (GREEN, ":"), "SymNet": ("#CC79A7", "--"),
         "CompCos closed": (RED, "-"), "CompCos": (BLUE, "-"), "CompCos, mask": (BLACK, "--")}


def train_missing(names, options, shared, settings, out):
    """Do what is not done: {run: [what `load` gives of each seed]}. settings: what the `shared` options of all mean."""
    runs, jobs = {name: [] for name in names}, [(name, seed) for name in names for seed in options.seeds]
    for i, (name, seed) in enumerate(jobs):
        folder, compared = out / "runs" / name / f"seed{seed}", name in baselines.MODELS
        own = f"{getattr(options, name if compared else 'compcos')} {RUNS[name]}"
        own += options.quick * f" --epochs 3{' --width 16' * (name == 'tmn')}"
        defaults = baselines.DEFAULTS[name] if compared else compcos.DEFAULTS
        key = dict(options=own, defaults=defaults.get(settings["dataset"], defaults["other"]), settings=settings,
                   mask=options.compcos)
        argv = [*shared, *shlex.split(own), "--seed", str(seed), "--out", str(folder)]
        argv += compared * ["--feasibility", str(out / "runs/full" / f"seed{seed}" / "best.pt")]
        done = run_once(baselines.main if compared else compcos.main, argv, folder, json.loads(json.dumps(key)))
        runs[name].append(load(folder))
        print(f"run {i + 1} of {len(jobs)}: {name}, seed {seed}: {done}", flush=True)
    return runs


def run_once(command, argv, folder, key):
    """One run, unless its results with the same `key` are there; says what was done."""
    note = folder / "run.json"
    same = note.exists() and read_json(note)["key"] == key
    if same and (folder / "metrics.json").exists():
        return "kept"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.json", "last.pt") if not same else ():
        (folder / name).unlink(missing_ok=True)
    experiment.write_json(note, dict(key=key, hardware=hardware()))
    try:
        with open(folder / "output.txt", "w", encoding="utf-8") as file, redirect_stdout(file):
            command(argv + ["--resume"] * same)
    except SystemExit:
        print("what is done is kept: the same reproduce.py command goes on from here", file=sys.stderr)
        raise
    return "trained"


def load(folder):
    """metrics.json of a run, its `folder`, `hardware`, `log` (arrays (epochs,) by name) and `seconds` of training."""
    with open(folder / "log.csv", newline="") as file:
        log = {name: np.array(column, float) for name, *column in zip(*csv.reader(file))}
    held = read_json(folder / "metrics.json") | read_json(folder / "run.json")
    return held | dict(folder=folder, log=log, seconds=log["seconds"][-1] * len(log["epoch"]))


def hardware():
    """The processor's name, and the GPU's if there is one."""
    about = Path("/proc/cpuinfo")
    found = re.search("model name\\s*: (.*)", about.read_text() if about.exists() else "")
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{found[1] if found else platform.machine()}, {torch.get_num_threads()} threads{gpu}"


def read_json(path):
    """What a JSON file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def cell(runs, *path):
    """Mean and standard deviation over seeds, of the number at a path of keys in the dict of each."""
    values = np.array([functools.reduce(operator.getitem, path, run) for run in runs], float)
    return dict(mean=float(values.mean()), std=float(values.std()), seeds=len(values))


def show(cell, digits=1, scale=100):
    """A cell as people read it, in percent."""
    deviation = f" ± {scale * cell['std']:.{digits}f}" if cell["seeds"] > 1 else ""
    return f"{scale * cell['mean']:.{digits}f}{deviation}"


def grid(head, rows):
    """Lines of a Markdown table."""
    return ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)] + [""]


def accuracy_table(results, name, rows, columns=COLUMNS):
    """(Markdown lines, cells) of rows {label: [{protocol: report} of each seed]}; the paper's, if any, stand below."""
    lines, cells, paper = [], {}, results.paper.get(name, {})
    for label, reports in rows.items():
        own = cells[label] = {protocol: {column: cell(reports, protocol, key) for column, key in ALL.items()}
                              for protocol in PROTOCOLS}
        lines += [[label, protocol, *(show(own[protocol][column], 1 + (column == "AUC")) for column in columns)]
                  for protocol in PROTOCOLS]
        if label in paper:
            own["paper"] = {column: percent / 100 for column, percent in zip(columns, paper[label])}
            own["difference"] = {column: own["published"][column]["mean"] - own["paper"][column] for column in columns}
            differences = (f"{100 * value:+.{1 + (column == 'AUC')}f}" for column, value in own["difference"].items())
            lines += [["", "the paper", *paper[label]], ["", "ours − paper", *differences]]
    return grid(["", "protocol", *columns], lines), cells


def ablation(results, name, phase="validation", columns=COLUMNS):
    """A table of TABLES."""
    rows = {label: [metrics[phase][setting] for metrics in results.runs[run]]
            for label, (run, setting) in TABLES[name].items()}
    return accuracy_table(results, name, rows, columns)


def table1(results, _):
    """Test accuracies in both worlds; in the open one also with the hard mask, which is CompCos's predictor there."""
    tables = {world: ablation(results, world, "test", PRIMITIVES | COLUMNS) for world in ("closed", "open")}
    lines = [line for world in tables for line in (f"**{world.capitalize()} world**", "", *tables[world][0])]
    return lines, {world: cells for world, (_, cells) in tables.items()}


def strategies(results, name):
    """The appendix's masks on the closed and the full model: validation, open world."""
    rows, seen = {}, results.dataset.seen
    for label in ("CompCos closed", "CompCos"):
        for run in results.runs[METHODS[label]]:
            model = compcos.CompCos.load(run["folder"] / "best.pt", results.validation[0].device)
            rho = model.checkpoint["feasibility"].numpy()
            halves = (median_mask(rho, seen, inverse=inverse) for inverse in (False, True))
            masks = map(np.ravel, (np.ones_like(seen), *halves, hard_mask(rho, seen, run["threshold"])))
            masks = dict(zip(("no mask", "median", "inverse median", "best"), masks))
            for mask, (one, _) in sweep(model, *results.validation, seen, masks).items():
                rows.setdefault(f"{label}, {mask}", []).append(experiment.both_protocols(one))
    return accuracy_table(results, name, rows)


def feasibility(results, _):
    """The paper's ranked tables from the first seed, and how the scores of all seeds fit what is known."""
    states, objects, seen = (getattr(results.dataset, name) for name in ("states", "objects", "seen"))
    models = [compcos.CompCos.load(held["folder"] / "best.pt") for held in results.runs["full"]]
    rho, *_ = rhos = [model.checkpoint["feasibility"].numpy() for model in models]
    ranking, lines, cells, paper = ranked(rho, seen, top=5), [], {}, results.paper.get("ranked", {})
    if paper:
        tables = read_json(HERE / "results/paper/ranked.json")
        paper = paper | {kind: paper.get(kind, {}) | tables[kind] for kind in tables}
    for kind, names, partners, scores, ends, top in (
            ("overall", ["all"], results.names, rho.reshape(1, -1), [ranking.overall], 5),
            ("objects", objects, states, rho.T, ranking.objects, 3),
            ("states", states, objects, rho, ranking.states, 3)):
        chosen = paper[kind] if paper else sorted(np.random.default_rng(0).permutation(names)[:25].tolist())
        cells[kind] = {names[i]: [[[partners[k], float(scores[i, k])] for k in end[:top]] for end in ends[i]]
                       for i in map(names.index, chosen)}
        rows = []
        for name, row in cells[kind].items():
            rows.append([name, *(", ".join(f"{partner} {value:.2f}" for partner, value in end) for end in row)])
            if paper:
                rows.append(["the paper", *map(", ".join, paper[kind][name])])
        lines += grid([kind, "most feasible", "least feasible"], rows)
    cells["AUROC"] = cell(results.runs["full"], "feasibility_auroc")
    lines += [f"Unseen compositions {results.runs['full'][0]['truth']} rank above the others with AUROC "
              f"{show(cells['AUROC'], 3, 1)} (0.5: chance).", ""]
    if paper:
        shared = [agreement(scores, seen, states, objects, tables=dict(list(paper.items())[1:])) for scores in rhos]
        cells["shared"] = {figure: cell(shared, figure) for figure in shared[0]}
        lines += grid(["entries shared with the paper", "number"],
                      ([figure, show(value, 1, 1)] for figure, value in cells["shared"].items()))
    return lines, cells


def panels(*labels):
    """Axes side by side in a new figure, one for each pair of labels (x, y)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("the figures need matplotlib: pip install matplotlib") from None
    axes = Figure(figsize=(8, 4.2), layout="constrained").subplots(1, len(labels), squeeze=False)[0]
    for ax, (x, y) in zip(axes, labels):
        ax.set(xlabel=x, ylabel=y)
        ax.grid(alpha=.25)
        ax.spines[["top", "right"]].set_visible(False)
    return axes


def picture(results, axes, name, text, **legend):
    """Save the figure that holds `axes`; the Markdown lines that show it."""
    options = dict(loc="outside lower center", ncols=3) | legend
    axes[0].figure.legend(*axes[0].get_legend_handles_labels(), **options)
    for ax in axes:
        ax.set_ylim(0)
    axes[0].figure.savefig(results.out / f"{name}.png", dpi=130)
    return [f"![{text}]({name}.png)", ""]


def threshold(results, name):
    """AUC and share removed against the threshold of the hard mask: validation, a line a seed."""
    runs, x = results.runs["full"], "threshold on feasibility"
    axes = panels((x, "validation AUC (%), exact"), (x, "compositions removed (%)"))
    for i, metrics in reversed(list(enumerate(runs))):
        curve, look = metrics["threshold_curve"], dict(alpha=.35, linewidth=1) if i else dict(linewidth=2)
        axes[0].plot(curve["threshold"], 100 * np.array(curve["auc"], float), color=RED, **look)
        axes[1].plot(curve["threshold"], 100 * np.array(curve["removed"]), color=GREEN, **look)
    axes[0].axhline(100 * runs[0]["validation"]["open"]["exact"]["auc"], color=BLACK, linestyle=":", label="no mask")
    for ax in axes:
        ax.axvline(runs[0]["threshold"], color=BLUE, linestyle="--", label="threshold chosen")
    removed = [1 - sizes["open_masked"] / sizes["open"] for sizes in (run["candidates"]["val"] for run in runs)]
    cells = {"threshold": cell(runs, "threshold"), "removed": cell(removed)}
    return picture(results, axes, name, "AUC and share of compositions removed against the threshold") + [
        f"CompCos, the first seed bold. The chosen threshold, {show(cells['threshold'], 2, 1)}, removes "
        f"{show(cells['removed'])} % of all compositions.", ""], cells


def curves(results, name):
    """Seen against unseen accuracy as the bias grows: test, open world, first seed."""
    axes, rows = panels([f"accuracy on {half} compositions (%)" for half in ("unseen", "seen")]), TABLES["open"]
    cells = {label: results.runs[run][0]["test"][setting]["exact"]["auc"] for label, (run, setting) in rows.items()}
    for label in sorted(LOOKS, key=cells.get, reverse=True):
        (run, setting), (colour, style) = rows[label], LOOKS[label]
        with np.load(results.runs[run][0]["folder"] / "curves.npz") as file:
            axes[0].plot(100 * file[f"{setting}_unseen"], 100 * file[f"{setting}_seen"], style, color=colour,
                         label=f"{label}: {100 * cells[label]:.1f}")
    axes[0].set_xlim(0)
    return picture(results, axes, name, "accuracy on seen against unseen compositions of each method",
                   title="AUC (%), exact", loc="outside right center", ncols=1), cells


def training(results, name):
    """Loss and validation AUC by epoch, first seed; when the best epoch was."""
    x, cells = "epochs passed (%)", {}
    axes = panels((x, "training loss / that of the first epoch"), (x, "validation AUC (%), exact"))
    for label, run in METHODS.items():
        runs, log, (colour, style) = results.runs[run], results.runs[run][0]["log"], LOOKS[label]
        share, best = 100 * log["epoch"] / len(log["epoch"]), [runs[0]["best_epoch"] - 1]
        axes[0].plot(share, log["loss"] / log["loss"][0], style, color=colour, label=label)
        axes[1].plot(share, 100 * log["validation"], style, color=colour, marker="o", markevery=best)
        cells[label] = {"epochs": cell(runs, "settings", "epochs"), "best_epoch": cell(runs, "best_epoch"),
                        "seconds": cell(runs, "seconds")}
    return picture(results, axes, name, "training loss and validation AUC by epoch") + [
        "First seed; dot: best epoch. The losses are of different kinds, so each is relative to its first epoch. "
        "CompCos is validated in the open world, where AUC is lower, the others in the closed one.", "",
        *grid(["", "epochs", "best epoch", "seconds"], (
            [label, *(show(value, 0, 1) for value in row.values())] for label, row in cells.items()))], cells


def qualitative(results, name):
    """Whom distractors mislead: shares of all test images, and a contact sheet of the first seed, drawn by lot."""
    dataset, shares, random = results.dataset, [], np.random.default_rng(0)
    real = dataset.seen | experiment.occurring(dataset) if dataset.feasible is None else dataset.feasible
    for pair in reversed(list(zip(results.runs["closed"], results.runs["full"]))):
        tables = (csv.DictReader((held["folder"] / "predictions.csv").read_text("utf-8").splitlines()) for held in pair)
        rows = np.array([(a["image"], a["open"], b["open_masked"], a["truth"], b["open"]) for a, b in zip(*tables)])
        a, b = (rows[:, i] == rows[:, 3] for i in (1, 2))
        kinds = {"only the full model is right": b & ~a, "both are wrong": ~a & ~b,
                 "only the closed model is right": a & ~b, "both are right": a & b}
        impossible = {f"impossible answers of the {who}": ~np.isin(rows[:, i], results.names[real.ravel()])
                      for who, i in (("closed model", 1), ("full model", 4), ("full model with mask", 2))}
        shares.append({kind: which.mean() for kind, which in (kinds | impossible).items()})
    cells = {kind: cell(shares, kind) for kind in shares[0]}
    lines = grid(["test images (full model: with mask)", "%"], ([kind, show(cells[kind])] for kind in cells))
    images = dataset.folder / "images"
    if not all((images / image).exists() for image in dataset.images["test"]):
        return [*lines, f"The picture is left out: {dataset.name} has no images here, only features.", ""], cells
    contact_sheet(results.out / f"{name}.png", images, {
        kind: random.permutation(rows[kinds[kind], :4])[:10] for kind in list(kinds)[:2]})
    return lines + [f"![test images with both models' answers and the truth]({name}.png)", "",
                    "First seed, at the bias fixed on validation; drawn by lot. Wrong answers are red.", ""], cells


def contact_sheet(path, images, blocks, columns=5, side=150, width=190, line=22):
    """Draw {title: [(image, closed model's answer, full model's, truth)]} as one picture, `columns` images to a row."""
    heights, margin = [40 + -(-len(items) // columns) * (side + 4 * line) for items in blocks.values()], 62
    sheet, top = Image.new("RGB", (margin + columns * width, sum(heights)), "white"), 0
    write, font = ImageDraw.Draw(sheet).text, ImageFont.load_default
    for (title, items), height in zip(blocks.items(), heights):
        write((8, top + 10), title.capitalize() + ": no image" * (not len(items)), BLACK, font(20))
        for i, (image, *answers) in enumerate(items):
            x, y = margin + i % columns * width, top + 40 + i // columns * (side + 4 * line)
            with Image.open(images / image) as photo:
                size = [max(1, side * length // max(photo.size)) for length in photo.size]
                sheet.paste(photo.convert("RGB").resize(size), (x, y))
            for j, (who, answer) in enumerate(zip(("closed", "full", "truth"), answers)):
                colour = (BLUE, BLUE, BLACK)[j] if answer == answers[2] else RED
                fitting = font(16 * min(1, (width - 8) / max(font(16).getlength(answer), 1)))
                write((x, y + side + 3 + j * line), answer, colour, fitting)
                if i % columns == 0:
                    write((6, y + side + 3 + j * line), who, BLACK, font(15))
        top += height
    with common.writing(path, "wb") as file:
        sheet.save(file, "PNG")


# A section is a function(results, name) -> (Markdown lines, cells for report.json). results: `out`, `dataset`, `names`
# (S*O,) of its compositions, `validation` (features (N, F), targets (N,)), `runs`, `paper` (its figures on it).
EVERY = list(METHODS.values())
SECTIONS = {  # name -> (function, title, the runs it needs besides `full`)
    "table1": (table1, "Table 1, expanded: all methods in both worlds", EVERY),
    "curves": (curves, "Seen against unseen accuracy (test, open world, first seed)", EVERY),
    "margins": (ablation, "Effect of the margins (validation, open world, no mask)", ["closed", "alpha0", "constant"]),
    "primitives": (ablation, "Effect of the primitives (validation, open world, no mask)", ["state", "object", "max"]),
    "masking": (ablation, "Effect of the hard mask (validation, open world)", EVERY),
    "strategies": (strategies, "Other masks (validation, open world)", ["closed"]),
    "threshold": (threshold, "AUC against the threshold of the hard mask (validation)", []),
    "feasibility": (feasibility, "The most and least feasible unseen compositions (first seed)", []),
    "qualitative": (qualitative, "Who is misled (test, open world)", ["closed"]),
    "training": (training, "Training", EVERY),
}
ABOUT = """{warning}Made by `python reproduce.py {command}` on {hardware}, with {versions}.
{count} runs were trained in {duration}.

Data: {dataset}, {states} states, {objects} objects, {seen} seen compositions, images: {images}. Features: {backbone}.
Word vectors (CompCos): {vectors}. Candidates (validation and test; masked: by CompCos, first seed): {sizes}.

Numbers are percent, mean ± standard deviation over {seeds} seed(s). Protocols: *exact* tries every bias on the unseen
compositions, *published* the about 20 of the field's evaluator. S, U, HM: best accuracy on seen and on unseen
compositions, best harmonic mean over the biases; AUC: area under the curve of the first two. Sta., Obj.: accuracy of
state and object of the predicted composition at bias 0 (among the unseen alone: in report.json).

Selection: the epoch with the best validation AUC (exact), of CompCos in the open world, of all else in the closed one;
the mask's threshold: the best of 50 by validation AUC. CompCos closed and CompCos mask by their own feasibility, the
others by that of CompCos with the same seed. The paper's CompCos of the open world is the row with *mask*.
"""


def about(results, argv, settings, options):
    """What was run, how it was chosen and what the numbers mean: Markdown."""
    runs, names = sum(results.runs.values(), []), ("python", "torch", "numpy", "pillow")
    versions = {", ".join(f"{name} {run['versions'][name]}" for name in names) for run in runs}
    held = results.runs["full"][0]["candidates"]
    sizes = (f"{world} {held['val'][world]:,} and {held['test'][world]:,}" for world in experiment.CANDIDATE_SETS)
    return ABOUT.format(**settings | dict(
        warning="**Quick form of 3 epochs: the numbers mean nothing.**\n\n" * options.quick, command=shlex.join(argv),
        hardware="; ".join(sorted({run["hardware"] for run in runs})), versions="; ".join(sorted(versions)),
        sizes="; ".join(sizes), count=len(runs), duration=common.duration(sum(run["seconds"] for run in runs)),
        images=", ".join(f"{count:,} {phase}" for phase, count in settings["images"].items()),
        seeds=len(options.seeds), vectors=", ".join(settings["vectors"])))


def findings(results, cells):
    """Sentences on the paper's claims, each from the numbers of the sections made."""
    tables = cells.get("table1", {}) | {"masking": cells.get("masking", {})}
    auc = {name: {label: row["exact"]["AUC"] for label, row in rows.items()} for name, rows in tables.items()}
    if "table1" in cells:
        means = {world: {label: auc[world][label]["mean"] for label in METHODS} for world in ("closed", "open")}
        falls = {label: 1 - means["open"][label] / max(means["closed"][label], 1e-9) for label in METHODS}
        least, most = (f"{100 * end(falls.values()):.0f} % ({end(falls, key=falls.get)})" for end in (min, max))
        yield (f"Does every method drop in the open world? {sum(fall > 0 for fall in falls.values())} of {len(falls)} "
               f"lose test AUC, from {least} to {most} of that in the closed world.")
        for world, ours in ("closed", "CompCos closed"), ("open", "CompCos"), ("open", "CompCos, mask"):
            best, rival = max((mean, label) for label, mean in means[world].items() if "CompCos" not in label)
            leads = "Yes" if auc[world][ours]["mean"] > best else "No"
            yield (f"Does {ours} lead in the {world} world? {leads}: test AUC {show(auc[world][ours], 2)} against "
                   f"{show(auc[world][rival], 2)} of {rival}, the best other system.")
    if "masking" in cells:
        means = {label: 100 * row["mean"] for label, row in auc["masking"].items()}
        gains = {label: means[f"{label}, mask"] - means[label] for label in METHODS}
        order = sorted(gains, key=gains.get, reverse=True)
        yield f"Who gains most from the mask? Validation AUC: {', '.join(f'{x} {gains[x]:+.2f}' for x in order)}."
    if "training" in cells:
        late = [label for label, row in cells["training"].items()
                if row["best_epoch"]["mean"] > .9 * row["epochs"]["mean"]]
        yield f"Whose best epoch is in the last tenth, so that longer training may help? {', '.join(late) or 'None'}."
    if "tmn" in results.runs:
        yield f"TMN had {results.runs['tmn'][0]['settings']['negatives']} negatives an image (published: 600)."


@common.command
def main(argv=None):
    """Train what is missing and write the report."""
    own = argparse.ArgumentParser(
        allow_abbrev=False, description="The paper's tables and figures: trains what is missing and writes a report.",
        epilog="Options of compcos.py on data and training (--dataset, --data-root, --vectors, ...) go to all runs.")
    add = own.add_argument
    add("--seeds", "--seed", type=int, nargs="+", default=[0, 1, 2], metavar="K", help="default 0 1 2")
    add("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME", help=", ".join(SECTIONS))
    add("--out", type=Path, metavar="DIR", help="default runs/reproduce-DATASET")
    add("--quick", action="store_true", help="3 epochs a run: all is there, nothing means anything")
    for name in ("compcos", *baselines.MODELS):
        add(f"--{name}", default="", metavar="'OPTIONS'", help="for its runs alone, as '--epochs 100'")
    argv = [str(word) for word in (sys.argv[1:] if argv is None else argv)]
    options, shared = own.parse_known_args(argv)
    parser = argparse.ArgumentParser("reproduce.py", allow_abbrev=False)
    experiment.add_options(parser)
    if {"curves", "threshold", "training"} & set(options.only):
        panels(("", ""))  # says now, and not after the training, if matplotlib is missing
    dataset, features, *_, device, settings = experiment.prepare(parser.parse_args(shared), "compcos", compcos.DEFAULTS)
    settings = {key: value for key, value in settings.items() if key not in ("model", "world", "device")}
    out = options.out or Path("runs", f"reproduce-{dataset.name}")
    needed = {"full"}.union(*(SECTIONS[name][2] for name in options.only))
    runs = train_missing([name for name in RUNS if name in needed], options, shared, settings, out)
    results = SimpleNamespace(
        out=out, dataset=dataset, runs=runs,
        names=np.array([f"{state} {name}" for state in dataset.states for name in dataset.objects]),
        validation=(torch.as_tensor(features["val"], device=device), dataset.targets["val"]),
        paper=read_json(HERE / "results/paper/tables.json").get(dataset.name, {}))
    body, cells = [], {}
    for name in (name for name in SECTIONS if name in options.only):
        lines, cells[name] = SECTIONS[name][0](results, name)
        body += [f"## {SECTIONS[name][1]}", "", *lines]
    head = [f"# The paper's tables and figures on {dataset.name}", "", about(results, argv, settings, options),
            "## Findings", "", *(f"- {sentence}" for sentence in findings(results, cells)), ""]
    with common.writing(out / "report.md") as file:
        file.write("\n".join(head + body))
    report = dict(command=argv, settings=settings, seeds=options.seeds, quick=options.quick, **cells)
    experiment.write_json(out / "report.json", report)
    print(f"written to {out / 'report.md'}")


if __name__ == "__main__":
    main()
