"""The paper's tables and figures from one command: trains what is missing, writes report.md, report.json and pictures.

    python reproduce.py --dataset shapes --seeds 0 1 2 --out results/shapes

Runs lie in OUT/runs/NAME/seedK: a finished one is used again, an interrupted one goes on, one with other settings starts
anew. S states, O objects, C = S*O compositions, (s, o) at s * O + o. Fractions in report.json, percent in report.md.
"""

import argparse
import csv
import json
import platform
import shlex
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

import baselines
import common
import compcos
import data
import experiment
from feasibility import agreement, median_mask, ranked
from train import sweep

HERE = Path(__file__).parent
PROTOCOLS = ("published", "exact")
METHODS = {"AoP": "aop", "LE+": "leplus", "TMN": "tmn", "SymNet": "symnet", "CompCos closed": "closed", "CompCos": "full"}
RUNS = {  # options of each run; `full` is first, since its feasibility masks the baselines
    "full": ["--world", "open"], "closed": ["--world", "closed"],
    "alpha0": ["--world", "open", "--margin", "0"], "constant": ["--world", "open", "--warmup", "0"],
    **{mix: ["--world", "open", "--mix", mix] for mix in ("state", "object", "max")},
    **{name: ["--world", "closed", "--model", name] for name in baselines.MODELS},
}
TABLES = {  # label -> (run, candidate set); the labels are those of testdata/paper_tables.json
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
UNSEEN_ONLY = {f"{name} unseen only": f"{key}_unseen_only" for name, key in PRIMITIVES.items()}
BLUE, GREEN, RED, BLACK = "#0072B2", "#009E73", "#D55E00", "#000000"  # Okabe and Ito's, which the colour-blind tell apart
LOOKS = {"AoP": ("#E69F00", "-."), "LE+": ("#56B4E9", "--"), "TMN": (GREEN, ":"), "SymNet": ("#CC79A7", "--"),
         "CompCos closed": (RED, "-"), "CompCos": (BLUE, "-"), "CompCos, mask": (BLACK, "--")}
KINDS = {"only the full model is right": (False, True), "both are wrong": (False, False),  # (closed, full) right?
         "only the closed model is right": (True, False), "both are right": (True, True)}


class Results(NamedTuple):
    """What the sections draw from."""

    out: Path
    dataset: data.Dataset
    validation: tuple  # features (N, F) on the device, targets (N,)
    metrics: dict  # run -> [metrics.json of each seed]
    folders: dict  # run -> [its folder of each seed]
    paper: dict  # the paper's figures on this dataset, if it has any


# ---- runs ----


def train_missing(names, options, shared, settings, out):
    """Do the runs that are not done: ({run: [metrics of each seed]}, {run: [folder of each seed]}).

    shared: the options of all runs; settings: what they mean, by which runs on other data are told apart.
    """
    metrics, folders = {name: [] for name in names}, {name: [] for name in names}
    for i, (name, seed) in enumerate((name, seed) for name in names for seed in options.seeds):
        folder, baseline = out / "runs" / name / f"seed{seed}", name in baselines.MODELS
        own = [*shlex.split(getattr(options, name if baseline else "compcos")), *RUNS[name]]
        if options.quick:
            own += ["--epochs", "3", *["--width", "16"] * (name == "tmn")]
        defaults = baselines.DEFAULTS[name] if baseline else compcos.DEFAULTS
        key = dict(options=own, defaults=defaults.get(settings["dataset"], defaults["other"]), settings=settings,
                   mask=options.compcos)
        paths = ["--seed", str(seed), "--out", str(folder)]
        if baseline:
            paths += ["--feasibility", str(out / "runs/full" / f"seed{seed}" / "best.pt")]
        command = baselines.main if baseline else compcos.main
        done = run_once(command, [*shared, *own, *paths], folder, json.loads(json.dumps(key)))
        print(f"run {i + 1} of {len(names) * len(options.seeds)}: {name}, seed {seed}: {done}", flush=True)
        metrics[name].append(read_json(folder / "metrics.json"))
        folders[name].append(folder)
    return metrics, folders


def run_once(command, argv, folder, key):
    """One run, unless its results with the same `key` are there; says what was done."""
    note, finished = folder / "run.json", folder / "metrics.json"
    held = read_json(note) if note.exists() else dict(key=None)
    same = held["key"] == key
    if same and finished.exists():
        return "kept"
    folder.mkdir(parents=True, exist_ok=True)
    finished.unlink(missing_ok=True)
    held = dict(key=key, hardware=hardware(), seconds=held["seconds"] if same else 0)
    experiment.write_json(note, held)
    start = time.monotonic()
    try:
        with open(folder / "output.txt", "w", encoding="utf-8") as file, redirect_stdout(file):
            command(argv + ["--resume"] * same)
    except SystemExit:
        print("what is done is kept: the same reproduce.py command goes on from here", file=sys.stderr)
        raise
    finally:
        held["seconds"] += time.monotonic() - start
        experiment.write_json(note, held)
    return f"took {common.duration(held['seconds'])}"


def hardware():
    """The processor's name, and the GPU's if there is one."""
    name, information = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text(encoding="utf-8").splitlines()
        name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), name)
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{name}, {torch.get_num_threads()} threads{gpu}"


