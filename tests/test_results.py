"""Candidate sets, the files and tables of a run, and that no run removes another."""

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import compcos
import data
import evaluate
from compcos import CompCos
from feasibility import feasibility_scores, hard_mask
from lab import features as image_features
from lab import results
from lab import run as runs
from lab import shell
from lab.files import read_rows
from toy import (SHORT, command, contents, make_toy, metrics_of, numbers, refusal, refused_run,
                 run)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run with its data, only read."""
    folder = tmp_path_factory.mktemp("finished")
    return run(make_toy(folder / "toy"), folder / "run", "--save-scores", "--mask", "paper")


# ---- the files ----


def test_files_of_a_run(finished, monkeypatch):
    """Every number of metrics.json and of the tables, from the saved scores and the model alone."""
    monkeypatch.setattr(evaluate, "RESAMPLES", 1000)  # as when the run was made
    metrics = metrics_of(finished)
    dataset = data.load(str(finished.parent / "toy"))
    features = image_features.load_features(dataset)[1]
    model = CompCos.load(finished / "best.pt")
    seen = dataset.seen
    rho = feasibility_scores(model.states.detach(), model.objects.detach(), seen)
    scores = np.load(finished / "scores.npy")
    target = dataset.targets["test"]
    expected = model(torch.as_tensor(features["test"])).detach().flatten(1)
    np.testing.assert_allclose(scores, expected, atol=1e-6)

    candidates = dict(closed=dataset.candidates("test"), open=np.ones(30, bool),
                      open_masked=hard_mask(rho, seen, metrics["threshold"]).ravel())
    states, objects = np.divmod(np.arange(30), 6)
    for name, mask in candidates.items():
        swept = evaluate.BiasSweep(seen.ravel(), candidates=mask, pairs=np.argwhere(seen | True))
        swept.update(scores, target)
        bias = metrics["bias"][name]
        reports = dict(exact=swept.report(confidence=0.95, unit="composition"),
                       published=swept.report("published"),
                       fixed_bias=evaluate.accuracy_at(swept, bias))
        for protocol, report in metrics["test"][name].items():
            assert report == pytest.approx(reports[protocol], abs=1e-12)
        assert metrics["candidates"]["test"][name] == mask.sum()
        assert (np.load(finished / f"scores_{name}.npz")["candidates"] == mask).all()
        answers = np.where(mask, scores + bias * ~seen.ravel(), -np.inf).argmax(1)
        predictions = read_rows(finished / "predictions.csv")
        given = [(row[f"{name}_state"], row[f"{name}_object"]) for row in predictions]
        assert given == [(f"s{states[c]}", f"o{objects[c]}") for c in answers]
        expected = [f"{scores[row, column]:.4f}" for row, column in enumerate(answers)]
        assert [row[f"{name}_score"] for row in predictions] == expected
        right = 0
        for row in read_rows(finished / "compositions.csv"):
            right += int(row["images"]) * float(row[name])
        assert right == pytest.approx((answers == target).sum(), abs=1e-2)
        curve = np.load(finished / "curves.npz")[f"{name}_seen"]
        np.testing.assert_allclose(curve, swept.curve().seen)

    # τ is the best of 50 by validation AUC alone
    unseen = rho[~seen]
    aucs = {}
    for tau in np.linspace(unseen.min(), unseen.max(), 50):
        masks = dict(one=hard_mask(rho, seen, tau).ravel())
        validation = torch.as_tensor(features["val"]), dataset.targets["val"]
        swept, _ = compcos.sweep(model, *validation, seen, masks)["one"]
        aucs[tau] = swept.report()["auc"]
    assert metrics["threshold"] == pytest.approx(max(aucs, key=aucs.get))

    log = read_rows(finished / "log.csv")
    best = max(log, key=lambda row: float(row["validation"]))
    assert len(log) == 4 and best["epoch"] == str(metrics["best_epoch"])
    found = [float(row["feasibility"]) for row in read_rows(finished / "feasibility.csv")]
    np.testing.assert_allclose(found, rho.ravel(), atol=1e-6)


def test_saved_scores_are_read_by_evaluate(finished):
    for name in results.CANDIDATE_SETS:
        sweep = evaluate.load(finished / f"scores_{name}.npz")
        found = sweep.report()["auc"]
        assert found == pytest.approx(metrics_of(finished)["test"][name]["exact"]["auc"])


# ---- candidate sets ----


def test_a_candidate_set_may_hold_no_seen_composition(toy, tmp_path, monkeypatch):
    unseen = lambda seen, *others: dict(unseen=~seen.ravel(), open_masked=seen.ravel() | True)
    monkeypatch.setattr(runs, "candidate_sets", unseen)
    out = run(toy, tmp_path / "run")
    seen = data.load(str(toy)).seen
    report = metrics_of(out)["test"]["unseen"]["exact"]
    assert report["best_seen"] == 0 < report["best_unseen"]
    compositions = data.load(str(toy)).compositions
    for row in read_rows(out / "predictions.csv"):
        answer = compositions.index(f"{row['unseen_state']} {row['unseen_object']}")
        assert not seen.flat[answer]


def test_the_mask_of_predictions_hides_nothing_that_is_listed(finished):
    dataset = data.load(str(finished.parent / "toy"))
    rho = np.full((5, 6), -0.5)
    listed = dataset.candidates("val") | dataset.candidates("test")
    found = runs.answer_candidates(dataset, dataset.seen, rho, 0.0)
    assert (found["open_masked"] == listed).all() and listed.sum() == 20
    assert (found["closed"] == dataset.candidates("test")).all() and found["open"].all()


# ---- what is printed ----


def test_intervals_say_on_how_much_they_rest():
    values = dict(auc_low=0.02, auc_high=0.194)
    assert results.interval(values, "auc", 9) == "9 compositions: too few for an interval"
    assert results.interval(values, "auc", 10) == "2% to 19%, rough: 10 compositions"
    assert results.interval(values, "auc", 20) == "2% to 19%"


def test_what_a_run_says_of_itself(finished):
    metrics = metrics_of(finished)
    auc = metrics["test"]["open"]["exact"]["auc"]
    measured = metrics["calibration"]
    said = "\n".join(results.table_notes(metrics))
    assert f"open {auc:.1%} (4 compositions: too few for an interval)" in said
    assert f"confidence {measured['confidence']:.0%}, accuracy {measured['accuracy']:.0%} (" in said
    expected = results.expectation(measured)
    assert f"of about {measured['unseen']['accuracy']:.0%} (4 compositions" in expected
    assert "none" not in results.expectation(dict(seen=measured["seen"]))


def test_several_seeds_give_a_deviation_and_no_interval(toy, tmp_path, capsys):
    """The mean is of all seeds in the folder, also of those that are there as another joins."""
    one = run(toy, tmp_path / "one")
    several = run(toy, tmp_path / "several", "--seed", 0, 1)
    assert numbers(one) == numbers(several / "seed0") != numbers(several / "seed1")
    capsys.readouterr()
    run(toy, several, "--seed", 2, "--resume")
    aucs = []
    for seed in range(3):
        report = numbers(several / f"seed{seed}")["test"]["open"]["exact"]
        assert report["auc_low"] <= report["auc"] <= report["auc_high"]
        aucs.append(report["auc"])
    summary = metrics_of(several)
    of_open = [summary[name]["test"]["open"]["exact"]["auc"] for name in ("mean", "std")]
    assert summary["settings"]["seeds"] == [0, 1, 2]
    assert of_open == pytest.approx([np.mean(aucs), np.std(aucs, ddof=1)])
    assert not any(key.endswith("_low") for key in summary["mean"]["test"]["open"]["exact"])
    printed = capsys.readouterr().out.partition("mean ± std of 3 seeds")[2]
    assert f"{100 * of_open[0]:.1f} ± {100 * of_open[1]:.1f}" in printed


# ---- the folder ----


def test_no_run_removes_another(toy, tmp_path, capsys):
    """Not by the same command, by further seeds or by another form; what joins leaves the rest."""
    out = run(toy, tmp_path / "seeds", "--seed", 0, 1)
    single = run(toy, tmp_path / "single")
    before = contents(tmp_path)
    taken = "already contains a run: pass --resume to continue it, or another --out"
    for folder, options, message in (
            (out, ["--seed", 3], taken), (single, [], taken), (single, ["--seed", 0, 1], taken),
            (single, ["--seed", 0, 1, "--resume"], "single seed, which further seeds cannot join"),
            (single, ["--seed", 1, "--resume"], "with seed=0, this command has seed=1"),
            (out, ["--seed", 0, 1, "--resume", "--margin", 0.1], "margin="),
            (out, ["--seed", 7, "--resume", "--epochs", 5], "with epochs=4, this command has ")):
        assert message in refused_run(capsys, toy, folder, *options)
        assert contents(tmp_path) == before

    run(toy, out, "--seed", 2, "--resume")
    after = contents(tmp_path)
    del before["seeds/metrics.json"]  # the mean, now of three
    assert before.items() <= after.items()
    for path in tmp_path.glob("**/last.pt"):
        path.unlink()
    assert str(single / "last.pt") in refused_run(capsys, toy, single, "--resume")
    assert "margin=" in refused_run(capsys, toy, out, "--seed", 7, "--resume", "--margin", 0.1)


def test_runs_without_a_folder_are_numbered(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = ["--dataset", toy, "--device", "cpu", *SHORT, "--epochs", 1]
    first, second = Path("runs/toy-compcos-open"), Path("runs/toy-compcos-open-2")
    command(*short)
    before = contents(first)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(compcos, "selection", lambda _: signal.raise_signal(signal.SIGINT))
        command(*short)
    assert list(second.iterdir()) == [second / ".lock"]  # begun, and nothing saved
    assert "--resume continues the run in --out" in refusal(capsys, *short, "--resume")
    command(*short, "--resume", "--out", second)
    assert f"written to {second}; next: python compcos.py --checkpoint {second}" in \
        capsys.readouterr().out
    assert contents(first) == before and numbers(second) == numbers(first)


def test_a_disk_that_fills_up_loses_nothing(toy, tmp_path, monkeypatch, capsys):
    """The error names the file, what was there stays, and --resume makes the rest, also the scores
    anew, which are there."""
    begun = run(toy, tmp_path / "begun", "--save-scores", "--epochs", 2)
    whole = run(toy, tmp_path / "whole", "--save-scores")
    before = contents(begun)
    replace = shell.os.replace
    for name in ("last.pt", "scores.npy", "metrics.json"):
        out = shutil.copytree(begun, tmp_path / name)

        def fill_up(part, path):
            if path.name == name:
                raise OSError(28, "No space left on device")
            replace(part, path)

        with monkeypatch.context() as patch:
            patch.setattr(shell.os, "replace", fill_up)
            error = refused_run(capsys, toy, out, "--resume")
        assert f"cannot write {out / name}: No space left on device" in error
        assert contents(out)[name] == before[name] and not list(out.glob(".*.part"))
        run(toy, out, "--resume")
        for file in ("scores.npy", "predictions.csv", "compositions.csv", "feasibility.csv"):
            assert (out / file).read_bytes() == (whole / file).read_bytes()
        assert numbers(out) == numbers(whole)
