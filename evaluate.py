"""A bias-sweep evaluator for compositional zero-shot learning: exact, streaming, NumPy only.

Copy this one file into any project.

An image is predicted as the best candidate of `score + bias * [unseen]`: a low bias favours the
compositions seen in training, a high one the unseen. Over all biases, seen against unseen accuracy
is a curve with an area (AUC) and a best harmonic mean (HM). The curve changes only where an image's
best seen and best unseen scores cross, so a sweep stores eight numbers an image.

    >>> scores = np.array([[.9, .1, .3], [.6, .2, .5], [.1, .3, .6], [.6, .3, .7]])  # (N, P)
    >>> target = np.array([0, 1, 2, 1])                            # (N,) columns of the truth
    >>> seen = np.array([True, True, False])                       # (P,)
    >>> report = evaluate(scores, target, seen)                    # higher scores are better
    >>> report["best_seen"], report["best_unseen"], round(report["auc"], 3)
    (0.3333333333333333, 1.0, 0.333)

Shapes: N images, B of them in one block, P compositions (columns of the scores), k = topk,
K points of a curve, T thresholds, R resamples. Accuracies are fractions. Ties go to the lower
column, seen before unseen. Every float64 bias is judged as real arithmetic would judge it.

There are two protocols. `exact` tries every bias where a prediction changes. `published` tries
about 20 biases, as the field's evaluator does. It usually understates: its HM never exceeds the
exact one, and its AUC does so only where scores lie closer than its step of 1e-4.

Torch tensors are accepted; convert bfloat16 by `.float()`. A dictionary of scores by pair becomes
an array by `np.stack([d[p] for p in pairs], 1)`. For scores larger than memory, make one
`BiasSweep` and `update` it a block at a time; on several machines, `merge` their sweeps. For scores
that a GPU has reduced, call `update_topk`. To compare two systems on the same images, call
`compare`.

As a script: `python evaluate.py scores.npz --confidence 0.95` (see `--help`).
"""

import argparse
import json
import os
import signal
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

PROTOCOLS = ("exact", "published")
UNITS = ("image", "composition")  # what a resample draws, and what counts equally in an average
HEADLINE = ("auc", "best_hm", "best_seen", "best_unseen")  # what `compare` compares
RESAMPLES = 1000


class Curve(NamedTuple):
    """Accuracy as the bias on unseen compositions grows.

    Attributes:
        bias: (K,) float. With `exact`, biases in strictly ascending order; the first is -inf, and
            entry i holds for biases above `bias[i]` up to and including `bias[i + 1]`. With
            `published`, the biases tried, in ascending order; the last is 1000, and entry i holds
            at `bias[i]`.
        seen: (K,) float in [0, 1], non-increasing: accuracy on images of seen compositions.
        unseen: (K,) float in [0, 1], non-decreasing: accuracy on images of unseen compositions.
    """
    bias: np.ndarray
    seen: np.ndarray
    unseen: np.ndarray


