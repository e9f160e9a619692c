"""The bias-sweep evaluator of compositional zero-shot learning: exact, streaming, NumPy alone.

Copy this one file into any project.

An image is predicted as the best candidate of `score + bias * [unseen]`: a low bias favours the
compositions seen in training, a high one the unseen. Over all biases, seen against unseen accuracy
is a curve with an area (AUC) and a best harmonic mean (HM). It changes only where an image's best
seen and best unseen scores cross, so eight numbers an image are all that is kept.

Shapes: N images, B of them in one block, P compositions (columns of the scores), k = topk,
K points of a curve, T thresholds. Accuracies are fractions. Ties go to the lower column, seen
before unseen. Every float64 bias is judged as real arithmetic would judge it.

Two protocols: `exact` tries every bias where a prediction changes; `published` the about 20 of the
field's evaluator. It usually understates: its HM never exceeds the exact one, and its AUC does so
only where scores lie closer than its step of 1e-4.

    >>> scores = np.array([[.9, .1, .3], [.6, .2, .5], [.1, .3, .6], [.6, .3, .7]])  # (N, P)
    >>> target = np.array([0, 1, 2, 1])                            # (N,) columns of the truth
    >>> seen = np.array([True, True, False])                       # (P,)
    >>> report = evaluate(scores, target, seen)                    # higher scores are better
    >>> report["best_seen"], report["best_unseen"], round(report["auc"], 3)
    (0.3333333333333333, 1.0, 0.333)

Torch tensors are taken as they are; `scores.float().cpu()` makes them smaller or quicker to read.
From a dictionary of scores by pair: `np.stack([d[p] for p in pairs], 1)`. Larger than memory: one
`BiasSweep`, `update` a block; over several machines: `merge`. Reduced on a GPU: `update_kept`.
Two systems on the same images: `compare`.

As a script: `python evaluate.py scores.npz --confidence 0.95 --plot curve.png` (see `--help`).
"""

import argparse
import json
import os
import signal
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

BLOCK = 1 << 22  # bytes of scores at a time: they stay in the cache between the passes over them
THREADS = min(4, os.cpu_count() or 1)  # more than a few only wait for memory
LIMIT = 8e307  # the difference of two scores beyond it would overflow
WHOLE = 2**53  # integers up to it are float64 numbers, each of them
RESAMPLES = 1000
ROUNDING = 1e-12  # accuracies that differ by less are equal: sums of weights are rounded

PROTOCOLS = ("exact", "published")
UNITS = ("image", "composition")  # what a resample draws, and what an average counts alike
ENDS = ("_low", "_high")
HEADLINE = ("auc", "best_hm", "best_seen", "best_unseen")  # what `compare` compares
ARRAYS = ("scores", "target", "seen", "candidates", "pairs")  # names in a saved file
CHECKSUM = "scores_crc32"  # beside them: of the bytes of the scores.npy in the same folder

# The columns of what is kept of an image, see _decisive. Composition, state and object have two
# columns each: right for biases up to the first, and right for biases above the second.
UP_TO, ABOVE, STATE, OBJECT, GAP, TARGET = 0, 1, 2, 4, 6, 7
KEPT = 8
PRIMITIVES = ((STATE, "state_accuracy"), (OBJECT, "object_accuracy"))

KINDS = {"b": "bool", "iu": "integer", "f": "float", "fiu": "real"}


class Curve(NamedTuple):
    """Accuracy as the bias on unseen compositions grows.

    `exact`: from -inf strictly ascending; entry i holds for biases above `bias[i]` up to and
    including `bias[i + 1]`. `published`: the biases tried, ascending, the last one 1000; entry i
    holds at `bias[i]`.
    """
    bias: np.ndarray  # (K,)
    seen: np.ndarray  # (K,) non-increasing, accuracy on the images of seen compositions
    unseen: np.ndarray  # (K,) non-decreasing, accuracy on the others


class Group(NamedTuple):
    """The candidates of one kind, seen or unseen."""
    member: np.ndarray  # (P,) bool
    columns: np.ndarray  # (n,) ascending
    few: bool  # so few columns that to gather them takes less time than to hide the others
    penalty: np.ndarray  # (P,) float32: 0 for these columns, -inf for the others


class Turns(NamedTuple):
    """Images in the order of the bias above which each turns wrong (if seen) or right (if not)."""
    order: np.ndarray  # (N,) rows as they were given
    turn: np.ndarray  # (N,) that bias, ascending; -inf and inf: the image never changes
    seen: np.ndarray  # (N,) bool, whether the truth is a seen composition
    gap: np.ndarray  # (N,) k-th best seen score minus the truth's: the published biases
    bias: np.ndarray  # (K,) -inf and each finite turn once: where the exact curve has its points
    turned: np.ndarray  # (K,) how many images have turned just above each of them


