"""The bias-sweep evaluator of compositional zero-shot learning: exact, streaming, one file, NumPy alone. Copy it.

An image is predicted as the best candidate of `score + bias * [unseen]`: a low bias favours the compositions seen in
training, a high one the unseen. Over all biases, seen against unseen accuracy is a curve with an area (AUC) and a best
harmonic mean (HM). It changes only where an image's best seen and unseen scores cross, so eight numbers an image do.

Shapes: N images, B of them in one block, P compositions (columns of the scores), k = topk, K points of a curve,
T thresholds. Accuracies are fractions. Ties go to the lower column, seen before unseen. Two protocols: `exact` tries
every (float64) bias where a prediction changes; `published` the about 20 of the field's evaluator, and so reports less.

    >>> scores = np.array([[.9, .1, .3], [.6, .2, .5], [.1, .3, .6], [.6, .3, .7]])  # (N, P), higher is better
    >>> target = np.array([0, 1, 2, 1])                                              # (N,) columns of the truth
    >>> seen = np.array([True, True, False])                                         # (P,)
    >>> report = evaluate(scores, target, seen)
    >>> report["best_seen"], report["best_unseen"], round(report["auc"], 3)
    (0.3333333333333333, 1.0, 0.333)

From torch: `scores.float().cpu()`. From a dictionary of scores by pair: `np.stack([d[p] for p in pairs], 1)`.
Larger than memory: one `BiasSweep`, `update` a block; over several machines: `merge`. Reduced on a GPU: `update_kept`.
As a script: `python evaluate.py scores.npz --confidence 0.95 --plot curve.png` (see `--help`).
"""

import argparse
import json
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np

BLOCK = 1 << 22  # bytes of scores at a time: they stay in the cache between the passes over them
THREADS = min(4, os.cpu_count() or 1)  # more than a few only wait for memory
LIMIT = 8e307  # the difference of two scores beyond it would overflow
PROTOCOLS, ENDS = ("exact", "published"), ("_low", "_high")
UP_TO, ABOVE, STATE, OBJECT, GAP, TARGET = 0, 1, 2, 4, 6, 7  # columns of what is kept an image, see BiasSweep._keep
KINDS = {"b": "bool", "iu": "integer", "f": "float", "fiu": "real"}
PRIMITIVES = (STATE, "state_accuracy"), (OBJECT, "object_accuracy")


class Curve(NamedTuple):
    """Accuracy as the bias on unseen compositions grows.

    `exact`: from -inf strictly ascending; entry i holds for biases above `bias[i]` up to and including `bias[i + 1]`.
    `published`: the biases tried, ascending, the last one 1000; entry i holds at `bias[i]`.
    """
    bias: np.ndarray  # (K,)
    seen: np.ndarray  # (K,) non-increasing, accuracy on the images of seen compositions
    unseen: np.ndarray  # (K,) non-decreasing, accuracy on the others


