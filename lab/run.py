"""One experiment: train, choose τ and biases on validation, test in three candidate sets, write.

It has no command line: `python compcos.py` and `python baselines.py` run experiments.

Shapes: N images, F features, S states, O objects, C = S*O compositions, (s, o) at s * O + o.
Fractions in files, percent in print.
"""

import itertools
import math
import platform
import shlex
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
import torch

from lab import shell
from lab.files import (check_writable, load_tensors, lock, read_json, read_rows, reading, write_json,
                       write_rows, writing)
import data
from lab import drawings
from lab import features as image_features
from lab import words
from evaluate import PROTOCOLS, accuracy_at, threshold_sweep
from feasibility import auroc, conformal_threshold, hard_mask, write_csv
from train import (check_model, check_settings, chunks, fit, fit_temperature, index_pairs,
                   selection, sweep)

RUNS = Path("runs")  # where the results go without --out
RUN_FILES = ("last.pt", "log.csv", "best.pt", "metrics.json")  # where one is, a folder is taken
FITTED = ("epochs", "batch_size", "lr", "weight_decay", "seed", "average", "patience",
          "min_epoch_steps")  # the settings that `fit` takes, where a recipe has them
FEW_COMPOSITIONS = 20    # below so many unseen compositions a figure rests on little
CALIBRATION = 1 << 24    # scores of validation that a temperature is fitted to


# ---- candidates ----


def candidate_sets(seen, listed, feasibility, threshold, named=None):
    """The compositions that may be answered, name -> (C,) bool: a further set is an entry here.

    closed: those `listed` (C,), training's and the phase's own; open: all; open_masked: seen (S, O)
    or ρ >= τ (Eq. 6), of feasibility (S, O) and threshold τ. `named` (C,), of a prediction, is
    never hidden by the mask.
    """
    masked = hard_mask(feasibility, seen, threshold).ravel()
    if named is not None:
        masked = masked | named
    return dict(closed=listed, open=np.ones(seen.size, bool), open_masked=masked)


# Their names in order, as one composition tells them.
CANDIDATE_SETS = tuple(candidate_sets(np.ones((1, 1), bool), np.ones(1, bool), np.ones((1, 1)), 0))


def unseen_shown(target, seen):
    """The unseen compositions that targets (N,) show, ascending indices."""
    shown = np.unique(target)
    return shown[~seen.ravel()[shown]]


# ---- the threshold of the hard mask ----


@torch.no_grad()
def best_threshold(model, features, target, seen, rho, *, mask="paper"):
    """τ of the hard mask (Eq. 6): of 50 over the range of unseen ρ, by validation AUC (exact).

    mask: "paper", by its rule, or "justified", in which τ is at most `conformal_threshold` and must
    gain more than a mask is expected to lose; -1, which hides nothing, where there is no such τ.
    Returns τ and the whole curve of `threshold_sweep`. Without images of both kinds nothing is
    masked.
    """
    thresholds = np.array([-1.0])
    if not seen.all():
        thresholds = np.linspace(rho[~seen].min(), rho[~seen].max(), 50)
    scored = chunks(model.eval(), features, model.compositions())
    blocks = ((scores.cpu().numpy(), target[part]) for part, scores in scored)
    curve = threshold_sweep(blocks, seen.ravel(), rho.ravel(), thresholds)
    auc = np.nan_to_num(curve["auc"])
    if mask == "justified":
        shown = unseen_shown(target, seen)
        auc = auc[thresholds <= conformal_threshold(rho.ravel()[shown])]  # those up to it
        # auc[0] is that of the least threshold, which hides nothing, and the best one must be ahead
        # of it in new data. A τ that hides r of the n unseen compositions shown is expected to hide
        # (r + 1) / (n + 1) of the next ones (see conformal_threshold). So of what validation left
        # in sight, 1 - r / n, the share (1 - (r + 1) / (n + 1)) / (1 - r / n) = n / (n + 1) =
        # 1 - 1 / (n + 1) remains, whatever r is.
        if not len(auc) or (1 - 1 / (len(shown) + 1)) * auc.max() <= auc[0]:
            return -1.0, curve
    return float(thresholds[np.argmax(auc)]), curve


