"""The paper's tables on a dataset of a few images: complete, reused, continued, with both recipes,
a model and a metric of one's own, and a run that fails."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import compcos
import data
import evaluate
from lab import baselines, figures, reproduce
from lab.files import read_json, read_rows
from toy import make_toy, metrics_of

ROOT = Path(__file__).parent.parent
PAPER = ROOT / "../shared/paper.tex"


def run(folder, out, *options):
    """Make a report of one epoch a run of small models; return report.json and report.md."""
    words = ["--dataset", folder, "--device", "cpu", "--epochs", 1, "--min-epoch-steps", 1,
             "--compcos=--hidden 32", "--strong=--hidden 32", "--out", out, "--seed", 0, *options]
    reproduce.main([str(word) for word in words])
    return read_json(out / "report.json"), (out / "report.md").read_text()


def run_metrics(out, name):
    return metrics_of(out / f"runs/{name}/seed0")


@pytest.fixture
def epochs(monkeypatch):
    """A list with an entry for each epoch trained."""
    trained = []
    original = compcos.draw_order

    def draw_order(*arguments):
        trained.append("an epoch")
        return original(*arguments)

    monkeypatch.setattr(compcos, "draw_order", draw_order)
    return trained


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("data") / "toy")


def test_interrupted_continued_complete_and_reused(toy, tmp_path, epochs, monkeypatch, capsys):
    out = tmp_path / "out"
    options = [toy, out, "--epochs", 2, "--data-note", "Made up; replace images.csv."]
    with monkeypatch.context() as patch:
        calls = iter(range(3))

        def interrupt(report):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return report["auc"]

        patch.setattr(compcos, "selection", interrupt)
        with pytest.raises(SystemExit) as stop:  # in the second epoch of the second run
            run(*options)
    assert stop.value.code == 130
    assert "run the same command again to continue" in capsys.readouterr().err
    assert len(list(out.rglob("metrics.json"))) == 1
    report, text = run(*options)
    names = {path.name for path in (out / "runs").iterdir()}
    assert names == {"full", "closed", "alpha0", "constant", "state", "object", "max",
                     *baselines.MODELS}
    assert len(epochs) == 1 + 2 * len(names)  # the interrupted epoch twice, no other
    assert "Made up; replace images.csv." in text and "implausible answers of" in text
    assert (out / "table1.png").exists() and (out / "threshold.png").exists()
    assert "![table1](table1.png)" in text and "![threshold](threshold.png)" in text
    assert "No picture could be drawn: [Errno 2] No such file" in text  # these data have no photos
    check_complete(report, text)
    check_numbers(out, report)
    epochs.clear()
    assert run(*options) == (report, text) and not epochs


def check_complete(report, text):
    """All sections and tables of the paper are there, after the findings."""
    for name in reproduce.PAPER_SECTIONS:
        assert f"## {reproduce.SECTIONS[name].title}\n" in text and name in report
    for name, table in reproduce.tables().items():
        if table.section in reproduce.PAPER_SECTIONS:
            assert len(report[table.section][name]) == len(table.runs) * len(table.candidates)
    assert "nan" not in text and " ± " not in text.split("## ")[1]
    assert text.splitlines()[2].startswith("On the test in the open world, ")
    assert list(report["findings"]) == ["with its hard mask", "with its margins"]


def check_numbers(out, report):
    """The numbers are those of the runs."""
    aucs = run_metrics(out, "full")["test"]["open_masked"]
    for protocol in reproduce.PROTOCOLS:
        row = report["table1"]["open"]["CompCos, mask"][protocol]
        auc = aucs[protocol]["auc"]
        assert row["AUC"] == dict(mean=auc, std=None, seeds=1, values=[auc])
    strategies = report["strategies"]["strategies"]
    full = report["masking"]["masking"]["CompCos"]
    assert strategies["CompCos, no mask"] == full
    assert report["margins"]["margins"]["CompCos, α > 0 and warm-up"] == full
    # the median hides another half than its inverse
    assert strategies["CompCos, median"] != strategies["CompCos, inverse median"]


def test_the_masks_of_the_appendix_are_evaluated_as_the_runs_were(toy, tmp_path, monkeypatch):
    """One that hides nothing gives what the run recorded without a mask."""
    monkeypatch.setattr(reproduce, "median_mask", lambda rho, seen, inverse: seen | True)
    report, _ = run(toy, tmp_path, "--only", "strategies")
    rows = report["strategies"]["strategies"]
    for name in ("CompCos closed", "CompCos"):
        for protocol in reproduce.PROTOCOLS:
            for column, value in rows[f"{name}, no mask"][protocol].items():
                masked = rows[f"{name}, median"][protocol][column]
                assert masked["mean"] == pytest.approx(value["mean"])


def test_both_recipes(toy, tmp_path):
    """The sections train what they need and no more; their numbers are those of the runs."""
    report, text = run(toy, tmp_path, "--only", "recipes", "ablation")
    assert "(test, exact protocol)" in text and "(test, published protocol)" in text
    names = {path.name for path in (tmp_path / "runs").iterdir()}
    assert names == {"closed", *reproduce.RECIPES.values(),
                     *(name for name, _ in reproduce.ABLATION.values())}
    runs = {name: run_metrics(tmp_path, name) for name in names}
    settings = {name: metrics["settings"] for name, metrics in runs.items()}
    for name, count in dict(paper4=4, strong1=1, strong16=16).items():
        assert settings[name]["members"] == count
    for label, (name, changes) in reproduce.ABLATION.items():
        changed = {key: value for key, value in settings[name].items()
                   if value != settings["strong4"][key]}
        assert changed == changes or name == "without-unseen"  # which these data choose anyway
        auc = runs[name]["test"]["open"]["exact"]["auc"]
        assert report["ablation"]["ablation_test"][label]["exact"]["AUC"]["mean"] == auc
    assert settings["strong4"]["mask"] == "justified" and settings["full"]["mask"] == "paper"
    sizes = runs["strong4"]["candidates"]["val"]
    assert sizes["open_masked"] == sizes["open"]  # so few unseen compositions tell no threshold
    label = "| strong, 4 members, mask (hides nothing in 1 of 1) | strong4 | "
    assert label in text and "![recipes](recipes.png)" in text
    gain = report["findings"]["with the strong recipe and 4 members"]["mean"]
    aucs = [runs[name]["test"]["open"]["published"]["auc"] for name in ("strong4", "full")]
    assert gain == pytest.approx(aucs[0] - aucs[1]) and f"{100 * gain:.2f} with the strong" in text


def test_own_model_and_metric_get_rows_and_columns(toy, tmp_path, monkeypatch):
    class Mine(baselines.VisProd):
        """A system of one's own."""

    monkeypatch.setattr(baselines, "MODELS", dict(mine=Mine))
    monkeypatch.setitem(reproduce.COLUMNS, "HM seen", "hm_seen")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # not installed
    report, text = run(toy, tmp_path, "--only", "table1", "masking", "--mine", "--lr 0.01")
    metrics = run_metrics(tmp_path, "mine")
    assert metrics["settings"]["lr"] == 0.01 and metrics["settings"]["world"] == "closed"
    cell = report["table1"]["closed"]["mine"]["exact"]["HM seen"]
    assert cell["mean"] == metrics["test"]["closed"]["exact"]["hm_seen"]
    assert "mine, mask" in report["masking"]["masking"] and "AoP" not in text
    assert "No picture could be drawn: import of matplotlib.figure halted" in text
    assert "| HM seen |" in text