class BiasSweep:
    """A sweep over every bias, for images that arrive in blocks; it stores eight numbers an image.

    Args:
        seen: (P,) bool, the compositions that have training images. The arrays are copied.
        candidates: (P,) bool, the compositions that may win. None means all, the open world. The
            closed world has those of training and of the phase, the hard mask those that are seen
            or feasible enough.
        pairs: (P, 2) int, state and object of each column; without them the accuracies on states
            and objects are nan.
        topk: int, at least 1. A prediction is right if the truth is among the topk best
            candidates. The time grows with it.

    Raises:
        ValueError: An argument has another type, shape or range.
    """

    def __init__(self, seen, *, candidates=None, pairs=None, topk=1):
        self.seen = _array("seen", seen, "b", (None,)).copy()
        count = len(self.seen)
        if candidates is None:
            candidates = np.ones(count, bool)
        self.candidates = _array("candidates", candidates, "b", (count,)).copy()
        self.pairs = None
        self._codes = [np.arange(count)]  # (P,) each: equal for columns that count as the truth
        if pairs is not None:
            self.pairs = _array("pairs", pairs, "iu", (count, 2)).copy()
            self._codes += list(self.pairs.T)
        self.topk = int(_array("topk", topk, "iu", ()))
        self._places = min(self.topk, count)  # further places of the top k would stay empty
        if self._places < 1:
            raise ValueError("topk and the length of seen must be at least 1, "
                             f"got {self.topk} and {count}")
        self._seen_group = np.flatnonzero(self.seen & self.candidates)  # ascending columns
        self._unseen_group = np.flatnonzero(~self.seen & self.candidates)
        self._summaries = [np.empty((ROWS, 0))]  # (8, B) each

    def update(self, scores, target):
        """Add B images by their scores, which are neither changed nor stored.

        Args:
            scores: (B, P) finite real numbers of any dtype and layout; higher is better. Floats
                longer than float64, and integers beyond 2^53, are rounded to float64.
            target: (B,) int in [0, P), the columns of the truth.

        Raises:
            ValueError: An argument is wrong; the error names the row. None of its images is added.
        """
        def reduce(block, top, target):
            best_seen = _best(block, top, self._seen_group, self._places)
            best_unseen = _best(block, top, self._unseen_group, self._places)
            return (*best_seen, *best_unseen, target)

        best = _each_block(scores, target, len(self.seen), reduce)
        self._summaries.append(_summarize(*best, self._codes))

    def update_topk(self, seen_scores, seen_columns, unseen_scores, unseen_columns, target):
        """Add B images that are already reduced to the best candidates of both groups.

        The result equals that of `update` only if equal scores stand in the order of their
        columns; a GPU's topk may not sort them so.

        Args:
            seen_scores: (B, min(k, P)) float, the k best scores of seen candidates, best first.
                Where there are fewer candidates, the further entries are ignored.
            seen_columns: (B, min(k, P)) int, their columns, all different in a row.
            unseen_scores: (B, min(k, P)) float, the k best scores of unseen candidates.
            unseen_columns: (B, min(k, P)) int, their columns, all different in a row.
            target: (B,) int in [0, P), the columns of the truth.

        Raises:
            ValueError: An argument is wrong; the error names the row. None of its images is added.
        """
        target = _array("target", target, "iu", (None,), len(self.seen))
        shape = (len(target), self._places)
        best_seen = _checked_best("seen", seen_scores, seen_columns, self._seen_group, shape)
        best_unseen = _checked_best("unseen", unseen_scores, unseen_columns,
                                    self._unseen_group, shape)
        self._summaries.append(_summarize(*best_seen, *best_unseen, target, self._codes))

    def merge(self, other):
        """Add the images of another sweep, for instance of another part of the test set.

        Args:
            other: BiasSweep with the same `seen`, `candidates`, `pairs` and `topk`.

        Raises:
            ValueError: `other` is not a BiasSweep, or differs in one of these.
        """
        _check_sweeps(other=other)
        _check_same(self, other, ("seen", "candidates", "pairs", "topk"))
        self._summaries = self._summaries + other._summaries

    def curve(self, protocol="exact", average="image"):
        """Return the curve of all images so far.

        Args:
            protocol: "exact" or "published".
            average: "image" or "composition", as in `report`.

        Returns:
            A Curve; the accuracy on seen or on unseen compositions is nan without such images.

        Raises:
            ValueError: There are no images, or an argument is none of its choices.
        """
        images = self._images()
        counts, weights = next(_draws(images, "image", average))
        return _curve(images, counts, weights, protocol)[0]

    def report(self, protocol="exact", confidence=None, unit="image", average="image"):
        """Return the metrics of all images so far.

        The HM's interval sits high: each resample takes the maximum over the biases anew, so the
        bootstrap is biased upward.

        Args:
            protocol: "exact" or "published".
            confidence: float between 0 and 1, for instance 0.95, or None for no intervals.
            unit: What the 1,000 seeded bootstrap resamples draw. "image" draws images, and the
                interval holds for other images of the same compositions; "composition" draws whole
                compositions, seen and unseen apart, and it holds for other compositions.
            average: What counts equally in an accuracy: each "image", or each "composition" that
                has images.

        Returns:
            A dict of plain numbers and strings, nan where there is nothing to divide by: `auc,
            best_hm, best_seen, best_unseen`; at the best HM `hm_seen, hm_unseen, bias`;
            `state_accuracy, object_accuracy` at bias 0, `..._at_best_hm` at `bias` and
            `..._unseen_only` at bias +inf; `average, n_seen, n_unseen, topk, protocol`. With
            `confidence`, also the percentiles `<metric>_low` and `<metric>_high`, `confidence` and
            `unit`.

        Raises:
            ValueError: There are no images, or an argument is out of its range or choices.
        """
        images = self._images()

        metrics = lambda counts, weights: _metrics(images, counts, weights, protocol)
        values = _with_intervals(metrics, images, confidence, unit, average)[0]
        return values | {"topk": self.topk, "protocol": protocol}

    def _images(self):
        """Return the Images so far; without any, raise ValueError."""
        summary = np.concatenate(self._summaries, axis=1)
        self._summaries = [summary]
        return _images(summary, self.seen)


def evaluate(scores, target, seen, *, candidates=None, pairs=None, topk=1, protocol="exact",
             confidence=None, unit="image", average="image"):
    """Return the metrics of scores that are in memory.

    Args:
        scores: (N, P) real numbers, as in `BiasSweep.update`; higher is better.
        target: (N,) int in [0, P), the columns of the truth.
        seen: (P,) bool, the compositions that have training images.
        candidates: (P,) bool or None, as in `BiasSweep`.
        pairs: (P, 2) int or None, as in `BiasSweep`.
        topk: int, at least 1, as in `BiasSweep`.
        protocol: "exact" or "published".
        confidence: float between 0 and 1 or None, as in `BiasSweep.report`.
        unit: "image" or "composition", as in `BiasSweep.report`.
        average: "image" or "composition", as in `BiasSweep.report`.

    Returns:
        The dict of `BiasSweep.report`.

    Raises:
        ValueError: An argument has another type, shape or range.
    """
    sweep = BiasSweep(seen, candidates=candidates, pairs=pairs, topk=topk)
    sweep.update(scores, target)
    return sweep.report(protocol, confidence, unit, average)


