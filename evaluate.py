"""The bias-sweep evaluator of compositional zero-shot learning: exact, streaming, one file, NumPy alone. Copy it.

An image is predicted as the best candidate of `score + bias * [unseen]`. A low bias favours the compositions seen in
training, a high one the unseen; the sweep over all biases gives a curve, its area (AUC) and its best harmonic mean (HM).
Where seen rank i and unseen rank k-1-i of an image cross is all that its top-k prediction depends on: scores are read
once, in blocks, a few numbers an image are kept, and the whole sweep is one sort.

Shapes: N images, B images of one block, P compositions (columns of the scores), k = topk, K points, T thresholds.
Ties go to the lower column, seen before unseen. Two protocols: `exact` tries every bias at which some prediction
changes; `published` tries the about 20 that the field's evaluator tries, and so reports less.

    >>> scores = np.array([[.9, .1, .3], [.6, .2, .5], [.1, .3, .6], [.6, .3, .7]])  # (N, P), higher is better
    >>> target = np.array([0, 1, 2, 1])                                              # (N,) columns of the truth
    >>> seen = np.array([True, True, False])                                         # (P,)
    >>> report = evaluate(scores, target, seen)
    >>> report["best_seen"], report["best_unseen"], round(report["auc"], 3)
    (0.3333333333333333, 1.0, 0.333)

From torch: `scores.float().cpu().numpy()`. From a dictionary of score vectors by pair: `np.stack([d[p] for p in pairs], 1)`.
Larger than memory: one `BiasSweep`, `update` a block; over several machines: `merge`. Reduced on a GPU: `update_kept`.
As a script: `python evaluate.py scores.npz --confidence 0.95 --plot curve.png` (see `--help`).
"""

import argparse
import csv
import json
import sys
import warnings
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np

BLOCK = 1 << 20  # bytes of scores worked on at a time: they stay in the cache between the passes
HUGE = 1e308  # crossings beyond it count as there, so that every finite crossing lies below bias +inf
RESAMPLES = 1000
PROTOCOLS = "exact", "published"


class Curve(NamedTuple):
    """Accuracy as the bias on unseen compositions grows.

    `exact`: `bias` is strictly ascending from -inf, and entry i holds for the biases above `bias[i]` up to and with
    `bias[i + 1]`. `published`: the biases tried, ascending, the last one 1000, and entry i holds at `bias[i]`.
    """

    bias: np.ndarray  # (K,)
    seen: np.ndarray  # (K,) non-increasing, accuracy on the images of seen compositions
    unseen: np.ndarray  # (K,) non-decreasing, accuracy on the others


