"""The paper's tables and figures in quick form, on a dataset of a few images: complete, reused,
continued, with both recipes, a model of one's own, and a run that fails."""

import csv
import io
import json
import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import baselines
import compcos
import experiment
import reproduce
import train

HERE = Path(__file__).parent
ROOT = HERE.parent
PAPER = HERE / "../../shared/paper.tex"


def make(folder, images):
    """Own data: 4 states x 5 objects, 19 compositions, features that tell them apart; optionally
    images."""
    random = np.random.default_rng(0)
    states = list("wxyz")
    objects = list("abcde")
    looks = random.normal(size=(9, 16))
    rows = []
    features = []
    (folder / "images").mkdir(parents=True)
    for s, o in np.ndindex(4, 5):
        if (s, o) == (3, 3):  # occurs nowhere
            continue
        shown_in = ("train", "val", "train", "test", "train")[(s + 2 * o) % 5]
        for phase, count in dict(train=8, val=3, test=3).items():
            if shown_in not in ("train", phase):
                continue
            for _ in range(count):
                name = f"{len(rows)}.png"
                rows.append([name, states[s], objects[o], phase])
                features.append(looks[s] + looks[4 + o] + random.normal(size=16))
                if images:
                    picture = Image.new("RGB", (20, 30), (60 * s, 50 * o, 90))
                    picture.save(folder / "images" / name)
    with open(folder / "images.csv", "w", newline="") as file:
        csv.writer(file).writerows([["image", "state", "object", "split"], *rows])
    names = [row[0] for row in rows]
    np.savez(folder / "features.npz", files=names, features=np.array(features, np.float32))
    with open(folder / "vectors.txt", "w") as file:
        for name in states + objects:
            numbers = " ".join(str(value) for value in random.normal(size=20).round(3))
            file.write(f"{name} {numbers}\n")
    return folder


def run(folder, *options):
    """A quick report; the folder and report.json. (A later --out or --seeds takes effect.)"""
    out = folder / "out"
    if "--out" in options:
        out = options[options.index("--out") + 1]
    reproduce.main(
        ["--dataset", folder, "--device", "cpu", "--quick", "--out", out, "--seeds", 0, 1, *options]
    )
    return out, json.loads((out / "report.json").read_text())


def numbers(value, path=""):
    """(path, number) of all that is not text."""
    if isinstance(value, str):
        return []
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    else:
        return [(path, value)]
    return [found for key, child in children for found in numbers(child, f"{path}/{key}")]


@pytest.fixture
def trained(monkeypatch):
    """Notes every epoch by its model's class; not those of Apart, which trains some more to choose
    its settings."""
    epochs = []
    original = train.train_epoch

    def train_epoch(model, *args, **keywords):
        if type(model).__name__ != "Apart":
            epochs.append(type(model).__name__)
        return original(model, *args, **keywords)

    monkeypatch.setattr(train, "train_epoch", train_epoch)
    return epochs