def read_json(path):
    """What a JSON file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


# ---- numbers and tables ----


def cell(runs, *path):
    """Mean and standard deviation over the metrics of a run's seeds, of the number at a path of keys."""
    values = []
    for value in runs:
        for key in path:
            value = value[key]
        values.append(np.nan if value is None else value)
    return dict(mean=float(np.mean(values)), std=float(np.std(values)), seeds=len(values))


def show(cell, digits=1, scale=100):
    """A cell as people read it, in percent."""
    deviation = f" ± {scale * cell['std']:.{digits}f}" if cell["seeds"] > 1 else ""
    return f"{scale * cell['mean']:.{digits}f}{deviation}"


def grid(head, rows):
    """Lines of a Markdown table."""
    return ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)] + [""]


def accuracy_table(rows, columns, paper, hidden={}):
    """(Markdown lines, cells) of rows {label: [{protocol: report} of each seed]}, a line a protocol.

    paper: label -> percents, set beside ours, with the difference (published protocol). hidden columns are only in the cells.
    """
    lines, cells = [], {}
    for label, reports in rows.items():
        own = cells[label] = {protocol: {name: cell(reports, protocol, key) for name, key in (columns | hidden).items()}
                              for protocol in PROTOCOLS}
        lines += [[label, protocol, *(show(own[protocol][name], 2 if name == "AUC" else 1) for name in columns)]
                  for protocol in PROTOCOLS]
        if label in paper:
            own["paper"] = {name: percent / 100 for name, percent in zip(columns, paper[label])}
            own["difference"] = {name: own["published"][name]["mean"] - own["paper"][name] for name in columns}
            lines += [["", "the paper", *paper[label]],
                      ["", "ours − paper", *(f"{100 * value:+.1f}" for value in own["difference"].values())]]
    return grid(["", "protocol", *columns], lines), cells


def chosen_rows(results, name, phase):
    """The rows of a table of TABLES."""
    return {label: [metrics[phase][setting] for metrics in results.metrics[run]]
            for label, (run, setting) in TABLES[name].items()}


def table1(results, _):
    """Test accuracies of all methods in both worlds; in the open one also with the hard mask, CompCos's predictor there."""
    lines, cells = [], {}
    for world in ("closed", "open"):
        table, cells[world] = accuracy_table(chosen_rows(results, world, "test"), PRIMITIVES | COLUMNS,
                                             results.paper.get(world, {}), UNSEEN_ONLY)
        lines += [f"**{world.capitalize()} world** (test, %)", "", *table]
    return lines, cells


def ablation(results, name):
    """A table of TABLES on validation."""
    return accuracy_table(chosen_rows(results, name, "validation"), COLUMNS, results.paper.get(name, {}))