def accuracy_at(sweep, bias, *, average="image"):
    """Return accuracies at a bias that was fixed in advance, for instance on validation data.

    Args:
        sweep: BiasSweep with images.
        bias: number, may be infinite.
        average: "image" or "composition", as in `BiasSweep.report`.

    Returns:
        A dict of fractions, nan where there is nothing to divide by: `seen, unseen, hm,
        state_accuracy, object_accuracy`.

    Raises:
        ValueError: There are no images, or an argument is of another type or nan.
    """
    _check_sweeps(sweep=sweep)
    bias = float(_numbers("bias", bias, ()))
    images = sweep._images()
    _, weights = next(_draws(images, "image", average))
    values = {}
    for name, half in (("seen", images.seen), ("unseen", ~images.seen)):
        values[name] = _accuracy(images.summary, UP_TO, bias, weights * half)
    for row, name in PRIMITIVES:
        values[name] = _accuracy(images.summary, row, bias, weights)
    values["hm"] = float(_harmonic(values["seen"], values["unseen"]))
    return values


def compare(sweep_a, sweep_b, confidence=0.95, unit="image", *, protocol="exact",
            average="image"):
    """Return by how much system a is better than system b on the same images, with intervals.

    Args:
        sweep_a: BiasSweep of system a.
        sweep_b: BiasSweep of system b, with the same images in the same order, the same `seen` and
            the same `topk`. Its candidates may differ.
        confidence: float between 0 and 1.
        unit: "image" or "composition", what the 1,000 seeded resamples draw for both systems alike.
        protocol: "exact" or "published".
        average: "image" or "composition", as in `BiasSweep.report`.

    Returns:
        A dict. For each of `auc, best_hm, best_seen, best_unseen` it has the fractions
        `<metric>_a`, `<metric>_b` and `<metric>_difference` (a minus b), each with `_low` and
        `_high`, and `<metric>_a_leads`, the share of the resamples in which a is strictly better.
        Then come `confidence, unit, average, n_seen, n_unseen, topk, protocol`.

    Raises:
        ValueError: The sweeps cannot be compared, or an argument is out of its range or choices.
    """
    _check_sweeps(sweep_a=sweep_a, sweep_b=sweep_b)
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

    values, resampled = _with_intervals(metrics, both[0], confidence, unit, average)
    for name in HEADLINE:
        differences = resampled[f"{name}_difference"]
        leads = np.mean(differences > ROUNDING) if len(differences) else np.nan
        values[f"{name}_a_leads"] = float(leads)
    return values | {"topk": sweep_a.topk, "protocol": protocol}


def threshold_sweep(blocks, seen, feasibility, thresholds, *, candidates=None):
    """Return the top-1 AUC of the hard mask at T thresholds, reading the scores once.

    The result equals that of T evaluations. At threshold t a candidate remains if it is seen or has
    a feasibility of at least t, compared in float64.

    Args:
        blocks: iterable of pairs: scores (B, P) and target (B,), as in `BiasSweep.update`.
        seen: (P,) bool, the compositions that have training images.
        feasibility: (P,) real numbers.
        thresholds: (T,) real numbers, at least one, in any order.
        candidates: (P,) bool or None, as in `BiasSweep`.

    Returns:
        A dict of arrays (T,): `threshold`, `removed` (the share of the candidates that is masked),
        `auc` and `auc_published`.

    Raises:
        ValueError: There are no images, or an argument has another type, shape or range.
    """
    whole = BiasSweep(seen, candidates=candidates)
    feasibility = _numbers("feasibility", feasibility, whole.seen.shape)
    thresholds = _numbers("thresholds", thresholds, (None,))
    steps, inverse = np.unique(thresholds, return_inverse=True)  # ascending

    level, columns, starts = _levels(whole._unseen_group, feasibility, steps)
    columns = np.append(columns, 0)  # a place for the score -inf, the best where no column remains

    def reduce(block, top, target):
        best_seen = _best(block, top, whole._seen_group, 1)
        # First the best of each level (reduceat gives a level without columns a score of the next
        # level), then of each step: the greatest of its own and all higher levels.
        left = block.take(columns, axis=1, mode="clip")
        left[:, -1] = -np.inf
        best = np.maximum.reduceat(left, starts, axis=1)
        best = np.maximum.accumulate(best[:, ::-1], axis=1)[:, ::-1]
        return (*best_seen, best, _truth_wins(block, target, best, level), target)

    parts = []
    if not hasattr(blocks, "__iter__"):
        blocks = [blocks]  # refused below
    for block in blocks:
        if not isinstance(block, (tuple, list)) or len(block) != 2:
            raise ValueError("blocks must hold pairs (scores, target), got "
                             f"{type(block).__name__}: pass a list of pairs")
        parts.append(_each_block(*block, len(whole.seen), reduce))
    if not parts:
        raise ValueError("blocks holds no images to evaluate: pass at least one pair")
    *best_seen, best, truth_wins, target = map(np.concatenate, zip(*parts))
    once = np.ones(len(target), int)
    areas = []  # (T, 2): each step is reduced as `update` reduces it for k = 1
    for score, wins in zip(best.T, truth_wins.T):
        score = score.astype(float)
        column = np.where(wins, target, -1)  # which other column wins does not matter
        summary = _summarize(*best_seen, score[:, None], column[:, None], target, whole._codes)
        images = _images(summary, whole.seen)
        areas.append([_curve(images, once, once, protocol)[1] for protocol in PROTOCOLS])
    auc, published = np.array(areas)[inverse].T
    removed = starts / max(whole.candidates.sum(), 1)
    return dict(threshold=thresholds, removed=removed[inverse], auc=auc, auc_published=published)