@pytest.fixture(scope="module", autouse=True)
def short_epochs():
    """An epoch is one pass over the few images, in place of twenty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "LEAST_STEPS", 1)
        yield


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make(tmp_path_factory.mktemp("toy") / "toy", images=True)


def test_interrupted_continued_complete_and_reused(toy, trained, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        calls = iter(range(7))

        def interrupt(report):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return report["auc"]

        patch.setattr(experiment, "selection", interrupt)
        with pytest.raises(SystemExit) as stop:  # in the second epoch of the third run
            run(toy)
    assert stop.value.code == 130
    assert "the same reproduce.py command goes on" in capsys.readouterr().err
    finished = [path.parent.parent.name for path in (toy / "out").rglob("metrics.json")]
    assert finished == ["full", "full"]
    out, report = run(toy)
    assert capsys.readouterr().out.count(": kept") == 2
    counted = len(reproduce.PAPER_RUNS) + len(set(baselines.MODELS) - {"apart"})
    assert len(trained) == 1 + 3 * 2 * counted  # the interrupted epoch twice, no other
    check_complete(out, report)

    text = (out / "report.md").read_text()
    before = text.split("## Findings")[1]
    trained.clear()
    assert run(toy)[1] == report and not trained
    assert (out / "report.md").read_text().split("## Findings")[1] == before
    check_numbers(out, report)


def check_complete(out, report):
    """All sections, numbers and pictures of the paper are there."""
    assert set(reproduce.PAPER_SECTIONS) <= set(report) and "strong" not in report
    cells = [pair for name in reproduce.PAPER_SECTIONS for pair in numbers(report[name], name)]
    assert len(cells) > 1000
    assert [path for path, value in cells if value is None or not math.isfinite(value)] == []
    text = (out / "report.md").read_text()
    assert "nan" not in text
    for name in reproduce.PAPER_SECTIONS:
        assert reproduce.SECTIONS[name].title in text
    pictures = re.findall(r"\]\((.*?)\)", text)
    assert len(pictures) == 4
    for name in pictures:
        with Image.open(out / name) as picture:
            assert min(picture.size) > 200


def check_numbers(out, report):
    """The numbers are those of the runs, and the masks made here give what the runs found."""
    aucs = []
    for seed in (0, 1):
        metrics = json.loads((out / f"runs/full/seed{seed}/metrics.json").read_text())
        aucs.append(metrics["test"]["open_masked"]["exact"]["auc"])
    expected = dict(mean=np.mean(aucs), std=np.std(aucs), seeds=2)
    ours = report["table1"]["open"]["CompCos, mask"]["exact"]["AUC"]
    assert ours == pytest.approx(expected)
    for mask, label in ("no mask", "CompCos"), ("best", "CompCos, mask"):
        for protocol in reproduce.PROTOCOLS:
            tried = report["strategies"][f"CompCos, {mask}"][protocol]
            for column, value in report["masking"][label][protocol].items():
                assert tried[column] == pytest.approx(value), column
    full = report["masking"]["CompCos"]
    assert report["margins"]["CompCos, α > 0 and warm-up"] == full
    assert report["primitives"]["mean"] == full
    shares = []
    for kind, value in report["qualitative"].items():
        if "right" in kind or "wrong" in kind:
            shares.append(value["mean"])
    assert len(shares) == 4 and sum(shares) == pytest.approx(1)


def test_only_what_is_asked_for_and_other_settings_start_anew(toy, trained, tmp_path, capsys):
    first = ["--only", "threshold", "--seeds", 0, "--out", tmp_path / "out"]
    run(toy, *first)
    capsys.readouterr()
    assert len(trained) == 3
    assert [path.name for path in (tmp_path / "out/runs").iterdir()] == ["full"]
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert "threshold" in report and "table1" not in report
    (tmp_path / "out/runs/full/seed0/last.pt").rename(tmp_path / "kept.pt")
    run(toy, *first, "--compcos=--margin 0.1 --epochs 9")  # --quick has the last word on the epochs
    assert len(trained) == 6 and "trained" in capsys.readouterr().out
    settings = json.loads((tmp_path / "out/runs/full/seed0/metrics.json").read_text())["settings"]
    assert (settings["margin"], settings["epochs"]) == (0.1, 3)


def test_both_recipes(toy, tmp_path, capsys):
    """The sections train what they need and no more; their numbers are those of the runs."""
    out = tmp_path / "out"
    run(toy, "--only", "strong", "changes", "--seeds", 0, "--out", out)
    report = json.loads((out / "report.json").read_text())
    names = {path.name for path in (out / "runs").iterdir()}
    assert names == {"full", "apart", *reproduce.STRONG_RUNS}
    settings = {}
    auc = {}
    for name in names:
        metrics = json.loads((out / "runs" / name / "seed0/metrics.json").read_text())
        settings[name] = metrics["settings"]
        auc[name] = metrics["test"]["open"]["exact"]["auc"]
    for name, count in dict(full=1, published4=4, strong1=1, strong4=4, strong16=16).items():
        assert settings[name]["members"] == count
    for label, name in reproduce.RECIPES.items():
        assert settings[name].get("recipe", "two classifiers apart") == label.split(",")[0]
        assert report["strong"]["open"][label]["exact"]["AUC"]["mean"] == auc[name]
    # each change is one setting against the whole recipe (a scale and its margin go together)
    changes = report["changes"]
    for name, (label, _) in reproduce.CHANGES.items():
        differing = {
            key for key, value in settings["strong4"].items() if settings[name][key] != value
        }
        assert len(differing) == (3 if "length" in name else 1), (name, differing)
        assert changes[label]["test"]["mean"] == auc[name]
    assert settings["strong4"]["mask"] == "justified" and settings["full"]["mask"] == "published"
    # once they are there, the first picture shows them
    run(toy, "--only", "curves", "--seeds", 0, "--out", out)
    curves = json.loads((out / "report.json").read_text())["curves"]
    assert curves["CompCos, strong"] == auc["strong1"]
    said = capsys.readouterr().out
    assert "leplus, seed 0: trained (" in said and "strong16, seed 0: kept" in said


def test_own_model_gets_its_runs_and_rows(toy, tmp_path, monkeypatch):
    class Mine(baselines.LabelEmbedPlus):
        """A system of one's own."""

    monkeypatch.setitem(baselines.MODELS, "mine", Mine)
    for name in ("aop", "tmn", "symnet"):
        monkeypatch.delitem(baselines.MODELS, name)
    out = tmp_path / "out"
    run(toy, "--only", "table1", "curves", "masking", "training", "--seeds", 0, "--out", out)
    report = json.loads((out / "report.json").read_text())
    assert (out / "runs/mine/seed0/metrics.json").exists()
    assert "mine" in report["table1"]["closed"] and "mine, mask" in report["masking"]
    assert "mine" in report["curves"] and "mine" in report["training"]
    assert reproduce.look("mine") == reproduce.OTHER_LOOKS[0]
    text = (out / "report.md").read_text()
    assert "| mine | exact |" in text and "AoP" not in text


