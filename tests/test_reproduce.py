"""The paper's tables and figures on a dataset of a few images: complete, reused, continued, with
both recipes, a model of one's own, and a run that fails; the forms that benchmark.py times."""

import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lab import baselines
from lab import benchmark
import compcos
from lab import run as experiment
from lab import reproduce
from lab.files import read_rows
import train
from test_experiment import make_toy

ROOT = Path(__file__).parent.parent
PAPER = ROOT / "../shared/paper.tex"


def make(folder):
    """Own data of few images, with photos."""
    make_toy(folder)
    (folder / "images").mkdir()
    for row in read_rows(folder / "images.csv"):
        Image.new("RGB", (20, 30)).save(folder / "images" / row["image"])
    return folder


def run(folder, out, *options):
    """A report of one epoch a run of small models; report.json and report.md."""
    words = ["--dataset", folder, "--device", "cpu", "--epochs", 1, "--compcos=--hidden 32",
             "--strong=--hidden 32", "--out", out, *options]
    reproduce.main([str(word) for word in words])
    return json.loads((out / "report.json").read_text()), (out / "report.md").read_text()


def metrics_of(out, name, seed=0):
    return json.loads((out / f"runs/{name}/seed{seed}/metrics.json").read_text())


@pytest.fixture
def epochs(monkeypatch):
    """An entry for each epoch trained."""
    trained = []
    original = train.train_epoch

    def train_epoch(*arguments):
        trained.append("an epoch")
        return original(*arguments)

    monkeypatch.setattr(train, "train_epoch", train_epoch)
    return trained


@pytest.fixture(scope="module", autouse=True)
def quick():
    """An epoch is one pass over the few images, and no picture is drawn: matplotlib is missing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        for settings in (compcos.FOLDER, compcos.STRONG, baselines.DEFAULTS["visprod"]["other"]):
            patch.setitem(settings, "min_epoch_steps", 1)
        yield


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make(tmp_path_factory.mktemp("data") / "toy")


def test_interrupted_continued_complete_and_reused(toy, tmp_path, epochs, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.delitem(sys.modules, "matplotlib.figure")  # so that it is imported again
    options = [toy, out, "--seed", 0, "--epochs", 2]
    with monkeypatch.context() as patch:
        calls = iter(range(3))

        def interrupt(report):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return report["auc"]

        patch.setattr(experiment, "selection", interrupt)
        with pytest.raises(SystemExit) as stop:  # in the second epoch of the second run
            run(*options)
    assert stop.value.code == 130 and "the same command goes on" in capsys.readouterr().err
    assert len(list(out.rglob("metrics.json"))) == 1
    report, text = run(*options)
    names = {path.name for path in (out / "runs").iterdir()}
    assert names == {"full", "closed", "alpha0", "constant", "state", "object", "max",
                     *baselines.MODELS}
    assert len(epochs) == 1 + 2 * len(names)  # the interrupted epoch twice, no other
    check_complete(out, report, text)
    check_numbers(out, report)
    epochs.clear()
    assert run(*options) == (report, text) and not epochs


def check_complete(out, report, text):
    """All sections, tables and pictures of the paper are there."""
    for name in reproduce.PAPER_SECTIONS:
        assert f"## {reproduce.SECTIONS[name].title}\n" in text and name in report
    for name, table in reproduce.tables().items():
        if table.section in reproduce.PAPER_SECTIONS:
            assert list(report[table.section][name]) == list(table.rows)
    assert "nan" not in text and "in no list" in text and "impossible" not in text
    pictures = re.findall(r"\]\((.*?)\)", text)
    assert sorted(pictures) == sorted(path.name for path in out.glob("*.png"))
    assert len(pictures) == 3


def check_numbers(out, report):
    """The numbers are those of the runs."""
    aucs = metrics_of(out, "full")["test"]["open_masked"]
    for protocol in reproduce.PROTOCOLS:
        row = report["table1"]["open"]["CompCos, mask"][protocol]
        assert row["AUC"] == dict(mean=aucs[protocol]["auc"], std=None, seeds=1)
    strategies = report["strategies"]["strategies"]
    full = report["masking"]["masking"]["CompCos"]
    assert strategies["CompCos, no mask"] == full
    assert report["margins"]["margins"]["CompCos, α > 0 and warm-up"] == full
    # the median hides another half than its inverse
    assert strategies["CompCos, median"] != strategies["CompCos, inverse median"]


def test_the_masks_of_the_appendix_are_evaluated_as_the_runs_were(toy, tmp_path, monkeypatch):
    """One that hides nothing gives what the run recorded without a mask."""
    monkeypatch.setattr(reproduce, "median_mask", lambda rho, seen, inverse: seen | True)
    report, _ = run(toy, tmp_path, "--seed", 0, "--only", "strategies")
    rows = report["strategies"]["strategies"]
    for name in ("CompCos closed", "CompCos"):
        for protocol in reproduce.PROTOCOLS:
            for column, value in rows[f"{name}, no mask"][protocol].items():
                assert rows[f"{name}, median"][protocol][column] == pytest.approx(value)


def test_both_recipes(toy, tmp_path, monkeypatch):
    """The sections train what they need and no more; their numbers are those of the runs."""
    monkeypatch.delitem(sys.modules, "matplotlib.figure")
    out = tmp_path / "out"
    report, text = run(toy, out, "--only", "recipes", "ablation", "--seed", 0)
    assert "(test, exact protocol)" in text and "published protocol" not in text
    assert (out / "recipes.png").exists()
    names = {path.name for path in (out / "runs").iterdir()}
    assert names == {"closed", *reproduce.RECIPES.values(),
                     *(name for name, _ in reproduce.ABLATION.values())}
    runs = {name: metrics_of(out, name) for name in names}
    settings = {name: metrics["settings"] for name, metrics in runs.items()}
    for name, count in dict(paper4=4, strong1=1, strong16=16).items():
        assert settings[name]["members"] == count
    # each change is one setting against the whole recipe (a scale and its margin go together)
    for label, (name, _) in list(reproduce.ABLATION.items())[1:]:
        changed = [key for key in settings[name] if settings[name][key] != settings["strong4"][key]]
        assert len(changed) == (3 if "length" in name else 1) or name == "without-train_candidates", name
        auc = runs[name]["test"]["open"]["exact"]["auc"]
        assert report["ablation"]["ablation_test"][label]["exact"]["AUC"]["mean"] == auc
    assert settings["strong4"]["mask"] == "justified" and settings["full"]["mask"] == "paper"
    masked = report["recipes"]["recipes_open"]["strong, 4 members, mask"]
    assert masked["rejected"] == 1  # few compositions


def test_own_model_gets_its_runs_and_rows(toy, tmp_path, monkeypatch):
    class Mine(baselines.VisProd):
        """A system of one's own."""

    monkeypatch.setattr(baselines, "MODELS", dict(mine=Mine))
    report, text = run(toy, tmp_path, "--only", "table1", "masking", "--seed", 0,
                       "--mine", "--lr 0.01")
    assert metrics_of(tmp_path, "mine")["settings"]["lr"] == 0.01
    assert "mine" in report["table1"]["closed"] and "mine, mask" in report["masking"]["masking"]
    assert "AoP" not in text