class Images(NamedTuple):
    """All that is known of the images of a sweep, in the order of `turns`."""
    turns: Turns
    kept: np.ndarray  # (N, 8)
    composition: np.ndarray  # (N,) the truth, numbered from 0 among the compositions with images


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
        if pairs is not None:
            self.pairs = _array("pairs", pairs, "iu", (count, 2)).copy()
        self.topk = int(_array("topk", topk, "iu", ()))
        if self.topk < 1 or not count:
            raise ValueError("topk and the length of seen must be at least 1, "
                             f"got {self.topk} and {count}")
        self._places = min(self.topk, count)  # further places of the top k would stay empty
        self._seen_group = _group(self.seen & self.candidates)
        self._unseen_group = _group(~self.seen & self.candidates)
        self._codes = [np.arange(count)]  # what must be equal to be right: (P,) each
        if self.pairs is not None:
            self._codes += [self.pairs[:, 0], self.pairs[:, 1]]
        self._parts = []  # (B, 8) each

    def update(self, scores, target):
        """Add B images: `scores` (B, P), any real dtype and layout, higher is better.

        `target` (B,) holds the columns of the truth. Integers beyond 2^53 are refused, longer
        floats are rounded to float64. The scores are neither changed nor kept. A ValueError names
        the row; nothing of that call is added.
        """
        def reduce(block, target, scratch):
            top = None
            if self._places == 1:
                top = block.argmax(axis=1)
            best_seen = _best(block, top, self._seen_group, self._places, scratch)
            best_unseen = _best(block, top, self._unseen_group, self._places, scratch)
            return (*best_seen, *best_unseen, target)

        parts = _each_block(scores, target, len(self.seen), reduce)
        joined = [np.concatenate(arrays) for arrays in zip(*parts)]
        self._parts.append(_decisive(*joined, self._codes))

    def update_kept(self, seen_scores, seen_columns, unseen_scores, unseen_columns, target):
        """Add B images already reduced to the k best seen and the k best unseen candidates.

        Scores and columns (B, min(k, P)) each, best first; where a group has fewer candidates the
        scores end in -inf (the columns there are ignored). `target` (B,). Equal scores must stand
        in the order of their columns to give what `update` gives; a GPU's topk may not do that.
        """
        target = _array("target", target, "iu", (None,), len(self.seen))
        shape = (len(target), self._places)
        best_seen = _checked_best("seen", seen_scores, seen_columns, self._seen_group, shape)
        best_unseen = _checked_best("unseen", unseen_scores, unseen_columns,
                                    self._unseen_group, shape)
        self._parts.append(_decisive(*best_seen, *best_unseen, target, self._codes))

    def merge(self, other):
        """Add the images of another sweep with the same masks, pairs and topk: shards of a set."""
        _check_sweep("other", other)
        for name in "seen", "candidates", "pairs", "topk":
            if not np.array_equal(getattr(self, name), getattr(other, name)):
                raise ValueError(f"cannot merge sweeps that differ in {name}: "
                                 "build both with the same arguments")
        self._parts = self._parts + other._parts

    def curve(self, protocol="exact", average="image"):
        """The Curve of the images so far; ValueError without images. A half without any is nan."""
        _choice("protocol", protocol, PROTOCOLS)
        _choice("average", average, UNITS)
        images = self._images()
        counts = np.ones(len(images.kept), int)
        weights = _weights(images.composition, counts, "image", average)
        return _curve(images.turns, counts, weights, protocol)[0]

    def report(self, protocol="exact", confidence=None, unit="image", average="image"):
        """The metrics as a dict of plain numbers; nan where there is nothing to divide by.

        `auc, best_hm, best_seen, best_unseen`; at the best HM `hm_seen, hm_unseen, bias`; at
        bias 0 `state_accuracy, object_accuracy`, also `..._at_best_hm` (at `bias`) and
        `..._unseen_only` (bias +inf); `n_seen, n_unseen, topk, protocol`.

        `confidence`, as 0.95, adds `<metric>_low` and `<metric>_high`, percentiles over 1,000
        seeded bootstrap resamples, and `unit`, what these draw: an "image", which answers for
        other images of the same compositions, or a whole "composition", seen and unseen apart,
        which answers for other compositions. `average`: each "image" counts alike, or each
        "composition" with images does (`average` is then in the report).

        Without seen or without unseen images one UserWarning says so.
        """
        _choice("protocol", protocol, PROTOCOLS)
        _choice("unit", unit, UNITS)
        _choice("average", average, UNITS)
        if confidence is not None:
            confidence = _checked_confidence(confidence)
        images = self._images()
        count = len(images.kept)
        seen_count = int(images.turns.seen.sum())
        _warn_of_a_missing_half(seen_count, count)

        values = _metrics(images, np.ones(count, int), protocol, "image", average)
        if confidence is not None:
            draws = [list(_metrics(images, drawn, protocol, unit, average).values())
                     for drawn in _resamples(images.composition, images.turns.seen, unit)]
            low, high = _percentiles(np.array(draws), confidence)
            names = list(values)
            for end, limits in zip(ENDS, (low, high)):
                for name, limit in zip(names, limits):
                    values[name + end] = float(limit)
            values["unit"] = unit
        if average != "image":
            values["average"] = average
        return values | {"n_seen": seen_count, "n_unseen": count - seen_count, "topk": self.topk,
                         "protocol": protocol}

    def _images(self):
        """The Images so far; ValueError without any."""
        kept = np.concatenate(self._parts or [np.empty((0, KEPT))])
        if not len(kept):
            raise ValueError("no images to evaluate: the set is empty, call update first")
        self._parts = [kept]
        target = kept[:, TARGET].astype(int)
        seen = self.seen[target]
        turn = np.where(seen, kept[:, UP_TO], kept[:, ABOVE])
        turns = _turns(turn, seen, kept[:, GAP])
        composition = np.unique(target, return_inverse=True)[1].reshape(-1)
        return Images(turns, kept[turns.order], composition[turns.order])


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
    _check_sweep("sweep", sweep)
    _choice("average", average, UNITS)
    bias = _checked_bias(bias)
    images = sweep._images()
    seen = images.turns.seen
    weights = _weights(images.composition, np.ones(len(seen), int), "image", average)
    values = {"seen": _accuracy(images.kept, UP_TO, bias, weights * seen),
              "unseen": _accuracy(images.kept, UP_TO, bias, weights * ~seen)}
    for column, name in PRIMITIVES:
        values[name] = _accuracy(images.kept, column, bias, weights)
    values["hm"] = float(_harmonic(values["seen"], values["unseen"]))
    return values


def compare(sweep_a, sweep_b, confidence=0.95, unit="image", *, protocol="exact",
            average="image"):
    """How much better system a is than system b on the same images, and how sure that is.

    The sweeps must have the same images (targets in the same order), `seen`, `topk` and, where
    both have them, `pairs`; candidates may differ. Anything else is a ValueError that says what
    differs.

    Returns a dict: for each of `auc, best_hm, best_seen, best_unseen`, as fractions,
    `<metric>_a`, `<metric>_b`, `<metric>_difference` (a minus b), its `_difference_low` and
    `_difference_high` over 1,000 seeded resamples that draw the same units for both, and
    `<metric>_a_leads`, the share of the resamples in which a is strictly better; then
    `confidence, unit, average, n_seen, n_unseen, topk, protocol`. For `unit` and `average` see
    `BiasSweep.report`.
    """
    confidence = _checked_confidence(confidence)
    _choice("unit", unit, UNITS)
    _choice("protocol", protocol, PROTOCOLS)
    _choice("average", average, UNITS)
    _check_comparable(sweep_a, sweep_b)
    both = (sweep_a._images(), sweep_b._images())

    # Resamples are drawn in the order in which the images were given, which both share.
    composition = _as_given(both[0], both[0].composition)
    seen = _as_given(both[0], both[0].turns.seen)
    _warn_of_a_missing_half(int(seen.sum()), len(seen))

    def headlines(counts, unit):  # of both: two lists of 4
        weights = _weights(composition, counts, unit, average)
        values = []
        for images in both:
            order = images.turns.order
            curve, area = _curve(images.turns, counts[order], weights[order], protocol)
            values.append(_headline(curve, area))
        return values

    a, b = headlines(np.ones(len(seen), int), "image")
    draws = np.array([headlines(counts, unit) for counts in _resamples(composition, seen, unit)])
    result = _differences(a, b, draws, confidence)
    return result | {"confidence": confidence, "unit": unit, "average": average,
                     "n_seen": int(seen.sum()), "n_unseen": int((~seen).sum()),
                     "topk": sweep_a.topk, "protocol": protocol}


