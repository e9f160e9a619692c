"""Feasibility of unseen compositions from how alike their states and objects are: scores, masks, reasons, rankings.

This file stands alone: copy it into any project that has NumPy. The method is that of Mancini et al., "Open World
Compositional Zero-Shot Learning", CVPR 2021. As a script it prints the paper's tables for a pair list and word vectors:

    python feasibility.py --pairs train_pairs.txt --vectors glove.6B.300d.txt [--explain wet cat]

S states, O objects, D the size of their vectors; the composition (s, o) is entry [s, o] of an (S, O) array.
Arrays are anything NumPy understands; from PyTorch pass `embedding.detach().cpu().numpy()`.
"""

import argparse
import csv
import difflib
import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

MIXES = {  # the paper's g and its ablation
    "mean": lambda state, object: (state + object) / 2, "max": np.maximum,
    "state": lambda state, object: state, "object": lambda state, object: object}


def feasibility_scores(state_vectors, object_vectors, seen, *, mix="mean"):
    """Feasibility ρ of every composition (Eq. 3 to 5): how alike its primitives are to those of seen compositions.

    state_vectors (S, D), object_vectors (O, D) of any float type, seen (S, O) bool -> (S, O) float64 in [-1, 1].
    ρ_obj(s, o) is the greatest cosine of o to an object seen with s, ρ_state(s, o) that of s to a state seen with o,
    and ρ is their "mean" or "max", or that of the "state" or "object" alone: the paper's g is `mix`.
    A term without any supporting seen composition is -1. Seen compositions are 1.
    ValueError: shapes that do not fit, a vector zero or not finite, `seen` not bool or nowhere True, an unknown mix.

    >>> states, objects = [[1, 0], [0.6, 0.8]], [[1, 0], [0.8, 0.6]]  # wet, small; dog, cat
    >>> seen = np.array([[True, False], [True, True]])
    >>> feasibility_scores(states, objects, seen)  # wet cat: wet as a dog, which is like a cat, 0.8; a small cat, 0.6
    array([[1. , 0.7],
           [1. , 1. ]])
    """
    states, objects, seen = _checked(state_vectors, object_vectors, seen)
    if mix not in MIXES:
        raise ValueError(f"unknown mix {mix!r}: choose from {', '.join(MIXES)}")
    scores = MIXES[mix](_closest(states, seen.T).T, _closest(objects, seen))
    scores[seen] = 1
    return scores


class Explanation(NamedTuple):
    """The seen compositions behind a feasibility score, as (state, object, cosine), most alike first."""

    lend_state: list  # the same state with other objects: the first cosine is ρ_obj
    lend_object: list  # the same object with other states: the first cosine is ρ_state


def explain(state, object, state_vectors, object_vectors, seen):
    """Why the composition with these two indices has its score: its seen relatives -> Explanation.

    Arrays and errors as in feasibility_scores. A seen composition does not explain itself: its lists leave it out.

    >>> explain(0, 1, [[1, 0], [0.6, 0.8]], [[1, 0], [0.8, 0.6]], np.array([[True, False], [True, True]]))
    Explanation(lend_state=[(0, 0, 0.8)], lend_object=[(1, 1, 0.6)])
    """
    states, objects, seen = _checked(state_vectors, object_vectors, seen)
    if not all(hasattr(i, "__index__") and 0 <= i < size for i, size in zip((state, object), seen.shape)):
        raise ValueError(f"no composition ({state!r}, {object!r}) among {len(states)} states by {len(objects)} objects")
    state, object = int(state), int(object)
    lend_state = [(state, int(o), float(objects[object, o])) for o in np.flatnonzero(seen[state]) if o != object]
    lend_object = [(int(s), object, float(states[state, s])) for s in np.flatnonzero(seen[:, object]) if s != state]
    return Explanation(*(sorted(support, key=lambda row: -row[2]) for support in (lend_state, lend_object)))


class Ranking(NamedTuple):
    """Unseen compositions in pairs of index arrays: the most feasible, best first; the least feasible, worst first."""

    objects: list  # a pair of arrays of states for each object
    states: list  # a pair of arrays of objects for each state
    overall: tuple  # one pair of arrays of compositions s * O + o