# From scores to what is stored of an image.

THREADS = min(4, os.cpu_count() or 1)  # more threads only wait for memory
# Bytes of scores in a block: it stays in the cache between the passes over it. With smaller blocks
# the passes are so short that the threads wait for each other.
BLOCK = (8 << 20) // max(THREADS, 2)
LIMIT = 8e307  # the difference of two scores beyond it would overflow

# The rows of a summary, see _summarize. Composition, state and object have two rows each: right for
# biases up to the first, and right for biases above the second.
UP_TO, ABOVE, STATE, OBJECT, GAP, TARGET = 0, 1, 2, 4, 6, 7
ROWS = 8
PRIMITIVES = ((STATE, "state_accuracy"), (OBJECT, "object_accuracy"))


def _each_block(scores, target, count, work):
    """Return the joined arrays that work(block, top, target) makes of all blocks of rows, in order.

    `scores` (N, count) is checked and read in blocks (B, count) of BLOCK bytes, C-contiguous
    float32 or float64; `top` (B,) is the column of each row's greatest score. `work` returns arrays
    (B, ...). A ValueError names the first bad row.
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

    # NumPy releases the GIL. This thread reads the results once all are made: waking it for each
    # block would hold up the others. The order makes the first bad row's error the one raised.
    starts = range(0, max(len(scores), 1), size)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            results = pool.map(check_and_work, starts)
    except RuntimeError:  # the system starts no further thread
        results = map(check_and_work, starts)
    return [np.concatenate(arrays) for arrays in zip(*results)]


def _best(block, top, group, k):
    """Return each row's k best scores in a group of columns, and their columns: (B, k) each.

    `block` is (B, P); `top` (B,) is the column of each row's greatest score. Among equal scores the
    lowest column comes first. The scores are float64; empty places hold -inf and -1.
    """
    rows = np.arange(len(block))
    best_scores = np.full((len(block), k), -np.inf)
    best_columns = np.full((len(block), k), -1)
    # Gathering few columns takes less time than hiding the others, gathering many takes more (the
    # columns exist: "clip" spares NumPy a check).
    if 4 * len(group) < block.shape[1]:
        left = block.take(group, axis=1, mode="clip")
        column_of = group
    else:
        penalty = np.full(block.shape[1], -np.inf, block.dtype)
        penalty[group] = 0
        if k == 1:
            # A row's best column is also the group's best if the group has it. Search the others,
            # unless they are so many that to copy them costs more than it saves.
            best_scores[:, 0] = block[rows, top]
            best_columns[:, 0] = top
            lacking = np.flatnonzero(penalty[top])
            if 2 * len(lacking) < len(block):
                rows = lacking
                block = block[lacking]
        left = block + penalty
        column_of = np.arange(len(penalty))
    searched = np.arange(len(rows))
    for rank in range(min(k, len(group))):
        index = left.argmax(axis=1)
        best_scores[rows, rank] = left[searched, index]
        best_columns[rows, rank] = column_of[index]
        left[searched, index] = -np.inf  # out of the way of the next rank
    return best_scores, best_columns


def _levels(columns, feasibility, steps):
    """Sort unseen candidates, `columns` (U,), by the last of T ascending `steps` to keep them.

    Return the level (P,) of each column, which is the last step that keeps it, -1 if it never
    competes; the columns by ascending level; and starts (T,): columns[starts[i]:] remain at step i.
    """
    level = np.full(len(feasibility), -1)
    level[columns] = np.searchsorted(steps, feasibility[columns], "right") - 1
    columns = columns[np.argsort(level[columns], kind="stable")]
    return level, columns, np.searchsorted(level[columns], np.arange(len(steps)))


def _truth_wins(block, target, best, level):
    """Return a bool (B, T): at this step of threshold_sweep the truth is the best unseen candidate.

    `best` (B, T) is the best unseen score at each step. The truth wins from the step on that
    removes the last lower column of its score, up to its own level, wherever it equals the best.
    """
    rows = np.arange(len(block))
    target_level = level[target]
    target_score = block[rows, target]
    wins = np.zeros(best.shape, bool)
    # Few rows pass this test, so a loop over them costs less than a pass over the block.
    for row in np.flatnonzero(best[rows, target_level] == target_score):
        lower = slice(target[row])
        ties = block[row, lower] == target_score[row]
        first = level[lower][ties].max(initial=-1) + 1
        steps = slice(first, target_level[row] + 1)
        wins[row, steps] = best[row, steps] == target_score[row]
    return wins


def _checked_best(name, scores, columns, group, shape):
    """Return a user's best scores and columns of a group as `_best` does; or raise ValueError."""
    scores = _array(f"{name}_scores", scores, "f", shape).astype(float)
    columns = _array(f"{name}_columns", columns, "iu", shape).astype(int)
    filled = min(len(group), shape[1])
    scores[:, filled:] = -np.inf
    columns[:, filled:] = -1

    good = (np.abs(scores) < LIMIT) & np.isin(columns, group)
    good[:, filled:] = True  # padding
    good[:, 1:] &= scores[:, 1:] <= scores[:, :-1]
    if not good.all():
        raise ValueError(f"{name} row {good.all(axis=1).argmin()} must hold finite scores of "
                         f"{name} candidates: sort them, the best first")
    return scores, columns