def test_failed_run_is_named_and_the_others_go_on(toy, tmp_path, monkeypatch, capsys):
    original = compcos.main.__wrapped__

    def fail(argv):
        if "--mix" in argv and argv[argv.index("--mix") + 1] == "max":
            raise RuntimeError("the roof fell in")
        if "closed" in argv:
            raise ValueError("no world")
        original(argv)

    monkeypatch.setattr(compcos, "main", fail)
    out = tmp_path / "out"
    options = ["--only", "primitives", "qualitative", "threshold", "--seeds", 0, "--out", out]
    with pytest.raises(SystemExit) as stop:
        run(toy, *options)
    assert stop.value.code == 1
    error = capsys.readouterr().err
    log = out / "runs/max/seed0/output.txt"
    assert f"max, seed 0: failed (the roof fell in), see {log}" in error
    assert "RuntimeError: the roof fell in" in log.read_text()
    text = (out / "report.md").read_text()
    assert "Failed, and left out of the numbers: closed (seed 0), max (seed 0)" in text
    assert "Left out: closed failed." in text and "qualitative.png" not in text
    report = json.loads((out / "report.json").read_text())
    assert list(report["primitives"]) == ["state", "object", "mean"]

    monkeypatch.setattr(compcos, "main", original)  # the same command makes good what failed
    run(toy, *options)
    assert capsys.readouterr().out.count(": trained") == 2
    assert "max" in json.loads((out / "report.json").read_text())["primitives"]


def test_time_of_a_run_is_the_sum_of_its_epochs(tmp_path):
    (tmp_path / "log.csv").write_text("epoch,loss,validation,seconds\n1,2,.1,3.5\n2,1,.2,.5\n")
    log = reproduce.read_log(tmp_path / "log.csv")
    assert log["seconds"].sum() == 4 and log["loss"].tolist() == [2, 1]


def test_without_images_and_beside_the_papers_figures(tmp_path, capsys):
    folder = make(tmp_path / "ut-zap50k", images=False)
    out = tmp_path / "out"
    reproduce.main(
        [
            "--dataset",
            "utzappos",
            "--data-root",
            tmp_path,
            "--vectors",
            folder / "vectors.txt",
            "--device",
            "cpu",
            "--quick",
            "--seeds",
            0,
            "--out",
            out,
            "--only",
            "table1",
            "qualitative",
        ]
    )
    text = (out / "report.md").read_text()
    report = json.loads((out / "report.json").read_text())
    assert "The picture is left out: utzappos has no images here" in text
    assert not (tmp_path / "out/qualitative.png").exists()
    row = report["table1"]["open"]["CompCos, mask"]
    assert list(row["paper"].values()) == pytest.approx([0.351, 0.724, 0.593, 0.468, 0.369, 0.213])
    assert row["difference"]["HM"] == pytest.approx(row["published"]["HM"]["mean"] - 0.369)
    assert "paper" not in report["table1"]["open"]["CompCos"]
    assert f"{100 * row['difference']['HM']:+.1f}" in text
    assert " ± " not in text.split("## Findings")[1]  # one seed deviates from nothing