def ranked(feasibility, seen, *, top=3):
    """The paper's ranked tables: most and least feasible unseen partners per object, per state and overall -> Ranking.

    feasibility (S, O), seen (S, O) bool. There are fewer than `top` where fewer are unseen; ties keep index order.
    """
    feasibility, seen = _scores(feasibility, seen)
    if top < 1:
        raise ValueError(f"top is {top}; expected at least 1")

    def ends(scores, seen):
        unseen = np.flatnonzero(~seen)
        return tuple(unseen[np.argsort(sign * scores[unseen], kind="stable")[:top]] for sign in (-1, 1))

    return Ranking([ends(*column) for column in zip(feasibility.T, seen.T)],
                   [ends(*row) for row in zip(feasibility, seen)], ends(feasibility.ravel(), seen.ravel()))


def hard_mask(feasibility, seen, threshold):
    """The compositions that the hard mask lets win (Eq. 6): seen, or of at least this feasibility -> (S, O) bool.

    For an evaluation's candidates. Scores are never to be multiplied by it: a 0 would win against negative scores.
    """
    feasibility, seen = _scores(feasibility, seen)
    return seen | (feasibility >= threshold)


def median_mask(feasibility, seen, *, inverse=False):
    """The appendix's check on the hard mask -> (S, O) bool: seen, or of the unseen those from their median up.

    `inverse` keeps the others, those below the median: if feasibility means anything, that is much the worse mask.
    """
    feasibility, seen = _scores(feasibility, seen)
    upper = feasibility >= (np.median(feasibility[~seen]) if not seen.all() else 1)
    return seen | (upper != inverse)


def combine(feasibility, external, *, weight):
    """Feasibility with knowledge from elsewhere, as the paper suggests: a knowledge base, a language model.

    feasibility (S, O), external (S, O) in [-1, 1] or nan where it knows nothing, weight in [0, 1] -> (S, O):
    (1 - weight) · feasibility + weight · external, or the feasibility alone where external is nan.
    Seen compositions are mixed like all others; margins, masks and rankings pass them by anyway.
    """
    feasibility, external = np.asarray(feasibility), np.asarray(external, float)
    if external.shape != feasibility.shape:
        raise ValueError(f"external scores are {external.shape}; expected {feasibility.shape}, states by objects")
    if not 0 <= weight <= 1 or np.any(np.abs(external) > 1):
        raise ValueError(f"weight {weight} must be in [0, 1], and external scores in [-1, 1] (or nan where unknown)")
    return np.where(np.isnan(external), feasibility, (1 - weight) * feasibility + weight * external)


def auroc(feasibility, positive, among):
    """How well feasibility ranks the `positive` above the others `among` which they are: 1 is perfect, 0.5 chance.

    All (S, O), the masks bool -> the share of (positive, other) pairs in which the positive one scores higher, ties
    counting half; nan without positives or without others. How often primitives occur explains a part of it: put the
    figure of shuffled vectors beside it.
    """
    feasibility, among = _scores(feasibility, among, "among")
    positive = _mask(positive, "positive", among.shape)[among]
    n, others = positive.sum(), (~positive).sum()
    wins = _ranks(feasibility[among])[positive].sum() - n * (n + 1) / 2
    return float(wins / (n * others)) if n and others else float("nan")