def _summarize(seen_scores, seen_columns, unseen_scores, unseen_columns, target, codes):
    """Return the numbers (8, B) that decide at every bias, from the (B, k) best of both groups.

    Seen rank i and unseen rank k-1-i compete for one place of the top k; the seen one holds it for
    biases up to crossing[:, i]. A column is right if it has the truth's code; `codes` are (P,)
    each, for compositions, states and objects (without the last two their rows are nan). A
    prediction is right up to one bias because of a seen column (-inf if at none), and above another
    because of an unseen one (inf if at none).
    """
    summary = np.full((ROWS, len(target)), np.nan)
    crossing = _crossings(seen_scores, unseen_scores[:, ::-1])
    for row, code in zip((UP_TO, STATE, OBJECT), codes):
        truth = code[target][:, None]
        # The last seen column to lose its place counts, and the first unseen column to win one.
        right = (code[seen_columns] == truth) & (seen_columns >= 0)
        summary[row] = np.where(right, crossing, -np.inf).max(axis=1)
        right = (code[unseen_columns] == truth) & (unseen_columns >= 0)
        summary[row + 1] = np.where(right, crossing[:, ::-1], np.inf).min(axis=1)

    # The published protocol takes its biases from the score of an unseen truth in the top k.
    is_truth = unseen_columns == target[:, None]
    summary[GAP] = seen_scores[:, -1] - np.where(is_truth, unseen_scores, -LIMIT).max(axis=1)
    summary[TARGET] = target
    return summary


def _crossings(seen, unseen):
    """Return the last float64 bias at which `seen >= unseen + bias` in real arithmetic.

    That is seen - unseen rounded down. The subtraction rounds to the nearest; the error it makes
    is a float64 itself, and Knuth's two-sum finds it: where it is negative, the difference was
    rounded up. Where both are -inf, padding, the result is nan, and no column matches it.
    """
    with np.errstate(invalid="ignore"):
        difference = seen - unseen
        subtracted = difference - seen  # about -unseen
        error = (seen - (difference - subtracted)) + (-unseen - subtracted)
        return np.where(error < 0, np.nextafter(difference, -np.inf), difference)


# From summaries to curves and metrics.

ROUNDING = 1e-12  # accuracies that differ by less are equal: sums of weights are rounded


class Images(NamedTuple):
    """The images of a sweep, in the order in which they were given.

    Each flips once as the bias grows: from right to wrong if its truth is seen, else from wrong to
    right.
    """
    summary: np.ndarray  # (8, N)
    target: np.ndarray  # (N,) column of the truth
    seen: np.ndarray  # (N,) bool, whether the truth is a seen composition
    order: np.ndarray  # (N,) rows by the bias above which they flip
    flip_bias: np.ndarray  # (N,) that bias, ascending; -inf and inf: the image never changes
    flip_seen: np.ndarray  # (N,) `seen` in that order
    bias: np.ndarray  # (K,) -inf and each finite flip_bias once: the points of the exact curve
    flipped: np.ndarray  # (K,) how many images have flipped just above each of them