def test_a_failed_run_is_named_left_out_and_tried_again(toy, tmp_path, monkeypatch, capsys):
    options = [toy, tmp_path, "--only", "primitives"]
    with monkeypatch.context() as patch:
        original = compcos.build

        def fail(states, objects, feature_dim, settings):
            if settings.mix == "max":
                raise RuntimeError("the roof fell in")
            return original(states, objects, feature_dim, settings)

        patch.setattr(compcos, "build", fail)
        with pytest.raises(SystemExit) as stop:
            run(*options)
    output = tmp_path / "runs/max/seed0/output.txt"
    assert stop.value.code == 1
    assert (f"max, seed0: failed (RuntimeError: the roof fell in), see {output}"
            in capsys.readouterr().err)
    text = (tmp_path / "report.md").read_text()
    assert "left out of the numbers: max, seed0." in text and "\n| max |" not in text
    _, text = run(*options)  # the same command makes good what failed
    assert "numbers: none." in text and "\n| max | max |" in text
    assert output.read_text().count("Traceback") == 1  # kept


def test_beside_the_papers_figures(tmp_path):
    """The paper's figures are looked up by name."""
    make_toy(tmp_path / "ut-zap50k")
    report, text = run("utzappos", tmp_path / "out", "--data-root", tmp_path, "--only", "table1",
                       "--tmn=--width 8 --negatives 9", "--backbone", "noise")
    rows = report["table1"]["open"]
    assert "paper" in rows["CompCos, mask"] and "paper" not in rows["CompCos"]
    assert "| the paper |  | 59.3 | 46.8 | 36.9 | 21.3 | 35.1 | 72.4 |" in text
    assert "\nFeatures: noise." in text
    settings = run_metrics(tmp_path / "out", "full")["settings"]
    assert settings["scale"] == 50 and settings["margin"] == 1  # of this dataset


