"""The bias-sweep evaluator of compositional zero-shot learning: exact, streaming, NumPy alone.

Copy this one file into any project.

An image is predicted as the best candidate of `score + bias * [unseen]`: a low bias favours the
compositions seen in training, a high one the unseen. Over all biases, seen against unseen accuracy
is a curve with an area (AUC) and a best harmonic mean (HM). It changes only where an image's best
seen and best unseen scores cross, so eight numbers an image are all that is kept.

    >>> scores = np.array([[.9, .1, .3], [.6, .2, .5], [.1, .3, .6], [.6, .3, .7]])  # (N, P)
    >>> target = np.array([0, 1, 2, 1])                            # (N,) columns of the truth
    >>> seen = np.array([True, True, False])                       # (P,)
    >>> report = evaluate(scores, target, seen)                    # higher scores are better
    >>> report["best_seen"], report["best_unseen"], round(report["auc"], 3)
    (0.3333333333333333, 1.0, 0.333)

Shapes: N images, B of them in one block, P compositions (columns of the scores), k = topk,
K points of a curve, T thresholds, R resamples. Accuracies are fractions. Ties go to the lower
column, seen before unseen. Every float64 bias is judged as real arithmetic would judge it.

Two protocols: `exact` tries every bias where a prediction changes; `published` the about 20 of the
field's evaluator. It usually understates: its HM never exceeds the exact one, and its AUC does so
only where scores lie closer than its step of 1e-4.

Torch tensors are taken as they are, bfloat16 by `.float()`. From a dictionary of scores by pair:
`np.stack([d[p] for p in pairs], 1)`. Larger than memory: one `BiasSweep`, `update` a block; over
several machines: `merge`. Reduced on a GPU: `update_topk`. Two systems on the same images:
`compare`.

As a script: `python evaluate.py scores.npz --confidence 0.95 --plot curve.png` (see `--help`).
"""

import argparse
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

PROTOCOLS = ("exact", "published")
UNITS = ("image", "composition")  # what a resample draws, and what an average counts alike
HEADLINE = ("auc", "best_hm", "best_seen", "best_unseen")  # what `compare` compares
RESAMPLES = 1000


class Curve(NamedTuple):
    """Accuracy as the bias on unseen compositions grows.

    `exact`: from -inf strictly ascending; entry i holds for biases above `bias[i]` up to and
    including `bias[i + 1]`. `published`: the biases tried, ascending, the last one 1000; entry i
    holds at `bias[i]`.
    """
    bias: np.ndarray  # (K,)
    seen: np.ndarray  # (K,) non-increasing, accuracy on the images of seen compositions
    unseen: np.ndarray  # (K,) non-decreasing, accuracy on the others