def _differences(a, b, draws, confidence):
    """What `compare` says of each headline metric, of its values (4,) and draws (R, 2, 4)."""
    draws_a = draws[:, 0]
    draws_b = draws[:, 1]
    low, high = _percentiles(draws_a - draws_b, confidence)
    result = {}
    for i, name in enumerate(HEADLINE):
        exists = ~np.isnan(draws_a[:, i])  # a resample may lack seen or unseen images
        leads = float("nan")
        if exists.any():
            ahead = draws_a[exists, i] - draws_b[exists, i] > ROUNDING
            leads = float(ahead.mean())
        result[f"{name}_a"] = a[i]
        result[f"{name}_b"] = b[i]
        result[f"{name}_difference"] = a[i] - b[i]
        result[f"{name}_difference_low"] = float(low[i])
        result[f"{name}_difference_high"] = float(high[i])
        result[f"{name}_a_leads"] = leads
    return result


def _check_comparable(sweep_a, sweep_b):
    """A ValueError that says why two sweeps are not of the same images and compositions."""
    _check_sweep("sweep_a", sweep_a)
    _check_sweep("sweep_b", sweep_b)
    must = "compare needs the same images and compositions for both"
    if len(sweep_a.seen) != len(sweep_b.seen):
        raise ValueError(f"the numbers of compositions differ, {len(sweep_a.seen)} and "
                         f"{len(sweep_b.seen)}: {must}")
    if not np.array_equal(sweep_a.seen, sweep_b.seen):
        column = (sweep_a.seen != sweep_b.seen).argmax()
        raise ValueError(f"seen differs, first in column {column}: {must}")
    if sweep_a.topk != sweep_b.topk:
        raise ValueError(f"topk differs, {sweep_a.topk} and {sweep_b.topk}: {must}")
    if sweep_a.pairs is not None and sweep_b.pairs is not None:
        if not np.array_equal(sweep_a.pairs, sweep_b.pairs):
            raise ValueError(f"pairs differ: {must}")
    targets = []
    for sweep in (sweep_a, sweep_b):
        images = sweep._images()
        targets.append(_as_given(images, images.kept[:, TARGET].astype(int)))
    if len(targets[0]) != len(targets[1]):
        raise ValueError(f"the numbers of images differ, {len(targets[0])} and "
                         f"{len(targets[1])}: {must}")
    different = targets[0] != targets[1]
    if different.any():
        row = different.argmax()
        raise ValueError(f"targets differ, first in row {row} ({targets[0][row]} and "
                         f"{targets[1][row]}): {must}, in the same order")


def _as_given(images, values):
    """Values (N,) in the order of the Images, back in the order in which these were given."""
    given = np.empty_like(values)
    given[images.turns.order] = values
    return given


def threshold_sweep(blocks, seen, feasibility, thresholds, *, candidates=None, gather=None):
    """Top-1 AUC of the hard mask at T thresholds from one reading of the scores.

    The same as T evaluations give. `blocks`: iterable of (scores (B, P), target (B,)). At
    threshold t those of `candidates` (P,) remain that are seen or have `feasibility` (P,) >= t,
    compared in float64. Returns arrays (T,): `threshold`, `removed` (share of the candidates),
    `auc`, `auc_published`. Anything else, and no images, is a ValueError. `gather`: where several
    processes have blocks of their own, hands each the list of what all of them give it.
    """
    whole = BiasSweep(seen, candidates=candidates)
    feasibility = _numbers("feasibility", feasibility, whole.seen.shape)
    thresholds = _numbers("thresholds", thresholds, (None,))
    try:
        blocks = iter(blocks)
    except TypeError:
        raise ValueError("blocks must be an iterable of pairs (scores, target), "
                         f"got {type(blocks).__name__}") from None
    steps, inverse = np.unique(thresholds, return_inverse=True)  # ascending
    levels = _levels(whole, feasibility, steps)

    parts = []
    for block in blocks:
        if not isinstance(block, (tuple, list)) or len(block) != 2:
            raise ValueError("blocks must be pairs (scores, target), as [(scores, target)]; "
                             f"got {type(block).__name__}")
        parts += _each_block(*block, len(whole.seen), levels.reduce)
    if gather is not None:
        parts = sum(gather(parts), [])
    if not sum(len(part[0]) for part in parts):
        raise ValueError("no images to evaluate: the blocks are empty")
    seen_score, seen_right, unseen_score, unseen_right, target = map(np.concatenate, zip(*parts))
    is_seen = whole.seen[target]
    counts = np.ones(len(target), int)  # each image once

    def areas(i):  # of both protocols at steps[i], as BiasSweep does it for k = 1
        best_unseen = unseen_score[:, i].astype(float)
        right_somewhere = np.where(is_seen, seen_right, unseen_right[:, i])
        never = np.where(is_seen, -np.inf, np.inf)
        turn = np.where(right_somewhere, _crossings(seen_score, best_unseen), never)
        with np.errstate(invalid="ignore"):  # -inf - -inf: no candidate of either kind
            turns = _turns(turn, is_seen, seen_score - best_unseen)
        return [_curve(turns, counts, counts, protocol)[1] for protocol in PROTOCOLS]

    with ThreadPoolExecutor(THREADS) as pool:
        auc, published = np.array(list(pool.map(areas, range(len(steps)))))[inverse].T
    return dict(threshold=thresholds, removed=levels.removed[inverse], auc=auc,
                auc_published=published)