def rank_correlation(a, b):
    """Spearman's rank correlation of two (N,) arrays, ties sharing their mean rank; nan where one is constant."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    if a.ndim != 1 or a.shape != b.shape or not a.size or np.isnan([a, b]).any():
        raise ValueError(f"cannot correlate {a.shape} with {b.shape}; expected two (N,) arrays, N > 0, without nan")
    a, b = (ranks - ranks.mean() for ranks in map(_ranks, (a, b)))
    size = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / size) if size else float("nan")


def _ranks(values):
    """(N,) -> (N,) ranks from 1, ties sharing their mean rank."""
    _, which, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[which]


def _checked(state_vectors, object_vectors, seen):
    """-> the (S, S) and (O, O) cosines and `seen`, once all three fit."""
    states, objects = _cosines(state_vectors, "state_vectors"), _cosines(object_vectors, "object_vectors")
    seen = _mask(seen, "seen", (len(states), len(objects)))
    if not seen.any():
        raise ValueError("no composition is seen: mark those of the training images True")
    return states, objects, seen


def _cosines(vectors, name):
    """(A, D) -> (A, A) float64 cosines of all rows."""
    vectors = np.asarray(vectors, np.float64)
    if vectors.ndim != 2 or not vectors.size:
        raise ValueError(f"{name} has shape {vectors.shape}; expected two dimensions, a row for each name")
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    bad = np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))
    if len(bad):
        raise ValueError(f"{name}: {len(bad)} rows, first row {bad[0]}, are zero or not finite; give each a direction")
    unit = vectors / lengths
    return np.clip(cosines := unit @ unit.T, -1, 1, out=cosines)  # in place: a second array takes as long


def _closest(similarity, seen):
    """(A, A), (B, A) bool -> (B, A) greatest similarity of each to those marked in the row, -1 where none is."""
    closest = np.empty(seen.shape)
    for marked, row in zip(seen, closest):  # a row at a time fits the cache, one reduceat over all does not
        np.maximum.reduce(similarity.take(marked.nonzero()[0], axis=0), axis=0, initial=-1, out=row)
    return closest


def _mask(mask, name, shape):
    mask = np.asarray(mask)
    if mask.dtype != bool or mask.shape != shape:
        raise ValueError(f"{name} is {mask.dtype} {mask.shape}; expected bool {shape}, states by objects")
    return mask


def _scores(feasibility, mask, name="seen"):
    """-> both as arrays, checked."""
    feasibility = np.asarray(feasibility)
    if feasibility.ndim != 2 or not np.isfinite(feasibility).all():
        raise ValueError(f"feasibility {feasibility.shape} must be finite and have two dimensions, states by objects")
    return feasibility, _mask(mask, name, feasibility.shape)


# ---- files and the script ----


def read_pairs(path):
    """The set of (state, object) in a list with one `state object` a line."""
    with open(path, encoding="utf-8-sig") as file:
        rows = {number: tuple(line.split()) for number, line in enumerate(file, 1) if line.strip()}
    bad = [number for number, row in rows.items() if len(row) != 2]
    if bad or not rows:
        raise ValueError(f"{path}, line {bad[0] if bad else 1}: expected `state object`, two words without spaces")
    return set(rows.values())


def read_vectors(path, states, objects, words):
    """-> (S, D), (O, D) from text lines `word number ...` or an .npz: states, objects, state_vectors, object_vectors.

    A name that is no word there, nor in lower case, is the mean of its parts: Boots.Mid-Calf of boots, mid and calf.
    `words` says what to look up instead of a name: {"Nubuck": "suede_leather"}.
    """
    words = {name: words.get(name, name) for name in [*states, *objects]}
    if str(path).endswith(".npz"):
        keys, vectors = _arrays(path, "states", "objects"), _arrays(path, "state_vectors", "object_vectors")
        if [names.shape for names in keys] != [rows.shape[:-1] for rows in vectors]:
            raise ValueError(f"{path}: {[rows.shape for rows in vectors]} vectors for {[*map(np.shape, keys)]} names")
        tables = [dict(zip(names.tolist(), rows)) for names, rows in zip(keys, vectors)]
    else:
        wanted = {part for word in words.values() for spelling in _spellings(word) for part in spelling}
        tables = [_text_vectors(path, wanted)] * 2
    found = [{name: _vector(words[name], table) for name in names} for names, table in zip((states, objects), tables)]
    missing = [name for rows in found for name, vector in rows.items() if vector is None]
    if missing:
        raise ValueError(f"{path} has no vector for {', '.join(missing)}; with --names, other words can stand for them")
    return tuple(np.stack(list(rows.values())) for rows in found)


def _text_vectors(path, wanted):
    """{word: vector (D,)} of those wanted among text lines `word number ...`."""
    table, size = {}, None
    with open(path, encoding="utf-8", errors="replace") as file:
        for row, line in enumerate(file, 1):
            word, _, text = line.rstrip().partition(" ")
            if word in wanted:
                size = size or len(text.split()) or 1
                try:
                    table[word] = np.array(text.split(), float).reshape(size)
                except ValueError:
                    raise ValueError(f"{path}, line {row}: {word!r} needs {size} numbers, not {text[:40]!r}") from None
    return table


def read_external(path, states, objects):
    """(S, O) from an .npz of `scores` for combine and the names of its rows, `states`, and columns, `objects`."""
    scores, rows, columns = _arrays(path, "scores", "states", "objects")
    if rows.ndim != 1 or columns.ndim != 1 or scores.shape != rows.shape + columns.shape:
        raise ValueError(f"{path}: scores are {scores.shape} for states {rows.shape} and objects {columns.shape}")
    return scores[np.ix_(_indices(states, rows.tolist(), path), _indices(objects, columns.tolist(), path))]


def save_csv(path, feasibility, seen, states, objects):
    """Write a row `state,object,seen,feasibility` for each composition; `path` appears only once all is written."""
    part = Path(f"{path}.part")
    with open(part, "w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["state", "object", "seen", "feasibility"])
        for (s, o), score in np.ndenumerate(feasibility):
            rows.writerow([states[s], objects[o], int(seen[s, o]), f"{score:.6f}"])
    part.replace(path)


def _spellings(name):
    """What a name may stand under, first choice first, each as words whose vectors are averaged."""
    return [name], [name.lower()], re.findall(r"[^\W_]+", name.lower())


def _vector(name, table):
    """The vector of a name, or None."""
    for words in _spellings(name):
        if words and all(word in table for word in words):
            return np.mean([table[word] for word in words], axis=0)


def _arrays(path, *keys):
    try:
        with np.load(path) as file:
            return [file[key] for key in keys]
    except OSError:
        raise
    except Exception as error:  # NumPy and zipfile have many ways to say that this is not the file
        raise ValueError(f"{path}: expected an .npz file with {', '.join(keys)} ({error})") from error


def _indices(names, known, where):
    """Where each of the names is in the list `known`, which `where` describes."""
    index = {name: i for i, name in enumerate(known)}
    for name in names:
        if name not in index:
            near = difflib.get_close_matches(name, known, 1)
            raise ValueError(f"no {name!r} in {where}{f'; did you mean {near[0]!r}?' if near else ''}")
    return [index[name] for name in names]


def agreement(scores, seen, states, objects, *, occurring=None, published=None, tables=None):
    """{figure: value} of how scores (S, O) fit what is known of the unseen compositions, as far as it is given:

    occurring (S, O) bool, those that exist; published (S, O), other scores; tables, ranked ones such as the paper's,
    {"objects" or "states": {name: [names of the most feasible partners, of the least]}}.
    """
    figures = {}
    if published is not None:
        figures["rank correlation"] = rank_correlation(scores[~seen], published[~seen])
    if occurring is not None:
        figures["AUROC"] = auroc(scores, occurring, ~seen)
    for kind, table in (tables or {}).items():
        if kind not in ("objects", "states"):
            raise ValueError(f"unknown kind of table {kind!r}: expected 'objects' or 'states'")
        own, partners = (objects, states) if kind == "objects" else (states, objects)
        ranking = getattr(ranked(scores, seen, top=max([1, *(len(x) for row in table.values() for x in row)])), kind)
        for end, title in enumerate(("most", "least")):
            paper = [set(row[end]) for row in table.values()]
            ours = [{partners[k] for k in ranking[i][end]} for i in _indices(table, own, f"the {kind}")]
            figures[f"{kind}: {title} (of {sum(map(len, paper))})"] = sum(len(a & b) for a, b in zip(paper, ours))
    return figures


def main(argv=None):
    """The command line; --help tells."""
    parser = argparse.ArgumentParser(description="Rank unseen compositions, explain them, compare with what is known.")
    add = parser.add_argument
    add("--pairs", required=True, metavar="FILE", help="the seen compositions, one `state object` a line")
    add("--vectors", required=True, metavar="FILE",
        help="text lines `word number ...`, as GloVe's, or an .npz of states, objects, state_vectors, object_vectors")
    add("--names", metavar="FILE", help='JSON of words to look up instead of names: {"Nubuck": "suede_leather"}')
    add("--mix", default="mean", choices=MIXES, help="of the state term and the object term (default mean)")
    add("--combine", metavar="FILE", help="knowledge from elsewhere: an .npz of `scores` in [-1, 1], nan where unknown "
        "(S, O), and the names of its rows, `states` (S,), and columns, `objects` (O,)")
    add("--weight", type=float, default=0.5, help="of --combine, in [0, 1] (default 0.5)")
    add("--csv", metavar="FILE", help="also write all scores as state,object,seen,feasibility")
    add("--top", type=int, default=3, metavar="K", help="show so many of each (default 3)")
    add("--object", metavar="NAME", help="show only the states of this object")
    add("--state", metavar="NAME", help="show only the objects of this state")
    add("--explain", nargs=2, metavar=("STATE", "OBJECT"), help="show the seen compositions behind a score")
    add("--occur", nargs="+", default=[], metavar="FILE", help="check against lists of compositions that exist")
    add("--published", metavar="FILE", help="check against an .npz of `feasibility`, sorted states by sorted objects")
    add("--tables", metavar="FILE", help="check against ranked tables: JSON, {objects|states: {name: [most, least]}}")
    options = parser.parse_args(argv)
    try:
        _run(options)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


def _run(options):
    """What main does once it knows the options."""
    lists = [read_pairs(path) for path in (options.pairs, *options.occur)]
    states, objects = (sorted(set(names)) for names in zip(*set.union(*lists)))
    seen, *occurring = (np.array([[(s, o) in pairs for o in objects] for s in states]) for pairs in lists)
    names = _json(options.names, "{name: word}", lambda word: isinstance(word, str))
    vectors = read_vectors(options.vectors, states, objects, names)
    external = options.combine and read_external(options.combine, states, objects)

    def scored(state_vectors, object_vectors):
        scores = feasibility_scores(state_vectors, object_vectors, seen, mix=options.mix)
        return np.where(seen, 1, combine(scores, external, weight=options.weight)) if options.combine else scores

    scores = scored(*vectors)
    if options.csv:
        save_csv(options.csv, scores, seen, states, objects)
    if options.explain:
        _print_explanation(options.explain, scores, vectors, seen, states, objects, options.top)
    elif options.occur or options.published or options.tables:
        tables = _json(options.tables, "{objects|states: {name: [most, least]}}, both lists of names", _is_table)
        known = {"occurring": np.any(occurring, axis=0) if occurring else None, "tables": tables}
        shuffles = [map(np.random.default_rng(seed).permutation, vectors) for seed in range(10)]
        rows = {"these vectors": [scores], "shuffled vectors": [scored(*shuffle) for shuffle in shuffles]}
        if options.published:
            published, = _arrays(options.published, "feasibility")
            if published.shape not in (seen.shape, (seen.size,)):
                raise ValueError(f"{options.published}: feasibility is {published.shape}; expected {seen.shape}")
            known["published"] = published.reshape(seen.shape)
            rows["published"] = [known["published"]]
        _print_agreement(rows, seen, states, objects, known)
    else:
        _print_tables(scores, seen, states, objects, options)


def _json(path, expected, fits):
    """The object in a JSON file, {} without one; ValueError unless its values fit what is expected."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig")) if path else {}
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, {expected} ({error})") from None
    if not isinstance(content, dict) or not all(map(fits, content.values())):
        raise ValueError(f"{path} holds {json.dumps(content)[:60]}; expected {expected}")
    return content