class BiasSweep:
    """Feed it blocks of scores; it keeps eight numbers an image and answers for every bias.

    `seen` (P,) bool: compositions with training images. `candidates` (P,) bool: those that may win; None, all of them:
    the open world; those of training and of the phase: the closed world; seen or feasible enough: the hard mask.
    `pairs` (P, 2) int: state and object of each column, for the accuracies on these (nan without). `topk`: right if the
    truth is among the k best; the time grows with k. Anything else is a ValueError.
    """

    def __init__(self, seen, *, candidates=None, pairs=None, topk=1):
        self.seen, p = _array("seen", seen, "b", (None,)).copy(), len(seen)
        self.candidates = _array("candidates", np.ones(p, bool) if candidates is None else candidates, "b", (p,)).copy()
        self.pairs = None if pairs is None else _array("pairs", pairs, "iu", (p, 2))
        self.topk = int(_array("topk", topk, "iu", ()))
        if self.topk < 1 or not p:
            raise ValueError(f"topk and the length of seen must be at least 1, got {topk} and {p}")
        halves = self.seen & self.candidates, ~self.seen & self.candidates
        self._groups = [(half, np.flatnonzero(half), np.flatnonzero(~half)) for half in halves]
        self._parts = []  # (B, 8) each

    def update(self, scores, target):
        """Add B images: `scores` (B, P), any real dtype and layout, higher is better; `target` (B,), the true columns.

        The scores are neither changed nor kept. A ValueError names the row; nothing of that call is added.
        """
        self._keep(*_each_block(scores, target, len(self.seen), lambda block, top, _: (
            *_best(block, top, self._groups[0], self.topk), *_best(block, top, self._groups[1], self.topk))))

    def update_kept(self, seen_scores, seen_columns, unseen_scores, unseen_columns, target):
        """Add B images already reduced to the k best seen and k best unseen candidates, (B, k) each; target (B,).

        Best first, scores padded with -inf where a group has fewer than k candidates. Equal scores must stand in the
        order of their columns to give what `update` gives; a GPU's topk may not do that.
        """
        target, kept = _array("target", target, "iu", (None,), len(self.seen)), []
        given = ("seen", seen_scores, seen_columns), ("unseen", unseen_scores, unseen_columns)
        for (name, scores, columns), (_, group, _) in zip(given, self._groups):
            scores = _array(f"{name}_scores", scores, "f", (len(target), self.topk)).astype(float)
            columns = _array(f"{name}_columns", columns, "iu", scores.shape).astype(int)
            real = np.arange(self.topk) < len(group)  # the rest is padding
            good = np.where(real, (np.abs(scores) < LIMIT) & np.isin(columns, group), scores == -np.inf)
            if not (good := good.all(1) & (scores[:, 1:] <= scores[:, :-1]).all(1)).all():
                raise ValueError(f"{name} row {good.argmin()} must hold scores of {name} candidates, best first, then "
                                 f"-inf; got {scores[good.argmin()]} at columns {columns[good.argmin()]}")
            kept += scores, np.where(real, columns, -1)
        self._keep(*kept, target)

    def merge(self, other):
        """Add the images of another sweep with the same masks, pairs and topk: shards evaluated apart."""
        for name in "seen", "candidates", "pairs", "topk":
            if not np.array_equal(getattr(self, name), getattr(other, name)):
                raise ValueError(f"cannot merge sweeps that differ in {name}: build both with the same arguments")
        self._parts = self._parts + other._parts

    def curve(self, protocol="exact"):
        """The Curve of the images so far; ValueError without images. A missing half (no unseen images) is nan."""
        turn, seen, kept = self._images()
        return _curve(turn, seen, kept[:, GAP], np.ones(len(turn), int), protocol)[0]

    def report(self, protocol="exact", confidence=None):
        """The metrics as a dict of plain numbers; nan where there is nothing to divide by.

        `auc, best_hm, best_seen, best_unseen`; at the best HM `hm_seen, hm_unseen, bias`; at bias 0 `state_accuracy,
        object_accuracy`, also `..._at_best_hm` and `..._unseen_only` (bias +inf); `n_seen, n_unseen, topk, protocol`;
        with a confidence as 0.95 `<metric>_low` and `<metric>_high`, percentiles over 1,000 seeded bootstrap resamples
        of the images. Without seen or without unseen images one UserWarning says so.
        """
        if confidence is not None and not 0 < confidence < 1:
            raise ValueError(f"confidence must lie between 0 and 1, as 0.95 does, got {confidence!r}")
        images = self._images()
        n, n_seen = len(images[1]), int(images[1].sum())
        if n_seen in (0, n):
            warnings.warn(f"no image of {'un' * bool(n_seen)}seen compositions: what needs one is nan", stacklevel=2)
        values = _metrics(*images, np.ones(n, int), protocol)
        if confidence is not None:
            random = np.random.default_rng(0)
            draws = (np.bincount(random.integers(n, size=n), minlength=n) for _ in range(1000))
            draws = np.sort([list(_metrics(*images, draw, protocol).values()) for draw in draws], axis=0)
            last = (~np.isnan(draws)).sum(0) - 1  # nan, from resamples without one half, comes last
            for end, share in zip(ENDS, (0.5 - confidence / 2, 0.5 + confidence / 2)):
                rank = np.rint(share * last).astype(int).clip(0)
                values |= {name + end: float(draws[rank[i], i]) for i, name in enumerate(list(values)[:len(last)])}
        return values | {"n_seen": n_seen, "n_unseen": n - n_seen, "topk": self.topk, "protocol": protocol}

    def _keep(self, seen_scores, seen_columns, unseen_scores, unseen_columns, target):
        """Reduce the (B, k) best of both groups, padded with -inf and column -1, to what decides at every bias.

        Seen rank i and unseen rank k-1-i compete for one place of the top k: the seen holds it for biases up to
        cross[:, i]. So composition, state and object (nan if not known) are each right up to one bias (-inf: at none)
        and above another (inf: at none): two columns each.
        """
        part = np.full((len(target), 8), np.nan)
        own = np.where(unseen_columns == target[:, None], unseen_scores, -np.inf).max(1)
        with np.errstate(invalid="ignore"):  # -inf - -inf: both are padding, and no column matches
            cross = seen_scores - unseen_scores[:, ::-1]
            part[:, GAP], part[:, TARGET] = seen_scores[:, -1] - own, target
        codes = [np.arange(len(self.seen)), *(() if self.pairs is None else self.pairs.T)]
        for i, code in zip((UP_TO, STATE, OBJECT), codes):
            for at, columns, turns, never in ((i, seen_columns, cross, -np.inf),
                                              (i + 1, unseen_columns, cross[:, ::-1], np.inf)):
                match = (code[columns] == code[target][:, None]) & (columns >= 0)
                part[:, at] = np.where(match.any(1), turns[np.arange(len(match)), match.argmax(1)], never)
        self._parts.append(part)

    def _images(self):
        """In the order of the bias above which an image turns wrong, if it is seen, or right: that bias, seen, kept."""
        kept = np.concatenate(self._parts or [np.empty((0, 8))])
        if not len(kept):
            raise ValueError("no images to evaluate: the set is empty, call update first")
        self._parts, seen = [kept], self.seen[kept[:, TARGET].astype(int)]
        turn = np.where(seen, kept[:, UP_TO], kept[:, ABOVE])
        order = np.argsort(turn)
        return turn[order], seen[order], kept[order]