def test_a_failed_run_is_named_left_out_and_tried_again(toy, tmp_path, monkeypatch, capsys):
    options = [toy, tmp_path, "--only", "primitives", "--seed", 0]
    with monkeypatch.context() as patch:
        original = compcos.make_model

        def fail(prepared):
            if prepared.settings["mix"] == "max":
                raise RuntimeError("the roof fell in")
            return original(prepared)

        patch.setattr(compcos, "make_model", fail)
        with pytest.raises(SystemExit) as stop:
            run(*options)
    output = tmp_path / "runs/max/seed0/output.txt"
    assert stop.value.code == 1
    assert (f"max, seed 0: failed (RuntimeError: the roof fell in), see {output}"
            in capsys.readouterr().err)
    text = (tmp_path / "report.md").read_text()
    assert "left out of the numbers: max, seed 0." in text and "\n| max |" not in text
    _, text = run(*options)  # the same command makes good what failed
    assert "numbers: none." in text and "\n| max |" in text
    assert output.read_text().count("Traceback") == 1  # kept


def test_without_images_and_beside_the_papers_figures(tmp_path, monkeypatch):
    """The paper's figures are looked up by name: a further column before AUC changes nothing."""
    shutil.rmtree(make(tmp_path / "ut-zap50k") / "images")
    monkeypatch.delitem(sys.modules, "matplotlib.figure")
    monkeypatch.setattr(reproduce, "COLUMNS", dict(more="hm_seen", **reproduce.COLUMNS))
    report, text = run("utzappos", tmp_path / "out", "--data-root", tmp_path, "--seed", 0,
                       "--only", "table1", "qualitative", "--tmn=--width 8 --negatives 9",
                       "--vectors", tmp_path / "ut-zap50k/vectors.txt")
    assert "No picture: there are no photos here" in text
    rows = report["table1"]["open"]
    assert "paper" in rows["CompCos, mask"] and "paper" not in rows["CompCos"]
    assert "| the paper | nan | 35.1 | 72.4 | 59.3 | 46.8 | 36.9 | 21.3 |" in text
    assert " ± " not in text.split("## Table 1")[1]  # one seed deviates from nothing