class BiasSweep:
    """Feed it blocks of scores; it keeps eight numbers an image and answers for every bias.

    `seen` (P,) bool: compositions with training images. `candidates` (P,) bool: those that may
    win; None, all of them: the open world; those of training and of the phase: the closed world;
    seen or feasible enough: the hard mask. `pairs` (P, 2) int: state and object of each column,
    for the accuracies on these (nan without). `topk`: right if the truth is among the k best; the
    time grows with k. Anything else is a ValueError. The arrays are copied.
    """

    def __init__(self, seen, *, candidates=None, pairs=None, topk=1):
        self.seen = _array("seen", seen, "b", (None,)).copy()
        count = len(self.seen)
        if candidates is None:
            candidates = np.ones(count, bool)
        self.candidates = _array("candidates", candidates, "b", (count,)).copy()
        self.pairs = None
        self._codes = [np.arange(count)]  # what must be equal to be right: (P,) each
        if pairs is not None:
            self.pairs = _array("pairs", pairs, "iu", (count, 2)).copy()
            self._codes += list(self.pairs.T)
        self.topk = int(_array("topk", topk, "iu", ()))
        self._places = min(self.topk, count)  # further places of the top k would stay empty
        if self._places < 1:
            raise ValueError("topk and the length of seen must be at least 1, "
                             f"got {self.topk} and {count}")
        self._seen_group = _group(self.seen & self.candidates)
        self._unseen_group = _group(~self.seen & self.candidates)
        self._parts = [np.empty((KEPT, 0))]  # (8, B) each

    def update(self, scores, target):
        """Add B images: `scores` (B, P), any real dtype and layout, higher is better.

        `target` (B,) holds the columns of the truth. Longer floats, and integers beyond 2^53, are
        rounded to float64. The scores are neither changed nor kept. A ValueError names the row;
        nothing of that call is added.
        """
        def reduce(block, top, target):
            best_seen = _best(block, top, self._seen_group, self._places)
            best_unseen = _best(block, top, self._unseen_group, self._places)
            return (*best_seen, *best_unseen, target)

        best = _each_block(scores, target, len(self.seen), reduce)
        self._parts.append(_decisive(*best, self._codes))

    def update_topk(self, seen_scores, seen_columns, unseen_scores, unseen_columns, target):
        """Add B images already reduced to the k best seen and the k best unseen candidates.

        Scores and columns (B, min(k, P)) each, best first; where a group has fewer candidates the
        rest is ignored. `target` (B,). Equal scores must stand in the order of their columns to
        give what `update` gives; a GPU's topk may not do that.
        """
        target = _array("target", target, "iu", (None,), len(self.seen))
        shape = (len(target), self._places)
        best_seen = _checked_best("seen", seen_scores, seen_columns, self._seen_group, shape)
        best_unseen = _checked_best("unseen", unseen_scores, unseen_columns,
                                    self._unseen_group, shape)
        self._parts.append(_decisive(*best_seen, *best_unseen, target, self._codes))

    def merge(self, other):
        """Add the images of another sweep with the same masks, pairs and topk: shards of a set."""
        _check_same(self, other, ("seen", "candidates", "pairs", "topk"))
        self._parts = self._parts + other._parts

    def curve(self, protocol="exact", average="image"):
        """The Curve of the images so far; ValueError without images. A half without any is nan."""
        images = self._images()
        counts, weights = next(_draws(images, "image", average))
        return _curve(images, counts, weights, protocol)[0]

    def report(self, protocol="exact", confidence=None, unit="image", average="image"):
        """The metrics as a dict of plain numbers; nan where there is nothing to divide by.

        `auc, best_hm, best_seen, best_unseen`; at the best HM `hm_seen, hm_unseen, bias`; at
        bias 0 `state_accuracy, object_accuracy`, also `..._at_best_hm` (at `bias`) and
        `..._unseen_only` (bias +inf); `average, n_seen, n_unseen, topk, protocol`.

        `confidence`, as 0.95, adds `<metric>_low` and `<metric>_high`, percentiles over 1,000
        seeded bootstrap resamples, itself and `unit`, what these draw: an "image", which answers
        for other images of the same compositions, or a whole "composition", seen and unseen apart,
        which answers for other compositions. `average`: each "image" counts alike, or each
        "composition" with images does.
        """
        images = self._images()

        def metrics(counts, weights):
            return _metrics(images, counts, weights, protocol)

        values, _ = _with_intervals(metrics, images, confidence, unit, average)
        return values | {"topk": self.topk, "protocol": protocol}

    def _images(self):
        """The Images so far; ValueError without any."""
        kept = np.concatenate(self._parts, axis=1)
        self._parts = [kept]
        return _images(kept, self.seen)


def evaluate(scores, target, seen, *, candidates=None, pairs=None, topk=1, protocol="exact",
             confidence=None, unit="image", average="image"):
    """The `BiasSweep.report` of scores (N, P), higher is better, against the true columns (N,).

    `scores` and `target` are as in `BiasSweep.update`, `seen` to `topk` as in `BiasSweep`, the
    rest as in `BiasSweep.report`.
    """
    sweep = BiasSweep(seen, candidates=candidates, pairs=pairs, topk=topk)
    sweep.update(scores, target)
    return sweep.report(protocol, confidence, unit, average)


def accuracy_at(sweep, bias, *, average="image"):
    """What a user gets who fixes the bias in advance, say to validation's best: without an oracle.

    Returns `seen, unseen, hm, state_accuracy, object_accuracy`, fractions; nan where there is
    nothing to divide by. `bias` may be infinite; nan, and what is no number, is a ValueError.
    """
    bias = float(_numbers("bias", bias, ()))
    images = sweep._images()
    _, weights = next(_draws(images, "image", average))
    values = {"seen": _accuracy(images.kept, UP_TO, bias, weights * images.seen),
              "unseen": _accuracy(images.kept, UP_TO, bias, weights * ~images.seen)}
    for column, name in PRIMITIVES:
        values[name] = _accuracy(images.kept, column, bias, weights)
    values["hm"] = _harmonic(values["seen"], values["unseen"])
    return {name: float(value) for name, value in values.items()}


def compare(sweep_a, sweep_b, confidence=0.95, unit="image", *, protocol="exact",
            average="image"):
    """How much better system a is than system b on the same images, and how sure that is.

    The sweeps must have the same images (targets in the same order), `seen` and `topk`;
    candidates may differ. Anything else is a ValueError that says what differs.

    Returns a dict: for each of `auc, best_hm, best_seen, best_unseen`, as fractions,
    `<metric>_a`, `<metric>_b` and `<metric>_difference` (a minus b), each with `_low` and `_high`
    over 1,000 seeded resamples that draw the same units for both, and `<metric>_a_leads`, the
    share of the resamples in which a is strictly better; then `confidence, unit, average, n_seen,
    n_unseen, topk, protocol`. For `unit` and `average` see `BiasSweep.report`.
    """
    _check_same(sweep_a, sweep_b, ("seen", "topk"))
    both = [sweep_a._images(), sweep_b._images()]
    _check_same(*both, ("target",))

    def metrics(counts, weights):
        a, b = [_headline(*_curve(images, counts, weights, protocol)) for images in both]
        values = {}
        for name in HEADLINE:
            values[f"{name}_a"] = a[name]
            values[f"{name}_b"] = b[name]
            values[f"{name}_difference"] = a[name] - b[name]
        return values

    values, draws = _with_intervals(metrics, both[0], confidence, unit, average)
    for name in HEADLINE:
        differences = draws[f"{name}_difference"]
        leads = np.mean(differences > ROUNDING) if len(differences) else np.nan
        values[f"{name}_a_leads"] = float(leads)
    return values | {"topk": sweep_a.topk, "protocol": protocol}