# ---- probabilities ----


def calibrate(model, features, target, seen, candidates, bias):
    """The temperature T of each candidate set, name -> float: softmax((score + bias·[unseen]) / T)
    over the candidates is then an answer's probability.

    Validation images (N, F), their targets (N,); candidates: name -> (C,) bool; bias: name -> the
    bias on the unseen. Images whose truth is no candidate do not count.
    """
    temperatures = {}
    for name, scores, place in ranked_scores(model, features, target, seen, candidates, bias):
        is_candidate = place >= 0
        temperatures[name] = fit_temperature(scores[is_candidate], place[is_candidate])
    return temperatures


def certainty(model, features, target, seen, candidates, bias, temperature):
    """How far the probabilities of `calibrate` can be trusted: of each candidate set, name -> the
    mean `probability` of the answers to these images and the share that is `right`.

    Test images (N, F), their targets (N,); candidates, bias and temperature by name.
    """
    found = {}
    for name, scores, place in ranked_scores(model, features, target, seen, candidates, bias):
        probability, answer = (scores / temperature[name]).softmax(1).max(1)
        right = (answer == place).float()
        found[name] = dict(probability=float(probability.mean()), right=float(right.mean()))
    return found


@torch.no_grad()
def ranked_scores(model, features, target, seen, candidates, bias):
    """Yield of each candidate set its name, the scores (n, P) of its P candidates as they are
    ranked, with the bias on the unseen, and the truth's place (n,) among them, -1 where it is none.

    One number needs few images (N, F): of many every so-manyth is scored.
    """
    count = min(len(features), max(20, CALIBRATION // seen.size))
    chosen = np.linspace(0, len(features) - 1, count).astype(int)
    model.eval()
    blocks = chunks(model, features[torch.as_tensor(chosen)], model.compositions())
    scores = torch.cat([block for _, block in blocks])  # (n, C)
    for name, mask in candidates.items():
        columns = np.flatnonzero(mask)
        offset = torch.as_tensor(np.where(seen.ravel()[columns], 0.0, bias[name])).to(scores)
        place = np.where(mask, np.cumsum(mask) - 1, -1)[target[chosen]]
        ranked = scores[:, torch.as_tensor(columns)] + offset
        yield name, ranked, torch.as_tensor(place, device=scores.device)


# ---- measuring ----


def evaluate_run(model, arrays, dataset, rho, *, mask="paper"):
    """All that is reported of a trained model: (metrics.json's content, what `sweep` gives of the
    test, the test's candidates by name).

    arrays: phase -> (features (N, F) on the device, targets (N,)); rho (S, O) feasibility. τ and
    the fixed biases come from validation alone.
    """
    seen = dataset.seen
    threshold, threshold_curve = best_threshold(model, *arrays["val"], seen, rho, mask=mask)
    masks = {}
    sizes = {}
    for phase in ("val", "test"):
        masks[phase] = candidate_sets(seen, dataset.candidates(phase), rho, threshold)
        sizes[phase] = {name: int(allowed.sum()) for name, allowed in masks[phase].items()}
    validation = {}
    bias = {}
    for name, (swept, _) in sweep(model, *arrays["val"], seen, masks["val"]).items():
        validation[name] = both_protocols(swept)
        bias[name] = validation[name]["exact"]["bias"]
        if not math.isfinite(bias[name]):
            bias[name] = 0.0
    temperature = calibrate(model, *arrays["val"], seen, masks["val"], bias)
    test = {}
    tested = sweep(model, *arrays["test"], seen, masks["test"])
    for name, (swept, _) in tested.items():
        test[name] = both_protocols(swept) | dict(fixed_bias=accuracy_at(swept, bias[name]))
    sure = certainty(model, *arrays["test"], seen, masks["test"], bias, temperature)
    exist = dataset.feasible
    in_words = "that are feasible"
    if exist is None:
        exist = (dataset.candidates("val") | dataset.candidates("test")).reshape(seen.shape)
        in_words = "that occur"
    metrics = dict(validation=validation, threshold=threshold, bias=bias, temperature=temperature,
                   certainty=sure, test=test, candidates=sizes, truth=in_words,
                   feasibility_auroc=auroc(rho, exist, ~seen),
                   threshold_curve={key: row.tolist() for key, row in threshold_curve.items()})
    return metrics, tested, masks["test"]


def both_protocols(swept):
    """{protocol: report} of a BiasSweep."""
    return {protocol: swept.report(protocol) for protocol in PROTOCOLS}


# ---- running ----


class Prepared(NamedTuple):
    """What the shared options mean, read and checked by `prepare`."""

    dataset: data.Dataset
    features: dict                # phase -> (N, F) float32
    state_vectors: np.ndarray     # (S, V)
    object_vectors: np.ndarray    # (O, V)
    device: torch.device
    settings: dict                # every choice as plain values, part of the results
    out: Path                     # where the results go; None: no folder was given
    seeds: list                   # one run each
    resume: bool
    save_scores: bool
    eager: bool


def experiment(build, prepared):
    """Train and test once a seed, printing tables: [metrics of each seed].

    `build()` gives a new model on the device that keeps the contract of train.py. One seed fills
    the folder; of several each fills its seedK, and metrics.json beside these holds mean and sample
    deviation of all that are there. Several processes train as many seeds at a time. ValueError: a
    run in the folder that this one would replace.
    """
    seeds = prepared.seeds
    settings = prepared.settings
    is_first = shell.rank() == 0
    out = prepared.out
    if out is None and is_first:
        out = new_folder(settings)
    out = shell.gather(out)[0]
    with lock(out) if is_first else nullcontext():
        check_output_folder(out, seeds, prepared.resume)
        check_joined(out, seeds, settings)
        shell.check_shared(out)
        if shell.processes() > len(seeds):
            shell.print_status("note: each seed is trained by one process, and others wait")

        def train(seed):
            return run_seed(build, prepared, seed, folder_of(out, seed, seeds))

        results = []
        for seed, metrics in shell.distribute(seeds, train):
            results.append(metrics)
            print(table([metrics], f"seed {seed}", metrics["test"]))
            print("\n".join(table_notes(metrics)), flush=True)
        finished = finished_seeds(out)
        if len(finished) > 1:
            mean = combine(finished, np.mean)
            std = combine(finished, deviation)
            print(table(finished, f"mean ± std of {len(finished)} seeds", mean["test"],
                        std["test"]))
            all_seeds = [metrics["settings"]["seed"] for metrics in finished]
            if is_first:
                write_json(out / "metrics.json", dict(settings=dict(settings, seeds=all_seeds),
                                                      versions=versions(), mean=mean, std=std))
    print(LEGEND)
    print(f"written to {out}; next: {next_step(prepared, folder_of(out, seeds[0], seeds))}")
    return results


def run_folders(settings):
    """Where runs with such settings go without --out: runs/NAME, runs/NAME-2, ..."""
    name = f"{settings['dataset']}-{settings['model']}-{settings['world']}"
    return [RUNS / name] + [RUNS / f"{name}-{number}" for number in range(2, 1000)]


def new_folder(settings):
    """The first of `run_folders` that is not there, made."""
    for folder in run_folders(settings):
        with suppress(FileExistsError):  # mkdir decides between two that start at once
            folder.mkdir(parents=True)
            return folder


def last_folder(settings):
    """The last of `run_folders` that is there, or the first of all."""
    folders = run_folders(settings)
    there = [folder for folder in folders if folder.exists()]
    return there[-1] if there else folders[0]


def check_output_folder(out, seeds, resume):
    """ValueError where the runs of these seeds would replace one in the folder `out`, or mix with
    it."""
    is_single = not has_seeds(out) and any((out / name).exists() for name in RUN_FILES)
    if (is_single or has_seeds(out)) and not resume:
        raise ValueError(f"{out} holds a run: --resume goes on with it, another --out begins one")
    if is_single and len(seeds) > 1:
        raise ValueError(f"{out} holds the run of a single seed, which others cannot join: give "
                         "another --out")


def check_joined(out, seeds, settings):
    """ValueError where seeds in the folder `out`, which others join, had other settings."""
    for there in recorded_settings(out):
        if there["seed"] not in seeds:  # those are looked at when their training goes on
            check_settings(out, there, settings, free=["device"])


def finished_seeds(out):
    """What metrics.json holds of each finished seed in a folder of several, by seed."""
    found = [read_json(path) for path in out.glob("seed[0-9]*/metrics.json")]
    return sorted(found, key=lambda metrics: metrics["settings"]["seed"])


def recorded_settings(out):
    """Yield the settings of each run that a folder holds, finished or begun, or both."""
    for metrics in finished_seeds(out):
        yield metrics["settings"]
    for path in out.glob("**/last.pt"):
        with reading(path, "restore the file, or give another --out"):
            settings = load_tensors(path)["settings"]
        yield settings


def folder_of(out, seed, seeds):
    """Where the files of one of these seeds go: `out`, or its seedK where there are several."""
    if len(seeds) > 1 or has_seeds(out):
        return out / f"seed{seed}"
    return out


def has_seeds(out):
    """Whether a folder holds those of several seeds."""
    return any(out.glob("seed[0-9]*"))


def run_seed(build, prepared, seed, out):
    """Train and test one seed, write all into the folder `out`; what metrics.json holds."""
    dataset = prepared.dataset
    settings = dict(prepared.settings, seed=seed)
    if (out / "metrics.json").exists() and not (out / "last.pt").exists():
        raise ValueError(f"{out} holds a run without last.pt, from which it would go on: give "
                         "another --out")
    out.mkdir(parents=True, exist_ok=True)
    # Without this a CPU adds up the gradient of `table[index]` in the order in which threads come.
    torch.use_deterministic_algorithms(prepared.device.type == "cpu", warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # to fill it takes time
    torch.manual_seed(seed)
    model = build()
    arrays = arrays_of(prepared)
    check_model(model, arrays["train"][0], dataset.seen)
    history = train_model(model, arrays, prepared, settings, out)
    rho = model.feasibility(dataset.seen)
    metrics, tested, masks = evaluate_run(model, arrays, dataset, rho, mask=settings["mask"])
    best = max(history, key=lambda row: row["validation"])
    metrics |= dict(settings=settings, versions=versions(), best_epoch=best["epoch"])
    # Scores of an earlier start may be of another epoch: those that are there are made anew.
    if prepared.save_scores or (out / "scores.npy").exists():
        write_scores(out, model, arrays["test"][0], dataset, masks)
    write_answers(out, dataset, tested, metrics["bias"])
    with writing(out / "feasibility.csv") as file:
        write_csv(file, rho, dataset.seen, dataset.states, dataset.objects)
    write_best(out / "best.pt", prepared, model, rho, metrics)
    write_json(out / "metrics.json", metrics)  # last: where it is, all else is
    return metrics


def arrays_of(prepared):
    """phase -> (features (N, F) on the device, targets (N,))."""
    arrays = {}
    for phase in data.PHASES:
        features = torch.as_tensor(prepared.features[phase], device=prepared.device)
        arrays[phase] = features, prepared.dataset.targets[phase]
    return arrays


def train_model(model, arrays, prepared, settings, out):
    """`fit`, with validation AUC (exact) in the world the model is trained for; the history."""
    dataset = prepared.dataset
    world = np.ones(dataset.seen.size, bool)
    if settings["world"] == "closed":
        world = dataset.candidates("val")

    def validate():
        found = sweep(model, *arrays["val"], dataset.seen, dict(world=world))
        swept, _ = found["world"]
        return selection(swept.report())

    features, targets = arrays["train"]
    keywords = {name: settings[name] for name in FITTED if name in settings}
    return fit(model, features, torch.as_tensor(targets, device=features.device), validate,
               out=out, settings=settings, resume=prepared.resume, eager=prepared.eager,
               **keywords)


def combine(results, function):
    """The metrics of several runs as one, `function` of the values of each number (None, as JSON
    has it, is nan); words stay."""
    first = results[0]
    if isinstance(first, dict):
        combined = {}
        for key in first:
            if key not in ("settings", "versions", "threshold_curve"):
                combined[key] = combine([result[key] for result in results], function)
        return combined
    if isinstance(first, str):
        return first
    return function(np.array(results, float))


def deviation(values):
    """The sample standard deviation, over n - 1; nan of one value."""
    return np.std(values, ddof=1) if len(values) > 1 else np.nan


def next_step(prepared, run):
    """The command that uses the results in the folder `run`."""
    hint = ""
    command = ["compcos.py", "--checkpoint", run / "best.pt"]
    if prepared.settings["model"] != "compcos":
        command = ["evaluate.py", run / "scores_open.npz"]
        if not prepared.save_scores:
            hint = ", after the same command with --resume --save-scores"
    elif prepared.settings["backbone"].startswith(("ResNet-18", drawings.FEATURE)):
        # the backbones whose features of further photos can be made here
        command += ["--predict", prepared.dataset.path(prepared.dataset.images["test"][0])]
    else:
        command += ["--features", "FILE"]
    return f"python {shlex.join(map(str, command))}{hint}"


# ---- writing ----


def write_answers(out, dataset, tested, bias):
    """What the test shows at the biases fixed on validation: predictions.csv, a test image a row;
    compositions.csv, each tested composition's accuracy; and curves.npz, at every bias."""
    names = np.array(dataset.compositions)
    seen = dataset.seen.ravel().astype(int)
    target = dataset.targets["test"]
    shown, count = np.unique(target, return_counts=True)
    predictions = dict(image=dataset.images["test"], truth=names[target], seen=seen[target])
    compositions = dict(composition=names[shown], seen=seen[shown], images=count)
    curves = {}
    for name, (swept, kept) in tested.items():
        seen_scores, seen_columns, unseen_scores, unseen_columns = kept
        # in float64, as `evaluate.accuracy_at` compares, so that files and metrics agree
        is_unseen = bias[name] > seen_scores.astype(float) - unseen_scores
        answers = np.where(is_unseen, unseen_columns, seen_columns)
        scores = np.where(is_unseen, unseen_scores, seen_scores)
        predictions[name] = names[answers]
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


@torch.no_grad()
def write_scores(out, model, features, dataset, masks):
    """For evaluate.py: scores.npy, float32 (N, C) of the test images (N, F), written block by block
    and whole or not at all; and beside it a file of each candidate set."""
    about = dict(descr="<f4", fortran_order=False, shape=(len(features), dataset.seen.size))
    with writing(out / "scores.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, about)
        for _, scores in chunks(model, features, model.compositions()):
            file.write(np.ascontiguousarray(scores.cpu(), "<f4"))
    for name, mask in masks.items():
        with writing(out / f"scores_{name}.npz", "wb") as file:
            np.savez(file, target=dataset.targets["test"], seen=dataset.seen.ravel(),
                     candidates=mask, pairs=index_pairs(dataset.seen))


def write_best(path, prepared, model, rho, metrics):
    """best.pt: all that prediction needs, without the data."""
    dataset = prepared.dataset
    closed = dataset.candidates("test")
    # of training's features: those of another kind lie far outside
    features = torch.as_tensor(prepared.features["train"])
    std, mean = torch.std_mean(features, 0, correction=0)
    contents = dict(
        config=model.config, weights=model.state_dict(), states=dataset.states,
        objects=dataset.objects, seen=torch.as_tensor(dataset.seen),
        closed=torch.as_tensor(closed), named=torch.as_tensor(closed | dataset.candidates("val")),
        feasibility=torch.as_tensor(rho), feature_mean=mean, feature_std=std)
    for key in ("settings", "threshold", "bias", "temperature"):
        contents[key] = metrics[key]
    with writing(path, "wb") as file:
        torch.save(contents, file)


def versions():
    """What the numbers depend on besides the settings."""
    machine = f"{platform.machine()}, threads {torch.get_num_threads()}"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    return dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__,
                pillow=PIL.__version__, processes=shell.processes(), machine=machine)


# ---- reading what a run left ----


def load_best(path):
    """What the best.pt of a CompCos holds, as `write_best` wrote it. ValueError: it is none."""
    with reading(path, "train anew, or restore the file"):
        contents = load_tensors(path)
        model = contents["settings"]["model"]
        if model != "compcos" or "feature_mean" not in contents:
            raise ValueError(f"it holds a {model}: expected the best.pt of a compcos of this "
                             "version, which alone answers for photos")
    return contents


def read_feasibility(path, states, objects):
    """(S, O) from a feasibility.csv. ValueError: without all the numbers."""
    with reading(path, "expected columns state, object, feasibility, and a row for each "
                        "composition of this data"):
        found = {(row["state"], row["object"]): float(row["feasibility"])
                 for row in read_rows(path)}
        scores = np.array([found[pair] for pair in itertools.product(states, objects)])
    return scores.reshape(len(states), len(objects))


# ---- the table ----


COLUMNS = dict(S="seen", U="unseen", HM="hm", AUC="auc", Sta="state_accuracy",
               Obj="object_accuracy")
LEGEND = """\
S, U, HM, AUC: best accuracy on seen and on unseen compositions, best harmonic mean, and area under
their curve, as the bias on unseen grows. Sta, Obj: accuracy of the state, of the object, at bias 0
fixed_bias: the whole row at the bias that validation chose. ±: sample deviation (n - 1)
closed: the answers are what training or the test's list shows. open: all. open_masked: what is
seen, or of a feasibility of at least τ. S, where exact, is the same in all: only the seen are left
Few unseen compositions tell little; how far the AUC holds: evaluate.py --confidence 0.95 --unit
composition"""


def describe_run(results):
    """A line of what the results of some seeds rest on."""
    settings = results[0]["settings"]
    best = ", ".join(str(metrics["best_epoch"]) for metrics in results)
    recipe = ""
    if "recipe" in settings:
        recipe = f"{settings['recipe']} recipe, members {settings['members']}; "
    return (f"{settings['backbone']}; vectors {', '.join(settings['vectors'])}; {recipe}best epoch "
            f"{best} of {settings['epochs']}; {settings['device']}")


def table(results, which, test, std=None):
    """Test results as text, in percent: what they rest on, and of each candidate set both protocols
    and fixed bias. `test` as in metrics.json, of `which` seeds; their deviation `std` alike."""
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


def table_notes(metrics):
    """Lines that stand under the table of a seed."""
    sizes = metrics["candidates"]["test"]
    sure = metrics["certainty"]["open_masked"]
    threshold = "none"
    if metrics["threshold"] > -1:
        threshold = f"τ = {metrics['threshold']:.3f}"
    return [
        f"hard mask: {threshold}, which leaves {sizes['open_masked']:,} of {sizes['open']:,} "
        "compositions",
        f"probability of an answer among these: {sure['probability']:.0%} in the mean over the "
        f"test, where {sure['right']:.0%} of the answers are right",
        f"feasibility ranks the unseen compositions {metrics['truth']} above the others with AUROC "
        f"{metrics['feasibility_auroc']:.3f}"]


# ---- options ----


def add_options(parser):
    """The options that every system shares."""
    add = parser.add_argument_group("data").add_argument
    add("--dataset", default="shapes",
        help="shapes (built in, the default), utzappos, mitstates, cgqa, or a folder")
    add("--data-root", default="data", metavar="DIR",
        help="where datasets and word vectors are (default data)")
    add("--features", metavar="FILE",
        help="features by file name (.npz: files, features (N, F)), from CLIP say; pixels: 16 × 16 "
             "of each photo")
    add("--weights", metavar="FILE",
        help="ResNet-18 weights for the extraction (default: torch hub's)")
    add("--vectors", nargs="+", metavar="NAME|FILE",
        help="word vectors, concatenated: word2vec, fasttext, glove, random, or files")
    add("--missing", default="error", choices=["error", "random", "mean"],
        help="for words without vectors")
    add("--skip-broken", action="store_true", help="leave out images that cannot be read")
    training = "training (defaults: those of the dataset's recipe)"
    add = parser.add_argument_group(training).add_argument
    at_least_one = shell.number(int, least=1)
    add("--world", default="open", choices=["open", "closed"])
    add("--epochs", type=at_least_one)
    add("--batch-size", type=at_least_one)
    add("--lr", type=shell.number(above=0), help="learning rate")
    add("--weight-decay", type=shell.number(least=0))
    add("--seed", type=shell.number(int, least=0, below=1 << 40), nargs="+", default=[0],
        metavar="K", help="one run each (default 0)")
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add("--eager", action="store_true", help="on CUDA, do not capture the training step as a graph")
    add("--mask", default="justified", choices=["justified", "paper"],
        help="how τ of the hard mask is chosen: at most so high that 5 %% of what exists is "
             "expected to be hidden, or by validation AUC alone, as in the paper (default "
             "justified)")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, metavar="DIR",
        help="a folder without a run (default: a new runs/DATASET-MODEL-WORLD)")
    add("--resume", action="store_true",
        help="go on with the run in --out, or the last one in runs/; further seeds join it")
    add("--save-scores", action="store_true", help="leave the test scores (N, C) for evaluate.py")


def with_defaults(known, of_datasets):
    """{dataset: all settings}: the known ones, changed by those `of_datasets`, by name. ValueError:
    one of these is not known."""
    table = {}
    for dataset, settings in of_datasets.items():
        unknown = settings.keys() - known.keys()
        if unknown:
            raise ValueError(f"the defaults of {dataset!r} set {', '.join(unknown)}: expected any "
                             f"of {', '.join(known)}")
        table[dataset] = known | settings
    return table


def prepare(options, model, defaults):
    """What the shared options mean: Prepared. What can be wrong is looked at before the long work.

    defaults: dataset name or "other" -> settings, which options of these names replace.
    """
    seeds = list(dict.fromkeys(options.seed))
    fallback = RUNS  # for the features where the data are read-only
    if options.out is not None:
        fallback = options.out.parent
        check_output_folder(options.out, seeds, options.resume)
    check_writable(options.out or RUNS)
    if options.dataset == "shapes" and shell.rank() == 0:
        drawings.ensure(Path(options.data_root, "shapes"))
    shell.gather(None)  # all wait: the data are there, and nobody has begun to write into --out
    dataset = data.load(options.dataset, options.data_root)
    device = image_features.pick_device(options.device)
    chosen = dict(defaults.get(options.dataset, defaults["other"]))
    for name, value in vars(options).items():
        if name in chosen and value is not None:
            chosen[name] = value
    sources = chosen.pop("vectors")
    own_vectors = dataset.folder / "vectors.txt"
    if own_vectors.exists() and not options.vectors:
        sources = [str(own_vectors)]
    vectors = words.word_vectors([*dataset.states, *dataset.objects], *sources,
                                 missing=options.missing, root=options.data_root)
    settings = dict(model=model, dataset=dataset.name, world=options.world,
                    vectors=sources, missing=options.missing, device=str(device),
                    mask=options.mask)
    out = options.out
    weights = options.weights
    if options.resume:
        out = out or last_folder(settings)
        for recorded in recorded_settings(out):
            weights = weights or recorded["weights"]
    dataset, features, backbone, weights = image_features.load_features(
        dataset, file=options.features, weights=weights, device=device,
        skip_broken=options.skip_broken, fallback=fallback)
    for note in dataset.notes:
        print(f"note: {note}")
    if chosen.get("train_candidates", "all") is None:
        chosen["train_candidates"] = choose_train_candidates(dataset)
    settings |= dict(data_crc32=data.checksum(dataset, vectors, features), backbone=backbone,
                     weights=weights, **chosen)
    states, objects = np.split(vectors, [len(dataset.states)])
    return Prepared(dataset, features, states, objects, device, settings, out, seeds,
                    options.resume, options.save_scores, options.eager)


def choose_train_candidates(dataset):
    """Which compositions compete with the truth in open-world training: "all", or the "seen" alone.

    The seen alone where they are at least half of all, and validation has few unseen ones. Most of
    the unseen then exist, and as train_candidates they would be taught to be wrong; how wrong, by the
    margins, so few cannot tell.
    """
    count = len(unseen_shown(dataset.targets["val"], dataset.seen))
    if count >= FEW_COMPOSITIONS or dataset.seen.mean() < 0.5:
        return "all"
    print(f"note: validation shows so few unseen compositions ({count}) that the seen alone "
          "compete in training (see --train_candidates)")
    return "seen"