def evaluate(scores, target, seen, *, candidates=None, pairs=None, topk=1, protocol="exact", confidence=None):
    """The `BiasSweep.report` of scores (N, P), higher is better, against the true columns `target` (N,); see there."""
    sweep = BiasSweep(seen, candidates=candidates, pairs=pairs, topk=topk)
    sweep.update(scores, target)
    return sweep.report(protocol, confidence)


def accuracy_at(sweep, bias):
    """What a user gets who fixes the bias in advance, say to validation's best: no oracle chooses it on the test set.

    Returns `seen, unseen, hm, state_accuracy, object_accuracy`; nan where there is nothing to divide by.
    """
    if (bias := np.asarray(bias)).ndim or bias.dtype.kind not in "fiu" or np.isnan(bias):
        raise ValueError(f"bias must be a number, got {bias.tolist()!r}; a report of seen or unseen alone has none")
    _, seen, kept = sweep._images()
    values = {name: _accuracy(kept, UP_TO, bias, half) for name, half in (("seen", seen), ("unseen", ~seen))}
    values |= {name: _accuracy(kept, i, bias, np.ones(len(kept))) for i, name in PRIMITIVES}
    return values | {"hm": float(_harmonic(values["seen"], values["unseen"]))}


def threshold_sweep(blocks, seen, feasibility, thresholds, *, candidates=None):
    """Top-1 AUC of the hard mask at T thresholds from one reading of the scores: the same as T evaluations give.

    `blocks`: iterable of (scores (B, P), target (B,)). At threshold t those of `candidates` (P,) remain that are seen
    or have `feasibility` >= t. Returns (T,) `threshold`, `removed` (share of the candidates), `auc`, `auc_published`.
    """
    whole = BiasSweep(seen, candidates=candidates)
    feasibility = _array("feasibility", feasibility, "fiu", whole.seen.shape)
    steps, inverse = np.unique(_array("thresholds", thresholds, "fiu", (None,)), return_inverse=True)
    if not len(steps) or np.isnan(feasibility).any() or np.isnan(steps).any():
        raise ValueError(f"feasibility and thresholds must be numbers, got {'nan' if len(steps) else 'no threshold'}")
    level = np.searchsorted(steps, feasibility, "right") - 1  # the last threshold at which a column is kept, -1: none
    _, unseen, others = whole._groups[1]
    removed = (level[unseen] < np.arange(len(steps))[:, None]).sum(1) / max(whole.candidates.sum(), 1)
    level[others] = -1
    kept = [_by_level(whole, level, len(steps), block) for block in blocks]
    best_seen, seen_wins, best, wins, seen = map(np.concatenate, zip(*kept)) if kept else whole._images()

    def areas(i):  # as BiasSweep does it, for k = 1
        with np.errstate(invalid="ignore"):
            cross = best_seen - best[:, i]
        order = np.argsort(turn := np.where(seen_wins | wins[:, i], cross, np.where(seen, -np.inf, np.inf)))
        images = turn[order], seen[order], cross[order], np.ones(len(seen), int)
        return [_curve(*images, protocol)[1] for protocol in PROTOCOLS]

    with ThreadPoolExecutor(THREADS) as pool:
        auc, published = np.array([*pool.map(areas, range(len(steps)))])[inverse].T
    return dict(threshold=steps[inverse], removed=removed[inverse], auc=auc, auc_published=published)