def threshold_sweep(blocks, seen, feasibility, thresholds, *, candidates=None):
    """Top-1 AUC of the hard mask at T thresholds from one reading of the scores.

    The same as T evaluations give. `blocks`: iterable of (scores (B, P), target (B,)). At
    threshold t those of `candidates` (P,) remain that are seen or have `feasibility` (P,) >= t,
    compared in float64. Returns arrays (T,): `threshold`, `removed` (share of the candidates),
    `auc`, `auc_published`. Anything else, and no images, is a ValueError.
    """
    whole = BiasSweep(seen, candidates=candidates)
    feasibility = _numbers("feasibility", feasibility, whole.seen.shape)
    thresholds = _numbers("thresholds", thresholds, (None,))
    if not len(thresholds):
        raise ValueError("thresholds must be one or more, got none")
    steps, inverse = np.unique(thresholds, return_inverse=True)  # ascending

    level, columns, starts = _levels(whole._unseen_group.columns, feasibility, steps)
    some_remain = starts < len(columns)

    def reduce(block, top, target):
        best_seen = _best(block, top, whole._seen_group, 1)
        # The best of each level (reduceat gives a level without columns a score of the next one),
        # and then of each step, the greatest of its own and all higher levels.
        best = np.full((len(block), len(steps)), -np.inf, block.dtype)
        best[:, some_remain] = np.maximum.reduceat(block.take(columns, axis=1, mode="clip"),
                                                   starts[some_remain], axis=1)
        best = np.maximum.accumulate(best[:, ::-1], axis=1)[:, ::-1]
        return (*best_seen, best, _truth_wins(block, target, best, level), target)

    parts = []
    for scores, target in blocks:
        parts.append(_each_block(scores, target, len(whole.seen), reduce))
    if not parts:
        raise ValueError("no images to evaluate: there are no blocks")
    *best_seen, best, truth_wins, target = map(np.concatenate, zip(*parts))
    once = np.ones(len(target), int)
    areas = []  # (T, 2): each step is reduced to what `update` keeps for k = 1
    for score, wins in zip(best.T, truth_wins.T):
        score = score.astype(float)
        column = np.where(wins, target, -1)  # which other column wins does not matter
        kept = _decisive(*best_seen, score[:, None], column[:, None], target, whole._codes)
        images = _images(kept, whole.seen)
        areas.append([_curve(images, once, once, protocol)[1] for protocol in PROTOCOLS])
    auc, published = np.array(areas)[inverse].T
    removed = starts[inverse] / max(whole.candidates.sum(), 1)
    return dict(threshold=thresholds, removed=removed, auc=auc, auc_published=published)


# How it does so: from scores to what is kept of an image.

THREADS = min(4, os.cpu_count() or 1)  # more only wait for memory
# Bytes of scores at a time: they stay in the cache between the passes over them. In smaller blocks
# the passes are so short that the threads wait for each other between them.
BLOCK = (8 << 20) // max(THREADS, 2)
LIMIT = 8e307  # the difference of two scores beyond it would overflow

# The columns of what is kept of an image, see _decisive. Composition, state and object have two
# columns each: right for biases up to the first, and right for biases above the second.
UP_TO, ABOVE, STATE, OBJECT, GAP, TARGET = 0, 1, 2, 4, 6, 7
KEPT = 8
PRIMITIVES = ((STATE, "state_accuracy"), (OBJECT, "object_accuracy"))


class Group(NamedTuple):
    """The candidates of one kind, seen or unseen."""
    columns: np.ndarray  # (n,) ascending
    penalty: np.ndarray  # (P,) float32: 0 for these columns, -inf for the others


def _group(member):
    """The Group of the columns where `member` (P,) is True."""
    return Group(np.flatnonzero(member), np.where(member, 0, -np.inf).astype(np.float32))


