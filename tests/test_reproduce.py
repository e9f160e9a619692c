"""The paper's tables and figures in quick form, on a dataset of a few images: complete, reused, continued."""

import csv
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import experiment
import reproduce
import train

HERE = Path(__file__).parent
ROOT = HERE.parent
PAPER = HERE / "../../shared/paper.tex"


def make(folder, images):
    """Own data: 4 states x 5 objects, 19 compositions, features that tell them apart; optionally images."""
    random = np.random.default_rng(0)
    states, objects = (list("wxyz"), list("abcde"))
    own = ("train", "val", "train", "test", "train")
    split = {(s, o): own[(s + 2 * o) % 5] for s in range(4) for o in range(5) if (s, o) != (3, 3)}
    looks, rows, features = random.normal(size=(9, 16)), [], []
    (folder / "images").mkdir(parents=True)
    for (s, o), own in split.items():
        for phase, count in dict(train=8, val=3, test=3).items():
            for _ in range(count if own in ("train", phase) else 0):
                rows.append([f"{len(rows)}.png", states[s], objects[o], phase])
                features.append(looks[s] + looks[4 + o] + random.normal(size=16))
                if images:
                    Image.new("RGB", (20, 30), (60 * s, 50 * o, 90)).save(folder / "images" / rows[-1][0])
    with open(folder / "images.csv", "w", newline="") as file:
        csv.writer(file).writerows([["image", "state", "object", "split"], *rows])
    np.savez(folder / "features.npz", files=[row[0] for row in rows], features=np.array(features, np.float32))
    vectors = {name: random.normal(size=20).round(3) for name in states + objects}
    (folder / "vectors.txt").write_text("".join(f"{name} {' '.join(map(str, row))}\n" for name, row in vectors.items()))
    return folder


def run(folder, *options):
    """A quick report; the folder and report.json."""
    reproduce.main(["--dataset", folder, "--device", "cpu", "--quick", "--out", folder / "out", "--seeds", 0, 1,
                    *options])
    return folder / "out", json.loads((folder / "out/report.json").read_text())


def numbers(value, path=""):
    """(path, number) of all that is not text."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if children is None:
        return [] if isinstance(value, str) else [(path, value)]
    return [found for key, child in children for found in numbers(child, f"{path}/{key}")]


@pytest.fixture
def trained(monkeypatch):
    """Counts epochs."""
    epochs, original = [], train.train_epoch
    monkeypatch.setattr(train, "train_epoch", lambda *args: epochs.append(args) or original(*args))
    return epochs


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
    assert stop.value.code == 130 and "the same reproduce.py command goes on" in capsys.readouterr().err
    assert [path.parent.parent.name for path in (toy / "out").rglob("metrics.json")] == ["full", "full"]
    out, report = run(toy)
    assert capsys.readouterr().out.count(": kept") == 2
    assert len(trained) == 1 + 3 * 2 * len(reproduce.RUNS)  # the interrupted epoch twice, no other

    assert set(reproduce.SECTIONS) <= set(report)
    cells = [pair for name in reproduce.SECTIONS for pair in numbers(report[name], name)]
    assert len(cells) > 1000 and [path for path, value in cells if value is None or not math.isfinite(value)] == []
    text = (out / "report.md").read_text()
    assert "nan" not in text and all(title in text for _, title, _ in reproduce.SECTIONS.values())
    for name in re.findall(r"\]\((.*?)\)", text):
        with Image.open(out / name) as picture:
            assert min(picture.size) > 200
    assert text.count("](") == 4

    before, trained[:] = text.split("## Findings")[1], []
    assert run(toy)[1] == report and not trained and (out / "report.md").read_text().split("## Findings")[1] == before
    # the numbers are those of the runs, and the masks made here give what the runs found
    held = [json.loads((out / f"runs/full/seed{seed}/metrics.json").read_text()) for seed in (0, 1)]
    aucs = [one["test"]["open_masked"]["exact"]["auc"] for one in held]
    assert report["table1"]["open"]["CompCos, mask"]["exact"]["AUC"] == pytest.approx(
        dict(mean=np.mean(aucs), std=np.std(aucs), seeds=2))
    for mask, label in ("no mask", "CompCos"), ("best", "CompCos, mask"):
        for protocol in reproduce.PROTOCOLS:
            for column, value in report["masking"][label][protocol].items():
                assert report["strategies"][f"CompCos, {mask}"][protocol][column] == pytest.approx(value), column
    full = report["masking"]["CompCos"]
    assert report["margins"]["CompCos, α > 0 and warm-up"] == report["primitives"]["mean"] == full
    kinds = [value["mean"] for kind, value in report["qualitative"].items() if "right" in kind or "wrong" in kind]
    assert len(kinds) == 4 and sum(kinds) == pytest.approx(1)


def test_only_what_is_asked_for_and_other_settings_start_anew(toy, trained, tmp_path, capsys):
    first = ["--only", "threshold", "--seeds", 0, "--out", tmp_path / "out"]
    _, _ = run(toy, *first), capsys.readouterr()
    assert len(trained) == 3 and {path.name for path in (tmp_path / "out/runs").iterdir()} == {"full"}
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert "threshold" in report and "table1" not in report
    (tmp_path / "out/runs/full/seed0/last.pt").rename(tmp_path / "kept.pt")
    run(toy, *first, "--compcos=--margin 0.1 --epochs 9")  # --quick has the last word on the epochs
    assert len(trained) == 6 and "trained" in capsys.readouterr().out
    settings = json.loads((tmp_path / "out/runs/full/seed0/metrics.json").read_text())["settings"]
    assert (settings["margin"], settings["epochs"]) == (0.1, 3)


def test_without_images_and_beside_the_papers_figures(tmp_path, capsys):
    folder = make(tmp_path / "ut-zap50k", images=False)
    reproduce.main(["--dataset", "utzappos", "--data-root", tmp_path, "--vectors", folder / "vectors.txt", "--device",
                    "cpu", "--quick", "--seeds", 0, "--out", tmp_path / "out", "--only", "table1", "qualitative"])
    text, report = (tmp_path / "out/report.md").read_text(), json.loads((tmp_path / "out/report.json").read_text())
    assert "The picture is left out: utzappos has no images here" in text
    assert not (tmp_path / "out/qualitative.png").exists()
    row = report["table1"]["open"]["CompCos, mask"]
    assert list(row["paper"].values()) == pytest.approx([.351, .724, .593, .468, .369, .213])
    assert row["difference"]["HM"] == pytest.approx(row["published"]["HM"]["mean"] - .369)
    assert "paper" not in report["table1"]["open"]["CompCos"] and f"{100 * row['difference']['HM']:+.1f}" in text
    assert " ± " not in text.split("## Findings")[1]  # one seed deviates from nothing


@pytest.mark.skipif(not PAPER.exists(), reason="the paper is not here")
def test_transcription_of_the_paper():
    """Every row of numbers stands in paper.tex in that order, and the lists of the five objects."""
    source = re.sub(r"\\cite\{.*?\}|\\multirow\{\d\}|\\hline|\\textbf|[{}\s]", "", PAPER.read_text())
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