@pytest.mark.skipif(not PAPER.exists(), reason="the paper is not here")
def test_transcription_of_the_paper():
    """Every row of numbers stands in paper.tex in that order, and the lists of the five objects."""
    commands = r"\\cite\{.*?\}|\\multirow\{\d\}|\\hline|\\textbf|[{}\s]"
    source = re.sub(commands, "", PAPER.read_text())
    numbers = re.findall(r"(?<=[&\\])-?\d*\.?\d+(?=[&\\])", re.sub(r"\\(?=[&\\])", "&", source))
    held = json.loads((ROOT / "results/paper/tables.json").read_text())
    whole = ",".join(f"{float(number):g}" for number in numbers)
    for tables in held.values():
        for name, table in tables.items():
            for label, row in table.items() if name != "ranked" else ():
                row = row if len(row) == 6 else row[1:]  # S is given once for a model
                assert ",".join(f"{value:g}" for value in row) in whole, (name, label)
    words = re.sub(r"\s", "", PAPER.read_text())
    for name, (most, least) in held["mitstates"]["ranked"]["objects"].items():
        assert f"{name}&{','.join(most)}&{','.join(least)}".replace(" ", "") in words, name


@pytest.mark.parametrize("contents", ["", "[]", "3", "{"])
def test_notes_that_are_none_are_named(tmp_path, contents):
    (tmp_path / "run.json").write_text(contents)
    with pytest.raises(ValueError, match="run.json .*remove it"):
        reproduce.read_json(tmp_path / "run.json")


