"""Tests of evaluate.py: brute force, closed forms, the published evaluator's answers."""

import csv
import json
import math
import os
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
import zlib
from fractions import Fraction
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

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


def problem(rng, kind="normal", n=30, p=9):
    """Scores (n, p), target, seen, candidates, pairs: both halves, some truths no candidate."""
    scores = {
        "normal": rng.normal(size=(n, p)),
        "ties": rng.integers(3, size=(n, p)) / 4,
        "constant": np.full((n, p), 0.5),
        "narrow": rng.normal(size=(n, p)) * 1e-4,
        "wide": rng.normal(size=(n, p)) * 2000,
    }[kind]
    seen = np.arange(p) % 2 == 0
    rng.shuffle(seen)
    candidates = rng.random(p) < 0.8
    target = rng.integers(p, size=n)
    target[:2] = np.flatnonzero(seen)[0], np.flatnonzero(~seen)[0]
    return scores, target, seen, candidates, rng.integers(3, size=(p, 2))


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
    return tuple(
        right[half].mean() if half.any() else np.nan for half in (seen[target], ~seen[target])
    )


def every_bias(scores, seen):
    """A bias below, between each two and above all biases at which any prediction can change."""
    scores = [[Fraction(float(x)) for x in row] for row in scores]
    pairs = [(s, u) for s in np.flatnonzero(seen) for u in np.flatnonzero(~seen)]
    turns = sorted({row[s] - row[u] for row in scores for s, u in pairs} or {0})
    return [turns[0] - 1, *((a + b) / 2 for a, b in zip(turns, turns[1:])), turns[-1] + 1]


def brute(scores, target, seen, candidates, k):
    """Best seen, best unseen, best HM and area from trying every bias with exact numbers."""
    exact = np.array([[Fraction(float(x)) for x in row] for row in scores], object)
    biases = every_bias(scores, seen)
    # In units of which each is a whole number: these are as exact as fractions, and add faster.
    units = math.lcm(*(number.denominator for number in [*exact.flat, *biases]))
    whole = np.array([[int(x * units) for x in row] for row in exact], object)
    points = []
    for bias in biases:
        points.append(accuracies(whole, target, seen, candidates, k, int(bias * units)))
    s, u = np.array(points).T
    hm = max(2 * a * b / (a + b) if a + b else 0 for a, b in points)
    area = s[0] * u[0] + sum((s[i] + s[i + 1]) * (u[i + 1] - u[i]) / 2 for i in range(len(s) - 1))
    return dict(best_seen=s.max(), best_unseen=u.max(), best_hm=hm, auc=area)