def strategies(results, name):
    """The appendix's masks on the closed and the full model: validation, open world."""
    rows = {}
    for label, run in (("CompCos closed", "closed"), ("CompCos", "full")):
        halves = {"median": [], "inverse median": []}
        for folder in results.folders[run]:
            model = compcos.CompCos.load(folder / "best.pt", results.validation[0].device)
            rho, seen = model.checkpoint["feasibility"].numpy(), results.dataset.seen
            masks = {half: median_mask(rho, seen, inverse=half != "median").ravel() for half in halves}
            for half, (swept, _) in sweep(model, *results.validation, seen, masks).items():
                halves[half].append(experiment.both_protocols(swept))
        none, best = ([metrics["validation"][world] for metrics in results.metrics[run]] for world in ("open", "open_masked"))
        rows |= {f"{label}, {mask}": reports for mask, reports in {"no mask": none, **halves, "best": best}.items()}
    return accuracy_table(rows, COLUMNS, results.paper.get(name, {}))


def feasibility(results, _):
    """The paper's ranked tables from the first seed, and how the scores of all seeds fit what is known."""
    rhos = [compcos.CompCos.load(folder / "best.pt").checkpoint["feasibility"].numpy() for folder in results.folders["full"]]
    dataset, rho, runs, random = results.dataset, rhos[0], results.metrics["full"], np.random.default_rng(0)
    pairs, ranking = names_of(dataset, np.ones_like(dataset.seen)), ranked(rho, dataset.seen, top=5)
    cells = {"overall": [[[pairs[c], float(rho.flat[c])] for c in end] for end in ranking.overall]}
    columns = ([f"{pair} {value:.2f}" for pair, value in end] for end in cells["overall"])
    lines = grid(["the five most feasible", "the five least feasible"], zip(*columns))
    paper = read_json(HERE / "testdata/feasibility_tables.json") if "overall" in results.paper else {}
    for kind, names, partners, ends, scores in (("objects", dataset.objects, dataset.states, ranking.objects, rho.T),
                                                ("states", dataset.states, dataset.objects, ranking.states, rho)):
        chosen = [*results.paper.get(kind, {}), *paper[kind]] if paper else sorted(random.permutation(names)[:25].tolist())
        cells[kind] = {name: [[[partners[k], float(scores[i, k])] for k in end[:3]] for end in ends[i]]
                       for i, name in ((names.index(name), name) for name in chosen)}
        lines += grid([kind[:-1], "most feasible", "least feasible"],
                      ([name, *(", ".join(f"{partner} {value:.2f}" for partner, value in end) for end in row)]
                       for name, row in cells[kind].items()))
    cells["AUROC"] = cell(runs, "feasibility_auroc")
    lines += [f"The unseen compositions {runs[0]['truth']} rank above the other unseen ones with AUROC "
              f"{show(cells['AUROC'], 3, 1)} (0.5: chance).", ""]
    if paper:
        shared = [agreement(scores, dataset.seen, dataset.states, dataset.objects, tables=paper) for scores in rhos]
        cells["shared"] = {figure: cell(shared, figure) for figure in shared[0]}
        lines += grid(["entries shared with the paper's tables", "number"],
                      ([figure, show(value, 1, 1)] for figure, value in cells["shared"].items()))
    return lines, cells


def names_of(dataset, mask):
    """The names of the compositions of a mask (S, O)."""
    return [f"{dataset.states[s]} {dataset.objects[o]}" for s, o in np.argwhere(mask)]


# ---- pictures ----