def damages(path):
    """A result of a run in many wrong forms; None: a named pipe."""
    whole = path.read_bytes()
    yield from (b"", b"\xff" * 99, whole[:len(whole) // 2], whole[:-3], b"<!DOCTYPE html>\n")
    if hasattr(os, "mkfifo"):
        yield None
    if path.suffix == ".json":
        held = json.loads(whole)
        yield b"[]"
        yield b"[" * 100_000
        for name in {"settings", "versions", "best_epoch", "validation", "test", "threshold",
                     "threshold_curve", "candidates", "feasibility_auroc", "truth"} & held.keys():
            for other in ({}, [], "x", None):
                is_right = name == "truth" and other == "x"
                is_unknown = name == "feasibility_auroc" and other is None
                if not is_right and not is_unknown:
                    yield json.dumps(held | {name: other}).encode()
        if "threshold_curve" in held:
            for name in ("threshold", "auc", "removed"):
                row = held["threshold_curve"][name]
                for other in (row[:-1], ["0.5", *row[1:]], [[], *row[1:]]):
                    curve = held["threshold_curve"] | {name: other}
                    yield json.dumps(held | dict(threshold_curve=curve)).encode()
            for other in ("2", True, 2.5):
                yield json.dumps(held | dict(best_epoch=other)).encode()
    if path.suffix == ".csv":
        first_lines = b"".join(whole.splitlines(keepends=True)[:2])
        yield from (first_lines, b"a,b\n1,2\n")
    if path.suffix == ".npz":
        for arrays in ({}, dict(open_seen=3.0, open_unseen=3.0),
                       dict(open_seen=np.ones(3), open_unseen=np.ones(2)),
                       dict(open_seen=np.full(3, "x"), open_unseen=np.full(3, "x")),
                       dict(open_seen=np.full(3, None), open_unseen=np.full(3, None))):
            file = io.BytesIO()
            np.savez(file, **arrays)
            yield file.getvalue()


@pytest.fixture(scope="module")
def finished(toy, tmp_path_factory):
    """The folder of a finished run, and the options with which it is used again."""
    out = tmp_path_factory.mktemp("finished")
    options = ["--only", "threshold", "--seeds", 0, "--out", out]
    run(toy, *options)
    return out / "runs/full/seed0", options


def test_damaged_results_are_named_with_what_to_do(finished, tmp_path):
    """Read as the sections read them."""
    folder, _ = finished
    read = {"log.csv": reproduce.load, "metrics.json": reproduce.load}
    read["run.json"] = lambda folder: reproduce.read_json(folder / "run.json")
    whole = reproduce.load(folder)
    images = [row["image"] for row in experiment.read_rows(folder / "predictions.csv")]
    read["predictions.csv"] = lambda folder: reproduce.read_answers(whole, whole, images)
    read["curves.npz"] = lambda folder: reproduce.read_curve(whole, "open")
    read["best.pt"] = lambda folder: reproduce.model_of(whole)
    for name, use in read.items():
        path = folder / name
        path.rename(tmp_path / "kept")
        path.write_bytes((tmp_path / "kept").read_bytes())
        for content in damages(path):
            path.unlink()
            if content is None:
                os.mkfifo(path)
            else:
                path.write_bytes(content)
            with pytest.raises(ValueError) as error:
                use(folder)
                pytest.fail(f"{name}: {content[:99]}")
            text = str(error.value)
            assert str(path) in text and "remove" in text and "\n" not in text
            assert "allow_pickle" not in text and "weights_only" not in text
        path.unlink()
        (tmp_path / "kept").rename(path)
        use(folder)


def leaves(value, path=()):
    """The paths of keys to all that is no dict."""
    if not isinstance(value, dict):
        return [path]
    return [found for key, child in value.items() for found in leaves(child, (*path, key))]


@pytest.mark.parametrize("model", ["compcos", "tmn"])
def test_what_a_damaged_metrics_file_lacks_is_named(finished, model):
    """Every key that the sections read, of the wrong type or not there; no other is asked for."""
    whole = json.loads((finished[0] / "metrics.json").read_text())
    whole["settings"] |= dict(model=model, negatives=50)
    named = set()
    for path in leaves(whole):
        for damage in ("lacking", "wrong"):
            held = json.loads(json.dumps(whole))
            inner = held
            for key in path[:-1]:
                inner = inner[key]
            del inner[path[-1]]
            if damage == "wrong":
                inner[path[-1]] = {}
            try:
                reproduce.check_metrics(held)
            except ValueError as error:
                assert ", ".join(path) in str(error), (path, error)
                named.add((path, damage))
    read = {path for path, _ in named}
    assert len(named) == 2 * len(read)
    assert (("settings", "negatives") in read) == (model == "tmn")
    assert ("open_auc_interval",) not in read
    for path in (("test", "open_masked", "published", "auc"), ("versions", "torch"), ("truth",),
                 ("candidates", "val", "open"), ("threshold_curve", "auc"), ("best_epoch",)):
        assert path in read


def test_a_tmn_without_negatives_is_named_by_the_command(toy, tmp_path, trained, capsys):
    options = ["--only", "training", "--seeds", 0, "--out", tmp_path / "out"]
    run(toy, *options)
    path = tmp_path / "out/runs/tmn/seed0/metrics.json"
    metrics = json.loads(path.read_text())
    del metrics["settings"]["negatives"]
    path.write_text(json.dumps(metrics))
    capsys.readouterr()
    trained.clear()
    with pytest.raises(SystemExit) as stop:
        run(toy, *options)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and not trained
    said = f"error: {path} cannot be used (ValueError: it has no settings, negatives)"
    assert error.startswith(said)
    assert f"remove {path}" in error
    path.unlink()
    run(toy, *options)  # from last.pt
    assert "negatives an image" in (tmp_path / "out/report.md").read_text() and not trained


def test_without_unseen_images_the_report_says_so(tmp_path):
    """AUC and what rests on it are not there: no traceback, no claim."""
    folder = make(tmp_path / "toy", images=False)
    with open(folder / "images.csv", newline="") as file:
        rows = list(csv.reader(file))
    seen = {tuple(row[1:3]) for row in rows if row[3] == "train"}
    rows = rows[:1] + [row for row in rows[1:] if tuple(row[1:3]) in seen]
    with open(folder / "images.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    options = ["--only", "table1", "curves", "masking", "threshold", "strong", "--seeds", 0]
    out, report = run(folder, *options)
    assert report["curves"]["CompCos"] is None
    text = (out / "report.md").read_text()
    found = text.split("## Findings")[1].split("## Table 1")[0]
    assert "No image of seen or none of unseen compositions in validation and test" in found
    assert "nan" not in found and "lead" not in found
    assert (out / "strong.png").exists() and (out / "threshold.png").exists()


def test_the_command_names_a_damaged_result_and_makes_it_anew(toy, finished, trained, capsys):
    """Before anything is trained; without metrics.json all results come again from last.pt."""
    folder, options = finished
    kept = {name: (folder / name).read_bytes() for name in ("log.csv", "predictions.csv")}
    for name in kept:
        (folder / name).write_text("<html>\n")
    trained.clear()
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(toy, *options)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith(f"error: {folder / 'log.csv'} cannot be used")
    assert f"remove {folder / 'metrics.json'}" in error and error.count("\n") == 1
    (folder / "metrics.json").unlink()
    run(toy, *options)
    assert trained == [] and {name: (folder / name).read_bytes() for name in kept} == kept


def test_a_photo_of_the_contact_sheet_that_is_none_is_named(toy, tmp_path):
    pytest.importorskip("matplotlib")
    photo = tmp_path / "cut.png"
    photo.write_bytes((toy / "images/0.png").read_bytes()[:-20])
    blocks = {"both are wrong": [("cut.png", "a", "b", "c")]}
    with pytest.raises(ValueError, match="cut.png cannot be used .*; restore the photo"):
        reproduce.contact_sheet(tmp_path / "sheet.png", tmp_path, blocks)
    assert not (tmp_path / "sheet.png").exists()


@pytest.mark.parametrize("size", [(1, 1), (5000, 1), (1, 900), (30, 40), (2000, 1500)])
def test_photos_of_any_size_fill_their_place(tmp_path, size):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    Image.new("I;16", size, 65535).save(tmp_path / "white.png")  # white in 16 bits
    cell = figure.subplots()
    reproduce.show_photo(cell, tmp_path / "white.png")
    shown, = cell.images
    left, right, bottom, top = shown.get_extent()
    assert (left, bottom) == (0, 0) and max(right, top) == reproduce.PHOTO_SIDE
    assert right / top == pytest.approx(size[0] / size[1], rel=0.1) or min(shown.get_size()) == 1
    assert (shown.get_array() == 255).all()


def test_answers_stay_in_their_column_whatever_the_names():
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(10, 3))
    names = ("a", "long name " * 9, "$5$ \\heels", "né ы نعم")
    for cell, name in zip(figure.subplots(1, 5), names):
        reproduce.show_answers(cell, name, "full", name)
        assert [(line.get_text(), line.get_color()) for line in cell.texts] == [
            (f"closed: {name}", reproduce.BLUE), ("full: full", reproduce.RED),
            (f"truth: {name}", reproduce.BLACK)]
        for line in cell.texts:
            assert line.get_window_extent().width < figure.bbox.width / 5


def test_a_font_without_the_names_characters_costs_one_warning(toy, tmp_path):
    pytest.importorskip("matplotlib")
    blocks = {"both are wrong": [("0.png", "\ue000", "\ue001", "\ue002")], "none": []}
    with pytest.warns(UserWarning, match="missing from font.*font.family") as said:
        reproduce.contact_sheet(tmp_path / "sheet.png", toy / "images", blocks)
    assert len(said) == 1 and (tmp_path / "sheet.png").exists()


def test_without_matplotlib_the_report_has_all_but_pictures(toy, finished, monkeypatch, capsys):
    folder, options = finished
    out = folder.parents[2]
    for picture in out.glob("*.png"):
        picture.unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run(toy, *options)
    assert "note: the report has no pictures" in capsys.readouterr().out
    text = (out / "report.md").read_text()
    assert "left out: it needs matplotlib (`pip install matplotlib`)" in text
    assert "The chosen threshold, " in text and not list(out.glob("*.png"))
    monkeypatch.undo()
    run(toy, *options)
    assert "](threshold.png)" in (out / "report.md").read_text()
    assert (out / "threshold.png").exists()


@pytest.mark.parametrize("options, said", [
    (["--seeds", 0, 0], "seeds [0, 0]: expected different numbers"),
    (["--seeds", -1], "seeds [-1]: expected different numbers"),
    (["--out", "{file}"], "cannot write into {file}"),
    (["--world", "closed"], "--world is chosen for each run"),
    (["--compcos=--seed 3"], "reproduce.py --compcos: --seed is chosen for each run"),
    (["--tmn=--lr -4"], "reproduce.py --tmn: --lr is -4.0: expected a positive number"),
    (["--strong=--recipe published"], "reproduce.py --strong: --recipe is chosen"),
    (["--tmn=--out elsewhere"], "reproduce.py --tmn: --out is chosen"),
    (["--compcos=--epochs 'x"], "reproduce.py --compcos \"--epochs 'x\": No closing quotation"),
    (["--aop=--lr x"], "reproduce.py --aop: error: argument --lr: invalid float value: 'x'"),
    (["--apart=--nonsense 1"], "reproduce.py --apart: error: unrecognized arguments: --nonsense"),
])
def test_options_that_cannot_be_are_said_before_the_work(toy, tmp_path, capsys, monkeypatch,
                                                         options, said):
    monkeypatch.setattr(reproduce, "train_missing", lambda *_: pytest.fail("too late"))
    file = tmp_path / "file"
    file.touch()
    options = [str(option).format(file=file) for option in options]
    with pytest.raises(SystemExit) as end:
        reproduce.main(["--dataset", toy, "--device", "cpu", "--quick", "--only", "threshold",
                        "--out", tmp_path / "out", *options])
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert said.format(file=file) in last and "error: " in last
    assert not (tmp_path / "out").exists()