def _images(summary, seen):
    """Return the Images of a summary (8, N) and the seen compositions (P,), or raise ValueError."""
    if not summary.size:
        raise ValueError("there are no images to evaluate: add at least one")
    target = summary[TARGET].astype(int)
    is_seen = seen[target]
    flip_bias = np.where(is_seen, summary[UP_TO], summary[ABOVE])
    order = np.argsort(flip_bias)
    flip_bias = flip_bias[order]
    bias = np.unique(np.append(-np.inf, flip_bias[flip_bias < np.inf]))
    flipped = np.searchsorted(flip_bias, bias, "right")
    return Images(summary, target, is_seen, order, flip_bias, is_seen[order], bias, flipped)


def _curve(images, counts, weights, protocol):
    """Return the Curve and its area, for images drawn `counts` (N,) times that weigh `weights`."""
    _choice("protocol", protocol, PROTOCOLS)
    weights = weights[images.order]
    # Weight that is wrong (seen) and right (unseen) once the first n images have flipped: (N + 1,)
    lost = np.append(0, np.cumsum(weights * images.flip_seen))
    gained = np.append(0, np.cumsum(weights * ~images.flip_seen))

    bias = images.bias
    flipped = images.flipped
    if protocol == "published":
        tried = ~images.seen & (images.summary[ABOVE] < 1000)  # unseen, and right at bias 1000
        bias = np.sort(np.repeat(images.summary[GAP][tried], counts[tried])) - 1e-4
        last = 1000 if gained[-1] else -np.inf
        bias = np.append(bias[::max(len(bias) // 20, 1)], last)
        flipped = np.searchsorted(images.flip_bias, np.nan_to_num(bias), "left")

    with np.errstate(invalid="ignore"):  # 0 / 0: no image of that half
        seen_accuracy = (lost[-1] - lost[flipped]) / lost[-1]
        unseen_accuracy = gained[flipped] / gained[-1]
    first = seen_accuracy[0] * unseen_accuracy[0]  # nan where one half is missing
    if protocol == "published":
        # The exact curve begins at unseen accuracy 0, this one later. nan stays nan.
        first = 0 * first
    heights = seen_accuracy[1:] + seen_accuracy[:-1]
    area = first + np.sum(heights * np.diff(unseen_accuracy)) / 2
    return Curve(bias, seen_accuracy, unseen_accuracy), area


def _headline(curve, area):
    """Return the HEADLINE metrics of a curve by name, nan where one half is."""
    return {"auc": area, "best_hm": _harmonic(curve.seen, curve.unseen).max(),
            "best_seen": curve.seen.max(), "best_unseen": curve.unseen.max()}


def _metrics(images, counts, weights, protocol):
    """Return a report's metrics by name, for images drawn `counts` (N,) times, by their weights."""
    curve, area = _curve(images, counts, weights, protocol)
    values = _headline(curve, area)
    best = [np.nan, np.nan, np.nan]
    if not np.isnan(area):
        hm = _harmonic(curve.seen, curve.unseen)
        i = (hm >= values["best_hm"] - ROUNDING).argmax()  # the first of the best ones
        best = [curve.seen[i], curve.unseen[i], curve.bias[i]]
        if protocol == "exact":
            best[2] = _bias_of_entry(curve, i)
    values |= zip(("hm_seen", "hm_unseen", "bias"), best)
    for when, bias in (("", 0.0), ("_at_best_hm", best[2]), ("_unseen_only", np.inf)):
        for row, name in PRIMITIVES:
            values[name + when] = _accuracy(images.summary, row, bias, weights)
    return values


def _bias_of_entry(curve, i):
    """Return a finite bias at which entry i of an exact curve holds.

    It lies midway to the bias where an accuracy next changes, or 1 away from the only such bias.
    """
    low = curve.bias[i]
    # A bias where only images without weight flip is no end.
    lead = curve.unseen - curve.seen  # non-decreasing
    high = np.append(curve.bias[lead > lead[i]], np.inf)[0]
    if low == -np.inf:
        return min(high - 1, 0.0)
    inside = low + 1 if high == np.inf else low / 2 + high / 2
    return max(inside, np.nextafter(low, np.inf))  # the upper one of neighbouring floats


def _accuracy(summary, row, bias, weights):
    """Return the weighted share of images right at a bias, nan if there is none.

    `row` is UP_TO, STATE or OBJECT of the summary (8, N), which says what must be right.
    """
    total = weights.sum()
    if np.isnan(bias) or np.isnan(summary[row, 0]) or not total:
        return np.nan
    bias = max(bias, -2 * LIMIT)  # below all crossings, but above the -inf of "at none"
    right = (bias <= summary[row]) | (bias > summary[row + 1])
    return float(weights[np.flatnonzero(right)].sum() / total)  # faster than by the mask


def _harmonic(a, b):
    return 2 * a * b / np.maximum(a + b, 1e-300)  # 0 where both are 0


# Resamples.


def _draws(images, unit, average):
    """Yield how often each image (N,) is drawn, and how much it then weighs.

    First each image is drawn once, then RESAMPLES times with replacement, seeded. A composition
    is drawn as a whole, and as many seen and as many unseen ones are drawn as there are.
    """
    _choice("unit", unit, UNITS)
    _choice("average", average, UNITS)
    random = np.random.default_rng(0)
    unit_of = np.arange(len(images.target))  # (N,) number of the unit that an image belongs to
    groups = [unit_of]  # the units are drawn from each group apart
    if unit == "composition":
        unit_of = images.target
        groups = [np.unique(unit_of[half]) for half in (images.seen, ~images.seen)]
    times_drawn = np.ones(unit_of.max() + 1, int)
    for _ in range(RESAMPLES + 1):
        counts = times_drawn[unit_of]
        weights = counts
        if average == "composition":
            # Its images share a weight of 1; a composition drawn twice as a unit counts as two.
            sharers = np.bincount(images.target, counts if unit == "image" else None)
            weights = counts / np.maximum(sharers, 1)[images.target]
        yield counts, weights
        for group in groups:
            draw = random.integers(len(group), size=len(group))
            times_drawn[group] = np.bincount(draw, minlength=len(group))


def _with_intervals(metrics, images, confidence, unit, average):
    """Return the values of metrics(counts, weights), with `_low` and `_high` for a confidence.

    Return a dict of floats and, by name, the resampled values, ascending, without nan.
    """
    # Computed when they are asked for: first with each image once, then for the resamples.
    computed = (metrics(*drawn) for drawn in _draws(images, unit, average))
    values = {name: float(value) for name, value in next(computed).items()}
    resampled = {}
    if confidence is not None:
        confidence = float(_numbers("confidence", confidence, ()))
        if not 0 < confidence < 1:
            raise ValueError(f"confidence must lie between 0 and 1, got {confidence}: pass 0.95")
        # One row a resample, each column ascending; nan, of resamples without one half, comes last.
        table = np.sort([list(drawn.values()) for drawn in computed], axis=0)
        for name, column in zip(list(values), table.T):
            resampled[name] = column[~np.isnan(column)]
            last = len(resampled[name]) - 1
            for end, share in (("_low", 0.5 - confidence / 2), ("_high", 0.5 + confidence / 2)):
                values[name + end] = float(column[round(share * last)])
        values |= {"confidence": confidence, "unit": unit}
    values |= {"average": average, "n_seen": int(images.seen.sum()),
               "n_unseen": int((~images.seen).sum())}
    return values, resampled


# Checks.

KINDS = {"b": "bool", "iu": "integer", "f": "float", "fiu": "real"}


def _array(name, value, kinds, shape, below=None):
    """Return an array of one of the dtype kinds and of a shape (None: any length).

    With `below`, its integers must lie in [0, below). Anything else raises ValueError.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(f"{name} is a masked array, whose mask would be lost: fill it; to exclude "
                         "compositions pass candidates")
    try:
        if hasattr(value, "detach"):  # a torch tensor of any device, with a gradient or not
            value = value.numpy(force=True)
        array = np.asarray(value)
    except Exception as error:  # lists of several lengths, torch's bfloat16
        raise ValueError(f"{name} cannot be converted to an array: {error}") from None
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
    """Return a float64 array of a shape (None: any length), not empty and without nan."""
    numbers = _array(name, value, "fiu", shape).astype(float)
    if np.isnan(numbers).any() or not numbers.size:
        raise ValueError(f"{name} must hold one or more numbers and no nan")
    return numbers


def _choice(name, value, choices):
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def _check_sweeps(**sweeps):
    """Raise ValueError unless all arguments are BiasSweeps."""
    for name, value in sweeps.items():
        if not isinstance(value, BiasSweep):
            raise ValueError(f"{name} must be a BiasSweep, got {type(value).__name__}")


def _check_same(first, second, names):
    """Raise ValueError if two sweeps, or their Images, differ in an attribute."""
    for name in names:
        if not np.array_equal(getattr(first, name), getattr(second, name)):
            raise ValueError(f"the sweeps differ in {name}: build both with the same arguments, of "
                             "the same images in the same order")


# The script.

CHECKSUM = "scores_crc32"  # in an .npz file, of the bytes of the scores.npy beside it


def load(path, topk=1):
    """Return the sweep of saved scores.

    Args:
        path: an .npz file that holds arrays by the names of the arguments of `evaluate`: `scores`,
            `target`, `seen`, perhaps `candidates` and `pairs`. Without `scores`, these are read
            from `scores.npy` beside it, which is memory-mapped, so it may be larger than memory.
        topk: int, at least 1, as in `BiasSweep`.

    Returns:
        A BiasSweep.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: An array is missing, or a file or an array is damaged or wrong.
    """
    path = Path(path)
    arrays = _read(path)
    checksum = arrays.pop(CHECKSUM, None)
    beside = path.with_name("scores.npy")
    if "scores" not in arrays and beside.is_file():
        arrays |= _read(beside)
        if checksum is not None and checksum != zlib.crc32(np.memmap(beside, mode="r")):
            raise ValueError(f"{beside} is damaged, or from another run than {path}: write both "
                             "anew by --resume --save-scores")
    missing = {"scores", "target", "seen"} - arrays.keys()
    if missing:
        raise ValueError(f"no array {min(missing)} in {path}: add it")
    scores = arrays.pop("scores")
    target = arrays.pop("target")
    try:
        sweep = BiasSweep(**arrays, topk=topk)
        sweep.update(scores, target)
    except (ValueError, TypeError) as error:  # a TypeError names an array of another name
        raise ValueError(f"{path}: {error}") from None
    return sweep


def _read(path):
    """Return the arrays of one file by name, or raise ValueError if it is wrong or damaged."""
    try:
        contents = np.load(path, mmap_mode="r")
        if isinstance(contents, np.ndarray):
            return {"scores": contents}
        with contents:
            # A comment can swallow the entry behind it, if its length is damaged.
            if contents.zip.testzip() or any(entry.comment for entry in contents.zip.infolist()):
                raise ValueError
            return {name: contents[name] for name in contents}
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged archive can fail anywhere in zipfile, zlib and NumPy
        raise ValueError(f"cannot read {path} ({type(error).__name__}): it is damaged, or no "
                         "file of plain arrays by np.savez or np.save; write it anew") from None


def _print_table(results):
    """Print a row for each entry of the results, with a column for each protocol."""
    print(f"{'':34}{'exact':>24}{'published':>24}")
    for name in results["exact"]:
        if not name.endswith(("_low", "_high")):
            cells = [_cell(result, name) for result in results.values()]
            print(f"{name:34}{cells[0]:>24}{cells[1]:>24}")


def _cell(result, name):
    """Return an entry as text: fractions in percent, but the bias as it is, with any interval."""
    value = result[name]
    if not isinstance(value, float):
        return str(value)
    scale = 1 if name == "bias" else 100
    cell = f"{scale * value:.2f}"
    if name + "_low" in result:
        cell += f" [{scale * result[name + '_low']:.2f}, {scale * result[name + '_high']:.2f}]"
    return cell


def _run(options):
    """Evaluate the files of parsed options, and print or write what the options ask for."""
    sweep = load(options.file, options.topk)
    results = {}
    for protocol in PROTOCOLS:
        results[protocol] = sweep.report(protocol, options.confidence, options.unit,
                                         options.average)
    against = {}
    if options.against:
        other = load(options.against, options.topk)
        for protocol in PROTOCOLS:
            against[protocol] = compare(sweep, other, options.confidence or 0.95, options.unit,
                                        protocol=protocol, average=options.average)
    if options.json:
        if against:
            results["against"] = against
        # JSON has no nan and no infinity: they become null.
        print(json.dumps(json.loads(json.dumps(results), parse_constant=lambda name: None)))
    else:
        print(f"{results['exact']['n_seen']:,} images of seen and "
              f"{results['exact']['n_unseen']:,} of unseen compositions; "
              f"{sweep.candidates.sum():,} candidates; accuracies in percent")
        _print_table(results)
        print("In papers: S best_seen, U best_unseen (each at its best bias), HM best_hm, AUC auc; "
              "Sta. state_accuracy, Obj. object_accuracy (at bias 0)")
        if against:
            print(f"\na against b, which has {other.candidates.sum():,} candidates")
            _print_table(against)


def main(argv=None):
    """Print the metrics of saved scores, with both protocols side by side.

    Args:
        argv: list of command-line arguments; None takes the script's own.
    """
    parser = argparse.ArgumentParser(
        description="Print the bias-sweep metrics of saved scores: of every bias (exact) and of "
                    "the about 20 biases that papers try (published).",
        epilog="example: python evaluate.py scores.npz --confidence 0.95 --unit composition")
    add = parser.add_argument
    add("file",
        help=".npz with scores (N, P), target (N,), seen (P,) and perhaps candidates (P,) and "
             "pairs (P, 2); scores may also lie in scores.npy beside it")
    add("--against", metavar="FILE",
        help=".npz of a second system b on the same images: print differences (a minus b) with "
             "paired intervals")
    add("--topk", type=int, default=1,
        help="count a prediction as right if the truth is among the TOPK best (default 1)")
    add("--confidence", type=float,
        help="print bootstrap intervals of this confidence, for instance 0.95 (default: none, but "
             "0.95 for --against)")
    add("--unit", choices=UNITS, default="image",
        help="what the bootstrap draws: each image by itself, or each composition with all its "
             "images (default image)")
    add("--average", choices=UNITS, default="image",
        help="what counts equally in an accuracy: each image, or each composition whatever its "
             "number of images (default image)")
    add("--json", action="store_true",
        help="print JSON in place of tables: fractions, null for what does not exist")
    options = parser.parse_args(argv)
    try:
        _run(options)
    except (ValueError, OSError, MemoryError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    for name in ("SIGINT", "SIGPIPE"):  # Ctrl-C and a closed pipe end the script silently
        if hasattr(signal, name):  # Windows has no SIGPIPE
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    main()