def panels(count, width, height):
    """`count` axes in a new figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("the figures need matplotlib: pip install matplotlib") from None
    axes = Figure(figsize=(width, height), layout="constrained").subplots(1, count, squeeze=False)[0]
    for ax in axes:
        ax.grid(alpha=.25)
        ax.spines[["top", "right"]].set_visible(False)
    return axes


def picture(results, axes, name, text):
    """Save the figure that holds `axes`; the Markdown lines that show it."""
    axes.figure.savefig(results.out / f"{name}.png", dpi=130)
    return [f"![{text}]({name}.png)", ""]


def threshold(results, name):
    """AUC and share removed against the threshold of the hard mask: validation, a line a seed."""
    runs, (left, right) = results.metrics["full"], panels(2, 8, 3.6)
    for i, metrics in reversed(list(enumerate(runs))):
        curve, look = metrics["threshold_curve"], dict(alpha=.35, linewidth=1) if i else dict(linewidth=2)
        left.plot(curve["threshold"], 100 * np.array(curve["auc"], float), color=RED, **look)
        right.plot(curve["threshold"], 100 * np.array(curve["removed"]), color=GREEN, **look)
    left.axhline(100 * runs[0]["validation"]["open"]["exact"]["auc"], color=BLACK, linestyle=":", label="no mask")
    for ax, label in (left, "validation AUC (%), exact"), (right, "compositions removed (%)"):
        ax.axvline(runs[0]["threshold"], color=BLUE, linestyle="--", label="threshold chosen")
        ax.set(xlabel="threshold on feasibility", ylabel=label, ylim=(0, None))
    left.legend(loc="lower left")
    shares = [{"removed": 1 - sizes["open_masked"] / sizes["open"]} for sizes in (run["candidates"]["val"] for run in runs)]
    cells = {"threshold": cell(runs, "threshold"), "removed": cell(shares, "removed"),
             **{world: cell(runs, "validation", world, "exact", "auc") for world in ("open", "open_masked")}}
    return picture(results, left, name, "AUC and share of compositions removed against the threshold") + [
        f"CompCos; bold: the first seed. The chosen threshold is {show(cells['threshold'], 2, 1)}; it removes "
        f"{show(cells['removed'])} % of all compositions and brings validation AUC from {show(cells['open'], 2)} to "
        f"{show(cells['open_masked'], 2)} %.", ""], cells


def curves(results, name):
    """Seen against unseen accuracy as the bias grows: test, open world, first seed."""
    (ax,), cells = panels(1, 6.5, 4.8), {}
    rows = {label: row for label, row in TABLES["open"].items() if label in LOOKS}
    for label, (run, setting) in rows.items():
        cells[label] = results.metrics[run][0]["test"][setting]["exact"]["auc"]
    for label in sorted(cells, key=cells.get, reverse=True):
        (run, setting), (colour, style) = rows[label], LOOKS[label]
        with np.load(results.folders[run][0] / "curves.npz") as file:
            ax.plot(100 * file[f"{setting}_unseen"], 100 * file[f"{setting}_seen"], style, color=colour, linewidth=1.8,
                    label=f"{label}: {100 * cells[label]:.1f}")
    ax.set(xlabel="accuracy on unseen compositions (%)", ylabel="accuracy on seen compositions (%)", xlim=0, ylim=0)
    ax.legend(title="AUC (%), exact")
    return picture(results, ax, name, "accuracy on seen against unseen compositions of each method"), cells


def training(results, name):
    """Loss and validation AUC by epoch, first seed; when the best epoch was."""
    (left, right), cells = panels(2, 8, 4), {}
    for label, run in METHODS.items():
        with open(results.folders[run][0] / "log.csv", newline="") as file:
            log = {key: np.array(column, float) for key, *column in zip(*csv.reader(file))}
        runs, (colour, style) = results.metrics[run], LOOKS[label]
        best = runs[0]["best_epoch"] - 1
        left.plot(log["epoch"], log["loss"] / log["loss"][0], style, color=colour, label=label)
        right.plot(log["epoch"], 100 * log["validation"], style, color=colour)
        right.plot(log["epoch"][best], 100 * log["validation"][best], "o", color=colour)
        cells[label] = {"epochs": len(log["epoch"]), "best epoch": cell(runs, "best_epoch"),
                        "seconds": cell([read_json(folder / "run.json") for folder in results.folders[run]], "seconds")}
    left.set(xlabel="epoch", ylabel="training loss / that of the first epoch", xscale="log", ylim=0)
    right.set(xlabel="epoch", ylabel="validation AUC (%), exact", xscale="log", ylim=0)
    left.figure.legend(loc="outside lower center", ncols=3)
    return picture(results, left, name, "training loss and validation AUC by epoch") + [
        "First seed; dot: best epoch. The losses are of different kinds, so each is relative to its first epoch. CompCos "
        "is validated in the open world, where AUC is lower, the others in the closed one.", "",
        *grid(["", "epochs", "best epoch", "seconds"], (
            [label, row["epochs"], show(row["best epoch"], 0, 1), show(row["seconds"], 0, 1)] for label, row in cells.items()))], cells


def qualitative(results, name):
    """Whom distractors mislead: shares of all test images, and a contact sheet of the first seed, drawn by lot."""
    dataset, shares, drawn = results.dataset, [], []
    known = set(names_of(dataset, dataset.seen | experiment.occurring(dataset) if dataset.feasible is None else dataset.feasible))
    for folders in zip(results.folders["closed"], results.folders["full"]):
        closed, full = (list(csv.DictReader((folder / "predictions.csv").open(encoding="utf-8", newline=""))) for folder in folders)
        rows = [(a["image"], a["open"], b["open_masked"], a["truth"]) for a, b in zip(closed, full)]
        kinds = [(row[1] == row[3], row[2] == row[3]) for row in rows]
        shares.append({kind: kinds.count(right) / len(rows) for kind, right in KINDS.items()} | {
            f"{who} answers what is not possible": np.mean([row[i] not in known for row in rows])
            for i, who in ((1, "the closed model"), (2, "the full model"))})
        drawn = drawn or [(kind, [row for row, right in zip(rows, kinds) if right == KINDS[kind]]) for kind in list(KINDS)[:2]]
    cells = {kind: cell(shares, kind) for kind in shares[0]}
    lines = grid(["test images (full model: with its mask)", "%"], ([kind, show(share)] for kind, share in cells.items()))
    images, random = dataset.folder / "images", np.random.default_rng(0)
    if not all((images / image).exists() for image in dataset.images["test"]):
        return lines + [f"The picture of examples is left out: {dataset.name} has no images here, only features.", ""], cells
    contact_sheet(results.out / f"{name}.png", [(kind, [rows[i] for i in random.permutation(len(rows))[:10]])
                                                for kind, rows in drawn], images)
    return lines + [f"![test images with both models' answers and the truth]({name}.png)", "",
                    "First seed, at the bias fixed on validation; drawn by lot. Wrong answers are red, right ones blue.", ""], cells


def contact_sheet(path, blocks, images, columns=5, side=150, width=190, line=22):
    """Draw blocks (title, [(image, closed model's answer, full model's, truth)]) as one picture, `columns` to a row."""
    heights, margin = [40 + -(-len(items) // columns) * (side + 3 * line + 14) for _, items in blocks], 62
    sheet = Image.new("RGB", (margin + columns * width, sum(heights)), "white")
    draw, top = ImageDraw.Draw(sheet), 0
    for (title, items), height in zip(blocks, heights):
        draw.text((8, top + 10), title.capitalize() if items else f"{title.capitalize()}: no such image", BLACK, ImageFont.load_default(20))
        for i, (image, *answers) in enumerate(items):
            x, y = margin + i % columns * width, top + 40 + i // columns * (side + 3 * line + 14)
            with Image.open(images / image) as opened:
                photo = opened.convert("RGB")
            scale = side / max(photo.size)
            sheet.paste(photo.resize([max(1, round(size * scale)) for size in photo.size], Image.Resampling.LANCZOS), (x, y))
            for j, (who, answer, colour) in enumerate(zip(("closed", "full", "truth"), answers, (BLUE, BLUE, BLACK))):
                font = ImageFont.load_default(16)
                font = ImageFont.load_default(min(16, 16 * (width - 8) / max(font.getlength(answer), 1)))
                draw.text((x, y + side + 3 + j * line), answer, colour if answer == answers[2] else RED, font)
                if i % columns == 0:
                    draw.text((6, y + side + 3 + j * line), who, BLACK, ImageFont.load_default(15))
        top += height
    with common.writing(path, "wb") as file:
        sheet.save(file, "PNG")


# ---- the report ----

EVERY = list(METHODS.values())
SECTIONS = {  # name -> (function, title, the runs it needs)
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


def findings(results, cells):
    """Sentences on the paper's claims, each from the numbers of the sections made."""
    def aucs(table):
        return {label: row["exact"]["AUC"] for label, row in table.items()}

    if "table1" in cells:
        closed, opened = (aucs(cells["table1"][world]) for world in ("closed", "open"))
        falls = {label: 1 - opened[label]["mean"] / max(closed[label]["mean"], 1e-9) for label in METHODS}
        least, most = (f"{end(falls, key=falls.get)} {100 * end(falls.values()):.0f} %" for end in (min, max))
        yield (f"Does every method drop in the open world? {sum(fall > 0 for fall in falls.values())} of {len(falls)} lose test "
               f"AUC; the smallest loss is that of {least} of its closed-world AUC, the greatest that of {most}.")
        for world, ours in (closed, "CompCos closed"), (opened, "CompCos"), (opened, "CompCos, mask"):
            rival = max((label for label in METHODS if "CompCos" not in label), key=lambda label: world[label]["mean"])
            gap = world[ours]["mean"] - world[rival]["mean"]
            clear = "more" if abs(gap) > world[ours]["std"] + world[rival]["std"] else "not more"
            yield (f"Does {ours} lead in the {'closed' if world is closed else 'open'} world? {'Yes' if gap > 0 else 'No'}: test "
                   f"AUC {show(world[ours], 2)} against {show(world[rival], 2)} of {rival}, the best of the other four systems; "
                   f"the gap is {clear} than both deviations together.")
    if "masking" in cells:
        auc = aucs(cells["masking"])
        gains = sorted(((auc[f"{label}, mask"]["mean"] - auc[label]["mean"], label) for label in METHODS), reverse=True)
        yield f"Who gains most from the mask? Validation AUC: {', '.join(f'{label} {100 * gain:+.2f}' for gain, label in gains)}."
    for section, question in dict(margins="Do the margins help?", primitives="Which g?", strategies="Which mask?").items():
        if section in cells:
            rows = ", ".join(f"{label} {show(auc, 2)}" for label, auc in aucs(cells[section]).items())
            yield f"{question} Validation AUC: {rows}."
    if "training" in cells:
        late = [label for label, row in cells["training"].items() if row["best epoch"]["mean"] > .9 * row["epochs"]]
        yield "Had validation AUC stopped rising? " + (
            f"Not of {', '.join(late)}: their best epoch is in the last tenth." if late else "Yes: no best epoch is in the last tenth.")
    if "tmn" in results.metrics:
        yield (f"TMN was trained with {results.metrics['tmn'][0]['settings']['negatives']} negatives an image (published: 600).")