@pytest.mark.skipif(not PAPER.exists(), reason="the paper is not here")
def test_transcription_of_the_paper():
    """Every row of numbers stands in paper.tex in that order, and every ranked list."""
    commands = r"\\cite\{.*?\}|\\multirow\{\d\}|\\hline|\\textbf|[{}\s]"
    source = re.sub(commands, "", PAPER.read_text())
    numbers = re.findall(r"(?<=[&\\])-?\d*\.?\d+(?=[&\\])", re.sub(r"\\(?=[&\\])", "&", source))
    whole = ",".join(f"{float(number):g}" for number in numbers)
    for tables in json.loads((ROOT / "results/paper/tables.json").read_text()).values():
        for name, table in tables.items():
            for label, row in table["rows"].items():
                row = row if len(row) == 6 else row[1:]  # S is given once for a model
                assert ",".join(f"{value:g}" for value in row) in whole, (name, label)
    words = re.sub(r"\s", "", PAPER.read_text())
    lists = json.loads((ROOT / "results/paper/ranked.json").read_text())["mitstates"]
    assert len(lists["objects"]) == 30 and len(lists["states"]) == 25
    for kind in ("objects", "states"):
        for name, (most, least) in lists[kind].items():
            assert f"{name}&{','.join(most)}&{','.join(least)}".replace(" ", "") in words, name


def test_where_the_mask_was_rejected_no_number_is_repeated():
    figures = dict.fromkeys(reproduce.COLUMNS, dict(mean=0.5, std=0.1, seeds=3))
    rows = {f"row {count}": dict(published=figures, rejected=count) for count in (0, 1, 3)}
    lines = reproduce.table_lines(reproduce.tables()["masking"], rows)
    numbers = "50.0 ± 10.0 | 50.0 ± 10.0 | 50.0 ± 10.0 | 50.00 ± 10.00 |"
    assert lines[4:7] == [f"| row 0 | {numbers}", f"| row 1 (τ rejected in 1 of 3) | {numbers}",
                          "| row 3 (τ rejected in 3 of 3) | as without |"]


@pytest.fixture(scope="module")
def made(toy, tmp_path_factory):
    """The folder of a report of two seeds."""
    out = tmp_path_factory.mktemp("made")
    run(toy, out, "--only", "threshold", "qualitative", "--seed", 0, 1)
    return out


@pytest.fixture
def again(made, toy, tmp_path):
    """A function that makes the report again, in a copy of its folder."""
    out = shutil.copytree(made, tmp_path / "copy")
    return lambda *options: run(toy, out, "--only", "threshold", "qualitative", "--seed", 0, 1,
                                *options)


def test_without_matplotlib_the_report_has_all_but_pictures(made):
    text = (made / "report.md").read_text()
    assert "No picture: import of matplotlib" in text and ".png" not in text
    assert "n = 2 seeds" in text and " ± " in text.split("## Who is misled")[1]


@pytest.mark.parametrize("options, said", [
    (["--seed", -1], "argument --seed: '-1'"),
    (["--world", "closed"], "reproduce.py: error: --world is chosen for each run"),
    (["--compcos=--seed 3"], "reproduce.py --compcos: error: --seed is chosen for each run"),
    (["--tmn=--lr -4"], "reproduce.py --tmn: error: argument --lr"),
    (["--compcos=--margin 0.1"], "run.json is of a run with other data or options: give another"),
    (["metrics.json"], "metrics.json cannot be used"),
    (["predictions.csv"], "predictions.csv cannot be used"),
])
def test_bad_input_is_one_line(again, tmp_path, capsys, options, said):
    """Of an option, or of a run's file that is damaged; before anything is trained."""
    file = tmp_path / "copy/runs/full/seed0" / str(options[0])
    if file.exists():
        contents = file.read_bytes()
        file.write_bytes(contents[:len(contents) // 2] + b"\xff")
        options = []
    with pytest.raises(SystemExit) as end:
        again(*options)
    last = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and said in last and "error: " in last


def test_the_forms_that_are_timed_give_one_loss():
    """The plain form, the factorised one and its chunks: the same loss and gradients."""
    seen = benchmark.random_seen(np.random.default_rng(0), 6, 7)
    target = torch.as_tensor(np.flatnonzero(seen)[:5])
    found = []
    for kind in (benchmark.Plain, benchmark.Unchunked, compcos.CompCos):
        torch.manual_seed(0)
        model = kind(torch.randn(6, 8), torch.randn(7, 8), 9, dropout=0.0).prepare(seen)
        model.after_epoch(15)
        loss = model.loss(torch.randn(5, 9), target)
        loss.backward()
        found.append((loss.item(), model.states.grad))
    for loss, gradient in found[1:]:
        assert math.isclose(loss, found[0][0], rel_tol=1e-5)
        assert torch.allclose(gradient, found[0][1], atol=1e-5)


def test_benchmarks_run(drawn, capsys):
    benchmark.main(["step", "--size", "4", "5", "--repeat", "1"])
    assert "times as long" in capsys.readouterr().out
    assert benchmark.time_run(str(drawn), "strong", 2, epochs=1) > 0