class BiasSweep:
    """Feed it blocks of scores; it keeps eight numbers an image and answers for every bias.

    `seen` (P,) bool: compositions with training images. `candidates` (P,) bool: those that may win (None: all); training
    and the phase's own pairs make the closed world, all the open one. `pairs` (P, 2) int: state and object of each
    column, for the accuracies on these (nan without). `topk`: right if the truth is among the k best (cost grows with
    k). ValueError for anything else.
    """

    def __init__(self, seen, *, candidates=None, pairs=None, topk=1):
        self.seen = _mask("seen", seen)
        p = len(self.seen)
        self.candidates = np.ones(p, bool) if candidates is None else _mask("candidates", candidates, p)
        self.pairs = None if pairs is None else _integers("pairs", pairs, (p, 2))
        if isinstance(topk, bool) or not isinstance(topk, (int, np.integer)) or topk < 1:
            raise ValueError(f"topk must be an integer of at least 1, got {topk!r}")
        self.topk = int(topk)
        self._groups = [np.flatnonzero(group & self.candidates) for group in (self.seen, ~self.seen)]
        self._parts = []  # (B, 8) each: see _keep

    def update(self, scores, target):
        """Add B images: `scores` (B, P) of any real dtype and layout, higher is better; `target` (B,) true columns.

        Scores are read once in blocks and neither changed nor kept. ValueError names the row of what is wrong, and then
        nothing of this call has been added.
        """
        scores, target = self._check(scores, target)
        kept = [_room(len(target), self.topk) for _ in self._groups]
        for rows, block in _blocks(scores):
            for columns, (best, where) in zip(self._groups, kept):
                best[rows], where[rows] = _best(block, columns, self.topk)
        self._keep(*kept[0], *kept[1], target)

    def update_kept(self, seen_scores, seen_columns, unseen_scores, unseen_columns, target):
        """Add B images already reduced to the k best seen and unseen candidates: (B, k) each, best first; target (B,).

        A group with fewer than k candidates has as many columns as it has candidates, or is padded with -inf. Equal
        scores must be ordered by column for the results of `update` (a GPU's topk may not do so).
        """
        target = _integers("target", target, (None,), len(self.seen))
        kept = []
        given = (seen_scores, seen_columns), (unseen_scores, unseen_columns)
        for name, (scores, columns), group in zip(("seen", "unseen"), given, self._groups):
            kept += self._check_kept(name, np.asarray(scores), columns, len(target), group)
        self._keep(*kept, target)

    def merge(self, other):
        """Add the images of another sweep with the same masks, pairs and topk: for shards evaluated apart."""
        for name in "seen", "candidates", "pairs", "topk":
            if not np.array_equal(getattr(self, name), getattr(other, name)):
                raise ValueError(f"cannot merge sweeps whose {name} differ: build both with the same arguments")
        self._parts += other._parts

    def curve(self, protocol="exact"):
        """The Curve of the images so far; ValueError if there are none. A missing half (no unseen images) is nan."""
        order, points = self._sorted(protocol)
        return points(np.ones(len(order)))

    def report(self, protocol="exact", confidence=None):
        """The metrics as a dict of plain numbers; fractions, nan where there is nothing to divide by.

        `auc, best_hm, best_seen, best_unseen`; `hm_seen, hm_unseen, bias` at the best HM; `state_accuracy,
        object_accuracy` at bias 0, `..._at_best_hm` and `..._unseen_only` (bias +inf); `n_seen, n_unseen, topk,
        protocol`. With `confidence=0.95` also `<metric>_low` and `<metric>_high`: percentiles of 1,000 bootstrap
        resamples of the images, seeded. Without seen or without unseen images one UserWarning says so.
        """
        if confidence is not None and not 0 < confidence < 1:
            raise ValueError(f"confidence must lie between 0 and 1, as 0.95, got {confidence!r}")
        order, points = self._sorted(protocol)
        kept, n = self._kept()[order], len(order)
        values = _metrics(points, kept, self.pairs is not None, np.ones(n), protocol)
        n_seen = int(self.seen[kept[:, TARGET].astype(int)].sum())
        if n_seen in (0, n):
            warnings.warn(f"no image of {'an unseen' if n_seen else 'a seen'} composition: only the half that exists "
                          "is reported, the rest is nan", stacklevel=2)
        if confidence is not None:
            random = np.random.default_rng(0)
            draws = [_metrics(points, kept, self.pairs is not None, np.bincount(random.integers(n, size=n), minlength=n),
                              protocol) for _ in range(RESAMPLES)]
            values |= _intervals(draws, confidence)
        return values | {"n_seen": n_seen, "n_unseen": n - n_seen, "topk": self.topk, "protocol": protocol}

    def _check(self, scores, target):
        """Scores and targets as arrays, or the ValueError that says why not."""
        scores = np.asarray(scores)
        if scores.ndim != 2 or scores.shape[1] != len(self.seen) or scores.dtype.kind not in "fiu":
            raise ValueError(f"scores must be real numbers of shape (images, {len(self.seen)}), a column for each entry "
                             f"of seen, got {scores.dtype} of shape {scores.shape}")
        return scores, _integers("target", target, (len(scores),), len(self.seen))

    def _check_kept(self, name, scores, columns, n, group):
        """One group of update_kept: checked and padded to (B, k)."""
        least = min(self.topk, len(group))
        if scores.ndim != 2 or len(scores) != n or not least <= scores.shape[1] <= self.topk or scores.dtype.kind != "f":
            raise ValueError(f"{name}_scores must be floats of shape ({n}, {self.topk}), got {scores.dtype} of shape "
                             f"{scores.shape}")
        best, where = _room(n, self.topk)
        best[:, :scores.shape[1]], where[:, :scores.shape[1]] = scores, _integers(f"{name}_columns", columns, scores.shape)
        where[best == -np.inf] = -1
        allowed = np.append(np.isin(np.arange(len(self.seen)), group), True)  # -1, the padding, is the last entry
        bad = ~(best[:, :least] > -np.inf).all(1) | ~(best < np.inf).all(1) | (best[:, 1:] > best[:, :-1]).any(1)
        bad |= ((where < -1) | (where >= len(self.seen)) | ~allowed[np.clip(where, -1, len(self.seen))]).any(1)
        if bad.any():
            raise ValueError(f"{name}_scores, {name}_columns: row {bad.argmax()} must hold finite scores, best first, of "
                             f"{name} candidates, got {best[bad.argmax()]} at columns {where[bad.argmax()]}")
        return best, where

    def _keep(self, seen_scores, seen_columns, unseen_scores, unseen_columns, target):
        """Reduce (B, k) best of both groups to the biases at which the truth enters or leaves the top k.

        Seen rank i and unseen rank k-1-i compete for one place: the seen holds it for biases up to cross[:, i].
        """
        with np.errstate(invalid="ignore", over="ignore"):  # -inf - -inf where neither exists: no column matches it
            cross = seen_scores - unseen_scores[:, ::-1]
            gap = seen_scores[:, -1] - np.where(unseen_columns == target[:, None], unseen_scores, -np.inf).max(1)
        both = np.isfinite(seen_scores) & np.isfinite(unseen_scores[:, ::-1])
        cross = np.where(both, np.clip(cross, -HUGE, HUGE), cross)
        codes = [np.arange(len(self.seen))] + ([] if self.pairs is None else list(self.pairs.T))
        part = np.full((len(target), 8), np.nan)
        for i, code in enumerate(codes):
            truth, code = code[target][:, None], np.append(code, code.min() - 1)  # the padding, -1, matches nothing
            part[:, 2 * i] = _first(cross, code[seen_columns] == truth)
            part[:, 2 * i + 1] = _first(cross[:, ::-1], code[unseen_columns] == truth)
        part[:, GAP], part[:, TARGET] = gap, target
        self._parts.append(part)

    def _kept(self):
        self._parts = [np.concatenate(self._parts)] if self._parts else [np.empty((0, 8))]
        if not len(self._parts[0]):
            raise ValueError("no images to evaluate: the set is empty")
        return self._parts[0]

    def _sorted(self, protocol):
        """Order of the images by the bias at which they turn, and a function of weights (N,) in that order -> Curve."""
        if protocol not in PROTOCOLS:
            raise ValueError(f"protocol must be one of {PROTOCOLS}, got {protocol!r}")
        kept = self._kept()
        seen = self.seen[kept[:, TARGET].astype(int)]
        turn = np.where(seen, kept[:, UP_TO], kept[:, ABOVE])
        order = np.argsort(turn)  # nan, never right, comes last
        turn, seen, gap = turn[order], seen[order], kept[order, GAP]
        turn = turn[:len(turn) - np.isnan(turn).sum()]
        if protocol == "exact":
            bias = np.append(-np.inf, np.unique(turn[np.isfinite(turn)]))
            at = np.searchsorted(turn, bias, "right")
        else:
            tried = np.flatnonzero(~seen[:len(turn)] & (turn < 1000))
            tried = tried[np.argsort(gap[tried])]

        def points(weights):
            nonlocal bias, at
            n_unseen = weights[~seen].sum()
            if protocol == "published":
                bias = np.repeat(gap[tried], weights[tried].astype(int)) - 1e-4
                bias = np.append(bias[::max(len(bias) // 20, 1)], 1000 if n_unseen else -np.inf)
                at = np.searchsorted(turn, bias, "left")
            lost, gained = (np.append(0, np.cumsum((weights * half)[:len(turn)])) for half in (seen, ~seen))
            with np.errstate(invalid="ignore"):
                return Curve(bias, (lost[-1] - lost[at]) / weights[seen].sum(), gained[at] / n_unseen)

        return order, points


UP_TO, ABOVE, GAP, TARGET = 0, 1, 6, 7  # columns of what is kept; 2 to 5: up to and above which bias state, object are right


def evaluate(scores, target, seen, *, candidates=None, pairs=None, topk=1, protocol="exact", confidence=None):
    """`BiasSweep.report` of scores (N, P), higher is better, against the true columns `target` (N,); see there."""
    sweep = BiasSweep(seen, candidates=candidates, pairs=pairs, topk=topk)
    sweep.update(scores, target)
    return sweep.report(protocol, confidence)


def accuracy_at(sweep, bias):
    """What a user gets who fixed the bias in advance, say on validation: the oracle's choice is not open to him.

    Returns `seen, unseen, hm, state_accuracy, object_accuracy` as fractions (nan where there is nothing to divide by).
    """
    kept = sweep._kept()
    right, seen = _right(kept, 0, bias), sweep.seen[kept[:, TARGET].astype(int)]
    seen, unseen = (float(right[half].mean()) if half.any() else float("nan") for half in (seen, ~seen))
    state, object_ = (float(_right(kept, i, bias).mean()) if sweep.pairs is not None else float("nan") for i in (2, 4))
    return dict(seen=seen, unseen=unseen, hm=_harmonic(seen, unseen), state_accuracy=state, object_accuracy=object_)


def per_composition(sweep, bias):
    """Images (P,) int of each composition, and how many of them are right at `bias` (P,) int."""
    kept = sweep._kept()
    target = kept[:, TARGET].astype(int)
    return tuple(np.bincount(rows, minlength=len(sweep.seen)) for rows in (target, target[_right(kept, 0, bias)]))


def threshold_sweep(blocks, seen, feasibility, thresholds, *, candidates=None):
    """AUC of the hard mask at many thresholds from one reading of the scores, equal to as many evaluations.

    `blocks`: iterable of (scores (B, P), target (B,)). Candidates at threshold t: those of `candidates` (P,) that are
    seen or have `feasibility` (P,) >= t. Returns arrays (T,) `threshold` (as given), `removed` (share of the candidates
    that the mask removes), `auc` and `auc_published` (top-1).
    """
    whole = BiasSweep(seen, candidates=candidates)
    feasibility = _reals("feasibility", feasibility, len(whole.seen))
    steps, inverse = np.unique(_reals("thresholds", thresholds), return_inverse=True)
    unseen = whole._groups[1]
    level = np.searchsorted(steps, feasibility[unseen], "right")  # kept at steps[:level]
    columns = unseen[np.argsort(level, kind="stable")][(level == 0).sum():]
    level = np.sort(level)[(level == 0).sum():] - 1
    levels, starts = np.unique(level, return_index=True)
    results = []
    kept = []
    for scores, target in blocks:
        scores, target = whole._check(scores, target)
        for rows, block in _blocks(scores):
            best, wins = _by_level(block, target[rows], columns, level, levels, starts, len(steps))
            kept.append((*_best(block, whole._groups[0], 1), best, wins, target[rows]))
    seen_scores, seen_columns, best, wins, target = map(np.concatenate, zip(*kept)) if kept else whole._kept()
    for i, step in enumerate(steps):
        sweep = BiasSweep(seen, candidates=whole.candidates & (whole.seen | (feasibility >= step)))
        columns = np.where(wins[:, i], target, -1)[:, None]
        sweep._keep(seen_scores, seen_columns, best[:, i:i + 1].astype(float), columns, target)
        removed = 1 - sweep.candidates.sum() / max(whole.candidates.sum(), 1)
        results.append([removed] + [_area(sweep.curve(protocol), protocol) for protocol in PROTOCOLS])
    removed, auc, published = np.array(results).reshape(-1, 3)[inverse.ravel()].T
    return dict(threshold=steps[inverse.ravel()], removed=removed, auc=auc, auc_published=published)


def _by_level(block, target, columns, level, levels, starts, steps):
    """Best unseen score (B, steps) among those kept at each step, and whether it is the truth's, ties exact.

    `columns` in ascending order of `level`, the last step at which a column is kept; `levels` those that occur.
    """
    best = np.full((len(block), steps), -np.inf, block.dtype)
    wins = np.zeros(best.shape, bool)
    if not len(columns):
        return best, wins
    gathered = np.take(block, columns, axis=1, mode="clip")
    best[:, levels] = np.maximum.reduceat(gathered, starts, axis=1)
    best = np.maximum.accumulate(best[:, ::-1], axis=1)[:, ::-1]
    place = np.full(block.shape[1], -1)
    place[columns] = np.arange(len(columns))
    own = np.where(place[target] < 0, -1, level[place[target]])  # -1: never kept
    truth = block[np.arange(len(block)), target]
    for row in np.flatnonzero((best[np.arange(len(block)), own] == truth) & (own >= 0)):
        rivals = (gathered[row] == truth[row]) & (columns < target[row])
        first = level[rivals].max() + 1 if rivals.any() else 0  # a lower column of the same score wins while it is kept
        wins[row, first:own[row] + 1] = best[row, first:own[row] + 1] == truth[row]
    return best, wins


def _blocks(scores):
    """Slices of rows and the scores there: contiguous, native float, finite, small enough for the cache."""
    kind = np.promote_types(scores.dtype, np.float32)
    rows = max(1, BLOCK // (scores.shape[1] * kind.itemsize))
    for start in range(0, len(scores), rows):
        block = np.ascontiguousarray(scores[start:start + rows], kind)
        if not (np.isfinite(block.min()) and np.isfinite(block.max())):
            row, column = np.argwhere(~np.isfinite(block))[0]
            raise ValueError(f"scores must be finite: row {start + row}, column {column} is {block[row, column]}; to "
                             "exclude compositions pass candidates")
        yield slice(start, start + len(block)), block


def _best(block, columns, k):
    """The k best of `columns` in each row, lowest column first among equals: scores and columns (B, k), -inf and -1 padded."""
    best, where = _room(len(block), k)
    rows = np.arange(len(block))
    block = np.take(block, columns, axis=1, mode="clip")
    for i in range(min(k, len(columns))):
        at = block.argmax(1)
        best[:, i], where[:, i] = block[rows, at], columns[at]
        block[rows, at] = -np.inf
    return best, where


def _room(n, k):
    return np.full((n, k), -np.inf), np.full((n, k), -1)


def _first(cross, match):
    """The crossing (B,) at the first match in each row of (B, k), nan where there is none."""
    return np.where(match.any(1), cross[np.arange(len(cross)), match.argmax(1)], np.nan)


def _right(kept, i, bias):
    """Which images (N,) are right at a bias: up to the crossing of kept column i, or above that of i + 1."""
    if np.isnan(bias):
        raise ValueError("bias must be a number, got nan: take it from a report with seen and unseen images")
    bias = np.clip(bias, -1.5 * HUGE, 1.5 * HUGE)
    return (bias <= kept[:, i]) | (bias > kept[:, i + 1])


def _harmonic(a, b):
    """2ab / (a + b), 0 where both are 0."""
    return 2 * a * b / np.maximum(a + b, np.finfo(float).tiny)


def _area(curve, protocol):
    """Trapezoids of seen over unseen accuracy; `exact` begins at unseen accuracy 0."""
    area = np.sum((curve.seen[1:] + curve.seen[:-1]) * np.diff(curve.unseen)) / 2
    return float(area + curve.seen[0] * curve.unseen[0] if protocol == "exact" else area)


def _metrics(points, kept, paired, weights, protocol):
    """The metrics of a report for images (N,) counted `weights` times."""
    curve = points(weights)
    nan, seen, unseen = float("nan"), float(curve.seen.max()), float(curve.unseen.max())
    values = dict(auc=_area(curve, protocol), best_hm=nan, best_seen=seen, best_unseen=unseen, hm_seen=nan, hm_unseen=nan,
                  bias=nan)
    if not np.isnan(seen + unseen):
        hm = _harmonic(curve.seen, curve.unseen)
        i = hm.argmax()
        bias = float(curve.bias[i]) if protocol == "published" else _inside(curve.bias, i)
        values |= dict(best_hm=float(hm[i]), hm_seen=float(curve.seen[i]), hm_unseen=float(curve.unseen[i]), bias=bias)
    for when, bias in ("", 0.0), ("_at_best_hm", values["bias"]), ("_unseen_only", np.inf):
        for i, name in (2, "state_accuracy"), (4, "object_accuracy"):
            known = paired and not np.isnan(bias)
            values[name + when] = float(weights @ _right(kept, i, bias) / weights.sum()) if known else nan
    return values


def _inside(bias, i):
    """A finite bias for which entry i of an exact curve holds."""
    low = bias[i]
    if i + 1 == len(bias):
        return float(max(low + 1, np.nextafter(low, np.inf))) if i else 0.0
    high = bias[i + 1]
    middle = low / 2 + high / 2 if i else high - 1
    return float(middle if low < middle <= high else high)


def _intervals(draws, confidence):
    """`<metric>_low` and `<metric>_high` over resamples, by nearest rank."""
    values = {}
    for name in draws[0]:
        drawn = np.sort([draw[name] for draw in draws])
        drawn = drawn[:len(drawn) - np.isnan(drawn).sum()]
        for side, share in ("low", (1 - confidence) / 2), ("high", (1 + confidence) / 2):
            values[f"{name}_{side}"] = float(drawn[round(share * (len(drawn) - 1))]) if len(drawn) else float("nan")
    return values


def _mask(name, mask, length=None):
    mask = np.asarray(mask)
    if mask.dtype != bool or mask.ndim != 1 or len(mask) != (len(mask) if length is None else length) or not len(mask):
        raise ValueError(f"{name} must be bool of shape ({length or 'compositions'},), got {mask.dtype} of shape "
                         f"{mask.shape}")
    return mask.copy()


def _integers(name, values, shape, below=None):
    """An int64 array of the shape (None: any length), its entries in [0, below) if that is given."""
    values = np.asarray(values)
    fits = len(shape) == values.ndim and all(want in (None, got) for want, got in zip(shape, values.shape))
    if not fits or (values.dtype.kind not in "iu" and values.size):
        raise ValueError(f"{name} must be integers of shape {shape}, got {values.dtype} of shape {values.shape}")
    if below is not None and ((values < 0) | (values >= below)).any():
        row = ((values < 0) | (values >= below)).argmax()
        raise ValueError(f"{name} must lie in 0 to {below - 1}, a column of the scores: row {row} is {values[row]}")
    return values.astype(np.int64)


def _reals(name, values, length=None):
    values = np.asarray(values)
    if values.ndim != 1 or values.dtype.kind not in "fiu" or len(values) != (len(values) if length is None else length):
        raise ValueError(f"{name} must be numbers of shape ({'any' if length is None else length},), got {values.dtype} "
                         f"of shape {values.shape}")
    if np.isnan(values).any():
        raise ValueError(f"{name} must not be nan: entry {np.isnan(values).argmax()} is")
    return values.astype(float)


def load(files):
    """Arrays by name from .npz files and, memory-mapped, from .npy files (named by the file; `scores` if that is none)."""
    arrays, names = {}, ("scores", "target", "seen", "candidates", "pairs")
    for file in map(Path, files):
        if file.suffix == ".npy":
            arrays[file.stem if file.stem in names else "scores"] = np.load(file, mmap_mode="r")
        else:
            with np.load(file) as archive:
                arrays |= {name: archive[name] for name in archive.files if name in names}
    if lacking := [name for name in names[:3] if name not in arrays]:
        raise ValueError(f"{', '.join(map(str, files))}: no array named {' and none named '.join(lacking)}; needed are "
                         "scores (N, P), target (N,), seen (P,), optional candidates (P,), pairs (P, 2)")
    return arrays


def table(reports):
    """Reports by protocol as lines of text, in percent (the bias as it is)."""
    names = [name for name in reports["exact"] if name + "_low" in reports["exact"] or isinstance(reports["exact"][name], float)]
    lines = [f"{'':<32}" + "".join(f"{protocol:>24}" for protocol in reports)]
    for name in (name for name in names if not name.endswith(("_low", "_high"))):
        scale, cells = 1 if name == "bias" else 100, []
        for report in reports.values():
            bounds = [report[name + side] * scale for side in ("_low", "_high") if name + side in report]
            cells.append(f"{report[name] * scale:.2f}" + (" [{:.2f}, {:.2f}]".format(*bounds) if bounds else ""))
        lines.append(f"{name:<32}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def plot(sweep, path):
    """Seen against unseen accuracy with the point of the best HM, both protocols, into an image file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plotting needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.subplots()
    for protocol, style in zip(PROTOCOLS, ("-", "o--")):
        curve, report = sweep.curve(protocol), sweep.report(protocol)
        label = f"{protocol}: AUC {100 * report['auc']:.1f}, best HM {100 * report['best_hm']:.1f}"
        line, = axes.plot(100 * curve.unseen, 100 * curve.seen, style, markersize=3, linewidth=1.2, label=label)
        axes.plot(100 * report["hm_unseen"], 100 * report["hm_seen"], "*", markersize=14, color=line.get_color())
    axes.set(xlabel="accuracy on unseen compositions (%)", ylabel="accuracy on seen compositions (%)",
             title=f"top-{sweep.topk}, star: best harmonic mean", xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def write_compositions(sweep, bias, path):
    """A row of CSV for each composition with images: accuracy at bias 0, at `bias` and with the unseen only."""
    images, plain = per_composition(sweep, 0.0)
    at_bias, unseen_only = per_composition(sweep, bias)[1], per_composition(sweep, np.inf)[1]
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["column", "state", "object", "seen", "candidate", "images", "accuracy", "accuracy_at_best_hm",
                       "accuracy_unseen_only"])
        for c in np.flatnonzero(images):
            pair = ["", ""] if sweep.pairs is None else sweep.pairs[c].tolist()
            rows.writerow([c, *pair, int(sweep.seen[c]), int(sweep.candidates[c]), images[c],
                           *(f"{right[c] / images[c]:.4f}" for right in (plain, at_bias, unseen_only))])


def main(argv=None):
    """Score a saved file: a table in percent on stdout, both protocols side by side."""
    parser = argparse.ArgumentParser(description="Exact and published bias-sweep metrics of saved scores.")
    parser.add_argument("files", nargs="+", help=".npz with scores (N, P), target (N,), seen (P,), optional candidates (P,), "
                        "pairs (P, 2); or .npy files of these names, read memory-mapped (scores.npy rest.npz)")
    parser.add_argument("--topk", type=int, default=1, help="right if the truth is among the k best (default 1)")
    parser.add_argument("--confidence", type=float, help="bootstrap intervals over images, as 0.95")
    parser.add_argument("--json", action="store_true", help="print JSON (fractions; null for what does not exist)")
    parser.add_argument("--per-composition", metavar="CSV", help="accuracy of each composition")
    parser.add_argument("--plot", metavar="PNG", help="draw the curves (needs matplotlib)")
    options = parser.parse_args(argv)
    try:
        arrays = load(options.files)
        sweep = BiasSweep(arrays["seen"], candidates=arrays.get("candidates"), pairs=arrays.get("pairs"), topk=options.topk)
        sweep.update(arrays["scores"], arrays["target"])
        reports = {protocol: sweep.report(protocol, options.confidence) for protocol in PROTOCOLS}
        if options.per_composition:
            write_compositions(sweep, np.nan_to_num(reports["exact"]["bias"]), options.per_composition)
        if options.plot:
            plot(sweep, options.plot)
    except (ValueError, OSError, BadZipFile) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if options.json:
        finite = {protocol: {name: None if isinstance(value, float) and not np.isfinite(value) else value
                             for name, value in report.items()} for protocol, report in reports.items()}
        print(json.dumps(finite, indent=1))
        return
    report = reports["exact"]
    print(f"{report['n_seen'] + report['n_unseen']:,} images ({report['n_seen']:,} of seen compositions, {report['n_unseen']:,} "
          f"of unseen), {sweep.candidates.sum():,} candidates of {len(sweep.seen):,} compositions "
          f"({(sweep.seen & sweep.candidates).sum():,} seen), top-{sweep.topk}; percent\n{table(reports)}")


if __name__ == "__main__":
    main()