ABOUT = """{warning}Made by `python reproduce.py {command}` on {hardware}, with {versions}; {count} runs that took {duration}.

Data: {dataset}, {states} states, {objects} objects, {seen} seen compositions, images: {images}. Features: {backbone}. Word
vectors (CompCos): {vectors}.

Numbers are percent, mean ± standard deviation over {seeds} seed(s). Two protocols: *exact* tries every bias on the unseen
compositions, *published* the about 20 of the field's evaluator, as papers do. S, U, HM: best accuracy on seen, on unseen
compositions, best harmonic mean over the biases; AUC: area under the curve of seen against unseen accuracy. Sta., Obj.:
accuracy of the state and of the object of the predicted composition at bias 0 (among the unseen alone: in report.json).

Selection: the epoch with the best validation AUC (exact), of CompCos in the open world, of CompCos closed and the four
other systems in the closed world; the mask's threshold is the best of 50 by validation AUC. CompCos closed and CompCos
mask by their own feasibility, the other systems by that of CompCos with the same seed. CompCos's predictor in the open
world is the paper's hard mask where a row says *mask*.
"""


def about(results, argv, settings, options):
    """What was run, how it was chosen and what the numbers mean: Markdown lines."""
    runs = [metrics for seeds in results.metrics.values() for metrics in seeds]
    notes = [read_json(folder / "run.json") for folders in results.folders.values() for folder in folders]
    versions = {", ".join(f"{name} {run['versions'][name]}" for name in ("python", "torch", "numpy", "pillow")) for run in runs}
    sizes = results.metrics["full"][0]["candidates"]
    labels = {"closed": "closed world: seen and the phase's own", "open": "open world: all",
              "open_masked": "open world, mask (CompCos, first seed)"}
    filled = dict(settings, warning="**Quick form of 3 epochs: the numbers mean nothing.**\n\n" * options.quick,
                  command=shlex.join(argv), hardware="; ".join(sorted({note["hardware"] for note in notes})), versions="; ".join(sorted(versions)),
                  count=len(runs), duration=common.duration(sum(note["seconds"] for note in notes)),
                  seeds=len(options.seeds), vectors=", ".join(settings["vectors"]),
                  images=", ".join(f"{count:,} {phase}" for phase, count in settings["images"].items()))
    return [ABOUT.format(**filled), *grid(["candidates", "validation", "test"], (
        [label, *(f"{sizes[phase][world]:,}" for phase in ("val", "test"))] for world, label in labels.items()))]