def _is_table(table):
    """Whether it is {name: [names, names]}, and not empty."""
    lists = [*table.values()] if isinstance(table, dict) else []
    cells = [cell for row in lists if isinstance(row, list) and len(row) == 2 for cell in row if isinstance(cell, list)]
    return len(cells) == 2 * len(lists) > 0 and all(isinstance(name, str) for cell in cells for name in cell)


def _print_explanation(pair, scores, vectors, seen, states, objects, top):
    (s,), (o,) = _indices(pair[:1], states, "the states"), _indices(pair[1:], objects, "the objects")
    print(f"{' '.join(pair)}: feasibility {scores[s, o]:.2f}{', seen' if seen[s, o] else ''}")
    for title, rows in zip(("state lent by", "object lent by"), explain(s, o, *vectors, seen)):
        lenders = (f"{states[a]} {objects[b]} {cosine:.2f}" for a, b, cosine in rows[:top])
        print(f"{title:14}  {'; '.join(lenders) or 'none'}")


def _print_tables(scores, seen, states, objects, options):
    """The paper's ranked tables, or the row asked for."""
    ranking = ranked(scores, seen, top=options.top)
    pairs = [f"{state} {object}" for state in states for object in objects]
    for kind, name, names, partners, ends, rows in (
        ("composition", None, ["all"], pairs, [ranking.overall], scores.reshape(1, -1)),
        ("object", options.object, objects, states, ranking.objects, scores.T),
        ("state", options.state, states, objects, ranking.states, scores),
    ):
        if (options.object or options.state) and not name:
            continue
        chosen = _indices([name] if name else names, names, f"the {kind}s")
        print(f"| {kind} | most feasible | least feasible |\n| --- | --- | --- |")
        for i in chosen:
            cells = (", ".join(f"{partners[k]} {rows[i, k]:.2f}" for k in end) for end in ends[i])
            print(f"| {names[i]} | {' | '.join(cells)} |")
        print()


def _print_agreement(rows, seen, states, objects, known):
    """Figures of {title: [scores (S, O), ...]}, as mean ± std where there are several."""
    table = {title: [agreement(scores, seen, states, objects, **known) for scores in rows[title]] for title in rows}
    figures = list(table["these vectors"][0])
    print(f"| scores of | {' | '.join(figures)} |\n|{' --- |' * (len(figures) + 1)}")
    for title, runs in table.items():
        columns = ([run[figure] for run in runs] for figure in figures)
        cells = (f"{np.mean(values):.3g}" + f" ± {np.std(values):.1g}" * (len(runs) > 1) for values in columns)
        print(f"| {title} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