def _by_level(whole, level, count, pair):
    """Best seen score (B,), whether it is the truth's; best unseen at each threshold (B, T), the same; truth seen (B,).

    The best unseen are found among the most feasible sixteenth and the other columns above the best of these: few,
    unless scores and feasibility contradict each other.
    """
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"blocks must be pairs (scores, target), as [(scores, target)]; got {type(pair).__name__}")
    columns = np.argsort(level, kind="stable")[(level < 0).sum():]
    runs, starts = np.unique(level[columns], return_index=True)
    tail = slice(max(np.searchsorted(starts, len(columns) * 15 // 16, "right") - 1, 0), None)
    runs, starts = runs[tail], starts[tail]

    def reduce(block, top, target):
        seen_score, seen_column = _best(block, top, whole._groups[0], 1)
        best = np.full((len(block), count), -np.inf, block.dtype)
        if len(columns):
            best[:, runs] = np.maximum.reduceat(block.take(columns[starts[0]:], axis=1), starts - starts[0], axis=1)
            rows, hits = np.divmod(np.flatnonzero(block > best.max(1, keepdims=True)), block.shape[1])
            rows, hits = rows[level[hits] >= 0], hits[level[hits] >= 0]
            np.maximum.at(best, (rows, level[hits]), block[rows, hits])
            best = np.maximum.accumulate(best[:, ::-1], axis=1)[:, ::-1]
        rows, own, wins = np.arange(len(block)), level[target], np.zeros(best.shape, bool)
        truth = block[rows, target]
        for i in np.flatnonzero((own >= 0) & (best[rows, own] == truth)):  # the truth wins while it is kept, but
            lower = level[:target[i]][block[i, :target[i]] == truth[i]]  # not while a lower column of its score is
            wins[i, lower.max(initial=-1) + 1:own[i] + 1] = True
        return seen_score[:, 0], seen_column[:, 0] == target, best, wins & (best == truth[:, None])

    *reduced, target = _each_block(*pair, len(level), reduce)
    return *reduced, whole.seen[target]


def _each_block(scores, target, p, work):
    """What work(block, top, target) returns for blocks of rows, joined, and target; top: columns of the rows' best."""
    scores = _array("scores", scores, "fiu", (None, p))
    target = _array("target", target, "iu", (len(scores),), p)
    kind = np.promote_types(scores.dtype, np.float32)
    step = max(1, BLOCK // (p * kind.itemsize))

    def one(start):
        block = np.ascontiguousarray(scores[start:start + step], kind)
        top = block.argmax(1)  # nan counts as the greatest
        low, high = block.min(initial=0), block[np.arange(len(block)), top].max(initial=0)
        if not (float(low) > -LIMIT and float(high) < LIMIT):
            row, column = np.argwhere(~(np.abs(block.astype(float)) < LIMIT))[0]
            raise ValueError(f"scores must be finite: row {start + row}, column {column} is {block[row, column]}; to "
                             "exclude compositions pass candidates")
        return work(block, top, target[start:start + step])

    with ThreadPoolExecutor(THREADS) as pool:  # NumPy lets go of the interpreter; the first row's error comes first
        return *map(np.concatenate, zip(*pool.map(one, range(0, max(len(scores), 1), step)))), target


def _best(block, top, group, k):
    """The k best of a group in each row, the lowest column first among equals: scores and columns (B, k), padded."""
    (member, columns, others), rows = group, np.arange(len(block))
    best, where = np.full((len(block), k), -np.inf), np.full((len(block), k), -1)
    if k == 1 and len(columns):  # where the best of all is of the group, it is the group's best
        where[:, 0], best[:, 0] = top, block[rows, top]
        rows = np.flatnonzero(~member[top])
    if not len(columns) or not len(rows):
        return best, where
    if few := 4 * len(columns) < len(member):
        part = block.take(columns, axis=1)[rows]
    else:
        part = block[rows]
        part[:, others] = -np.inf
    for i in range(min(k, len(columns))):
        at = part.argmax(1)
        best[rows, i], where[rows, i] = part[np.arange(len(rows)), at], columns[at] if few else at
        part[np.arange(len(rows)), at] = -np.inf
    return best, where


def _accuracy(kept, i, bias, weights):
    """The share of images (N,) counted `weights` times that are right at a bias (see BiasSweep._keep), or nan."""
    if np.isnan(bias) or np.isnan(kept[0, i]) or not weights.any():
        return float("nan")
    bias = np.nan_to_num(bias)  # infinite: beyond every crossing
    return float((((bias <= kept[:, i]) | (bias > kept[:, i + 1])) * weights).sum() / weights.sum())


def _harmonic(a, b):
    return 2 * a * b / np.maximum(a + b, np.finfo(float).tiny)  # 0 where both are 0


def _curve(turn, seen, gap, weights, protocol):
    """The Curve of images (N,) counted `weights` times, in the order of BiasSweep._images, and the area under it."""
    n_seen, n_unseen = weights[seen].sum(), weights[~seen].sum()
    if protocol == "exact":
        bias = np.unique(np.append(-np.inf, turn[turn < np.inf]))
        turned = np.searchsorted(turn, bias, "right")
    elif protocol == "published":
        tried = ~seen & (turn < 1000)  # unseen and right at bias 1000
        bias = np.sort(np.repeat(gap[tried], weights[tried])) - 1e-4
        bias = np.append(bias[::max(len(bias) // 20, 1)], 1000 if n_unseen else -np.inf)
        turned = np.searchsorted(turn, np.nan_to_num(bias), "left")
    else:
        raise ValueError(f"protocol must be one of {PROTOCOLS}, got {protocol!r}")
    lost, gained = (np.append(0, np.cumsum(weights * half)) for half in (seen, ~seen))
    with np.errstate(invalid="ignore"):  # 0 / 0: no image of that half
        seen, unseen = (n_seen - lost[turned]) / n_seen, gained[turned] / n_unseen
    first = seen[0] * unseen[0] * (protocol == "exact")  # it begins at unseen accuracy 0
    return Curve(bias, seen, unseen), float(first + np.sum((seen[1:] + seen[:-1]) * np.diff(unseen)) / 2)


def _metrics(turn, seen, kept, weights, protocol):
    """The metrics of a report for images (N,) counted `weights` times, in the order of BiasSweep._images."""
    (curve, auc), nan = _curve(turn, seen, kept[:, GAP], weights, protocol), float("nan")
    values = dict(auc=auc, best_hm=nan, best_seen=float(curve.seen.max()), best_unseen=float(curve.unseen.max()),
                  hm_seen=nan, hm_unseen=nan, bias=nan)
    if not np.isnan(auc):
        hm = _harmonic(curve.seen, curve.unseen)
        i = hm.argmax()
        values |= dict(best_hm=float(hm[i]), hm_seen=float(curve.seen[i]), hm_unseen=float(curve.unseen[i]),
                       bias=float(curve.bias[i]) if protocol == "published" else _inside(curve.bias, i))
    for when, bias in ("", 0.0), ("_at_best_hm", values["bias"]), ("_unseen_only", np.inf):
        values |= {name + when: _accuracy(kept, i, bias, weights) for i, name in PRIMITIVES}
    return values


def _inside(bias, i):
    """A finite bias at which entry i of an exact curve holds: midway to the next one where there is one."""
    low, high = bias[i], bias[i + 1] if i + 1 < len(bias) else np.inf
    if low == -np.inf or high == np.inf:
        return float(max(low + 1, np.nextafter(low, high)) if low > -np.inf else min(high - 1, 0.0))
    middle = low / 2 + high / 2
    return float(middle if low < middle else high)  # neighbouring floats: the entry holds at high


def _array(name, values, kinds, shape, below=None):
    """An array of one of the dtype kinds and of a shape (None: any length), integers in [0, below); or a ValueError."""
    values = np.asarray(values)
    fits = values.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, values.shape))
    if not fits or values.dtype.kind not in kinds:
        want = f"{KINDS[kinds]} of shape {shape}".replace("None", "any")
        raise ValueError(f"{name} must be {want}, got {values.dtype} of shape {values.shape}")
    if below is not None and (wrong := (values < 0) | (values >= below)).any():
        raise ValueError(f"{name} must lie in 0 to {below - 1}, got {values[wrong][0]} in row {wrong.argmax()}")
    return values if below is None else values.astype(int)


def load(files):
    """Scores, target, and the rest by name, from .npz and memory-mapped .npy files (named by stem, or `scores`)."""
    arrays, names = {}, ("scores", "target", "seen", "candidates", "pairs")
    for path in map(Path, files):
        try:
            data = np.load(path, mmap_mode="r")
            data = {path.stem if path.stem in names else "scores": data} if isinstance(data, np.ndarray) else data
            arrays |= {name: data[name] for name in names if name in data}
        except (ValueError, EOFError, BadZipFile) as error:
            raise ValueError(f"{path} is no .npz or .npy file of plain arrays: {str(error).splitlines()[0]}") from None
    if lacking := [name for name in names[:3] if name not in arrays]:
        raise ValueError(f"no array {', '.join(lacking)} in {', '.join(files)}: scores, target and seen are needed")
    return arrays.pop("scores"), arrays.pop("target"), arrays


def table(reports):
    """Lines of text, a metric each, of the reports by protocol: percent, but the bias as it is."""
    lines = [" " * 30 + "".join(f"{protocol:>25}" for protocol in reports)]
    for name, value in reports["exact"].items():
        if isinstance(value, float) and not name.endswith(ENDS):
            lines.append(f"{name:30}")
            for report in reports.values():
                value, low, high = (report.get(name + end, 0) * (1 if name == "bias" else 100) for end in ("", *ENDS))
                lines[-1] += f"{value:.2f}{f' [{low:.2f}, {high:.2f}]' if name + '_low' in report else ''}".rjust(25)
    return "\n".join(lines)


def plot(sweep, reports, path):
    """Seen against unseen accuracy, both protocols, the best HM marked, into an image file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("the plot needs matplotlib: pip install matplotlib") from None
    axes = Figure(figsize=(5, 4.5), layout="constrained").subplots()
    for (protocol, report), style in zip(reports.items(), ("-", "o--")):
        _, seen, unseen = sweep.curve(protocol)
        label = f"{protocol}: AUC {100 * report['auc']:.1f}, best HM {100 * report['best_hm']:.1f}"
        line, = axes.plot(100 * unseen, 100 * seen, style, markersize=3, linewidth=1.2, label=label)
        axes.plot(100 * report["hm_unseen"], 100 * report["hm_seen"], "*", markersize=14, color=line.get_color())
    axes.set(xlabel="accuracy on unseen compositions (%)", ylabel="accuracy on seen compositions (%)", xlim=0, ylim=0)
    axes.legend(title=f"top-{sweep.topk}, star: best HM", loc="lower left")
    axes.figure.savefig(path, dpi=150)


def write_compositions(sweep, bias, path):
    """A CSV row for each composition with images: its accuracy at bias 0, at `bias` and with the unseen only."""
    kept = sweep._images()[2]
    lines = ["column,state,object,seen,candidate,images,accuracy,accuracy_at_best_hm,accuracy_unseen_only"]
    for c in np.unique(kept[:, TARGET]).astype(int):
        pair, here = ("", "") if sweep.pairs is None else sweep.pairs[c], kept[:, TARGET] == c
        shares = (_accuracy(kept, UP_TO, at, here) for at in (0.0, bias, np.inf))
        lines.append(",".join(map(str, (c, *pair, int(sweep.seen[c]), int(sweep.candidates[c]), here.sum(), *shares))))
    Path(path).write_text("\n".join(lines) + "\n")


def main(argv=None):
    """Score a saved file: a table in percent on stdout, both protocols side by side."""
    parser = argparse.ArgumentParser(description="Exact and published bias-sweep metrics of saved scores.")
    parser.add_argument("files", nargs="+", help=".npz with scores (N, P), target (N,), seen (P,), optional candidates "
                        "(P,), pairs (P, 2); or .npy files of these names, read memory-mapped: scores.npy rest.npz")
    parser.add_argument("--topk", type=int, default=1, help="right if the truth is among the k best (default 1)")
    parser.add_argument("--confidence", type=float, help="bootstrap intervals over images, as 0.95")
    parser.add_argument("--json", action="store_true", help="print JSON: fractions, null for what does not exist")
    parser.add_argument("--per-composition", metavar="CSV", help="write the accuracy of each composition")
    parser.add_argument("--plot", metavar="PNG", help="draw the curves (needs matplotlib)")
    options = parser.parse_args(argv)
    try:
        scores, target, arrays = load(options.files)
        sweep = BiasSweep(**arrays, topk=options.topk)
        sweep.update(scores, target)
        reports = {protocol: sweep.report(protocol, options.confidence) for protocol in PROTOCOLS}
        if options.json:
            print(json.dumps({protocol: {name: None if value in (np.inf, -np.inf) or value != value else value
                                         for name, value in report.items()} for protocol, report in reports.items()}))
        else:
            print("{n_seen:,} images of seen and {n_unseen:,} of unseen compositions; ".format(**reports["exact"])
                  + f"{sweep.candidates.sum():,} candidates ({len(sweep._groups[0][1]):,} seen) of {len(sweep.seen):,} "
                  f"compositions; top-{sweep.topk}; percent", table(reports), sep="\n")
        if options.per_composition:
            write_compositions(sweep, np.nan_to_num(reports["exact"]["bias"]), options.per_composition)
        if options.plot:
            plot(sweep, reports, options.plot)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # without a line of source
    main()