def own_options():
    """The parser of this command's own options; all others go to the runs."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="The paper's tables and figures: trains what is missing and writes a report.",
        epilog="Options of compcos.py on data and training (--dataset, --data-root, --vectors, --device ...) go to all runs.")
    parser.add_argument("--seeds", "--seed", type=int, nargs="+", default=[0, 1, 2], metavar="K", help="default 0 1 2")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--out", type=Path, metavar="DIR", help="default runs/reproduce-DATASET")
    parser.add_argument("--quick", action="store_true", help="3 epochs a run: all is there, nothing means anything")
    for name in ("compcos", *baselines.MODELS):
        parser.add_argument(f"--{name}", default="", metavar="OPTIONS", help=f"for its runs alone: --{name}='--epochs 100'")
    return parser


@common.command
def main(argv=None):
    """Train what is missing and write the report."""
    argv = [str(word) for word in (sys.argv[1:] if argv is None else argv)]
    options, shared = own_options().parse_known_args(argv)
    parser = argparse.ArgumentParser("reproduce.py", allow_abbrev=False)
    experiment.add_options(parser)
    dataset, features, _, _, device, settings = experiment.prepare(parser.parse_args(shared), "compcos", compcos.DEFAULTS)
    settings = {key: value for key, value in settings.items() if key not in ("model", "world", "device")}
    out, needed = options.out or Path("runs", f"reproduce-{dataset.name}"), {"full"}.union(*(SECTIONS[name][2] for name in options.only))
    metrics, folders = train_missing([name for name in RUNS if name in needed], options, shared, settings, out)
    validation = torch.as_tensor(features["val"], device=device), dataset.targets["val"]
    paper = read_json(HERE / "testdata/paper_tables.json").get(dataset.name, {})
    results, body, cells = Results(out, dataset, validation, metrics, folders, paper), [], {}
    for name, (function, title, _) in SECTIONS.items():
        if name in options.only:
            lines, cells[name] = function(results, name)
            body += [f"## {title}", "", *lines]
    head = [f"# The paper's tables and figures on {dataset.name}", "", *about(results, argv, settings, options),
            "## Findings", "", *(f"- {sentence}" for sentence in findings(results, cells)), ""]
    with common.writing(out / "report.md") as file:
        file.write("\n".join(head + body))
    experiment.write_json(out / "report.json", dict(command=argv, settings=settings, seeds=options.seeds, quick=options.quick, **cells))
    print(f"written to {out / 'report.md'}")


if __name__ == "__main__":
    main()