def _each_block(scores, target, count, work):
    """What work(block, top, target) makes of all blocks of rows, joined, in order.

    `scores` (N, count) is checked and read in blocks (B, count) of BLOCK bytes, C-contiguous
    float32 or float64; `top` (B,) is the column of each row's greatest score; the work returns
    arrays (B, ...). A ValueError names the first bad row.
    """
    scores = _array("scores", scores, "fiu", (None, count))
    target = _array("target", target, "iu", (len(scores),), count)
    kind = np.dtype("float32" if np.can_cast(scores.dtype, "float32") else "float64")
    size = max(1, BLOCK // (count * kind.itemsize))

    def check_and_work(start):
        block = np.ascontiguousarray(scores[start:start + size], kind)
        top = block.argmax(axis=1)  # this pass brings the block into the cache
        least = float(block.min(initial=0))
        greatest = float(block[np.arange(len(block)), top].max(initial=0))
        if not (least > -LIMIT and greatest < LIMIT):  # nan fails both
            row, column = np.argwhere(~(np.abs(block.astype(float)) < LIMIT))[0]
            raise ValueError(f"scores must be finite: row {start + row}, column {column} is "
                             f"{block[row, column]}; to exclude compositions pass candidates")
        return work(block, top, target[start:start + size])

    # NumPy lets go of the interpreter. This thread reads the results once all are made: to wake it
    # for each block would hold up the others. In order, so the first bad row's error comes first.
    with ThreadPoolExecutor(THREADS) as pool:
        results = pool.map(check_and_work, range(0, max(len(scores), 1), size))
    return [np.concatenate(arrays) for arrays in zip(*results)]


def _best(block, top, group, k):
    """The k best of a group in each row (B, P), the lowest column first among equals.

    `top` (B,): the column of each row's greatest score. Returns scores (B, k) float64 and columns
    (B, k), padded with -inf and -1.
    """
    columns = group.columns
    rows = np.arange(len(block))
    best = np.full((len(block), k), -np.inf)
    where = np.full((len(block), k), -1)
    # To gather a few columns takes less time than to hide the others, but not to gather many (the
    # columns exist: "clip" spares NumPy a check).
    if 4 * len(columns) < block.shape[1]:
        left = block.take(columns, axis=1, mode="clip")
        column_of = columns
    else:
        column_of = np.arange(block.shape[1])
        if k == 1:
            # Where the best of all columns is of the group, it is the group's best.
            best[:, 0] = block[rows, top]
            where[:, 0] = top
            lacking = np.flatnonzero(group.penalty[top])
            if 2 * len(lacking) < len(block):  # else a copy of these rows costs more than it saves
                rows = lacking
                block = block[lacking]
        left = block + group.penalty
    lines = np.arange(len(rows))  # the rows that are still searched, as `left` numbers them
    for rank in range(min(k, len(columns))):
        place = left.argmax(axis=1)
        best[rows, rank] = left[lines, place]
        where[rows, rank] = column_of[place]
        left[lines, place] = -np.inf  # out of the way of the next rank
    return best, where


def _levels(columns, feasibility, steps):
    """Which of some steps (T,), ascending thresholds, keep the unseen candidates, columns (U,).

    Returns the level (P,) of each column, the last step that keeps it, -1 if it never competes;
    the columns by ascending level; and starts (T,): those of step i are columns[starts[i]:].
    """
    level = np.full(len(feasibility), -1)
    level[columns] = np.searchsorted(steps, feasibility[columns], "right") - 1
    columns = columns[np.argsort(level[columns], kind="stable")]
    return level, columns, np.searchsorted(level[columns], np.arange(len(steps)))


def _truth_wins(block, target, best, level):
    """Whether the truth is the best unseen candidate of each step of a threshold_sweep: (B, T).

    `best` (B, T): the best unseen score at each step. The truth has it from the step on that
    removes the last lower column of its score, up to its own level, wherever it equals the best.
    """
    rows = np.arange(len(block))
    own_level = level[target]
    own_score = block[rows, target]
    wins = np.zeros(best.shape, bool)
    # Few rows pass this test, so that a loop over them costs less than a pass over the block.
    for row in np.flatnonzero(best[rows, own_level] == own_score):
        lower = slice(target[row])
        ties = block[row, lower] == own_score[row]
        first = level[lower][ties].max(initial=-1) + 1
        wins[row, first:own_level[row] + 1] = True
    return wins & (best == own_score[:, None])


def _checked_best(name, scores, columns, group, shape):
    """What a user gives as the best of a group, in the form of `_best`; or a ValueError."""
    scores = _array(f"{name}_scores", scores, "f", shape).astype(float)
    columns = _array(f"{name}_columns", columns, "iu", shape).astype(int)
    filled = min(len(group.columns), shape[1])
    scores[:, filled:] = -np.inf
    columns[:, filled:] = -1

    # Distinct candidates with finite scores, best first.
    valid = (np.abs(scores) < LIMIT) & np.isin(columns, group.columns)
    distinct = np.diff(np.sort(columns[:, :filled])) > 0
    good = (valid[:, :filled].all(axis=1) & distinct.all(axis=1)
            & (scores[:, 1:] <= scores[:, :-1]).all(axis=1))
    if not good.all():
        raise ValueError(f"{name} row {good.argmin()} must hold finite scores of distinct {name} "
                         "candidates, best first")
    return scores, columns


def _decisive(seen_scores, seen_columns, unseen_scores, unseen_columns, target, codes):
    """Reduce the (B, k) best of both groups to what decides at every bias: (8, B).

    Seen rank i and unseen rank k-1-i compete for one place of the top k; the seen one holds it for
    biases up to crossing[:, i]. So what must be right (the composition, its state, its object: one
    of `codes` (P,) each, the last two nan if not known) is right up to one bias, -inf if at none,
    because of a seen column, and above another, inf if at none, because of an unseen one.
    """
    kept = np.full((KEPT, len(target)), np.nan)
    crossing = _crossings(seen_scores, unseen_scores[:, ::-1])
    for at, code in zip((UP_TO, STATE, OBJECT), codes):
        truth = code[target][:, None]
        # Of several seen columns the last one to lose its place counts, of unseen the first to win.
        right = (code[seen_columns] == truth) & (seen_columns >= 0)
        kept[at] = np.where(right, crossing, -np.inf).max(axis=1)
        right = (code[unseen_columns] == truth) & (unseen_columns >= 0)
        kept[at + 1] = np.where(right, crossing[:, ::-1], np.inf).min(axis=1)

    # The published protocol takes its biases from the score of an unseen truth in the top k.
    is_truth = unseen_columns == target[:, None]
    kept[GAP] = seen_scores[:, -1] - np.where(is_truth, unseen_scores, -LIMIT).max(axis=1)
    kept[TARGET] = target
    return kept


def _crossings(seen, unseen):
    """The last float64 bias at which `seen >= unseen + bias` in real arithmetic; inputs alike.

    That is seen - unseen rounded down. The subtraction rounds to the nearest; the error it makes
    is a float64 itself, and Knuth's two-sum finds it: where it is negative, the difference was
    rounded up. Where both are -inf, padding, the result is nan, and no column matches it.
    """
    with np.errstate(invalid="ignore"):
        difference = seen - unseen
        subtracted = difference - seen  # about -unseen
        error = (seen - (difference - subtracted)) + (-unseen - subtracted)
        return np.where(error < 0, np.nextafter(difference, -np.inf), difference)


# From what is kept to curves and metrics.

ROUNDING = 1e-12  # accuracies that differ by less are equal: sums of weights are rounded


class Images(NamedTuple):
    """All that is known of the images of a sweep, in the order in which they were given.

    Each turns once as the bias grows: if its truth is seen, wrong, else right.
    """
    kept: np.ndarray  # (8, N)
    target: np.ndarray  # (N,) column of the truth
    seen: np.ndarray  # (N,) bool, whether the truth is a seen composition
    order: np.ndarray  # (N,) rows by the bias above which they turn
    turn: np.ndarray  # (N,) that bias, ascending; -inf and inf: the image never changes
    bias: np.ndarray  # (K,) -inf and each finite turn once: where the exact curve has its points
    turned: np.ndarray  # (K,) how many images have turned just above each of them


def _images(kept, seen):
    """The Images of what is kept (8, N) and the mask of seen compositions (P,); or a ValueError."""
    if not kept.size:
        raise ValueError("no images to evaluate: the set is empty, call update first")
    target = kept[TARGET].astype(int)
    is_seen = seen[target]
    turn = np.where(is_seen, kept[UP_TO], kept[ABOVE])
    order = np.argsort(turn)
    turn = turn[order]
    bias = np.unique(np.append(-np.inf, turn[turn < np.inf]))
    return Images(kept, target, is_seen, order, turn, bias, np.searchsorted(turn, bias, "right"))


def _curve(images, counts, weights, protocol):
    """The Curve of images drawn `counts` (N,) times that weigh `weights`, and the area under it."""
    _choice("protocol", protocol, PROTOCOLS)
    seen = images.seen[images.order]
    weights = weights[images.order]
    # What has turned wrong (seen) and right (unseen) once the first n images have turned: (N + 1,)
    lost = np.append(0, np.cumsum(weights * seen))
    gained = np.append(0, np.cumsum(weights * ~seen))

    bias = images.bias
    turned = images.turned
    if protocol == "published":
        tried = ~images.seen & (images.kept[ABOVE] < 1000)  # unseen, and right at bias 1000
        bias = np.sort(np.repeat(images.kept[GAP][tried], counts[tried])) - 1e-4
        last = 1000 if gained[-1] else -np.inf
        bias = np.append(bias[::max(len(bias) // 20, 1)], last)
        turned = np.searchsorted(images.turn, np.nan_to_num(bias), "left")

    with np.errstate(invalid="ignore"):  # 0 / 0: no image of that half
        seen_accuracy = (lost[-1] - lost[turned]) / lost[-1]
        unseen_accuracy = gained[turned] / gained[-1]
    first = seen_accuracy[0] * unseen_accuracy[0]  # nan where one half is missing
    if protocol == "published":
        # The exact curve begins at unseen accuracy 0, this one later. nan stays nan.
        first = 0 * first
    heights = seen_accuracy[1:] + seen_accuracy[:-1]
    area = first + np.sum(heights * np.diff(unseen_accuracy)) / 2
    return Curve(bias, seen_accuracy, unseen_accuracy), area


def _headline(curve, area):
    """The HEADLINE metrics of a curve; nan where one half is."""
    return {"auc": area, "best_hm": _harmonic(curve.seen, curve.unseen).max(),
            "best_seen": curve.seen.max(), "best_unseen": curve.unseen.max()}


def _metrics(images, counts, weights, protocol):
    """The metrics of a report for Images (N,) that are drawn `counts` times and weigh `weights`."""
    curve, area = _curve(images, counts, weights, protocol)
    values = _headline(curve, area)
    best = [np.nan, np.nan, np.nan]
    if not np.isnan(area):
        hm = _harmonic(curve.seen, curve.unseen)
        i = (hm >= hm.max() - ROUNDING).argmax()  # the first of the best ones
        best = [curve.seen[i], curve.unseen[i], curve.bias[i]]
        if protocol == "exact":
            best[2] = _bias_of_entry(curve, i)
    values |= zip(("hm_seen", "hm_unseen", "bias"), best)
    for when, bias in (("", 0.0), ("_at_best_hm", best[2]), ("_unseen_only", np.inf)):
        for column, name in PRIMITIVES:
            values[name + when] = _accuracy(images.kept, column, bias, weights)
    return values


def _bias_of_entry(curve, i):
    """A finite bias at which entry i of an exact curve holds.

    Midway to the bias where an accuracy next changes; 1 away from the only one, at the ends.
    """
    low = curve.bias[i]
    # Biases where only images without weight turn are no ends.
    lead = curve.unseen - curve.seen  # non-decreasing
    high = np.append(curve.bias[lead > lead[i]], np.inf)[0]
    if low == -np.inf:
        return min(high - 1, 0.0)
    if high == np.inf:
        inside = low + 1
    else:
        inside = low / 2 + high / 2
    return max(inside, np.nextafter(low, np.inf))  # of neighbouring floats, the upper one


def _accuracy(kept, column, bias, weights):
    """The weighted share of images (N,) right at a bias (see _decisive), nan if there is none."""
    if np.isnan(bias) or np.isnan(kept[column, 0]) or not weights.any():
        return np.nan
    bias = np.nan_to_num(bias)  # infinite: beyond every crossing
    right = (bias <= kept[column]) | (bias > kept[column + 1])
    return weights[right].sum() / weights.sum()


def _harmonic(a, b):
    return 2 * a * b / np.maximum(a + b, 1e-300)  # 0 where both are 0


# Resamples.


def _draws(images, unit, average):
    """How often each image (N,) is drawn, and how much it then weighs.

    First each once, then RESAMPLES times with replacement, seeded: images, or whole compositions,
    as many seen and as many unseen ones as there are.
    """
    _choice("unit", unit, UNITS)
    _choice("average", average, UNITS)
    random = np.random.default_rng(0)
    unit_of = np.arange(len(images.target))  # (N,) number of the unit that an image belongs to
    groups = [unit_of]  # of units, each drawn from apart
    if unit == "composition":
        unit_of = images.target
        groups = [np.unique(unit_of[half]) for half in (images.seen, ~images.seen) if half.any()]
    times_drawn = np.ones(unit_of.max() + 1, int)
    for _ in range(RESAMPLES + 1):
        counts = times_drawn[unit_of]
        weights = counts
        if average == "composition":
            # Its images share a weight of 1; one that is drawn twice as a unit counts as two.
            sharers = np.bincount(images.target, counts)
            if unit == "composition":
                sharers = np.bincount(images.target)
            weights = counts / np.maximum(sharers, 1)[images.target]
        yield counts, weights
        for group in groups:
            draw = random.integers(len(group), size=len(group))
            times_drawn[group] = np.bincount(draw, minlength=len(group))


def _with_intervals(metrics, images, confidence, unit, average):
    """What metrics(counts, weights) finds, and if there is a confidence its `_low` and `_high`.

    Returns a dict of floats and, by name, the values of the resamples, ascending, nan left out.
    """
    # Made when they are asked for: first of each image once, then of the resamples.
    found = (metrics(*drawn) for drawn in _draws(images, unit, average))
    values = {name: float(value) for name, value in next(found).items()}
    draws = {}
    if confidence is not None:
        confidence = float(_numbers("confidence", confidence, ()))
        if not 0 < confidence < 1:
            raise ValueError(f"confidence must lie between 0 and 1, as 0.95 does, got {confidence}")
        # A row a resample, each column ascending; nan, where it lacks seen or unseen images, last.
        resampled = np.sort([list(drawn.values()) for drawn in found], axis=0)
        for name, column in zip(list(values), resampled.T):
            draws[name] = column[~np.isnan(column)]
            last = max(len(draws[name]) - 1, 0)
            values[f"{name}_low"] = float(column[round((0.5 - confidence / 2) * last)])
            values[f"{name}_high"] = float(column[round((0.5 + confidence / 2) * last)])
        values |= {"confidence": confidence, "unit": unit}
    values |= {"average": average, "n_seen": int(images.seen.sum()),
               "n_unseen": int((~images.seen).sum())}
    return values, draws


# Checks.

KINDS = {"b": "bool", "iu": "integer", "f": "float", "fiu": "real"}


def _array(name, value, kinds, shape, below=None):
    """An array of one of the dtype kinds and of a shape (None: any length); or a ValueError.

    With `below`, its integers must lie in [0, below).
    """
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(f"{name} is a masked array, whose mask would be lost: fill it; to exclude "
                         "compositions pass candidates")
    if hasattr(value, "detach"):  # a torch tensor of any device, with a gradient or not
        value = value.numpy(force=True)
    array = np.asarray(value)
    fits = [expected in (None, got) for expected, got in zip(shape, array.shape)]
    if array.dtype.kind not in kinds or array.ndim != len(shape) or not all(fits):
        expected = f"{KINDS[kinds]} of shape {shape}".replace("None", "any")
        raise ValueError(f"{name} must be {expected}, got {array.dtype} of shape {array.shape}")
    if below is None:
        return array
    wrong = (array < 0) | (array >= below)
    if wrong.any():
        raise ValueError(f"{name} must lie in 0 to {below - 1}, got {array[wrong][0]} in row "
                         f"{wrong.argmax()}")
    return array.astype(int)


def _numbers(name, value, shape):
    """A float64 array of a shape (None: any length) without nan; or a ValueError."""
    numbers = _array(name, value, "fiu", shape).astype(float)
    if np.isnan(numbers).any():
        raise ValueError(f"{name} must be numbers, got nan")
    return numbers


def _choice(name, value, choices):
    """A ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def _check_same(first, second, names):
    """A ValueError that says in what two sweeps, or their Images, differ."""
    for name in names:
        if not np.array_equal(getattr(first, name), getattr(second, name)):
            raise ValueError(f"the sweeps differ in {name}: build both with the same arguments, of "
                             "the same images in the same order")


# The script.

ARRAYS = ("scores", "target", "seen", "candidates", "pairs")  # names in a saved file


def load(files, topk=1):
    """The BiasSweep of what .npz and memory-mapped .npy files hold.

    A .npy file holds the scores. Where no file has them, the `scores.npy` beside the first one is
    read. ValueError: what is missing, damaged, wrong, or in two of the files.
    """
    arrays = {}
    for path in map(Path, files):
        found = _read(path)
        if arrays.keys() & found:
            raise ValueError(f"{path} holds arrays that a file named before it holds, too; the "
                             "files of a second system stand after --against")
        arrays |= found
    names = ", ".join(files)
    beside = Path(files[0]).with_name("scores.npy")
    if "scores" not in arrays and beside.exists():
        arrays |= _read(beside)
    for name in ARRAYS[:3]:
        if name not in arrays:
            raise ValueError(f"no array {name} in {names}: scores, target and seen are needed")
    scores = arrays.pop("scores")
    target = arrays.pop("target")
    try:
        sweep = BiasSweep(**arrays, topk=topk)
        sweep.update(scores, target)
    except ValueError as error:
        raise ValueError(f"{names}: {error}") from None
    return sweep


def _read(path):
    """The arrays of one file by name; ValueError or OSError where it cannot be read."""
    try:
        found = np.load(path, mmap_mode="r")
        if isinstance(found, np.ndarray):
            return {"scores": found}
        with found:
            return {name: found[name] for name in ARRAYS if name in found}
    except OSError:
        raise
    except Exception as error:  # a damaged archive can fail anywhere in zipfile, zlib and NumPy
        raise ValueError(f"{path} is no .npz or .npy file of plain arrays (pickled objects are "
                         f"not loaded), or is damaged ({type(error).__name__})") from None


def print_table(results):
    """A row for each entry of the results, a column for each protocol."""
    print(f"{'':34}{'exact':>24}{'published':>24}")
    for name in results["exact"]:
        if not name.endswith(("_low", "_high")):
            cells = [_cell(result, name) for result in results.values()]
            print(f"{name:34}{cells[0]:>24}{cells[1]:>24}")


def _cell(result, name):
    """An entry in words: metrics in percent, but the bias as it is, with the interval if any."""
    if not isinstance(result[name], float):
        return str(result[name])
    scale = 1 if name == "bias" else 100
    cell = f"{scale * result[name]:.2f}"
    if name + "_low" in result:
        cell += f" [{scale * result[name + '_low']:.2f}, {scale * result[name + '_high']:.2f}]"
    return cell


def plot(sweep, reports, path):
    """Seen against unseen accuracy, both protocols, the best HM marked, into an image file."""
    from matplotlib.figure import Figure

    axes = Figure(layout="constrained").subplots()
    for protocol, report in reports.items():
        curve = sweep.curve(protocol, report["average"])
        axes.plot(curve.unseen, curve.seen, ".-", label=f"{protocol}: AUC {report['auc']:.3f}")
        axes.plot(report["hm_unseen"], report["hm_seen"], "k*")
    axes.set(xlabel="accuracy on unseen compositions", ylabel="accuracy on seen compositions")
    axes.legend(title=f"top-{sweep.topk}, star: best HM")
    _write(path, lambda part: axes.figure.savefig(part, dpi=150))


def write_compositions(sweep, path, average="image"):
    """A CSV row for each composition with images: its accuracy at three biases.

    At bias 0, at the best exact HM of the whole set (with `average` as in the report; nan where
    there is none, as in the report), and with the unseen alone (bias +inf).
    """
    images = sweep._images()
    best_bias = sweep.report(average=average)["bias"]
    lines = ["column,state,object,seen,candidate,images,accuracy,accuracy_at_best_hm,"
             "accuracy_unseen_only"]
    for column in np.unique(images.target):
        pair = ("", "") if sweep.pairs is None else sweep.pairs[column]
        kept = images.kept[:, images.target == column]
        once = np.ones(len(kept[0]), int)
        row = [column, *pair, int(sweep.seen[column]), int(sweep.candidates[column]), len(once)]
        for bias in (0.0, best_bias, np.inf):
            row.append(_accuracy(kept, UP_TO, bias, once))
        lines.append(",".join(map(str, row)))
    _write(path, lambda part: part.write_text("\n".join(lines) + "\n"))


def _write(path, write):
    """Let write(part) make a file beside `path`, then give it its name: whole or not at all."""
    part = Path(path).with_name(".part." + Path(path).name)  # the ending says the format
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def run(options):
    """Score the files of parsed options and print or write what they ask for."""
    sweep = load(options.files, options.topk)
    if options.against:
        other = load(options.against, options.topk)
    results = {}
    against = {}
    for protocol in PROTOCOLS:
        results[protocol] = sweep.report(protocol, options.confidence, options.unit,
                                         options.average)
        if options.against:
            against[protocol] = compare(sweep, other, options.confidence or 0.95, options.unit,
                                        protocol=protocol, average=options.average)
    if options.json:
        text = json.dumps(results | {"against": against})
        # JSON has no nan and no infinity: they become null.
        print(json.dumps(json.loads(text, parse_constant=lambda name: None)))
    else:
        print(f"{_candidates(sweep)}; percent")
        print_table(results)
        print("In papers: S best_seen, U best_unseen (each at its best bias), HM best_hm, AUC auc; "
              "Sta. state_accuracy, Obj. object_accuracy (at bias 0)")
        if against:
            print(f"\na against b; of b {_candidates(other)}")
            print_table(against)
    if options.per_composition:
        write_compositions(sweep, options.per_composition, options.average)
    if options.plot:
        plot(sweep, results, options.plot)


def _candidates(sweep):
    return f"{sweep.candidates.sum():,} of {len(sweep.seen):,} compositions are candidates"


def main(argv=None):
    """Score a saved file: a table in percent on stdout, both protocols side by side."""
    parser = argparse.ArgumentParser(
        description="Exact and published bias-sweep metrics of saved scores.")
    add = parser.add_argument
    add("files", nargs="+",
        help=".npz with scores (N, P), target (N,), seen (P,), optional candidates (P,), pairs "
             "(P, 2); the scores may be a .npy file of their own, read memory-mapped: scores.npy "
             "rest.npz (scores.npy is found beside rest.npz)")
    add("--against", nargs="+", metavar="FILE",
        help="files of a second system (b) on the same images: differences with paired intervals")
    add("--topk", type=int, default=1, help="right if the truth is among the k best (default 1)")
    add("--confidence", type=float,
        help="bootstrap intervals, as 0.95 (--against has them without)")
    add("--unit", choices=UNITS, default="image",
        help="what the intervals resample (default image)")
    add("--average", choices=UNITS, default="image",
        help="what counts alike in an accuracy (default image)")
    add("--json", action="store_true", help="print JSON: fractions, null for what does not exist")
    add("--per-composition", metavar="CSV", help="write the accuracy of each composition")
    add("--plot", metavar="PNG", help="draw the curves (needs matplotlib)")
    options = parser.parse_args(argv)
    try:
        run(options)
    except ImportError:
        parser.exit(2, "error: --plot needs matplotlib: pip install matplotlib\n")
    except (ValueError, OSError, MemoryError) as error:
        parser.exit(2, f"error: {error or 'out of memory'}\n")


if __name__ == "__main__":
    for name in ("SIGINT", "SIGPIPE"):  # Ctrl-C and a closed pipe end it without a word
        if hasattr(signal, name):  # Windows has no SIGPIPE
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    sys.stdout.reconfigure(errors="backslashreplace")
    main()