def published(scores, target, seen, candidates, k):
    """The published protocol from its description, literally."""
    unseen = ~seen[target]
    right = [y in top(row, seen, candidates, k, 1000.0) for row, y in zip(scores, target)]
    best_seen = np.sort(np.where(seen & candidates, scores, -np.inf), axis=1)[:, -k]
    d = np.sort((best_seen - scores[np.arange(len(target)), target])[unseen & right]) - 1e-4
    biases = [*d[:: max(len(d) // 20, 1)], 1000.0]
    s, u = np.array([accuracies(scores, target, seen, candidates, k, bias) for bias in biases]).T
    hm = [2 * a * b / (a + b) if a + b else 0 for a, b in zip(s, u)]
    i = int(np.argmax(hm))
    return dict(
        best_seen=s.max(),
        best_unseen=u.max(),
        best_hm=hm[i],
        hm_seen=s[i],
        hm_unseen=u[i],
        bias=biases[i],
        auc=np.sum((s[1:] + s[:-1]) * np.diff(u)) / 2,
    )


@pytest.mark.parametrize("kind", ["normal", "ties", "constant", "narrow", "wide"])
@pytest.mark.parametrize("k", [1, 2, 3, 12])
def test_equals_brute_force_over_every_bias(kind, k):
    for seed in range(2):
        scores, target, seen, candidates, pairs = problem(
            np.random.default_rng(seed), kind, n=14, p=7
        )
        for mask in candidates, np.ones(7, bool):
            report = evaluate(scores, target, seen, candidates=mask, pairs=pairs, topk=k)
            for name, value in brute(scores, target, seen, mask, k).items():
                assert report[name] == pytest.approx(value, abs=1e-12), name


@pytest.mark.parametrize("kind", ["normal", "ties", "wide"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_curve_and_accuracy_at_hold_at_every_bias(kind, k):
    scores, target, seen, candidates, pairs = problem(np.random.default_rng(5), kind, n=12)
    sweep = BiasSweep(seen, candidates=candidates, pairs=pairs, topk=k)
    sweep.update(scores, target)
    curve = sweep.curve()
    assert curve.bias[0] == -np.inf and (np.diff(curve.bias) > 0).all()
    assert (np.diff(curve.seen) <= 0).all() and (np.diff(curve.unseen) >= 0).all()
    exact = np.array([[Fraction(float(x)) for x in row] for row in scores], object)
    at_turns = (
        [Fraction(float(b)) for b in curve.bias[1:]] if kind == "ties" else []
    )  # exact in float64 there
    for bias in every_bias(scores, seen)[::7] + at_turns:
        got, i = accuracy_at(sweep, float(bias)), np.searchsorted(curve.bias, float(bias)) - 1
        want = accuracies(exact, target, seen, candidates, k, bias)
        assert (got["seen"], got["unseen"]) == want == (curve.seen[i], curve.unseen[i])
        chosen = [top(row, seen, candidates, k, bias) for row in exact]
        for name, code in ("state_accuracy", pairs[:, 0]), ("object_accuracy", pairs[:, 1]):
            assert got[name] == np.mean([code[y] in code[c] for y, c in zip(target, chosen)])


@pytest.mark.parametrize("kind", ["normal", "narrow", "wide", "ties"])
@pytest.mark.parametrize("k", [1, 3])
def test_published_protocol_as_described(kind, k):
    scores, target, seen, candidates, _ = problem(np.random.default_rng(3), kind, n=90)
    candidates[np.flatnonzero(seen)[:3]] = True
    report = evaluate(scores, target, seen, candidates=candidates, topk=k, protocol="published")
    for name, value in published(scores, target, seen, candidates, k).items():
        assert report[name] == pytest.approx(value, abs=1e-12), name


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


def golden(folder):
    arrays, answers = (
        np.load(folder / "evaluator.npz"),
        json.loads((folder / "evaluator.json").read_text()),
    )
    for case, by_k in answers.items():
        get = {
            name: arrays[f"{case}/{name}"]
            for name in ("scores", "target", "seen", "candidates", "pairs")
        }
        for k, answer in by_k.items():
            yield case, int(k.removeprefix("topk=")), get, answer


@pytest.mark.parametrize("folder", [HERE / "data", SHARED], ids=["testdata", "shared"])
def test_published_evaluators_answers(folder):
    if not folder.exists():
        pytest.skip(f"{folder} is not here")
    understated = {"auc": 0, "best_hm": 0}
    for case, k, arrays, answer in golden(folder):
        report = evaluate(**arrays, topk=k, protocol="published")
        for name, theirs in GOLDEN.items():
            assert report[name] == pytest.approx(answer[theirs], abs=1e-6), (case, k, name)
        exact = evaluate(**arrays, topk=k)
        for name in understated:
            understated[name] = max(understated[name], exact[name] - report[name])
            assert exact[name] >= report[name]
    if folder == SHARED:  # by up to 3.1 points of AUC and 2.0 of HM
        assert [round(100 * x, 1) for x in understated.values()] == [3.1, 2.0]


def test_closed_forms():
    seen = np.array([True, True, False, False])
    tied = evaluate(np.zeros((4, 4)), np.array([0, 1, 2, 3]), seen)
    assert (tied["best_seen"], tied["best_unseen"], tied["best_hm"], tied["auc"]) == (
        0.5,
        0.5,
        0,
        0.125,
    )
    assert (
        accuracy_at(sweep_of(np.zeros((4, 4)), np.array([0, 1, 2, 3]), seen), 0.0)["unseen"] == 0
    )  # seen wins ties
    perfect = evaluate(np.eye(4), np.arange(4), seen)
    assert (perfect["auc"], perfect["best_hm"], perfect["bias"]) == (1, 1, 0)
    # one image of each half: the seen one is right up to bias 0.5, the unseen one above 0.25
    report = evaluate(np.array([[0.75, 0, 0.25, 0], [0.5, 0, 0, 0.25]]), np.array([0, 3]), seen)
    assert (report["best_hm"], report["bias"], report["auc"]) == (1, 0.375, 1)
    for above in (
        0.5,
        np.nextafter(0.5, 1),
    ):  # the seen one is right up to 0.5 or a hair above, the unseen one above 0.5
        sweep = sweep_of(np.array([[above, 0, 0, 0], [0.5, 0, 0, 0]]), np.array([0, 2]), seen)
        assert accuracy_at(sweep, sweep.report()["bias"])["hm"] == sweep.report()["best_hm"]
    assert [type(value) for value in report.values()] == [float] * 13 + [int] * 3 + [str]


def sweep_of(scores, target, seen, **options):
    sweep = BiasSweep(seen, **options)
    sweep.update(scores, target)
    return sweep


@pytest.mark.parametrize("kind", ["normal", "ties"])
@pytest.mark.parametrize("k", [1, 3])
def test_blocks_threads_layout_and_shards_change_nothing(kind, k, monkeypatch, tmp_path):
    scores, target, seen, candidates, pairs = problem(np.random.default_rng(1), kind, n=50, p=40)
    scores, masks = scores.astype(np.float16), dict(candidates=candidates, pairs=pairs, topk=k)
    want = evaluate(scores, target, seen, **masks)
    np.save(tmp_path / "scores.npy", scores)
    strided = np.zeros((50, 80), np.float32)[:, ::2]
    strided[:] = scores
    shapes = [
        scores.astype(np.float32),
        scores.astype(float),
        np.asfortranarray(scores),
        strided,
        strided[::-1][::-1],
        scores.astype(">f4"),
        scores.astype(np.longdouble),
        np.load(tmp_path / "scores.npy", mmap_mode="r"),
    ]
    for block in 1, 200, 1 << 22:
        monkeypatch.setattr(module, "BLOCK", block)
        for form in shapes:
            copy = form.copy()
            assert evaluate(form, target, seen, **masks) == want
            assert np.array_equal(form, copy)
    shards = [
        sweep_of(scores[part], target[part], seen, **masks) for part in (slice(30, 50), slice(30))
    ]
    shards[0].merge(shards[1])
    assert shards[0].report() == want
    assert (
        evaluate(
            (scores.astype(float) * 4 if kind == "ties" else scores).astype(int), target, seen
        )["n_seen"]
        > 0
    )


@pytest.mark.parametrize("p", [9, 40])
@pytest.mark.parametrize("k", [1, 2])
def test_order_of_columns_changes_nothing_without_ties(p, k):
    rng = np.random.default_rng(2)
    scores, target, seen, candidates, pairs = problem(rng, p=p)
    order = rng.permutation(p)
    for protocol in PROTOCOLS:
        want = evaluate(
            scores, target, seen, candidates=candidates, pairs=pairs, topk=k, protocol=protocol
        )
        assert want == evaluate(
            scores[:, order],
            np.argsort(order)[target],
            seen[order],
            candidates=candidates[order],
            pairs=pairs[order],
            topk=k,
            protocol=protocol,
        )


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("k", [1, 3])
def test_kept_scores_are_the_stable_best(share, k):
    rng = np.random.default_rng(4)
    scores, p = rng.integers(6, size=(60, 50)).astype(np.float32), 50
    seen, target = np.arange(p) < max(share * p, k), rng.integers(p, size=60)
    target[:2] = 0, p - 1
    kept = []
    for group in seen, ~seen:
        columns = np.flatnonzero(group)
        order = np.argsort(-scores[:, group], axis=1, kind="stable")[:, :k]
        missing = ((0, 0), (0, k - order.shape[1]))
        kept += [
            np.pad(
                np.take_along_axis(scores[:, group], order, 1), missing, constant_values=-np.inf
            ),
            np.pad(columns[order], missing),
        ]
    options = dict(topk=k, pairs=rng.integers(4, size=(p, 2)))
    sweep = BiasSweep(seen, **options)
    sweep.update_kept(*kept, target)
    for protocol in PROTOCOLS:
        assert sweep.report(protocol) == evaluate(
            scores, target, seen, protocol=protocol, **options
        )


@pytest.mark.parametrize("kind", ["normal", "ties", "constant", "opposed", "agreeing"])
def test_thresholds_equal_separate_evaluations(kind, monkeypatch):
    rng = np.random.default_rng(6)
    scores, target, seen, candidates, _ = problem(
        rng, kind if kind in ("ties", "constant") else "normal", n=80, p=60
    )
    feasibility = np.round(rng.uniform(-1, 1, 60), 1)
    scores = (scores + {"opposed": -9, "agreeing": 9}.get(kind, 0) * feasibility).astype(np.float32)
    thresholds = np.array([0.3, -2, -1, *np.linspace(-1, 1, 9), 0.3, 0.7, 2])
    monkeypatch.setattr(module, "BLOCK", 3000)
    for mask in candidates, np.ones(60, bool):
        blocks = ((scores[i : i + 30], target[i : i + 30]) for i in (0, 30, 60))
        got = threshold_sweep(blocks, seen, feasibility, thresholds, candidates=mask)
        assert np.array_equal(got["threshold"], thresholds)
        for i, threshold in enumerate(thresholds):
            kept = mask & (seen | (feasibility >= threshold))
            assert got["removed"][i] == pytest.approx(1 - kept.sum() / mask.sum())
            for name, protocol in ("auc", "exact"), ("auc_published", "published"):
                assert (
                    got[name][i]
                    == evaluate(scores, target, seen, candidates=kept, protocol=protocol)["auc"]
                )


def test_bias_of_the_report_gives_its_harmonic_mean():
    for seed in range(20):
        scores, target, seen, candidates, _ = problem(
            np.random.default_rng(seed), ["normal", "ties", "wide"][seed % 3]
        )
        for protocol in PROTOCOLS:
            sweep = sweep_of(scores, target, seen, candidates=candidates)
            report = sweep.report(protocol)
            at = accuracy_at(sweep, report["bias"])
            assert np.isfinite(report["bias"])
            assert (at["hm"], at["seen"], at["unseen"]) == (
                report["best_hm"],
                report["hm_seen"],
                report["hm_unseen"],
            )


def test_bootstrap_is_that_of_repeated_images():
    scores, target, seen, candidates, pairs = problem(np.random.default_rng(8), "ties", n=60)
    options = dict(candidates=candidates, pairs=pairs, topk=2)
    sweep = sweep_of(scores, target, seen, **options)
    rng = np.random.default_rng(0)
    images = sweep._images()
    turn, kept = images.turns.turn, images.kept
    order = np.argsort(np.where(seen[target], *sweep._parts[0][:, :2].T))
    assert np.array_equal(kept[:, module.TARGET], target[order]) and (turn[1:] >= turn[:-1]).all()
    for protocol in PROTOCOLS:
        for _ in range(5):
            weights = rng.multinomial(60, np.full(60, 1 / 60))
            rows = np.repeat(order, weights)
            want = evaluate(scores[rows], target[rows], seen, protocol=protocol, **options)
            got = module._metrics(images, weights, protocol, "image", "image")
            for name in got:
                assert got[name] == pytest.approx(want[name], abs=1e-12), name
            want = evaluate(
                scores[rows],
                target[rows],
                seen,
                protocol=protocol,
                average="composition",
                **options,
            )
            got = module._metrics(images, weights, protocol, "image", "composition")
            for name in got:
                assert got[name] == pytest.approx(want[name], abs=1e-9), name


def test_rounding_does_not_choose_among_equal_harmonic_means():
    """Found by generated inputs: 2 points of this curve have one HM, but for a sum's last digit."""
    scores = np.array(
        [[0, 3, 3], [0, 1, 0], [2, 2, 2], [0, 0, 2], [1, 0, 2], [3, 1, 2], [1, 2, 2], [2, 3, 1]]
    )
    target = np.array([0, 2, 1, 0, 2, 2, 0, 1])
    seen = np.array([True, True, False])
    drawn = np.array([0, 5, 6, 6, 1, 2, 7, 7])
    images = sweep_of(scores, target, seen, topk=2)._images()
    counts = np.bincount(drawn, minlength=8)[images.turns.order]
    got = module._metrics(images, counts, "exact", "image", "composition")
    want = evaluate(scores[drawn], target[drawn], seen, topk=2, average="composition")
    for name in "best_hm", "hm_seen", "hm_unseen", "bias":
        assert got[name] == pytest.approx(want[name], abs=1e-12), name


def test_confidence_intervals():
    rng = np.random.default_rng(9)
    seen, target = np.array([True, False]), np.tile([0, 1], 200)
    scores = np.zeros((400, 2))
    scores[np.arange(400), np.where(rng.random(400) < 0.8, target, 1 - target)] = (
        1  # right with probability 0.8
    )
    report = evaluate(scores, target, seen, confidence=0.95)
    np.testing.assert_equal(evaluate(scores, target, seen, confidence=0.95), report)  # seeded
    narrow = evaluate(scores, target, seen, confidence=0.5)
    at_zero = sweep_of(scores, target, seen)
    assert accuracy_at(at_zero, 0.0)["seen"] == report["hm_seen"]
    for name in "auc", "best_hm", "hm_seen", "hm_unseen":
        assert (
            report[name + "_low"]
            <= narrow[name + "_low"]
            <= narrow[name + "_high"]
            <= report[name + "_high"]
        )
    spread = (
        2 * 1.96 * np.sqrt(report["hm_seen"] * (1 - report["hm_seen"]) / 200)
    )  # the binomial's interval
    assert report["hm_seen_high"] - report["hm_seen_low"] == pytest.approx(spread, rel=0.15)
    assert {name[:-4] for name in report if name.endswith("_low")} == {
        k for k, v in narrow.items() if isinstance(v, float) and k + "_low" in narrow
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_one_half_alone(protocol):
    scores, seen = np.eye(4)[[0, 1, 1]], np.array([True, True, False, False])
    with pytest.warns(UserWarning, match="no image of unseen") as caught:
        report = evaluate(scores, np.array([0, 1, 0]), seen, protocol=protocol)
    assert (
        len(caught) == 1 and report["best_seen"] == pytest.approx(2 / 3) and report["n_unseen"] == 0
    )
    assert all(
        np.isnan(report[name])
        for name in ("auc", "best_hm", "best_unseen", "hm_seen", "hm_unseen", "bias")
    )
    with pytest.warns(UserWarning, match="no image of seen"):
        report = evaluate(scores, np.array([2, 3, 3]), seen, protocol=protocol, confidence=0.9)
    assert report["best_unseen"] == pytest.approx(1 / 3) and np.isnan(report["best_seen_low"])


def test_truth_outside_the_candidates_is_wrong():
    seen = np.array([True, True, False, False])
    report = evaluate(
        np.eye(4), np.arange(4), seen, candidates=np.array([True, False, True, False])
    )
    assert (report["best_seen"], report["best_unseen"]) == (0.5, 0.5)
    nothing = evaluate(
        np.eye(4), np.arange(4), seen, candidates=np.zeros(4, bool), pairs=np.zeros((4, 2), int)
    )
    assert nothing["auc"] == nothing["best_hm"] == nothing["state_accuracy"] == 0


def test_memory_stays_small():
    rng = np.random.default_rng(0)
    scores = rng.random((400, 28175), np.float32)
    seen, target, feasibility = (
        np.arange(28175) < 1262,
        rng.integers(28175, size=400),
        rng.random(28175),
    )
    for form in scores, np.asfortranarray(scores), scores.astype(np.float16):
        tracemalloc.start()
        evaluate(form, target, seen)
        threshold_sweep([(form, target)], seen, feasibility, np.linspace(0, 1, 50))
        assert tracemalloc.get_traced_memory()[1] < 64e6
        tracemalloc.stop()


SEEN, SCORES, TARGET = np.array([True, False]), np.zeros((3, 2)), np.array([0, 1, 1])
BAD = [
    (dict(scores=np.array([[0, 0], [0, np.nan], [0, 0]])), r"row 1, column 1 is nan"),
    (dict(scores=np.array([[0, 0], [0, 0], [np.inf, 0]])), r"row 2, column 0 is inf"),
    (dict(scores=np.array([[0, -np.inf], [0, 0], [0, 0]])), r"row 0, column 1 is -inf"),
    (
        dict(scores=np.array([[0, 0], [0, np.nan], [0, 0]]), candidates=np.array([True, False])),
        r"row 1, column 1",
    ),
    (
        dict(scores=np.zeros((3, 3))),
        r"scores must be real of shape \(any, 2\), got float64 of shape \(3, 3\)",
    ),
    (dict(scores=np.zeros(3)), r"scores must be real"),
    (dict(scores=SCORES > 0), "scores must be real"),
    (dict(scores=SCORES + 0j), r"got complex128"),
    (dict(target=np.array([0, 1])), r"target must be integer of shape \(3,\)"),
    (dict(target=np.array([0, 2, 1])), r"0 to 1, got 2 in row 1"),
    (dict(target=np.array([0, -1, 1])), r"got -1 in row 1"),
    (dict(target=TARGET * 1.0), r"target must be integer .* got float64"),
    (dict(seen=[1, 0]), r"seen must be bool"),
    (dict(seen=np.zeros(0, bool)), "at least 1"),
    (dict(candidates=np.ones(3, bool)), r"candidates must be bool"),
    (
        dict(pairs=np.zeros((2, 3), int)),
        r"pairs must be integer of shape \(2, 2\), got int64 of shape \(2, 3\)",
    ),
    (dict(topk=0), "topk"),
    (dict(topk=1.5), "topk must be integer"),
    (dict(topk=True), "topk"),
    (dict(protocol="fast"), "exact.*published.*got 'fast'"),
    (dict(confidence=95), "between 0 and 1.*95"),
    (dict(scores=np.zeros((0, 2)), target=np.zeros(0, int)), "no images"),
]


@pytest.mark.parametrize("change, message", BAD, ids=range(len(BAD)))
def test_bad_input_is_named(change, message):
    with warnings.catch_warnings(), pytest.raises(ValueError, match=message):
        warnings.simplefilter("error")
        evaluate(**{"scores": SCORES, "target": TARGET, "seen": SEEN, **change})


def test_bad_rows_are_counted_over_blocks_and_add_nothing(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 100)
    scores, target = np.zeros((50, 2), np.float32), np.zeros(50, int)
    sweep = sweep_of(scores, target, SEEN)
    scores[[31, 44], 1] = np.nan
    with pytest.raises(ValueError, match="row 31, column 1"):
        sweep.update(scores, target)
    with pytest.warns(UserWarning):
        assert sweep.report()["n_seen"] == 50


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("lead", [0, 9], ids=["mixed", "seen ahead"])
def test_a_bad_score_is_found_in_every_column_whichever_half_leads(lead, k, dtype):
    rng = np.random.default_rng(3)
    seen = np.arange(12) % 6 == 0  # few are seen: the others are hidden in a copy, or never read
    candidates = np.arange(12) != 4
    scores = rng.normal(size=(40, 12))
    scores[:, seen] += lead
    scores = scores.astype(dtype)
    target = rng.integers(12, size=40)
    bad = [np.nan, np.inf, -np.inf]
    if dtype == "f8":
        bad += [1e308, -1e308]
    for value in bad:
        for column in range(12):
            row = rng.integers(40)
            changed = scores.copy()
            changed[row, column] = value
            with warnings.catch_warnings(), pytest.raises(
                ValueError, match=f"must be finite: row {row}, column {column} is"
            ):
                warnings.simplefilter("error")
                evaluate(changed, target, seen, candidates=candidates, topk=k)
    few = slice(8)
    report = evaluate(scores[few], target[few], seen, candidates=candidates, topk=k)
    for name, value in brute(scores[few], target[few], seen, candidates, k).items():
        assert np.isnan(value) or report[name] == pytest.approx(value, abs=1e-12), name


def test_bad_kept_scores_merges_and_thresholds():
    sweep = BiasSweep(np.array([True, True, False, False]), topk=2)
    good = dict(
        seen_scores=np.array([[0.5, 0.1]]),
        seen_columns=np.array([[1, 0]]),
        unseen_scores=np.array([[0.5, 0.1]]),
        unseen_columns=np.array([[2, 3]]),
        target=np.array([1]),
    )
    sweep.update_kept(**good)
    for change in (
        dict(seen_scores=np.array([[0.1, 0.5]])),
        dict(seen_columns=np.array([[2, 0]])),
        dict(unseen_scores=np.array([[0.5, np.nan]])),
        dict(unseen_columns=np.array([[2, 9]])),
        dict(unseen_columns=np.array([[-1, 3]])),
        dict(seen_scores=np.array([[0.1, -np.inf]])),
    ):
        with pytest.raises(ValueError, match="row 0 must hold scores of .* best first"):
            sweep.update_kept(**{**good, **change})
    with pytest.raises(ValueError, match=r"seen_scores must be float of shape \(1, 2\)"):
        sweep.update_kept(**{**good, "seen_scores": np.zeros((1, 3))})
    with pytest.raises(ValueError, match="differ in topk"):
        sweep.merge(BiasSweep(sweep.seen))
    for bias in np.nan, None, "1", [0.5]:
        with pytest.raises(ValueError, match="bias must be a number, got"):
            accuracy_at(sweep, bias)
    with pytest.raises(ValueError, match="no images"):
        threshold_sweep([], SEEN, np.zeros(2), [0.5])
    with pytest.raises(ValueError, match="got 2, 1 of them nan"):
        threshold_sweep([(SCORES, TARGET)], SEEN, np.array([0, np.nan]), [0.5])
    with pytest.raises(ValueError, match=r"feasibility must be real of shape \(2,\)"):
        threshold_sweep([(SCORES, TARGET)], SEEN, np.zeros(3), [0.5])
    with pytest.raises(ValueError, match="got 0, 0 of them nan"):
        threshold_sweep([(SCORES, TARGET)], SEEN, np.zeros(2), [])
    for blocks in (SCORES, TARGET), [(SCORES, TARGET, SEEN)]:
        with pytest.raises(ValueError, match=r"blocks must be pairs \(scores, target\)"):
            threshold_sweep(blocks, SEEN, np.zeros(2), [0.5])


def test_torch_tensors_are_as_good_as_arrays():
    torch = pytest.importorskip("torch")
    scores, target, seen, candidates, pairs = problem(np.random.default_rng(0))
    arrays = dict(scores=scores, target=target, seen=seen, candidates=candidates, pairs=pairs)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    report = evaluate(**tensors)
    assert report == evaluate(**arrays)
    at_bias = accuracy_at(
        sweep_of(tensors["scores"], tensors["target"], tensors["seen"]), torch.tensor(0.5)
    )
    assert at_bias["seen"] == accuracy_at(sweep_of(scores, target, seen), 0.5)["seen"]
    sweeps = [
        threshold_sweep([(a["scores"], a["target"])], a["seen"], a["scores"][0], a["scores"][0][:3])
        for a in (arrays, tensors)
    ]
    assert all(np.array_equal(sweeps[0][name], sweeps[1][name]) for name in sweeps[0])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_any_input_gives_the_exact_result_or_the_documented_error(data):
    n, p = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    finite = st.integers(-2, 2).map(float) | st.floats(
        -65504, 65504, width=16
    )  # float64 subtracts these exactly
    values = (
        finite | st.sampled_from([np.nan, np.inf, -1e308])
        if data.draw(st.integers(0, 3)) == 0
        else finite
    )
    scores = data.draw(hnp.arrays(float, (n, p), elements=values))
    seen, candidates = (data.draw(hnp.arrays(bool, p)) for _ in range(2))
    least = -1 if data.draw(st.integers(0, 9)) == 0 else 0
    target = data.draw(hnp.arrays(int, n, elements=st.integers(least, max(p - 1, 0))))
    k, protocol = data.draw(st.integers(1, 6)), data.draw(st.sampled_from(PROTOCOLS))
    valid = n and p and (np.abs(scores) < 8e307).all() and (target >= 0).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "no image of", UserWarning)
        if not valid:
            with pytest.raises(
                ValueError, match="scores must be finite|target must lie|no images|at least 1"
            ):
                evaluate(scores, target, seen, candidates=candidates, topk=k, protocol=protocol)
            return
        report = evaluate(scores, target, seen, candidates=candidates, topk=k, protocol=protocol)
    if protocol == "exact":
        for name, value in brute(scores, target, seen, candidates, k).items():
            assert np.isnan(value) or report[name] == pytest.approx(value, abs=1e-12), name


@pytest.fixture
def saved(tmp_path):
    scores, target, seen, candidates, pairs = problem(np.random.default_rng(0), n=60)
    arrays = dict(scores=scores, target=target, seen=seen, candidates=candidates, pairs=pairs)
    np.savez(tmp_path / "scores.npz", **arrays)
    return tmp_path, arrays


def test_script_table_json_and_files(saved, capsys):
    folder, arrays = saved
    module.main([str(folder / "scores.npz"), "--confidence", "0.9", "--topk", "2"])
    text = capsys.readouterr().out
    assert (
        "27 images of seen and 33 of unseen" in text
        and f"{arrays['candidates'].sum()} candidates (" in text
    )
    auc = evaluate(**arrays, topk=2)["auc"]
    assert f"{100 * auc:.2f} [" in text
    module.main(
        [str(folder / "scores.npz"), "--json", "--per-composition", str(folder / "out.csv")]
    )
    reports = json.loads(capsys.readouterr().out)
    assert reports["published"] == evaluate(**arrays, protocol="published") and reports[
        "exact"
    ] == evaluate(**arrays)
    rows = list(csv.DictReader((folder / "out.csv").open()))
    assert sum(int(row["images"]) for row in rows) == 60
    hits = sum(float(row["accuracy_at_best_hm"]) * int(row["images"]) for row in rows)
    exact = reports["exact"]
    assert hits == pytest.approx(
        exact["hm_seen"] * exact["n_seen"] + exact["hm_unseen"] * exact["n_unseen"]
    )


def test_script_reads_memory_mapped_scores_and_names_what_is_wrong(saved, capsys):
    folder, arrays = saved
    np.save(folder / "big.npy", arrays["scores"])
    rest = {name: array for name, array in arrays.items() if name != "scores"}
    np.savez(folder / "rest.npz", **rest)
    module.main([str(folder / "big.npy"), str(folder / "rest.npz"), "--json"])
    assert json.loads(capsys.readouterr().out)["exact"] == evaluate(**arrays)
    np.savez(folder / "bad.npz", **{**arrays, "scores": arrays["scores"] * np.nan})
    (folder / "text.npz").write_text("no archive")
    for name, message in (
        ("none.npz", "none.npz"),
        ("rest.npz", "no array scores"),
        ("text.npz", "text.npz"),
        ("bad.npz", "row 0, column 0 is nan"),
    ):
        with pytest.raises(SystemExit) as exit:
            module.main([str(folder / name)])
        error = capsys.readouterr().err
        assert (
            exit.value.code == 2
            and error.startswith("error: ")
            and error.count("\n") == 1
            and message in error
        )


def test_script_refuses_two_systems_in_the_place_of_one(saved, capsys):
    folder, arrays = saved
    np.savez(folder / "a.npz", **arrays)
    np.savez(folder / "b.npz", **arrays | dict(scores=arrays["scores"] + 1))
    with pytest.raises(SystemExit):
        module.main([str(folder / "a.npz"), str(folder / "b.npz")])
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "b.npz holds other scores than" in error
    assert "--against" in error
    module.main([str(folder / "a.npz"), str(folder / "a.npz")])  # the same twice harms nothing


def test_script_says_what_does_not_exist_and_has_null_for_it(tmp_path):
    np.savez(tmp_path / "s.npz", scores=np.eye(2), target=np.array([0, 0]), seen=SEEN)
    command = [sys.executable, module.__file__, str(tmp_path / "s.npz"), "--json"]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(out.stdout)["exact"]["auc"] is None
    assert out.stderr == "warning: no image of unseen compositions: what needs one is nan\n"


def test_script_plot(saved):
    pytest.importorskip("matplotlib")
    folder, _ = saved
    module.main([str(folder / "scores.npz"), "--plot", str(folder / "curve.png")])
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")


# Exact to the last float.


def test_a_tie_that_rounding_hides_is_judged_as_in_real_arithmetic():
    scores = np.array([[100000, 300000], [66666.66666666667, 266666.6666666667]])
    sweep = sweep_of(scores, np.array([0, 1]), SEEN)
    assert accuracy_at(sweep, -200000)["hm"] == 1
    assert sweep.report()["best_hm"] == 1


@pytest.mark.parametrize("k", [1, 2])
def test_every_float_bias_is_judged_as_real_arithmetic_would(k):
    rng = np.random.default_rng(11)
    for _ in range(60):
        scores = rng.normal(size=(6, 5)) * 10.0 ** rng.integers(-9, 9, size=(6, 5))
        scores[rng.random(scores.shape) < 0.2] = 1 / 3
        seen = np.array([True, True, False, True, False])
        target = rng.integers(5, size=6)
        sweep = sweep_of(scores, target, seen, topk=k)
        exact = np.array([[Fraction(float(x)) for x in row] for row in scores], object)
        near = (scores[:, seen][:, :, None] - scores[:, ~seen][:, None, :]).ravel()
        for bias in np.concatenate([near, np.nextafter(near, -np.inf), np.nextafter(near, np.inf)])[
            ::5
        ]:
            want = accuracies(exact, target, seen, np.ones(5, bool), k, Fraction(float(bias)))
            got = accuracy_at(sweep, bias)
            np.testing.assert_equal((got["seen"], got["unseen"]), want)


def test_crossings_are_the_differences_rounded_down():
    rng = np.random.default_rng(12)
    seen, unseen = rng.normal(size=(2, 20000)) * 10.0 ** rng.integers(-300, 300, size=(2, 20000))
    unseen[::3] = seen[::3] * rng.uniform(0.4, 2.5, size=len(seen[::3]))
    crossing = module._crossings(seen, unseen)
    for a, b, got in zip(seen[::20], unseen[::20], crossing[::20]):
        assert Fraction(got) <= Fraction(a) - Fraction(b) < Fraction(np.nextafter(got, np.inf))


def test_integers_that_are_no_floats_are_refused():
    whole = np.array([[2**53, 0], [-(2**53), 1]])
    with pytest.warns(UserWarning, match="no image of unseen"):
        evaluate(whole, np.array([0, 0]), SEEN)
    for bad in (
        np.array([[0, 0], [0, 2**53 + 1]]),
        np.array([[0, 0], [0, 2**63 + 1]], np.uint64),
        np.array([[0, 0], [0, -(2**53) - 1]]),
    ):
        with pytest.raises(ValueError, match="within 2.53.*row 1, column 1"):
            evaluate(bad, np.array([0, 0]), SEEN)


def test_a_report_is_what_its_bias_gives():
    ends = 0
    for seed in range(60):
        scores, target, seen, candidates, pairs = problem(np.random.default_rng(seed), n=6, p=6)
        sweep = sweep_of(scores, target, seen, candidates=candidates, pairs=pairs)
        for protocol in "exact", "published":
            report = sweep.report(protocol)
            there = accuracy_at(sweep, report["bias"])
            assert (report["hm_seen"], report["hm_unseen"]) == (there["seen"], there["unseen"])
            for name in "state_accuracy", "object_accuracy":
                assert report[name + "_at_best_hm"] == there[name]
        curve = sweep.curve()
        ends += sweep.report()["bias"] > curve.bias[-1] or not sweep.report()["best_hm"]
    assert ends  # some best biases lie at an end of the curve


def test_infinite_biases_of_any_float_type():
    scores, target, seen, candidates, pairs = problem(np.random.default_rng(1), "wide")
    sweep = sweep_of(scores * 1e6, target, seen, candidates=candidates, pairs=pairs)
    report = sweep.report()
    for kind in np.float16, np.float32, np.float64, float:
        assert accuracy_at(sweep, kind("inf"))["unseen"] == report["best_unseen"]
        assert accuracy_at(sweep, kind("-inf"))["seen"] == report["best_seen"]


# Averages and intervals over compositions.


@pytest.mark.parametrize("kind", ["normal", "ties"])
@pytest.mark.parametrize("k", [1, 2])
def test_each_composition_counts_alike(kind, k):
    for seed in range(4):
        scores, target, seen, candidates, pairs = problem(
            np.random.default_rng(seed), kind, n=25, p=7
        )
        once = np.unique(target)

        def balanced(bias):
            chosen = [top(row, seen, candidates, k, bias) for row in scores]
            right = np.array([y in columns for y, columns in zip(target, chosen)])
            share = {c: right[target == c].mean() for c in once}
            return tuple(
                np.mean([share[c] for c in once if seen[c] == half]) for half in (True, False)
            )

        def states(bias):
            chosen = [top(row, seen, candidates, k, bias) for row in scores]
            right = np.array([pairs[y, 0] in pairs[c, 0] for y, c in zip(target, chosen)])
            return np.mean([right[target == c].mean() for c in once])

        options = dict(candidates=candidates, pairs=pairs, topk=k, average="composition")
        biases = [float(bias) for bias in every_bias(scores, seen)]
        for protocol in PROTOCOLS:
            if protocol == "published":
                sweep = sweep_of(scores, target, seen, candidates=candidates, topk=k)
                biases = sweep.curve("published").bias
            s, u = np.array([balanced(bias) for bias in biases]).T
            area = np.sum((s[1:] + s[:-1]) * np.diff(u)) / 2
            area += s[0] * u[0] * (protocol == "exact")
            hm = np.max(2 * s * u / np.maximum(s + u, 1e-300))
            report = evaluate(scores, target, seen, protocol=protocol, **options)
            for name, value in zip(HEADLINE, (area, hm, s.max(), u.max())):
                assert report[name] == pytest.approx(value, abs=1e-12), (protocol, name)
            assert report["state_accuracy"] == pytest.approx(states(0.0), abs=1e-12)
            assert report["average"] == "composition"
        sweep = sweep_of(scores, target, seen, candidates=candidates, pairs=pairs, topk=k)
        assert accuracy_at(sweep, 0.5, average="composition")["seen"] == pytest.approx(
            balanced(0.5)[0]
        )


def test_resampled_compositions_are_copies_of_whole_compositions():
    scores, target, seen, candidates, pairs = problem(np.random.default_rng(8), n=60)
    sweep = sweep_of(scores, target, seen, candidates=candidates, pairs=pairs)
    images = sweep._images()
    target, rows = target[images.turns.order], images.turns.order
    for counts, _ in zip(
        module._resamples(images.composition, seen[target], "composition"), range(20)
    ):
        for c in np.unique(target):
            assert len(set(counts[target == c])) == 1
        copies = {c: counts[target == c][0] for c in np.unique(target)}
        for half in seen, ~seen:  # as many seen and unseen ones as there are
            assert sum(n for c, n in copies.items() if half[c]) == sum(half[c] for c in copies)
        drawn = np.repeat(rows, counts)
        want = evaluate(
            scores[drawn], np.repeat(target, counts), seen, candidates=candidates, pairs=pairs
        )
        got = module._metrics(images, counts, "exact", "composition", "image")
        for name in got:
            assert got[name] == pytest.approx(want[name], abs=1e-12), name
        balanced = module._metrics(images, counts, "exact", "composition", "composition")
        at = {
            c: np.mean(
                [
                    y == top(row, seen, candidates, 1, 1e6)[0]
                    for row, y in zip(scores, target[np.argsort(rows)])
                    if y == c
                ]
            )
            for c in copies
            if not seen[c]
        }
        want = sum(copies[c] * at[c] for c in at) / sum(copies[c] for c in at)
        assert balanced["best_unseen"] == pytest.approx(want, abs=1e-12)


def test_composition_intervals_cover_where_image_intervals_do_not(monkeypatch):
    """20 unseen compositions of 50 images, right with a chance of the composition's own."""
    monkeypatch.setattr(module, "RESAMPLES", 100)
    seen = np.arange(21) < 1
    target = np.append(np.zeros(10, int), np.repeat(np.arange(1, 21), 50))
    covered = {"composition": [], "image": []}
    for seed in range(100):
        rng = np.random.default_rng(seed)
        chance = np.append(
            1, rng.beta(2, 2, size=20)
        )  # the mean accuracy, and so the mean AUC, is 1/2
        right = rng.random(len(target)) < chance[target]
        wrong = np.where(target == 20, 1, target + 1)
        sweep = BiasSweep(seen)
        sweep.update_kept(
            np.where(seen[target], 10.0, -20.0)[:, None],
            np.zeros((len(target), 1), int),
            np.where(seen[target], -10.0, 0.0)[:, None],
            np.where(right & ~seen[target], target, wrong)[:, None],
            target,
        )
        for unit in UNITS if seed < 25 else ("composition",):
            report = sweep.report(confidence=0.95, unit=unit)
            assert report["unit"] == unit and report["auc"] == pytest.approx(right[10:].mean())
            covered[unit].append(report["auc_low"] <= 0.5 <= report["auc_high"])
    assert np.mean(covered["composition"]) >= 0.89
    assert np.mean(covered["image"]) < 0.7


# Paired comparison.


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("average", UNITS)
def test_comparison_is_that_of_the_same_resamples(protocol, unit, average, monkeypatch):
    monkeypatch.setattr(module, "RESAMPLES", 40)
    rng = np.random.default_rng(3)
    scores, target, seen, candidates, pairs = problem(rng, n=50)
    other = scores + rng.normal(size=scores.shape) / 2
    sweeps = [
        sweep_of(scores, target, seen, candidates=candidates, pairs=pairs),
        sweep_of(other, target, seen),
    ]
    got = compare(*sweeps, 0.9, unit, protocol=protocol, average=average)
    np.testing.assert_equal(compare(*sweeps, 0.9, unit, protocol=protocol, average=average), got)
    reports = [sweep.report(protocol, average=average) for sweep in sweeps]
    composition = np.unique(target, return_inverse=True)[1]
    differences = {name: [] for name in HEADLINE}
    for counts in module._resamples(composition, seen[target], unit):
        if (
            unit == "composition" and average == "composition"
        ):  # copies are compositions: give them columns
            values = []
            for sweep in sweeps:
                images = sweep._images()
                values.append(
                    module._metrics(images, counts[images.turns.order], protocol, unit, average)
                )
        else:
            rows = np.repeat(np.arange(50), counts)
            options = dict(protocol=protocol, average=average)
            values = [
                evaluate(scores[rows], target[rows], seen, candidates=candidates, **options),
                evaluate(other[rows], target[rows], seen, **options),
            ]
        for name in HEADLINE:
            differences[name].append(values[0][name] - values[1][name])
    for name in HEADLINE:
        assert (got[name + "_a"], got[name + "_b"]) == (reports[0][name], reports[1][name])
        assert got[name + "_difference"] == got[name + "_a"] - got[name + "_b"]
        ordered = np.sort(differences[name])
        assert got[name + "_difference_low"] == pytest.approx(ordered[2], abs=1e-12)
        assert got[name + "_difference_high"] == pytest.approx(ordered[37], abs=1e-12)
        assert got[name + "_a_leads"] == pytest.approx((ordered > 1e-9).sum() / 40)
    assert got["unit"] == unit and got["average"] == average and got["confidence"] == 0.9


def test_comparison_of_a_system_with_itself_and_with_a_better_one():
    rng = np.random.default_rng(0)
    target, seen = rng.integers(8, size=400), np.arange(8) < 4
    noise = rng.normal(size=(400, 8))
    weak = sweep_of(noise + np.eye(8)[target], target, seen)
    strong = sweep_of(noise + 3 * np.eye(8)[target], target, seen)
    same, better = compare(weak, weak), compare(strong, weak)
    for name in HEADLINE:
        assert [
            same[name + end]
            for end in ("_difference", "_difference_low", "_difference_high", "_a_leads")
        ] == [0] * 4
        assert better[name + "_difference_low"] > 0 and better[name + "_a_leads"] == 1


def test_what_cannot_be_compared_is_named():
    pairs = np.array([[0, 0], [0, 1]])
    sweep = sweep_of(SCORES, TARGET, SEEN, pairs=pairs)
    cases = [
        (sweep_of(SCORES, TARGET, ~SEEN), "seen differs, first in column 0"),
        (sweep_of(SCORES, TARGET[::-1], SEEN), r"targets differ, first in row 0 \(0 and 1\)"),
        (sweep_of(SCORES[:2], TARGET[:2], SEEN), "numbers of images differ, 3 and 2"),
        (
            sweep_of(np.zeros((3, 3)), TARGET, np.append(SEEN, False)),
            "numbers of compositions differ, 2 and 3",
        ),
        (sweep_of(SCORES, TARGET, SEEN, topk=2), "topk differs, 1 and 2"),
        (sweep_of(SCORES, TARGET, SEEN, pairs=pairs[::-1]), "pairs differ"),
        (BiasSweep(SEEN), "no images"),
        (None, "sweep_b must be a BiasSweep, got NoneType"),
    ]
    for other, message in cases:
        with pytest.raises(ValueError, match=message):
            compare(sweep, other)
    for change, message in (
        (dict(confidence=None), "confidence must be"),
        (dict(unit="pixel"), "unit must be one of"),
        (dict(average=None), "average must be one of"),
        (dict(protocol=1), "protocol must be"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(sweep, sweep, **change)
    ok = sweep_of(
        SCORES, TARGET, SEEN, candidates=np.array([True, False])
    )  # other candidates, no pairs
    assert compare(sweep, ok)["n_seen"] == 1


def test_comparison_of_one_half_alone():
    sweep = sweep_of(np.eye(2)[[0, 0, 1]], np.array([0, 0, 0]), SEEN)
    with pytest.warns(UserWarning, match="no image of unseen") as caught:
        result = compare(sweep, sweep)
    assert (
        len(caught) == 1 and np.isnan(result["auc_difference"]) and np.isnan(result["auc_a_leads"])
    )
    assert result["best_seen_difference"] == 0


# Edges.


def test_topk_beyond_the_compositions_is_all_of_them():
    scores, target, seen, candidates, pairs = problem(np.random.default_rng(0), p=7)
    options = dict(candidates=candidates, pairs=pairs)
    for protocol in PROTOCOLS:
        want = evaluate(scores, target, seen, topk=7, protocol=protocol, **options)
        got = evaluate(scores, target, seen, topk=10**12, protocol=protocol, **options)
        assert got == want | {"topk": 10**12}


def test_pairs_and_masks_are_copied():
    pairs, seen = np.array([[0, 0], [0, 1]]), SEEN.copy()
    sweep = sweep_of(SCORES, TARGET, seen, pairs=pairs)
    want = sweep.report()
    pairs[:] = 5
    seen[:] = False
    assert sweep.report() == want and (sweep.pairs < 5).all()


def test_wrong_types_are_named():
    good = dict(scores=SCORES, target=TARGET, seen=SEEN)
    for change in (
        dict(confidence="0.95"),
        dict(confidence=True),
        dict(confidence=np.nan),
        dict(confidence=[0.9]),
        dict(unit="images"),
        dict(average=0),
        dict(protocol=["exact"]),
        dict(topk="2"),
        dict(topk=10**30),
        dict(scores=[[0, 1], [0], [1, 1]]),
        dict(scores=None),
        dict(scores={}),
        dict(scores="ab"),
        dict(target=[[0], [1, 2]]),
        dict(seen=None),
        dict(candidates="all"),
        dict(pairs=[[0, 1], [0]]),
    ):
        with pytest.raises(ValueError, match=list(change)[0]):
            evaluate(**{**good, **change})
    for name in good:  # a mask would be lost
        with pytest.raises(ValueError, match=f"{name} is a masked array"):
            evaluate(**{**good, name: np.ma.masked_equal(good[name], 0)})
    with pytest.raises(ValueError, match=r"got uint8 of shape \(2,\); from 0 and 1 by .astype"):
        evaluate(**{**good, "seen": good["seen"].astype(np.uint8)})
    for change in dict(confidence=np.zeros((9, 9))), dict(unit=np.zeros((9, 9))):
        with pytest.raises(ValueError, match=list(change)[0]) as error:
            evaluate(**{**good, **{"confidence": 0.9, **change}})
        assert "\n" not in str(error.value)
    sweep = sweep_of(**good)
    for other in None, 3, SCORES:
        with pytest.raises(ValueError, match="sweep must be a BiasSweep"):
            accuracy_at(other, 0.0)
    for other in None, 3, SCORES:
        with pytest.raises(ValueError, match="other must be a BiasSweep"):
            sweep.merge(other)
    for blocks in 5, None:
        with pytest.raises(ValueError, match="blocks must be an iterable of pairs"):
            threshold_sweep(blocks, SEEN, np.zeros(2), [0.5])
    with pytest.raises(ValueError, match="thresholds"):
        threshold_sweep([(SCORES, TARGET)], SEEN, np.zeros(2), ["a"])


def test_update_kept_refuses_a_column_twice():
    sweep = BiasSweep(np.array([True, True, False, False]), topk=2)
    with pytest.raises(
        ValueError, match="unseen row 0 must hold scores of distinct unseen candidates"
    ):
        sweep.update_kept(
            np.array([[0.5, 0.1]]),
            np.array([[1, 0]]),
            np.array([[0.5, 0.1]]),
            np.array([[2, 2]]),
            np.array([1]),
        )


def test_thresholds_of_no_images_are_refused():
    with pytest.raises(ValueError, match="no images"):
        threshold_sweep([(SCORES[:0], TARGET[:0])], SEEN, np.zeros(2), [0.5])


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_thresholds_compare_feasibility_in_float64(kind):
    rng = np.random.default_rng(2)
    scores, target, seen, _, _ = problem(rng, n=60, p=30)
    feasibility = rng.choice([0.1, 0.3, 0.7], size=30).astype(kind)
    thresholds = np.array([0.1, 0.3, 0.7])  # float16(0.1) < 0.1 < float32(0.1)
    got = threshold_sweep([(scores, target)], seen, feasibility, thresholds)
    for i, threshold in enumerate(thresholds):
        mask = seen | (feasibility.astype(float) >= threshold)
        assert got["auc"][i] == evaluate(scores, target, seen, candidates=mask)["auc"]
        assert got["removed"][i] == pytest.approx(1 - mask.mean())


def test_torch_tensors_of_any_kind():
    torch = pytest.importorskip("torch")
    scores, target, seen, _, _ = problem(np.random.default_rng(0), "ties")
    tensor = torch.from_numpy(scores).to(torch.bfloat16).requires_grad_()
    got = evaluate(tensor, torch.from_numpy(target), torch.from_numpy(seen))
    np.testing.assert_equal(got, evaluate(scores, target, seen))


# The script.


def test_composition_rows_have_nan_where_the_report_has(tmp_path):
    sweep = sweep_of(np.eye(2)[[0, 1]], np.array([0, 0]), SEEN)
    module.write_compositions(sweep, tmp_path / "c.csv")
    (row,) = csv.DictReader((tmp_path / "c.csv").open())
    assert (row["accuracy"], row["accuracy_at_best_hm"], row["accuracy_unseen_only"]) == (
        "0.5",
        "nan",
        "0.0",
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "c.csv"]
    with pytest.raises(ValueError, match="no folder .*none to write c.csv into"):
        module.write_compositions(sweep, tmp_path / "none/c.csv")


def test_script_finds_the_scores_beside_a_run_and_explains_its_names(saved, capsys):
    folder, arrays = saved
    (folder / "run").mkdir()
    rest = {name: array for name, array in arrays.items() if name != "scores"}
    np.savez(folder / "run/scores_open.npz", **rest)
    np.save(folder / "run/scores.npy", arrays["scores"])
    module.main([str(folder / "run/scores_open.npz")])
    text = capsys.readouterr().out
    assert f"{100 * evaluate(**arrays)['auc']:.2f}" in text
    assert all(
        name in text.splitlines()[-1]
        for name in (
            "S best_seen",
            "U best_unseen",
            "HM best_hm",
            "AUC auc",
            "Sta. state_accuracy",
            "Obj. object_accuracy",
        )
    )


def test_script_compares_averages_and_resamples(saved, capsys, monkeypatch):
    monkeypatch.setattr(module, "RESAMPLES", 100)
    folder, arrays = saved
    other = {**arrays, "scores": arrays["scores"] + np.eye(9)[arrays["target"]]}
    np.savez(folder / "other.npz", **other)
    files = [str(folder / "scores.npz"), "--against", str(folder / "other.npz")]
    module.main([*files, "--json", "--unit", "composition", "--average", "composition"])
    got = json.loads(capsys.readouterr().out)
    masks = dict(candidates=arrays["candidates"], pairs=arrays["pairs"])
    sweeps = [
        sweep_of(each["scores"], each["target"], each["seen"], **masks) for each in (arrays, other)
    ]
    for protocol in PROTOCOLS:
        assert got["against"][protocol] == compare(
            *sweeps, 0.95, "composition", protocol=protocol, average="composition"
        )
        assert got[protocol] == sweeps[0].report(protocol, average="composition")
    module.main([*files, "--confidence", "0.9"])
    text = capsys.readouterr().out
    assert "90 % intervals over images" in text and "a leads" in text and text.count("auc, ") == 2
    for wrong in (["--unit", "image"], ["--against", str(folder / "none.npz")]):
        with pytest.raises(SystemExit) as exit:
            module.main([files[0], *wrong])
        assert exit.value.code == 2 and capsys.readouterr().err.startswith("error: ")
    np.savez(folder / "other.npz", **{**other, "scores": arrays["scores"] * np.nan})
    with pytest.raises(SystemExit):
        module.main(files)
    assert "other.npz: scores must be finite" in capsys.readouterr().err  # not scores.npz


def test_script_says_that_the_candidates_differ(saved, monkeypatch, recwarn):
    monkeypatch.setattr(module, "RESAMPLES", 10)
    folder, arrays = saved
    np.savez(folder / "open.npz", **{**arrays, "candidates": np.ones(9, bool)})
    closed, opened = str(folder / "scores.npz"), str(folder / "open.npz")
    module.main([closed, "--against", closed])
    assert not recwarn.list
    module.main([closed, "--against", opened])
    (warning,) = recwarn.list
    assert f"a has {arrays['candidates'].sum()} candidates, b 9" in str(warning.message)


@pytest.mark.skipif(os.name != "posix", reason="a pipe of Unix")
@pytest.mark.parametrize("alone", [True, False])
def test_script_is_quiet_when_its_reader_has_enough(saved, alone):
    folder, _ = saved
    script = module.__file__
    if alone:
        script = folder / "evaluate.py"
        script.write_bytes(Path(module.__file__).read_bytes())
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(script), str(folder / "scores.npz")]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=folder)
    os.close(writer)
    assert ended.stderr == b""


def test_a_comparison_shows_no_negative_zero():
    values = {"confidence": 0.95, "unit": "image"}
    for name in HEADLINE:
        for end in "a", "b", "difference", "difference_low", "difference_high", "a_leads":
            values[f"{name}_{end}"] = -1e-17
    assert "-0.00" not in module.comparison_table({"exact": values})


def test_damaged_archives_end_in_one_line(saved, capsys):
    folder, arrays = saved
    np.savez_compressed(folder / "small.npz", **arrays)
    whole, rng = (folder / "small.npz").read_bytes(), np.random.default_rng(0)
    variants = [whole[:n] for n in (0, 3, 50, len(whole) // 2, len(whole) - 5)]
    for _ in range(150):  # flipped bytes
        damaged = bytearray(whole)
        for at in rng.integers(len(whole), size=3):
            damaged[at] ^= int(rng.integers(1, 256))
        variants.append(bytes(damaged))
    entry = whole.index(b"PK\x01\x02")  # the first entry of the directory of a zip archive
    variants.append(whole[: entry + 8] + b"\x01" + whole[entry + 9 :])  # encrypted
    variants.append(whole[: entry + 10] + b"\x63" + whole[entry + 11 :])  # unknown compression
    name = whole.rindex(b"pairs.npy")  # in the directory: the array would pass for not given
    variants.append(whole[:name] + b"pairz" + whole[name + 5 :])
    for at in range(entry, len(whole)):  # each byte of the directory
        damaged = bytearray(whole)
        damaged[at] ^= 1
        variants.append(bytes(damaged))
    module.main([str(folder / "small.npz")])
    answer = capsys.readouterr().out
    refused = 0
    for data in variants:
        (folder / "damaged.npz").write_bytes(data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module.main([str(folder / "damaged.npz")])
        except SystemExit as exit:
            error = capsys.readouterr().err
            assert exit.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
            refused += 1
        else:  # a byte that nothing reads
            assert capsys.readouterr().out == answer
    assert refused > 100


def test_a_huge_shape_in_a_header_ends_in_one_line(saved, capsys):
    folder, arrays = saved
    np.save(folder / "scores.npy", arrays["scores"])
    data = (folder / "scores.npy").read_bytes()
    assert b"(60, 9), }" in data
    for shape in (b"(60000000000, 9), }", b"(9" + b"9" * 30 + b", 9), }", b"(-60, 9), }"):
        longer = len(shape) - len(b"(60, 9), }")
        (folder / "scores.npy").write_bytes(data.replace(b"(60, 9), }" + b" " * longer, shape))
        with pytest.raises(SystemExit) as exit:
            module.main([str(folder / "scores.npy"), str(folder / "scores.npz")])
        error = capsys.readouterr().err
        assert exit.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
        with zipfile.ZipFile(folder / "huge.npz", "w") as archive:
            archive.write(folder / "scores.npy", "scores.npy")
        with pytest.raises(SystemExit) as exit:
            module.main([str(folder / "huge.npz")])
        error = capsys.readouterr().err
        assert exit.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "scores.npz")
    with pytest.raises(ValueError, match="no plain file"):
        module.load([tmp_path / "scores.npz"])


def test_scores_beside_are_named_with_what_keeps_their_checksum(saved):
    """Either file may be the wrong one."""
    folder, arrays = saved
    scores = arrays.pop("scores")
    np.save(folder / "scores.npy", scores)
    np.savez(folder / "scores.npz", **arrays, scores_crc32=np.zeros(3))
    with pytest.raises(ValueError, match="scores.npy is damaged, or of another run than .*npz"):
        module.load([folder / "scores.npz"])
    np.save(folder / "scores.npy", scores[None])
    with pytest.raises(ValueError, match=r"scores.npy holds scores of shape \(1, "):
        module.load([folder / "scores.npz"])


def test_a_checksum_is_compared_with_named_scores_of_its_folder_alone(saved, tmp_path):
    """A flipped bit in scores.npy is found whether or not the file is named; scores of another
    folder may be others."""
    folder, arrays = saved
    scores = arrays.pop("scores")
    checksum = zlib.crc32(scores)
    np.save(folder / "scores.npy", scores)
    np.savez(folder / "rest.npz", **arrays, scores_crc32=checksum)
    named = [folder / "scores.npy", folder / "rest.npz"]
    assert np.array_equal(module.load(named)[0], scores)
    content = bytearray((folder / "scores.npy").read_bytes())
    content[-1] ^= 1
    (folder / "scores.npy").write_bytes(content)
    for files in (named, named[::-1], named[1:]):
        with pytest.raises(ValueError, match="scores.npy is damaged, or of another run than"):
            module.load(files)
    other = tmp_path / "other/scores.npy"
    other.parent.mkdir()
    (folder / "scores.npy").rename(other)
    assert len(module.load([other, folder / "rest.npz"])[0]) == len(scores)


def test_a_folder_in_place_of_a_plot_is_named(saved, capsys):
    folder, _ = saved
    with pytest.raises(SystemExit):
        module.main([str(folder / "scores.npz"), "--plot", str(folder)])
    assert capsys.readouterr().err == f"error: {folder} is a folder: name a file to write\n"