class Levels(NamedTuple):
    """Which unseen candidates remain at each of T ascending thresholds.

    The level of a column is the last threshold at which it is kept, -1 if it never competes. The
    candidates of threshold i are those of level i or more, so the best unseen score at i is the
    greatest of the best scores of the levels from i on: a maximum accumulated from the end.
    """
    level: np.ndarray  # (P,)
    removed: np.ndarray  # (T,) share of the candidates that each threshold removes
    seen_group: Group
    columns: np.ndarray  # (n,) those that compete at some threshold, ascending by level
    occupied: np.ndarray  # (R,) their levels, each once
    starts: np.ndarray  # (R,) where each of these begins in `columns`

    def reduce(self, block, target, scratch):
        """Best seen score (B,), whether it is the truth's; best unseen (B, T), the same; target."""
        top = block.argmax(axis=1)
        seen_score, seen_column = _best(block, top, self.seen_group, 1, scratch)
        best = self._best_unseen(block, scratch)
        return (seen_score[:, 0], seen_column[:, 0] == target, best,
                self._truth_wins(block, target, best), target)

    def _best_unseen(self, block, scratch):
        """The best score of an unseen candidate at each threshold: (B, T), -inf without any."""
        best = np.full((len(block), len(self.removed)), -np.inf, block.dtype)
        if len(self.columns):
            scores = _gather(block, self.columns, scratch)
            best[:, self.occupied] = np.maximum.reduceat(scores, self.starts, axis=1)
        return np.maximum.accumulate(best[:, ::-1], axis=1)[:, ::-1]

    def _truth_wins(self, block, target, best):
        """Whether the truth is the best unseen candidate at each threshold: (B, T) bool.

        It is from the threshold on that removes the last lower column of its score, up to the
        last one that keeps it, wherever it equals the best.
        """
        rows = np.arange(len(block))
        own_level = self.level[target]
        own_score = block[rows, target]
        wins = np.zeros(best.shape, bool)
        possible = (own_level >= 0) & (best[rows, own_level] == own_score)
        for row in np.flatnonzero(possible):
            lower = block[row, :target[row]] == own_score[row]
            first = self.level[:target[row]][lower].max(initial=-1) + 1
            wins[row, first:own_level[row] + 1] = True
        return wins & (best == own_score[:, None])


def _levels(whole, feasibility, steps):
    """The Levels of the unseen candidates of a sweep at ascending thresholds (T,)."""
    unseen = whole._unseen_group.columns
    level = np.full(len(feasibility), -1)
    level[unseen] = np.searchsorted(steps, feasibility[unseen], "right") - 1

    # The number of columns below each threshold, from how many end at each level.
    ending = np.bincount(level[unseen] + 1, minlength=len(steps) + 1)
    removed = np.cumsum(ending)[:len(steps)] / max(whole.candidates.sum(), 1)

    columns = np.argsort(level, kind="stable")[(level < 0).sum():]
    occupied, starts = np.unique(level[columns], return_index=True)
    return Levels(level, removed, whole._seen_group, columns, occupied, starts)


# From scores to what is kept of an image.


def _group(member):
    """The Group of the columns where `member` (P,) is True."""
    columns = np.flatnonzero(member)
    few = 4 * len(columns) < len(member)
    penalty = np.where(member, 0, -np.inf).astype(np.float32)
    return Group(member, columns, few, penalty)


