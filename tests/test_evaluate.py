"""Tests of evaluate.py: brute force, closed forms, the published evaluator's answers."""

import json
import math
import os
import re
import subprocess
import sys
import threading
import tracemalloc
import zlib
from fractions import Fraction
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import evaluate as module
from evaluate import (
    HEADLINE,
    PROTOCOLS,
    UNITS,
    BiasSweep,
    accuracy_at,
    compare,
    evaluate,
    threshold_sweep,
)

HERE = Path(__file__).parent
SHARED = HERE / "../../shared/golden"
SEEN = np.array([True, False])
TARGET = np.array([0, 1, 1])


def problem(seed, kind="normal", n=30, p=9):
    """Scores (n, p) and the other arrays by name: both halves, some truths no candidate."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(n, p))
    if kind == "ties":
        scores = rng.integers(3, size=(n, p)) / 4
    if kind == "wide":
        scores *= 2000
    if kind == "wild":
        scores *= 10.0 ** rng.integers(-9, 9, size=(n, p))
        scores[rng.random(scores.shape) < 0.2] = 1 / 3
    seen = np.arange(p) % 2 == 0
    rng.shuffle(seen)
    target = rng.integers(p, size=n)
    target[:p] = np.arange(p)[:n]
    masks = dict(candidates=rng.random(p) < 0.8, pairs=rng.integers(3, size=(p, 2)))
    return scores, target, seen, masks


def sweep_of(scores, target, seen, **masks):
    sweep = BiasSweep(seen, **masks)
    sweep.update(scores, target)
    return sweep


def top(row, seen, candidates, k, bias):
    """The k best columns of score + bias if unseen: seen first, then the lower column."""
    rank = sorted(
        np.flatnonzero(candidates),
        key=lambda c: (-(row[c] if seen[c] else row[c] + bias), not seen[c], c),
    )
    return rank[:k]


def accuracies(scores, target, seen, candidates, k, bias):
    """Seen and unseen accuracy at one bias, from the definition."""
    right = np.array([y in top(row, seen, candidates, k, bias) for row, y in zip(scores, target)])
    halves = (seen[target], ~seen[target])
    return tuple(right[half].mean() if half.any() else np.nan for half in halves)


def fractions(scores):
    return np.array([[Fraction(float(x)) for x in row] for row in scores], object)


def brute(scores, target, seen, candidates, k):
    """Best seen, best unseen, best HM and area from trying every bias with exact numbers: one
    below, one between each two and one above all at which any prediction can change."""
    exact = fractions(scores)
    differences = exact[:, seen][:, :, None] - exact[:, ~seen][:, None]
    turns = sorted({*differences.ravel(), Fraction(0)})
    biases = [turns[0] - 1, *((a + b) / 2 for a, b in zip(turns, turns[1:])), turns[-1] + 1]
    points = [accuracies(exact, target, seen, candidates, k, bias) for bias in biases]
    s, u = np.array(points).T
    hm = 2 * s * u / np.maximum(s + u, 1e-99)
    area = s[0] * u[0] + np.sum((s[1:] + s[:-1]) * np.diff(u)) / 2
    return dict(best_seen=s.max(), best_unseen=u.max(), best_hm=hm.max(), auc=area)


def check(report, wanted):
    """What is wanted is in the report, nan aside."""
    for name, value in wanted.items():
        assert np.isnan(value) or report[name] == pytest.approx(value, abs=1e-12), name


# Exact at every bias.


@pytest.mark.parametrize("kind", ["normal", "ties", "wild"])
def test_equals_brute_force_over_every_bias(kind):
    for seed in range(60):
        rng = np.random.default_rng(seed)
        n, p, k = rng.integers(1, 8, size=3)
        scores, target, seen, masks = problem(seed, kind, n, p)
        if seed % 4 == 0:
            masks["candidates"] = seen = rng.random(p) < 0.5  # all of one kind, or none of one
        report = evaluate(scores, target, seen, topk=k, **masks)
        check(report, brute(scores, target, seen, masks["candidates"], k))


@pytest.mark.parametrize("kind", ["normal", "ties", "wide", "wild"])
@pytest.mark.parametrize("k", [1, 3])
def test_every_float_bias_is_judged_as_real_arithmetic_would(kind, k):
    scores, target, seen, masks = problem(5, kind, n=12)
    sweep = sweep_of(scores, target, seen, topk=k, **masks)
    curve = sweep.curve()
    exact = fractions(scores)
    turns = (scores[:, seen][:, :, None] - scores[:, ~seen][:, None]).ravel()[::5]
    for bias in [*turns, *np.nextafter(turns, -np.inf), *np.nextafter(turns, np.inf)]:
        got = accuracy_at(sweep, bias)
        i = np.searchsorted(curve.bias, bias) - 1
        want = accuracies(exact, target, seen, masks["candidates"], k, Fraction(float(bias)))
        assert (got["seen"], got["unseen"]) == want == (curve.seen[i], curve.unseen[i])
    assert accuracy_at(sweep, -np.inf)["seen"] == sweep.report()["best_seen"]
    assert accuracy_at(sweep, np.inf)["unseen"] == sweep.report()["best_unseen"]


def test_a_report_is_what_its_bias_gives():
    for seed in range(40):
        kind = ["normal", "ties", "wide"][seed % 3]
        scores, target, seen, masks = problem(seed, kind, n=6, p=6)
        sweep = sweep_of(scores, target, seen, **masks)
        for protocol in PROTOCOLS:
            for average in UNITS:
                report = sweep.report(protocol, average=average)
                there = accuracy_at(sweep, report["bias"], average=average)
                check(report, dict(best_hm=there["hm"], hm_seen=there["seen"],
                                   hm_unseen=there["unseen"],
                                   state_accuracy_at_best_hm=there["state_accuracy"],
                                   object_accuracy_at_best_hm=there["object_accuracy"]))


def test_closed_forms():
    seen = np.array([True, True, False, False])
    tied = sweep_of(np.zeros((4, 4)), np.arange(4), seen)
    assert [tied.report()[name] for name in HEADLINE] == [0.125, 0, 0.5, 0.5]
    assert accuracy_at(tied, 0.0)["unseen"] == 0  # seen wins ties
    assert tied.report()["bias"] == -1  # at the lower end, 1 away from the only turn
    # one image of each half: the seen one is right up to bias 0.5, the unseen one above 0.25
    report = evaluate([[0.75, 0, 0.25, 0], [0.5, 0, 0, 0.25]], np.array([0, 3]), seen)
    assert (report["best_hm"], report["bias"], report["auc"]) == (1, 0.375, 1)
    # the seen one is right up to a hair above 0.5, the unseen one above 0.5
    hair = np.nextafter(0.5, 1)
    assert evaluate([[hair, 0, 0, 0], [0.5, 0, 0, 0]], np.array([0, 2]), seen)["bias"] == hair
    # of the top 2 the seen one stays at any bias, the unseen one is among them above 0.25
    report = evaluate([[0.75, 0.5, 0.25]] * 2, np.array([0, 2]), seen[:3], topk=2)
    assert (report["best_hm"], report["bias"]) == (1, 1.25)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("half", [True, False])
def test_one_half_alone(protocol, half):
    """What needs the other half does not exist: nan."""
    sweep = sweep_of(np.eye(4)[[0, 1, 1]] * 9999, np.array([0, 1, 0]), np.full(4, half))
    report = sweep.report(protocol, confidence=0.9)
    there, missing = ("best_seen", "best_unseen") if half else ("best_unseen", "best_seen")
    assert report[there] == pytest.approx(2 / 3) and report["n_seen"] == 3 * half
    for name in missing, "auc", "best_hm", "best_hm_low", "hm_seen", "hm_unseen", "bias":
        assert np.isnan(report[name]), name
    assert np.isnan(compare(sweep, sweep, protocol=protocol)["auc_a_leads"])


# The published protocol.


@pytest.mark.parametrize("kind", ["normal", "wide", "ties"])
@pytest.mark.parametrize("k", [1, 3])
def test_published_biases_as_described(kind, k):
    scores, target, seen, masks = problem(3, kind, n=90)
    candidates = masks["candidates"] | seen
    sweep = sweep_of(scores, target, seen, candidates=candidates, topk=k)
    curve = sweep.curve("published")
    right = [y in top(row, seen, candidates, k, 1000.0) for row, y in zip(scores, target)]
    best_seen = np.sort(np.where(seen, scores, -np.inf), axis=1)[:, -k]
    gaps = best_seen - scores[np.arange(90), target]
    d = np.sort(gaps[~seen[target] & right]) - 1e-4
    assert [*curve.bias] == [*d[:: max(len(d) // 20, 1)], 1000.0]
    for bias, *point in zip(*curve):
        assert tuple(point) == accuracies(scores, target, seen, candidates, k, bias)
    # The area begins at the first of these points, and not at unseen accuracy 0.
    area = (curve.seen[1:] + curve.seen[:-1]) @ np.diff(curve.unseen) / 2
    assert sweep.report("published")["auc"] == pytest.approx(area)


GOLDEN = {
    "auc": "AUC",
    "best_hm": "best_hm",
    "best_seen": "best_seen",
    "best_unseen": "best_unseen",
    "hm_seen": "hm_seen",
    "hm_unseen": "hm_unseen",
    "bias": "biasterm",
    "state_accuracy": "closed_ub_attr_match",
    "object_accuracy": "closed_ub_obj_match",
    "state_accuracy_unseen_only": "closed_attr_match",
    "object_accuracy_unseen_only": "closed_obj_match",
}


def test_published_evaluators_answers():
    folder = SHARED if SHARED.exists() else HERE / "data"  # which has two cases of the five
    saved = np.load(folder / "evaluator.npz")
    for case, by_k in json.loads((folder / "evaluator.json").read_text()).items():
        names = ("scores", "target", "seen", "candidates", "pairs")
        arrays = {name: saved[f"{case}/{name}"] for name in names}
        for k, answer in by_k.items():
            k = int(k.removeprefix("topk="))
            report = evaluate(**arrays, topk=k, protocol="published")
            for name, theirs in GOLDEN.items():
                assert report[name] == pytest.approx(answer[theirs], abs=1e-6), (case, k, name)


# Blocks, forms and shards.


@pytest.mark.parametrize("k", [1, 3, 10**12])
def test_blocks_layout_and_shards_change_nothing(k, monkeypatch):
    scores, target, seen, masks = problem(1, "ties", n=50, p=40)
    scores = scores.astype(np.float16)
    masks["topk"] = k
    want = evaluate(scores, target, seen, **masks)
    forms = [np.asfortranarray(scores)]
    forms += [scores.astype(form) for form in ("f4", ">f8", np.longdouble)]
    for block in 1, 800, 1 << 22:
        monkeypatch.setattr(module, "BLOCK", block)
        for form in forms:
            assert evaluate(form, target, seen, **masks) == want
            assert np.array_equal(form, scores)
    first, second = (sweep_of(scores[i::2], target[i::2], seen, **masks) for i in (0, 1))
    first.merge(second)
    assert first.report() == want
    seen[:] = False  # it was copied
    assert first.report() == want


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("k", [1, 3])
def test_kept_scores_are_the_stable_best(share, k):
    rng = np.random.default_rng(4)
    seen = np.arange(50) < share * 50
    target = rng.integers(50, size=60)
    scores = rng.integers(6, size=(60, 50)).astype(float)
    kept = []
    for group in seen, ~seen:
        order = np.argsort(-np.where(group, scores, -np.inf), axis=1, kind="stable")[:, :k]
        kept += [np.take_along_axis(scores, order, axis=1), order]
    sweep = BiasSweep(seen, topk=k)
    sweep.update_topk(*kept, target)
    for protocol in PROTOCOLS:
        want = evaluate(scores, target, seen, topk=k, protocol=protocol)
        check(sweep.report(protocol), {name: want[name] for name in HEADLINE})


def test_memory_stays_small():
    rng = np.random.default_rng(0)
    scores = rng.random((400, 28175), np.float32)
    seen = np.arange(28175) < 1262
    target = rng.integers(28175, size=400)
    feasibility = rng.random(28175)
    tracemalloc.start()
    evaluate(scores, target, seen)
    threshold_sweep([(scores, target)], seen, feasibility, np.linspace(0, 1, 50))
    assert tracemalloc.get_traced_memory()[1] < 16e6
    tracemalloc.stop()


def test_torch_tensors_are_as_good_as_arrays():
    torch = pytest.importorskip("torch")
    scores, target, seen, _ = problem(0)
    tensor = torch.from_numpy(scores).requires_grad_()
    got = evaluate(tensor, torch.from_numpy(target), torch.from_numpy(seen))
    assert str(got) == str(evaluate(scores, target, seen))  # without pairs some are nan


# Thresholds.


@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_thresholds_equal_separate_evaluations(kind, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 3200)
    scores, target, seen, masks = problem(6, kind, n=80, p=60)
    feasibility = np.random.default_rng(6).uniform(-1, 1, 60).round(1)
    if kind == "ties":  # of every truth, a candidate or not, with lower columns or none
        scores[np.arange(80), target] = 0.5
    scores = scores.astype(np.float32)
    feasibility = feasibility.astype(np.float16)  # float16(0.1) < 0.1
    thresholds = np.array([0.3, -2, *np.linspace(-1, 0.5, 7), 0.3, 0.1, 2])
    mask = masks["candidates"]
    blocks = ((scores[i:i + 30], target[i:i + 30]) for i in (0, 30, 60))
    got = threshold_sweep(blocks, seen, feasibility, thresholds, candidates=mask)
    for i, threshold in enumerate(thresholds):
        kept = mask & (seen | (feasibility.astype(float) >= threshold))
        assert got["removed"][i] == pytest.approx(1 - kept.sum() / mask.sum())
        sweep = sweep_of(scores, target, seen, candidates=kept)
        assert got["auc"][i] == sweep.report()["auc"]
        assert got["auc_published"][i] == sweep.report("published")["auc"]


# Averages, resamples and comparisons.


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("average", UNITS)
def test_what_is_drawn_counts_as_so_many_copies(unit, average):
    scores, target, seen, masks = problem(8, "ties", n=24)
    sweep = sweep_of(scores, target, seen, topk=2, **masks)
    images = sweep._images()
    draws = module._draws(images, unit, average)
    for i, (counts, weights) in zip(range(8), draws):
        assert (counts == 1).all() == (i == 0)
        assert unit == "composition" or counts.sum() == 24
        if unit == "composition":  # whole ones, as many of each half as there are
            once = np.unique(target, return_index=True)[1]
            assert (counts == counts[once][target]).all()
            assert counts[once][seen].sum() == seen.sum() and counts[once].sum() == 9
        copies = counts
        if average == "composition":
            drawn = np.bincount(target, counts if unit == "image" else None).astype(int)
            copies = math.lcm(*drawn[drawn > 0]) * counts // np.maximum(drawn, 1)[target]
        rows = np.repeat(np.arange(24), copies)
        for protocol in PROTOCOLS[: 2 if average == "image" else 1]:
            got = module._metrics(images, counts, weights, protocol)
            want = evaluate(scores[rows], target[rows], seen, topk=2, protocol=protocol, **masks)
            check(got, {name: want[name] for name in got})


@pytest.mark.parametrize("seed", [6, 12])
def test_rounding_does_not_choose_among_equal_harmonic_means(seed):
    """One seen and one unseen composition of 9 images: each counts 1/9, whose sums are rounded."""
    first = np.random.default_rng(seed).permutation(18)
    scores = np.stack([first, 0 * first], axis=1)
    report = evaluate(scores, np.repeat([0, 1], 9), SEEN, average="composition")
    check(report, {"bias": evaluate(scores, np.repeat([0, 1], 9), SEEN)["bias"]})


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("average", UNITS)
def test_a_comparison_draws_the_same_for_both(protocol, unit, average, monkeypatch):
    monkeypatch.setattr(module, "RESAMPLES", 40)
    scores, target, seen, masks = problem(3, n=50)
    sweeps = [sweep_of(scores, target, seen, **masks), sweep_of(scores[:, ::-1], target, seen)]
    got = compare(*sweeps, 0.9, unit, protocol=protocol, average=average)
    values = []
    for drawn in [*module._draws(sweeps[0]._images(), unit, average)][1:]:
        values.append([module._metrics(each._images(), *drawn, protocol) for each in sweeps])
    for name in HEADLINE:
        a, b = np.array([[each[name] for each in both] for both in values]).T
        low, high = np.sort(a - b)[[2, 37]]
        assert got[name + "_difference_low"] == low and got[name + "_difference_high"] == high
        assert got[name + "_a"] == sweeps[0].report(protocol, average=average)[name]
        assert got[name + "_a_leads"] == (a - b > 1e-9).mean()


# Bad input.

GOOD = dict(scores=np.zeros((3, 2)), target=TARGET, seen=SEEN)
BAD = [
    ("scores", np.zeros((3, 3)), r"real of shape \(any, 2\), got float64 of shape \(3, 3\)"),
    ("target", [0, 2, 1], "0 to 1, got 2 in row 1"),
    ("topk", 0, "topk .* at least 1"),
    ("protocol", "fast", "exact.*published.*got 'fast'"),
    ("confidence", 95, "between 0 and 1.*95"),
    ("scores", [[0.5, 1], [0.5]], "scores cannot be converted to an array"),
]


@pytest.mark.parametrize("name, value, message", BAD, ids=range(len(BAD)))
def test_bad_input_is_named(name, value, message):
    with pytest.raises(ValueError, match=message):
        evaluate(**{**GOOD, name: value})


def test_a_bad_score_is_found_in_every_column_and_nothing_is_added(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 800)
    scores, target, seen, masks = problem(3, n=40, p=12)
    sweep = sweep_of(scores, target, seen, **masks)
    want = sweep.report()
    for value in np.nan, np.inf, -np.inf, 1e308:
        for column in range(12):
            changed = scores.copy()
            changed[[31, 35], column] = value
            with pytest.raises(ValueError, match=f"must be finite.*row 31, column {column} is"):
                sweep.update(changed, target)
    assert sweep.report() == want


@pytest.mark.parametrize("name, value", [
    ("seen_scores", [0.1, 0.5, 0.0]),
    ("unseen_scores", [np.inf, 0.5, 0.1]),
    ("seen_columns", [3, 1, 0]),
])
def test_bad_kept_scores_are_named(name, value):
    kept = dict(seen_scores=[[0.5, 0.2, 0.1]], seen_columns=[[1, 0, 2]],
                unseen_scores=[[0.5, 0.2, 0.1]], unseen_columns=[[3, 5, 4]], target=[1])
    sweep = BiasSweep(np.arange(6) < 3, topk=3)
    sweep.update_topk(**kept)
    with pytest.raises(ValueError, match=f"{name[:4]}.* must .*"):
        sweep.update_topk(**{**kept, name: [value]})


@pytest.mark.parametrize("call, message", [
    (lambda sweep: sweep.merge(None), "other must be a BiasSweep, got NoneType"),
    (lambda sweep: sweep.merge(sweep_of(**GOOD, candidates=SEEN)), "differ in candidates"),
    (lambda sweep: compare(sweep, {}), "sweep_b must be a BiasSweep, got dict"),
    (lambda sweep: compare(sweep, sweep_of(np.eye(3, 2), TARGET[::-1], SEEN)), "differ in target"),
    (lambda sweep: compare(sweep, BiasSweep(SEEN)), "no images"),
    (lambda sweep: accuracy_at(sweep, np.nan), "bias must hold"),
    (lambda sweep: threshold_sweep([], SEEN, [0, 0], [0.5]), "no images"),
    (lambda sweep: threshold_sweep(5, SEEN, [0, 0], [0.5]), r"pairs \(scores, target\), got int"),
])
def test_wrong_sweeps_and_blocks_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(sweep_of(**GOOD))


# The script.


@pytest.fixture
def saved(tmp_path):
    """A folder with scores.npz, and what is in it."""
    scores, target, seen, masks = problem(0, n=60)
    arrays = dict(scores=scores, target=target, seen=seen, **masks)
    np.savez(tmp_path / "scores.npz", **arrays)
    return tmp_path, arrays


def test_script_prints_and_writes(saved, capsys):
    folder, arrays = saved
    file = str(folder / "scores.npz")
    module.main([file, "--confidence", "0.9", "--topk", "2"])
    report = evaluate(**arrays, topk=2, confidence=0.9)
    auc, low, high = (f"{100 * report['auc' + end]:.2f}" for end in ("", "_low", "_high"))
    text = capsys.readouterr().out
    assert f" {auc} [{low}, {high}]" in text
    assert f" {report['bias']:.2f} [" in text

    module.main([file, "--json"])
    reports = json.loads(capsys.readouterr().out)
    assert reports == {name: evaluate(**arrays, protocol=name) for name in PROTOCOLS}


def test_script_says_what_does_not_exist(tmp_path, capsys):
    file = str(tmp_path / "s.npz")
    np.savez(file, scores=np.eye(2), target=np.array([0, 0]), seen=SEEN)
    module.main([file, "--json"])
    assert json.loads(capsys.readouterr().out)["exact"]["auc"] is None
    module.main([file])
    assert capsys.readouterr().out.startswith("2 images of seen and 0 of unseen compositions; 2 ")


def test_script_compares(saved, capsys):
    folder, arrays = saved
    other = {**arrays, "scores": arrays["scores"][:, ::-1], "candidates": np.ones(9, bool)}
    np.savez(folder / "other.npz", **other)
    files = [str(folder / "scores.npz"), "--against", str(folder / "other.npz")]
    module.main([*files, "--json", "--unit", "composition", "--average", "composition"])
    got = json.loads(capsys.readouterr().out)["against"]["exact"]
    both = (sweep_of(**arrays), sweep_of(**other))
    assert got == compare(*both, 0.95, "composition", average="composition")
    module.main(files)
    assert "auc_difference " in capsys.readouterr().out


def test_script_finds_the_scores_beside_the_rest(saved, capsys):
    folder, arrays = saved
    want = evaluate(**arrays)
    np.save(folder / "scores.npy", arrays.pop("scores"))
    np.savez(folder / "rest.npz", **arrays)
    module.main([str(folder / "rest.npz"), "--json"])
    assert json.loads(capsys.readouterr().out)["exact"] == want


@pytest.mark.parametrize("arguments, message", [
    (["none.npz"], "No such file or directory: 'none.npz'"),
    (["scores.npz", "--against", "."], "cannot read ."),
    (["pickled.npz"], "cannot read pickled.npz .*plain arrays"),
    (["target.npz"], "no array scores in .*target.npz"),
    (["misspelt.npz"], "misspelt.npz: .* unexpected keyword argument 'candidate'"),
])
def test_bad_files_end_in_one_line(saved, arguments, message, capsys, monkeypatch):
    folder, arrays = saved
    monkeypatch.chdir(folder)
    np.savez("pickled.npz", **{**arrays, "seen": np.array([None, "a"])})
    np.savez("target.npz", target=TARGET, seen=SEEN)
    np.savez("misspelt.npz", **arrays, candidate=SEEN)
    with pytest.raises(SystemExit) as end:
        module.main(arguments)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    assert re.search(message, error), error


def refused_flips(file, path, bits):
    """How many of some bits, flipped one at a time, are refused; any other changes nothing."""
    whole = path.read_bytes()
    want = module.load(file).report()
    refused = 0
    for bit in bits:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert module.load(file).report() == want, bit
        except ValueError as error:
            assert "\n" not in str(error)
            refused += 1
    return refused


def test_no_flipped_bit_of_an_archive_changes_the_answer(tmp_path):
    scores, target, seen, masks = problem(1, n=12, p=6)
    path = tmp_path / "small.npz"
    np.savez(path, scores=scores, target=target, seen=seen, **masks)
    assert refused_flips(path, path, range(0, 8 * path.stat().st_size, 19)) > 500


def test_damaged_scores_are_refused_by_their_sum(saved):
    folder, arrays = saved
    path = folder / "scores.npy"
    np.save(path, arrays.pop("scores"))
    np.savez(folder / "rest.npz", **arrays, scores_crc32=zlib.crc32(path.read_bytes()))
    assert refused_flips(folder / "rest.npz", path, range(0, 9000, 331)) == 28


def test_works_where_no_further_thread_can_start(monkeypatch):
    scores, target, seen, masks = problem(2)
    want = evaluate(scores, target, seen, **masks)
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError))
    assert evaluate(scores, target, seen, **masks) == want


def test_the_script_stands_alone_and_ends_quietly(saved):
    """With a closed pipe and with a closed stdout."""
    folder, _ = saved
    script = folder / "copy.py"
    script.write_bytes(Path(module.__file__).read_bytes())
    command = [sys.executable, str(script), str(folder / "scores.npz")]
    reader, writer = os.pipe()
    os.close(reader)
    assert subprocess.run(command, stdout=writer, stderr=subprocess.PIPE).stderr == b""
    os.close(writer)
    ended = subprocess.run(command, stderr=subprocess.PIPE, preexec_fn=lambda: os.close(1))
    assert ended.returncode == 0 and ended.stderr == b""