@pytest.mark.skipif(not PAPER.exists(), reason="the paper is not here")
def test_transcription_of_the_paper():
    """Every row of numbers stands in paper.tex in that order."""
    commands = r"\\cite\{.*?\}|\\multirow\{\d\}|\\hline|\\textbf|[{}\s]"
    source = re.sub(commands, "", PAPER.read_text())
    numbers = re.findall(r"(?<=[&\\])-?\d*\.?\d+(?=[&\\])", re.sub(r"\\(?=[&\\])", "&", source))
    whole = ",".join(f"{float(number):g}" for number in numbers)
    for tables in read_json(ROOT / "results/paper/tables.json").values():
        for name, table in tables.items():
            for label, row in table["rows"].items():
                row = row if len(row) == 6 else row[1:]  # S is given once for a model
                assert ",".join(f"{value:g}" for value in row) in whole, (name, label)


@pytest.fixture(scope="module")
def made(toy, tmp_path_factory):
    """The folder of a report of two seeds."""
    out = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "RESAMPLES", 20)  # made before the fixture of conftest.py acts
        run(toy, out, "--only", "qualitative", "--seed", 0, 1)
    return out


def test_shares_of_misled_images(made):
    """The two kinds share out the images that the closed model answers wrongly."""
    report = read_json(made / "report.json")["qualitative"]
    wrong = []
    for seed in (0, 1):
        rows = read_rows(made / f"runs/closed/seed{seed}/predictions.csv")
        wrong.append(np.mean([(row["open_state"], row["open_object"])
                              != (row["state"], row["object"]) for row in rows]))
    kinds = [report[kind] for kind in ("only the full model is right", "both are wrong")]
    assert np.sum([kind["values"] for kind in kinds], axis=0) == pytest.approx(wrong)
    assert kinds[0]["std"] == pytest.approx(np.std(kinds[0]["values"], ddof=1))


def test_pictures_show_the_chosen_threshold_and_who_is_right(made, toy, monkeypatch):
    runs = {name: [run_metrics(made, name) | dict(folder=made / f"runs/{name}/seed0")]
            for name in ("closed", "full")}
    results = reproduce.Results(SimpleNamespace(dataset=data.load(toy)), runs)
    line, = figures.draw_threshold(results).axes[0].lines
    auc = runs["full"][0]["validation"]["open_masked"]["exact"]["auc"]
    assert line.get_ydata()[line.get_markevery()] == pytest.approx(100 * auc)
    monkeypatch.setattr(figures, "open_photo", lambda path, upright: np.ones((2, 2)))
    for part, is_right in zip(figures.draw_photos(results).subfigs, (True, False)):
        assert 0 < len(part.axes) <= 10
        for ax in part.axes:
            closed, full, truth = re.findall(": (.*)", ax.get_title("left"))
            assert closed != truth and (full == truth) == is_right


@pytest.mark.parametrize("options, said", [
    (["--world", "closed"], "reproduce: error: unrecognized arguments: --world closed"),
    (["--compcos=--seed 3"], "reproduce --compcos: error: unrecognized arguments: --seed 3"),
    (["--tmn=--lr x"], "reproduce --tmn: error: argument --lr"),
    (["--strong=--lr -4", "--only", "recipes"], "error: lr must be above 0, got -4"),
    (["--compcos=--margin 0.1"], "it was trained with margin=0.4, this command has margin=0.1"),
    (["metrics.json"], "metrics.json cannot be used"),
    (["predictions.csv"], "predictions.csv cannot be used"),
])
def test_bad_input_is_one_line(made, toy, tmp_path, capsys, epochs, options, said):
    """Of an option, or of a run's file that is damaged; before anything is trained."""
    out = shutil.copytree(made, tmp_path / "copy")
    file = out / "runs/full/seed0" / str(options[0])
    if file.exists():
        contents = file.read_bytes()
        file.write_bytes(contents[:len(contents) // 2] + b"\xff")
        options = []
    with pytest.raises(SystemExit) as end:
        run(toy, out, "--only", "qualitative", "--seed", 0, 1, *options)
    last = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and said in last and "error: " in last and not epochs