def _each_block(scores, target, count, work):
    """What work(block, target, scratch) makes of each block of rows, in order, checked.

    `scores` (N, count) is read in blocks (B, count) of BLOCK bytes, C-contiguous float32 or
    float64; `scratch` is an array of the block's shape and dtype that the work may overwrite. A
    ValueError names the first bad row.
    """
    scores = _array("scores", scores, "fiu", (None, count))
    target = _array("target", target, "iu", (len(scores),), count)
    kind = np.float32
    if np.promote_types(scores.dtype, np.float32) != np.float32:
        kind = np.float64
    step = max(1, BLOCK // (count * np.dtype(kind).itemsize))
    step = min(step, max(len(scores), 1))

    def check_and_work(start, scratch):
        piece = scores[start:start + step]
        if piece.dtype.kind in "iu":
            _check_whole(piece, start)
        with np.errstate(over="ignore"):  # a longer float that becomes infinite is refused below
            block = np.ascontiguousarray(piece, kind)
        least = float(block.min(initial=0))  # this pass brings the block into the cache
        greatest = float(block.max(initial=0))
        if not (least > -LIMIT and greatest < LIMIT):  # nan fails both
            row, column = np.argwhere(~(np.abs(block.astype(float)) < LIMIT))[0]
            raise ValueError(f"scores must be finite: row {start + row}, column {column} is "
                             f"{block[row, column]}; to exclude compositions pass candidates")
        return work(block, target[start:start + step], scratch[:len(block)])

    def work_through(starts):
        scratch = np.empty((step, count), kind)  # fresh memory for every block would cost more
        return [check_and_work(start, scratch) for start in starts]

    # A few strips of consecutive blocks for each thread: NumPy lets go of the interpreter, and
    # handing over block by block would cost more. In order, so the first row's error comes first.
    starts = range(0, max(len(scores), 1), step)
    length = -(-len(starts) // (4 * THREADS))
    strips = [starts[i:i + length] for i in range(0, len(starts), length)]
    results = []
    with ThreadPoolExecutor(THREADS) as pool:
        for made in pool.map(work_through, strips):
            results += made
    return results


def _check_whole(piece, start):
    """A ValueError if an integer score has no float64 equal."""
    if piece.dtype.itemsize < 8 or not piece.size:
        return
    if int(piece.max()) <= WHOLE and int(piece.min()) >= -WHOLE:
        return
    too_large = piece > WHOLE
    if piece.dtype.kind == "i":
        too_large = too_large | (piece < -WHOLE)
    row, column = np.argwhere(too_large)[0]
    raise ValueError("integer scores must lie within 2^53, beyond which they are not exact: row "
                     f"{start + row}, column {column} is {piece[row, column]}; subtract a constant")


def _best(block, top, group, k, scratch):
    """The k best of a group in each row (B, P), the lowest column first among equals.

    `top` (B,): the column of each row's greatest score if k is 1, else None. `scratch` is
    overwritten. Returns scores (B, k) float64 and columns (B, k), padded with -inf and -1.
    """
    columns = group.columns
    rows = np.arange(len(block))
    best = np.full((len(block), k), -np.inf)
    where = np.full((len(block), k), -1)
    if not len(columns):
        return best, where
    if group.few:
        part = _gather(block, columns, scratch)
    else:
        if top is not None:
            # Where the best of all columns is of the group, it is the group's best.
            best[:, 0] = block[rows, top]
            where[:, 0] = top
            lacking = np.flatnonzero(~group.member[top])
            if 2 * len(lacking) < len(block):  # else a copy of these rows costs more than it saves
                rows = lacking
                block = block[lacking]
        # To hide the other columns takes less time than to gather so many.
        penalty = group.penalty.astype(block.dtype, copy=False)
        part = np.add(block, penalty, out=scratch[:len(rows)])
    lines = np.arange(len(rows))
    for rank in range(min(k, len(columns))):
        at = part.argmax(axis=1)
        best[rows, rank] = part[lines, at]
        where[rows, rank] = columns[at] if group.few else at
        part[lines, at] = -np.inf  # out of the way of the next rank
    return best, where


def _gather(block, columns, scratch):
    """block[:, columns] in the memory of `scratch`, which is as large as the block."""
    shape = (len(block), len(columns))
    part = scratch.reshape(-1)[:shape[0] * shape[1]].reshape(shape)
    # The columns exist; without mode="clip" NumPy would write to a copy first.
    return block.take(columns, axis=1, out=part, mode="clip")


def _checked_best(name, scores, columns, group, shape):
    """What a user gives as the best of a group, in the form of `_best`; or a ValueError."""
    scores = _array(f"{name}_scores", scores, "f", shape).astype(float)
    columns = _array(f"{name}_columns", columns, "iu", shape).astype(int)
    places = shape[1]
    real = np.arange(places) < len(group.columns)  # the rest is padding
    columns = np.where(real, columns, -1 - np.arange(places))  # padding differs from all else

    is_candidate = (np.abs(scores) < LIMIT) & np.isin(columns, group.columns)
    good = np.where(real, is_candidate, scores == -np.inf).all(axis=1)
    good &= (scores[:, 1:] <= scores[:, :-1]).all(axis=1)
    good &= (np.diff(np.sort(columns, axis=1), axis=1) > 0).all(axis=1)
    if not good.all():
        row = good.argmin()
        raise ValueError(f"{name} row {row} must hold scores of distinct {name} candidates, best "
                         f"first, then -inf; got {scores[row]} at columns {columns[row]}")
    return scores, np.where(real, columns, -1)


def _decisive(seen_scores, seen_columns, unseen_scores, unseen_columns, target, codes):
    """Reduce the (B, k) best of both groups to what decides at every bias: (B, 8).

    Seen rank i and unseen rank k-1-i compete for one place of the top k; the seen one holds it for
    biases up to crossing[:, i]. So what must be right (the composition, its state, its object: one
    of `codes` (P,) each, the last two nan if not known) is right up to one bias, -inf if at none,
    because of a seen column, and above another, inf if at none, because of an unseen one.
    """
    kept = np.full((len(target), KEPT), np.nan)
    crossing = _crossings(seen_scores, unseen_scores[:, ::-1])
    for at, code in zip((UP_TO, STATE, OBJECT), codes):
        kept[:, at] = _at_best_match(code, target, seen_columns, crossing, -np.inf)
        kept[:, at + 1] = _at_best_match(code, target, unseen_columns, crossing[:, ::-1], np.inf)

    # The published protocol takes its biases from the score of an unseen truth in the top k.
    is_truth = unseen_columns == target[:, None]
    truth_score = np.where(is_truth, unseen_scores, -np.inf).max(axis=1)
    with np.errstate(invalid="ignore"):  # -inf - -inf: neither exists
        kept[:, GAP] = seen_scores[:, -1] - truth_score
    kept[:, TARGET] = target
    return kept


def _at_best_match(code, target, columns, crossing, never):
    """The crossing (B,) of the best of `columns` (B, k) with the target's code, or `never`.

    The best one is the last to lose its place, or the first to win one.
    """
    match = (code[columns] == code[target][:, None]) & (columns >= 0)
    rows = np.arange(len(match))
    return np.where(match.any(axis=1), crossing[rows, match.argmax(axis=1)], never)


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


def _turns(turn, seen, gap):
    """The Turns of images (N,) whose truth changes at the bias `turn`."""
    order = np.argsort(turn)
    turn = turn[order]
    bias = np.unique(np.append(-np.inf, turn[turn < np.inf]))
    turned = np.searchsorted(turn, bias, "right")
    return Turns(order, turn, seen[order], gap[order], bias, turned)


def _weights(composition, counts, unit, average):
    """How much each image (N,) weighs that a resample of `unit` has drawn `counts` times.

    Where each composition counts alike, its images share a weight of 1; a composition drawn twice
    as a unit counts as two.
    """
    if average == "image":
        return counts
    if unit == "composition":
        images = np.bincount(composition)
    else:
        images = np.bincount(composition, counts)
    return counts / np.maximum(images, 1)[composition]


def _curve(turns, counts, weights, protocol):
    """The Curve of images drawn `counts` (N,) times that weigh `weights`, and the area under it."""
    seen = turns.seen
    # What has turned wrong (seen) and right (unseen) once the first n images have turned: (N + 1,)
    lost = np.append(0, np.cumsum(weights * seen))
    gained = np.append(0, np.cumsum(weights * ~seen))

    if protocol == "exact":
        bias = turns.bias
        turned = turns.turned
    else:
        tried = ~seen & (turns.turn < 1000)  # unseen, and right at bias 1000
        bias = np.sort(np.repeat(turns.gap[tried], counts[tried])) - 1e-4
        last = 1000 if counts[~seen].any() else -np.inf
        bias = np.append(bias[::max(len(bias) // 20, 1)], last)
        turned = np.searchsorted(turns.turn, np.nan_to_num(bias), "left")

    with np.errstate(invalid="ignore"):  # 0 / 0: no image of that half
        seen_accuracy = (lost[-1] - lost[turned]) / lost[-1]
        unseen_accuracy = gained[turned] / gained[-1]
    first = seen_accuracy[0] * unseen_accuracy[0]  # nan where one half is missing
    if protocol == "published" and not np.isnan(first):
        first = 0.0  # the exact curve begins at unseen accuracy 0, this one later
    heights = seen_accuracy[1:] + seen_accuracy[:-1]
    area = first + np.sum(heights * np.diff(unseen_accuracy)) / 2
    return Curve(bias, seen_accuracy, unseen_accuracy), float(area)


def _headline(curve, area):
    """AUC, best HM, best seen and best unseen accuracy of a curve; nan where one half is."""
    best_hm = float("nan")
    if not np.isnan(area):
        best_hm = float(_harmonic(curve.seen, curve.unseen).max())
    return [area, best_hm, float(curve.seen.max()), float(curve.unseen.max())]


def _metrics(images, counts, protocol, unit, average):
    """The metrics of a report for Images (N,), drawn `counts` times by a resample of `unit`."""
    weights = _weights(images.composition, counts, unit, average)
    curve, area = _curve(images.turns, counts, weights, protocol)
    values = dict(zip(HEADLINE, _headline(curve, area)))
    nan = float("nan")
    values |= {"hm_seen": nan, "hm_unseen": nan, "bias": nan}
    if not np.isnan(area):
        i = _best_entry(curve)
        values["hm_seen"] = float(curve.seen[i])
        values["hm_unseen"] = float(curve.unseen[i])
        values["bias"] = _bias_of_entry(curve, i, protocol)
    for when, bias in (("", 0.0), ("_at_best_hm", values["bias"]), ("_unseen_only", np.inf)):
        for column, name in PRIMITIVES:
            values[name + when] = _accuracy(images.kept, column, bias, weights)
    return values


def _best_entry(curve):
    """The first entry of a curve with the best harmonic mean, as far as rounding lets it tell."""
    hm = _harmonic(curve.seen, curve.unseen)
    return int((hm >= hm.max() - ROUNDING).argmax())


def _bias_of_entry(curve, i, protocol):
    """A finite bias at which entry i of a curve holds.

    Exact: midway to the bias where an accuracy next changes; 1 away from the only one, at the ends.
    """
    low = curve.bias[i]
    if protocol == "published":
        return float(low)
    # Biases where only images without weight turn are no ends.
    changed = (curve.seen[i:] != curve.seen[i]) | (curve.unseen[i:] != curve.unseen[i])
    high = np.inf
    if changed.any():
        high = curve.bias[i + changed.argmax()]

    if low == -np.inf and high == np.inf:
        return 0.0
    if low == -np.inf:
        return float(min(high - 1, 0.0))
    if high == np.inf:
        return float(max(low + 1, np.nextafter(low, np.inf)))
    middle = float(low / 2 + high / 2)
    if not low < middle:  # neighbouring floats: the entry holds at the upper one
        return float(high)
    return middle


def _accuracy(kept, column, bias, weights):
    """The weighted share of images (N,) right at a bias (see _decisive), nan if there is none."""
    if np.isnan(bias) or np.isnan(kept[0, column]) or not weights.any():
        return float("nan")
    bias = np.nan_to_num(bias)  # infinite: beyond every crossing
    right = (bias <= kept[:, column]) | (bias > kept[:, column + 1])
    return float((right * weights).sum() / weights.sum())


def _harmonic(a, b):
    return 2 * a * b / np.maximum(a + b, np.finfo(float).tiny)  # 0 where both are 0


# Resamples.


def _resamples(composition, seen, unit):
    """RESAMPLES times how often each image (N,) is drawn, seeded.

    `composition` (N,) its number from 0, `seen` (N,) bool. Whole compositions are drawn with
    replacement, as many seen and as many unseen ones as there are.
    """
    random = np.random.default_rng(0)
    count = len(composition)
    if unit == "image":
        for _ in range(RESAMPLES):
            yield np.bincount(random.integers(count, size=count), minlength=count)
        return
    halves = [np.unique(composition[half]) for half in (seen, ~seen)]
    drawn = np.zeros(composition.max() + 1, int)
    for _ in range(RESAMPLES):
        for half in halves:
            if len(half):
                draw = random.integers(len(half), size=len(half))
                drawn[half] = np.bincount(draw, minlength=len(half))
        yield drawn[composition]


def _percentiles(draws, confidence):
    """The ends (M,) of the central `confidence` of resampled values (R, M), nan left out."""
    draws = np.sort(draws, axis=0)  # nan, from resamples without one half, comes last
    last = (~np.isnan(draws)).sum(axis=0) - 1
    ends = []
    for share in (0.5 - confidence / 2, 0.5 + confidence / 2):
        rank = np.rint(share * last).astype(int).clip(0)
        ends.append(draws[rank, np.arange(draws.shape[1])])
    return ends


# Checks.


def _plain(name, values):
    """`values` as an array; a torch tensor of any device or float type, with a gradient or not."""
    if isinstance(values, np.ma.MaskedArray):
        raise ValueError(f"{name} is a masked array, whose mask would be lost: fill it; to exclude "
                         "compositions pass candidates")
    try:
        if hasattr(values, "detach"):
            values = values.detach().cpu()
            if str(values.dtype) == "torch.bfloat16":  # NumPy has none; float32 holds each exactly
                values = values.float()
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{name} cannot be read as an array: {reason}") from None


def _array(name, values, kinds, shape, below=None):
    """An array of one of the dtype kinds and of a shape (None: any length); or a ValueError.

    With `below`, its integers must lie in [0, below).
    """
    values = _plain(name, values)
    fits = values.ndim == len(shape)
    for expected, got in zip(shape, values.shape):
        fits = fits and expected in (None, got)
    if not fits or values.dtype.kind not in kinds:
        expected = f"{KINDS[kinds]} of shape {shape}".replace("None", "any")
        advice = ""
        if kinds == "b" and values.dtype.kind in "iu":
            advice = "; from 0 and 1 by .astype(bool)"
        raise ValueError(f"{name} must be {expected}, got {values.dtype} of shape {values.shape}"
                         f"{advice}")
    if below is None:
        return values
    wrong = (values < 0) | (values >= below)
    if wrong.any():
        raise ValueError(f"{name} must lie in 0 to {below - 1}, got {values[wrong][0]} in row "
                         f"{wrong.argmax()}")
    return values.astype(int)


def _numbers(name, values, shape):
    """A float64 array of a shape (None: any length) without nan; or a ValueError."""
    numbers = _array(name, values, "fiu", shape).astype(float)
    nans = int(np.isnan(numbers).sum())
    if nans or not numbers.size:
        raise ValueError(f"{name} must be one or more numbers, got {numbers.size}, {nans} of them "
                         "nan")
    return numbers


def _is_number(array):
    """Whether an array is one real number."""
    return array.ndim == 0 and array.dtype.kind in "fiu" and not np.isnan(array)


def _checked_confidence(confidence):
    """A float between 0 and 1, or a ValueError."""
    number = _plain("confidence", confidence)
    if not _is_number(number) or not 0 < number < 1:
        raise ValueError("confidence must be a number between 0 and 1, as 0.95 is, "
                         f"got {_in_words(confidence)}")
    return float(number)


def _checked_bias(bias):
    """A float64 bias, infinite or not, of a number of any type; or a ValueError."""
    number = _plain("bias", bias)
    if not _is_number(number):
        raise ValueError(f"bias must be a number, got {_in_words(number.tolist())}; a report of "
                         "seen or unseen alone has none")
    return float(number)


def _choice(name, value, choices):
    """A ValueError unless the value is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {_in_words(value)}")


def _check_sweep(name, sweep):
    """A ValueError unless it is a BiasSweep."""
    if not isinstance(sweep, BiasSweep):
        raise ValueError(f"{name} must be a BiasSweep, got {type(sweep).__name__}")


def _in_words(value):
    """A value in one line of an error, which an array would fill."""
    text = " ".join(repr(value).split())
    if len(text) > 60:
        return type(value).__name__
    return text


def _warn_of_a_missing_half(seen_count, count):
    """One warning, shown at the caller's caller, where all images are seen ones or none is."""
    if seen_count in (0, count):
        half = "unseen" if seen_count else "seen"
        warnings.warn(f"no image of {half} compositions: what needs one is nan", stacklevel=3)


# The script.


def load(files):
    """Scores, target, and the rest by name, from .npz and memory-mapped .npy files.

    A .npy file counts as the array that its stem names, or as `scores`. Where no file has the
    scores, a `scores.npy` beside one of them is read. Named or not, it is compared with the
    checksum that a file beside it keeps of it. ValueError: what is missing or damaged, or differs
    from file to file.
    """
    arrays = {}
    origin = {}  # name of an array -> the file that it is of
    paths = [Path(file) for file in files]
    for path in paths:
        found = _read(path)
        differ = [name for name in found
                  if name in arrays and not np.array_equal(found[name], arrays[name])]
        if differ:
            raise ValueError(f"{path} holds other {', '.join(differ)} than a file named before it: "
                             "the files are parts of one system; a second system's stand after "
                             "--against")
        arrays |= found
        origin |= dict.fromkeys(found, path)
    if "scores" not in arrays:
        for path in paths:
            beside = path.parent / "scores.npy"
            if beside.exists():
                arrays |= _read(beside)
                origin["scores"] = beside
                if arrays["scores"].ndim != 2:
                    raise ValueError(f"{beside} holds scores of shape {arrays['scores'].shape}; "
                                     "expected (N, P)")
                break
    checksum = arrays.pop(CHECKSUM, None)
    if checksum is not None and "scores" in arrays:
        _check_scores(origin["scores"], origin[CHECKSUM], arrays["scores"], checksum)
    lacking = [name for name in ARRAYS[:3] if name not in arrays]
    if lacking:
        raise ValueError(f"no array {', '.join(lacking)} in {', '.join(map(str, files))}: scores, "
                         "target and seen are needed")
    return arrays.pop("scores"), arrays.pop("target"), arrays


def _check_scores(path, keeper, scores, checksum):
    """ValueError where scores.npy beside `keeper` is not the one of which that has a checksum."""
    if path.absolute() != keeper.absolute().with_name("scores.npy"):
        return  # scores of another make, say, for the same images
    if zlib.crc32(np.ascontiguousarray(scores)) != checksum.tolist():
        raise ValueError(f"{path} is damaged, or of another run than {keeper} beside it: write "
                         "both anew (--resume --save-scores); other scores are named, and lie in "
                         "another folder")


def _read(path):
    """The arrays of one file by name, or a ValueError (an OSError if it cannot be opened)."""
    if path.exists() and not path.is_file():  # a named pipe would be waited for without end
        raise ValueError(f"{path} is no plain file: expected an .npz or .npy file")
    try:
        data = np.load(path, mmap_mode="r")
        if isinstance(data, np.ndarray):
            name = path.stem if path.stem in ARRAYS else "scores"
            return {name: data}
        with data:
            # An array whose name is damaged, or lost in a comment, would pass for one not there.
            for entry in data.zip.infolist():
                data.zip.open(entry).close()  # the name stands twice: refused if they differ
                if entry.comment:
                    raise ValueError("its directory has a comment, which no array has")
            return {name: data[name] for name in (*ARRAYS, CHECKSUM) if name in data}
    except OSError as error:
        if error.filename is not None:  # the operating system's: no such file, no permission
            raise
        reason = error
    except Exception as error:  # a damaged archive can fail anywhere in zipfile, zlib and NumPy
        reason = error
    reason = (str(reason).splitlines() or [type(reason).__name__])[0]
    if "allow_pickle" in reason:  # NumPy's advice to load unsafely
        reason = "of no such form, or pickled objects, which are not loaded"
    raise ValueError(f"{path} is no .npz or .npy file of plain arrays, or is damaged: {reason}")


def table(reports):
    """Lines of text, a metric each, of the reports by protocol: percent, but the bias as it is."""
    lines = [f"{'':30}" + "".join(f"{protocol:>25}" for protocol in reports)]
    for name, value in reports["exact"].items():
        if not isinstance(value, float) or name.endswith(ENDS):
            continue
        line = f"{name:30}"
        scale = 1 if name == "bias" else 100
        for report in reports.values():
            cell = f"{scale * report[name]:.2f}"
            if name + "_low" in report:
                low = scale * report[name + "_low"]
                high = scale * report[name + "_high"]
                cell += f" [{low:.2f}, {high:.2f}]"
            line += cell.rjust(25)
        lines.append(line)
    lines.append("In papers: S best_seen, U best_unseen (each at its best bias), HM best_hm, "
                 "AUC auc; Sta. state_accuracy, Obj. object_accuracy (at bias 0)")
    return "\n".join(lines)


def comparison_table(comparisons):
    """Lines of text, a metric and protocol each, of the comparisons by protocol: percent."""
    first = comparisons["exact"]
    lines = [f"a against b, percent; differences with {100 * first['confidence']:g} % intervals "
             f"over {first['unit']}s; share of resamples in which a leads",
             f"{'':24}{'a':>8}{'b':>8}{'a - b':>26}{'a leads':>10}"]
    for protocol, comparison in comparisons.items():
        for name in HEADLINE:
            percent = {}
            for end in ("a", "b", "difference", "difference_low", "difference_high", "a_leads"):
                # Adding 0 turns the -0.00 of what is equal but for rounding into +0.00.
                percent[end] = round(100 * comparison[f"{name}_{end}"], 2) + 0.0
            interval = (f"{percent['difference']:+.2f} [{percent['difference_low']:+.2f}, "
                        f"{percent['difference_high']:+.2f}]")
            lines.append(f"{name + ', ' + protocol:24}{percent['a']:8.2f}{percent['b']:8.2f}"
                         f"{interval:>26}{percent['a_leads']:10.1f}")
    return "\n".join(lines)


def plot(sweep, reports, path):
    """Seen against unseen accuracy, both protocols, the best HM marked, into an image file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("the plot needs matplotlib: pip install matplotlib") from None
    axes = Figure(figsize=(5, 4.5), layout="constrained").subplots()
    for (protocol, report), style in zip(reports.items(), ("-", "o--")):
        curve = sweep.curve(protocol, report.get("average", "image"))
        label = f"{protocol}: AUC {100 * report['auc']:.1f}, best HM {100 * report['best_hm']:.1f}"
        line, = axes.plot(100 * curve.unseen, 100 * curve.seen, style, markersize=3,
                          linewidth=1.2, label=label)
        axes.plot(100 * report["hm_unseen"], 100 * report["hm_seen"], "*", markersize=14,
                  color=line.get_color())
    axes.set(xlabel="accuracy on unseen compositions (%)",
             ylabel="accuracy on seen compositions (%)", xlim=0, ylim=0)
    axes.legend(title=f"top-{sweep.topk}, star: best HM", loc="lower left")
    _write_whole(path, lambda part: axes.figure.savefig(part, dpi=150))


def write_compositions(sweep, path, average="image"):
    """A CSV row for each composition with images: its accuracy at three biases.

    At bias 0, at the best exact HM of the whole set (with `average` as in the report; nan where
    there is none, as in the report), and with the unseen alone (bias +inf).
    """
    images = sweep._images()
    curve = sweep.curve(average=average)
    best_bias = float("nan")
    if not np.isnan(curve.seen + curve.unseen).any():
        best_bias = _bias_of_entry(curve, _best_entry(curve), "exact")

    lines = ["column,state,object,seen,candidate,images,accuracy,accuracy_at_best_hm,"
             "accuracy_unseen_only"]
    target = images.kept[:, TARGET].astype(int)
    for column in np.unique(target):
        state, object_ = ("", "") if sweep.pairs is None else sweep.pairs[column]
        kept = images.kept[target == column]
        row = [column, state, object_, int(sweep.seen[column]), int(sweep.candidates[column]),
               len(kept)]
        for bias in (0.0, best_bias, np.inf):
            row.append(_accuracy(kept, UP_TO, bias, np.ones(len(kept), int)))
        lines.append(",".join(map(str, row)))
    text = "\n".join(lines) + "\n"
    _write_whole(path, lambda part: part.write_text(text))


def _write_whole(path, write):
    """Let write(part) make a file beside `path`, then give it its name: whole or not at all."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file to write")
    if not path.parent.is_dir():
        raise ValueError(f"no folder {path.parent} to write {path.name} into: create it first")
    part = path.with_name(".part." + path.name)  # the ending stays: it says the format
    try:
        write(part)
        os.replace(part, path)
    except OSError as error:
        raise type(error)(error.errno, f"cannot write {path}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)


def _sweep_of_files(files, topk):
    """The BiasSweep of saved arrays; a ValueError about these names the files."""
    scores, target, arrays = load(files)
    try:
        sweep = BiasSweep(**arrays, topk=topk)
        sweep.update(scores, target)
    except ValueError as error:
        raise ValueError(f"{', '.join(files)}: {error}") from None
    return sweep


def _heading(sweep, report, options):
    """What a table is about, in one line."""
    text = (f"{report['n_seen']:,} images of seen and {report['n_unseen']:,} of unseen "
            f"compositions; {sweep.candidates.sum():,} candidates "
            f"({len(sweep._seen_group.columns):,} seen) of {len(sweep.seen):,} compositions; "
            f"top-{sweep.topk}; percent")
    if options.average != "image":
        text += f"; each {options.average} counts alike"
    if options.confidence is not None:
        text += f"; {100 * options.confidence:g} % intervals over {report['unit']}s"
    return text


def _as_json(value):
    """The same with None for what is no number, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _as_json(item) for name, item in value.items()}
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def run(options):
    """Score the files of parsed options and print or write what they ask for."""
    if options.unit is not None and options.confidence is None and not options.against:
        raise ValueError("--unit says what the intervals resample: give --confidence, as 0.95, or "
                         "--against too")
    unit = options.unit or "image"
    sweep = _sweep_of_files(options.files, options.topk)
    reports = {protocol: sweep.report(protocol, options.confidence, unit, options.average)
               for protocol in PROTOCOLS}
    comparisons = {}
    if options.against:
        other = _sweep_of_files(options.against, options.topk)
        if not np.array_equal(sweep.candidates, other.candidates):
            warnings.warn(f"a has {sweep.candidates.sum():,} candidates, b "
                          f"{other.candidates.sum():,}, not the same: the differences below are "
                          "also those of the candidates")
        confidence = 0.95 if options.confidence is None else options.confidence
        for protocol in PROTOCOLS:
            comparisons[protocol] = compare(sweep, other, confidence, unit, protocol=protocol,
                                            average=options.average)
    if options.json:
        everything = dict(reports)
        if comparisons:
            everything["against"] = comparisons
        print(json.dumps(_as_json(everything)))
    else:
        print(_heading(sweep, reports["exact"], options))
        print(table(reports))
        if comparisons:
            print()
            print(comparison_table(comparisons))
    if options.per_composition:
        write_compositions(sweep, options.per_composition, options.average)
    if options.plot:
        plot(sweep, reports, options.plot)


def main(argv=None):
    """Score a saved file: a table in percent on stdout, both protocols side by side."""
    parser = argparse.ArgumentParser(
        description="Exact and published bias-sweep metrics of saved scores.")
    add = parser.add_argument
    add("files", nargs="+",
        help=".npz with scores (N, P), target (N,), seen (P,), optional candidates (P,), pairs "
             "(P, 2); or .npy files of these names, read memory-mapped: scores.npy rest.npz "
             "(scores.npy is found beside rest.npz)")
    add("--against", nargs="+", metavar="FILE",
        help="files of a second system (b) on the same images: differences with paired intervals")
    add("--topk", type=int, default=1, help="right if the truth is among the k best (default 1)")
    add("--confidence", type=float,
        help="bootstrap intervals, as 0.95 (--against has them without)")
    add("--unit", choices=UNITS, help="what the intervals resample (default image)")
    add("--average", choices=UNITS, default="image",
        help="what counts alike in an accuracy (default image)")
    add("--json", action="store_true", help="print JSON: fractions, null for what does not exist")
    add("--per-composition", metavar="CSV", help="write the accuracy of each composition")
    add("--plot", metavar="PNG", help="draw the curves (needs matplotlib)")
    options = parser.parse_args(argv)
    try:
        run(options)
    except (ValueError, OSError, MemoryError) as error:
        parser.exit(2, f"error: {error or 'out of memory'}\n")


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # without a line of source
    try:
        from common import command  # quiet Ctrl-C, closed pipes; a copied file works without
        main = command(main)
    except ImportError:
        if hasattr(signal, "SIGPIPE"):  # Windows has none
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly once `| head` has enough
    main()
