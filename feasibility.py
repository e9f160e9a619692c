"""Feasibility of unseen compositions, from how alike their states and objects are to seen ones.

This file stands alone: copy it into any project that has NumPy. The method is that of Mancini et
al., "Open World Compositional Zero-Shot Learning", CVPR 2021. It scores compositions, makes masks
of the scores, explains and ranks them. As a script it prints the paper's tables for a pair list
and word vectors:

    python feasibility.py --pairs train_pairs.txt --vectors glove.6B.300d.txt [--explain wet cat]

S states, O objects, D the size of their vectors; the composition (s, o) is entry [s, o] of an
(S, O) array. Arrays are anything NumPy understands, and torch tensors.
"""

import argparse
import csv
import difflib
import gzip
import json
import operator
import re
import signal
import sys
import warnings
import zlib
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

# g of Eq. 5 by name, of ρ_state and ρ_obj, (S, O) each: the paper's mean, and its ablation. Another
# g is another line here, whose name `--mix` then takes.
MIXES = {
    "mean": lambda of_state, of_object: (of_state + of_object) / 2,
    "max": np.maximum,
    "state": lambda of_state, of_object: of_state,
    "object": lambda of_state, of_object: of_object,
}


def feasibility_scores(state_vectors, object_vectors, seen, *, mix="mean"):
    """Feasibility ρ of every composition (Eq. 3 to 5): is it made of what seen ones are made of?

    state_vectors (S, D), object_vectors (O, D) of any float type, seen (S, O) bool
    -> (S, O) float64 in [-1, 1].
    ρ_obj(s, o) is the greatest cosine of o to an object seen with s, ρ_state(s, o) that of s to a
    state seen with o, and ρ is their "mean" or "max", or that of the "state" or "object" alone:
    `mix`, a name in MIXES, is the paper's g. A term without any supporting seen composition is -1.
    Seen compositions are 1.
    ValueError: shapes that do not fit, a vector zero or not finite, `seen` not bool or nowhere
    True, an unknown mix.

    A cat is like the dog of a wet dog (0.8), wet is like the small of a small cat (0.6), so a wet
    cat is feasible by 0.7:

    >>> states, objects = [[1, 0], [0.6, 0.8]], [[1, 0], [0.8, 0.6]]  # wet, small; dog, cat
    >>> seen = np.array([[True, False], [True, True]])
    >>> feasibility_scores(states, objects, seen)
    array([[1. , 0.7],
           [1. , 1. ]])
    """
    state_cosines, object_cosines, seen = _checked(state_vectors, object_vectors, seen)
    if not isinstance(mix, str) or mix not in MIXES:
        raise ValueError(f"unknown mix {_in_words(mix)}: choose from {', '.join(MIXES)}")

    # ρ_obj looks along a state's row for the objects seen with it. ρ_state looks along an
    # object's column for the states seen with it: the same with rows and columns exchanged.
    object_term = _closest(object_cosines, seen)        # (S, O)
    state_term = _closest(state_cosines, seen.T).T      # (S, O)

    scores = MIXES[mix](state_term, object_term)
    scores[seen] = 1
    return scores


class Explanation(NamedTuple):
    """The seen compositions behind a score, as (state, object, cosine), most alike first."""

    lend_state: list  # the same state with other objects: the first cosine is ρ_obj
    lend_object: list  # the same object with other states: the first cosine is ρ_state


def explain(state, object, state_vectors, object_vectors, seen):
    """Why the composition with these two indices has its score: its seen relatives -> Explanation.

    Arrays and errors as in feasibility_scores; ValueError, too, for what is no index.
    A seen composition does not explain itself: its lists leave it out.

    >>> seen = np.array([[True, False], [True, True]])
    >>> explain(0, 1, [[1, 0], [0.6, 0.8]], [[1, 0], [0.8, 0.6]], seen)
    Explanation(lend_state=[(0, 0, 0.8)], lend_object=[(1, 1, 0.6)])
    """
    state_cosines, object_cosines, seen = _checked(state_vectors, object_vectors, seen)
    S, O = seen.shape
    if not _is_index(state, S) or not _is_index(object, O):
        raise ValueError(f"no composition of state {_in_words(state)} and object "
                         f"{_in_words(object)} among {S} states by {O} objects")
    state = operator.index(state)
    object_ = operator.index(object)

    lend_state = []
    for other in np.flatnonzero(seen[state]):
        if other != object_:
            lend_state.append((state, int(other), float(object_cosines[object_, other])))
    lend_object = []
    for other in np.flatnonzero(seen[:, object_]):
        if other != state:
            lend_object.append((int(other), object_, float(state_cosines[state, other])))

    lend_state.sort(key=lambda lender: -lender[2])
    lend_object.sort(key=lambda lender: -lender[2])
    return Explanation(lend_state, lend_object)


class Ranking(NamedTuple):
    """Unseen compositions as pairs of index arrays: (most feasible first, least feasible first)."""

    objects: list  # a pair of arrays of states for each object
    states: list  # a pair of arrays of objects for each state
    overall: tuple  # one pair of arrays of compositions s * O + o


def ranked(feasibility, seen, *, top=3):
    """The paper's ranked tables: most and least feasible unseen partners -> Ranking.

    feasibility (S, O), seen (S, O) bool. `top` of each per object, per state and overall; fewer
    where fewer are unseen; ties keep index order. ValueError: shapes or types that do not fit,
    a `top` that is no integer of at least 1.
    """
    feasibility, seen = _scores(feasibility, seen)
    top = _top(top)
    objects = [_ends(scores, known, top) for scores, known in zip(feasibility.T, seen.T)]
    states = [_ends(scores, known, top) for scores, known in zip(feasibility, seen)]
    overall = _ends(feasibility.ravel(), seen.ravel(), top)
    return Ranking(objects, states, overall)


def _ends(scores, seen, top):
    """(K,) scores, (K,) bool -> indices of the unseen: the `top` best first, the worst first."""
    unseen = np.flatnonzero(~seen)
    ascending = np.argsort(scores[unseen], kind="stable")
    descending = np.argsort(-scores[unseen], kind="stable")  # not the reverse: ties keep order
    return unseen[descending[:top]], unseen[ascending[:top]]


def hard_mask(feasibility, seen, threshold):
    """What the hard mask lets win (Eq. 6): seen, or of at least this feasibility -> (S, O) bool.

    The paper writes ρ > τ; with ρ >= τ a τ can be the feasibility of a composition that is kept.
    feasibility (S, O), of whatever float type it is, is compared in float64, as the evaluation
    does. The mask is for an evaluation's candidates: scores are never to be multiplied by it, for
    a 0 would win against negative scores.
    ValueError: shapes or types that do not fit, a threshold that is no number (nan; inf is one).
    """
    feasibility, seen = _scores(feasibility, seen)
    return seen | (feasibility >= _number(threshold, "threshold"))


def median_mask(feasibility, seen, *, inverse=False):
    """The appendix's check on the hard mask -> (S, O) bool: seen, or upper half of the unseen.

    The upper half are the unseen from their median up. `inverse` keeps the others, those below
    it: if feasibility means anything, that is much the worse mask. ValueError as in hard_mask.
    """
    feasibility, seen = _scores(feasibility, seen)
    if not isinstance(inverse, (bool, np.bool_)):
        raise ValueError(f"inverse is {_in_words(inverse)}; expected True or False")
    if seen.all():
        return seen.copy()
    median = np.median(feasibility[~seen])
    if inverse:
        return seen | (feasibility < median)
    return seen | (feasibility >= median)


def combine(feasibility, external, *, weight):
    """Feasibility with knowledge from elsewhere (a knowledge base, a language model).

    feasibility (S, O), external (S, O) in [-1, 1] or nan where it knows nothing, weight in [0, 1]
    -> (S, O) float64: (1 - weight) · feasibility + weight · external, or the feasibility alone
    where external is nan. Seen compositions are mixed like all others; margins, masks and rankings
    pass them by anyway. ValueError: shapes, types or values other than these.
    """
    feasibility = _numbers(feasibility, "feasibility")
    external = _numbers(external, "external")
    weight = _number(weight, "weight")
    if external.shape != feasibility.shape or not np.isfinite(feasibility).all():
        raise ValueError(f"external scores are {external.shape}, feasibility {feasibility.shape}; "
                         "expected one shape, states by objects, and finite feasibility")
    if not 0 <= weight <= 1 or np.any(np.abs(external) > 1):
        raise ValueError(f"weight {weight} must be in [0, 1], and external scores in [-1, 1] "
                         "(or nan where unknown)")
    mixed = (1 - weight) * feasibility + weight * external
    return np.where(np.isnan(external), feasibility, mixed)


def auroc(feasibility, positive, among):
    """How well feasibility ranks the `positive` compositions above the rest of `among`.

    All (S, O), the masks bool -> the share of (positive, other) pairs in which the positive one
    scores higher, ties counting half: 1 is perfect, 0.5 chance; nan without positives or without
    others. How often primitives occur explains a part of it: put the figure of shuffled vectors
    beside it.
    """
    feasibility, among = _scores(feasibility, among, "among")
    positive = _mask(positive, "positive", among.shape)[among]
    n = int(positive.sum())
    others = positive.size - n
    if n == 0 or others == 0:
        return float("nan")
    # Mann and Whitney: the positives' ranks count whom each beats, itself and other positives too.
    wins = _ranks(feasibility[among])[positive].sum() - n * (n + 1) / 2
    return float(wins / (n * others))


def rank_correlation(a, b):
    """Spearman's rank correlation of two (N,) arrays, ties sharing their mean rank.

    nan where one is constant. ValueError unless both are numbers without nan, of one length > 0.
    """
    a = _numbers(a, "a")
    b = _numbers(b, "b")
    if a.ndim != 1 or a.shape != b.shape or not a.size or np.isnan([a, b]).any():
        raise ValueError(f"cannot correlate a {a.shape} with b {b.shape}; expected two (N,) "
                         "arrays, N > 0, without nan")
    a = _ranks(a)
    b = _ranks(b)
    a = a - a.mean()
    b = b - b.mean()
    size = np.sqrt((a @ a) * (b @ b))
    if size == 0:
        return float("nan")
    return float(a @ b / size)


def _ranks(values):
    """(N,) -> (N,) ranks from 1, ties sharing their mean rank."""
    _, which, count = np.unique(values, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(count) - (count - 1) / 2  # of each distinct value
    return mean_rank[which]


def _closest(similarity, seen):
    """(A, A), (B, A) bool -> (B, A): how alike each is to the most alike of those marked in a row.

    -1 where none is marked.
    """
    closest = np.empty(seen.shape)
    for marked, row in zip(seen, closest):
        # A row at a time fits the processor's cache, one maximum over a (B, A, A) array does not.
        candidates = similarity.take(marked.nonzero()[0], axis=0)    # (marked, A)
        np.maximum.reduce(candidates, axis=0, initial=-1, out=row)
    return closest


# ---- checks ----


def _checked(state_vectors, object_vectors, seen):
    """-> the (S, S) and (O, O) cosines and `seen`, once all three fit."""
    state_cosines = _cosines(state_vectors, "state_vectors")
    object_cosines = _cosines(object_vectors, "object_vectors")
    seen = _mask(seen, "seen", (len(state_cosines), len(object_cosines)))
    if not seen.any():
        raise ValueError("no composition is seen: mark those of the training images True")
    return state_cosines, object_cosines, seen


def _cosines(vectors, name):
    """(A, D) -> (A, A) float64 cosines of all rows."""
    vectors = _array(vectors, name)
    if vectors.dtype.kind not in "fiu":
        raise ValueError(f"{name} is {vectors.dtype}; expected numbers, a row for each name")
    vectors = vectors.astype(np.float64)
    if vectors.ndim != 2 or not vectors.size:
        raise ValueError(f"{name} has shape {vectors.shape}; expected two dimensions, "
                         "a row for each name")
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    bad = np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))
    if len(bad):
        raise ValueError(f"{name}: rows that are zero or not finite: {len(bad)}, first row "
                         f"{bad[0]}; give each a direction")
    unit = vectors / lengths
    cosines = unit @ unit.T
    np.clip(cosines, -1, 1, out=cosines)  # in place: a second array takes as long as the product
    return cosines


def _array(value, name):
    """The value as an array; ValueError naming it where NumPy cannot make one."""
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(f"{name} is a masked array, whose mask would be lost; fill it first")
    try:
        if hasattr(value, "detach"):  # a torch tensor of any device, with a gradient or without
            value = value.detach().cpu()
            if str(value.dtype) == "torch.bfloat16":  # NumPy has none; float32 holds each exactly
                value = value.float()
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # ragged lists, say
        raise ValueError(f"{name} is no array: {error}") from None


def _numbers(values, name):
    """The values as float64, so that float16 and float32 compare as the numbers they stand for."""
    array = _array(values, name)
    if array.dtype.kind not in "fi":
        raise ValueError(f"{name} is {array.dtype}; expected floats")
    return array.astype(np.float64)


def _number(value, name):
    """A single number as a float; infinite is one, nan is none."""
    array = _array(value, name)
    if array.ndim or array.dtype.kind not in "fiu" or np.isnan(array):
        raise ValueError(f"{name} is {_in_words(value)}; expected a number")
    return float(array)


def _mask(mask, name, shape):
    """The mask as an array; ValueError unless it is bool and of this shape."""
    mask = _array(mask, name)
    if mask.dtype != bool or mask.shape != shape:
        advice = ""
        if mask.dtype.kind in "iu":
            advice = " (from 0 and 1 by .astype(bool))"
        raise ValueError(f"{name} is {mask.dtype} {mask.shape}; expected bool {shape}, "
                         f"states by objects{advice}")
    return mask


def _scores(feasibility, mask, name="seen"):
    """-> both as (S, O) arrays, float64 and bool, checked."""
    feasibility = _numbers(feasibility, "feasibility")
    if feasibility.ndim != 2 or not np.isfinite(feasibility).all():
        raise ValueError(f"feasibility {feasibility.shape} must be finite and have two dimensions, "
                         "states by objects")
    return feasibility, _mask(mask, name, feasibility.shape)


def _is_index(value, size):
    """Whether it is an integer from 0 to size - 1."""
    if isinstance(value, bool):
        return False
    try:
        return 0 <= operator.index(value) < size
    except TypeError:
        return False


def _top(top):
    """`top` as an int; ValueError unless it is an integer of at least 1."""
    if not _is_index(top, sys.maxsize) or top < 1:
        raise ValueError(f"top is {_in_words(top)}; expected an integer of at least 1")
    return operator.index(top)


def _in_words(value):
    """A value in one line of an error, which an array would fill."""
    text = " ".join(repr(value).split())
    if len(text) > 60:
        return type(value).__name__
    return text


# ---- pair lists ----

COLUMNS = {"state": ("state", "attr"), "object": ("object", "obj"), "phase": ("split", "set")}
MARKUP = ("<!", "<?", "<html")  # how a page begins, which a site sent in place of the file
TRAINING = ("train", "training")  # what a table of images may call the training set, in any case


def read_pairs(path, *, training=False):
    """The set of (state, object) in a file: a list of pairs or a table of images.

    A list has one pair a line, `state object`; a tab or a comma on every line parts names that
    have spaces. A table (an images.csv, or a folder with one) has a first line that names the
    columns state and object; with `training`, only its rows whose `split` is train count, if it
    has that column. ValueError names the first line that is neither; OSError: no such file.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "images.csv"
    _check_plain(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no UTF-8 text; save it as UTF-8 (CSV UTF-8)") from None
    if text.lstrip().lower().startswith(MARKUP):
        raise ValueError(f"{path} is a web page, no list of pairs: fetch the file itself")
    lines = text.split("\n")
    if lines[0].startswith("sep="):  # a spreadsheet's note on its own separator
        lines[0] = ""
    header = next((line for line in lines if line.strip()), "")
    separator = max(",;\t", key=header.count)
    if separator not in header:
        separator = " "
    columns = [cell.strip(' "\r').lower() for cell in header.split(separator)]
    if _column(columns, "state") is not None and _column(columns, "object") is not None:
        return _pairs_of_table(path, lines, separator, training)
    return _pairs_of_list(path, lines)


def _check_plain(path):
    """ValueError for a pipe or a folder: a pipe would be waited for without end."""
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"{path} is no plain file: give a file that can be read to its end")


def _column(columns, meaning):
    """The index of the column with this meaning (a key of COLUMNS), None where it is missing."""
    for name in COLUMNS[meaning]:
        if name in columns:
            return columns.index(name)
    return None


def _pairs_of_list(path, lines):
    """The pairs of a list, one a line."""
    filled = [line for line in lines if line.strip()]
    separator = None  # any run of spaces
    for candidate in ("\t", ",", ";"):
        if filled and all(line.count(candidate) == 1 for line in filled):
            separator = candidate
            break
    pairs = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        cells = [cell.strip(' "') for cell in line.strip().split(separator)]
        names = tuple(" ".join(cell.split()) for cell in cells)
        if len(names) != 2 or not all(names):
            raise ValueError(f"{path}, line {number}: expected `state object`, two words; names "
                             "with spaces need a tab or a comma between them on every line")
        pairs.add(names)
    if not pairs:
        raise ValueError(f"{path}, line 1: expected `state object` a line; the file has none")
    return pairs


def _pairs_of_table(path, lines, separator, training):
    """The pairs that the rows of a table of images show."""
    rows = csv.reader((line + "\n" for line in lines), delimiter=separator)
    columns = None
    pairs = set()
    try:
        for row in rows:
            cells = [" ".join(cell.split()) for cell in row]
            if not any(cells):
                continue
            if columns is None:
                columns = [cell.lower() for cell in cells]
                continue
            pair = _pair_of_row(cells, columns, training, f"{path}, line {rows.line_num}")
            if pair is not None:
                pairs.add(pair)
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.line_num}: {error}") from None
    if not pairs:
        kind = "training rows" if training else "rows"
        raise ValueError(f"{path} has no {kind} with a state and an object")
    return pairs


def _pair_of_row(cells, columns, training, where):
    """The (state, object) of a row; None where it shows none or is not wanted."""
    state_column = _column(columns, "state")
    object_column = _column(columns, "object")
    phase_column = _column(columns, "phase")
    cells = cells + [""] * (len(columns) - len(cells))
    if training and phase_column is not None and cells[phase_column].lower() not in TRAINING:
        return None
    pair = (cells[state_column], cells[object_column])
    if not all(pair):
        raise ValueError(f"{where}: state or object is empty")
    if "NA" in pair:
        return None
    return pair


# ---- word vectors ----

# Names of UT-Zappos and C-GQA that are no words, here in lower case, and what published work
# looks up instead. The second table holds for text files without a first line of counts alone.
EXCEPTIONS = {
    "faux.fur": "fake_fur",
    "faux.leather": "fake_leather",
    "full.grain.leather": "thick_leather",
    "hair.calf": "hair_leather",
    "patent.leather": "shiny_leather",
    "boots.ankle": "ankle_boots",
    "boots.knee.high": "knee_high_boots",
    "boots.mid-calf": "midcalf_boots",
    "shoes.boat.shoes": "boat_shoes",
    "shoes.clogs.and.mules": "clogs_shoes",
    "shoes.flats": "flats_shoes",
    "shoes.heels": "heels",
    "shoes.loafers": "loafers",
    "shoes.oxfords": "oxford_shoes",
    "shoes.sneakers.and.athletic.shoes": "sneakers",
    "trash_can": "trashcan",
    "dry-erase_board": "dry_erase_board",
    "black_and_white": "black_white",
    "eiffel_tower": "tower",
}
EXCEPTIONS_OF_GLOVE = {"nubuck": "grainy_leather"}
ARRAYS = {  # of an .npz: names -> their vectors
    "states": "state_vectors", "objects": "object_vectors", "names": "vectors", "words": "vectors"}
HEAD = 1 << 20  # bytes from which a text file's shape is judged


def read_vectors(path, states, objects, words, *, missing="error"):
    """-> (S, D), (O, D) float64: the vectors of the names of states and objects.

    The file holds text lines `word number ...` (GloVe's, word2vec's and fastText's, with or
    without a first line of counts, also as .gz; the first of repeated words counts), or is an
    .npz of `states`, `objects`, `state_vectors`, `object_vectors`, or of `names` and `vectors`.
    `words` says what to look up instead of a name: {"Nubuck": "suede_leather"}; else the published
    exceptions above hold. Then, of these readings, the first counts whose words all have vectors,
    and their mean is the name's: in an .npz the name as it is; the whole; its parts at `_` and
    `.`; its parts at all but letters and digits; the same without *a, and, of, to*.
    `missing`: "error" lists every name without a vector; "random" (seeded by the word, as long as
    the others on average) or "mean" (of those found) stands in for a missing word, with a warning.
    ValueError: names without vectors, or a file that is none of these.
    """
    if missing not in ("error", "random", "mean"):
        raise ValueError(f'missing is {missing!r}; expected "error", "random" or "mean"')
    names = [*states, *objects]
    looked_up = [words.get(name, name) for name in names]
    _check_plain(path)
    if str(path).endswith(".npz") or _begins_with(path, b"PK"):
        kind = "npz"
        state_table, object_table = _npz_tables(path)
    else:
        kind, state_table = _text_table(path, looked_up)
        object_table = state_table

    count = len(states)
    state_readings = [_first_complete(name, state_table, kind) for name in looked_up[:count]]
    object_readings = [_first_complete(name, object_table, kind) for name in looked_up[count:]]
    absent = []
    for name, reading in zip(names, state_readings + object_readings):
        if any(vector is None for _, vector in reading):
            absent.append(name)
    if absent and missing == "error":
        raise ValueError(f"{path} has no vector for {', '.join(absent)}; with --names, other words "
                         "can stand for them, with --missing random or mean, made-up vectors")
    if absent:
        warnings.warn(f"{path} has no vector for {', '.join(absent)}: {missing} vectors stand in",
                      stacklevel=2)
    wanted = sorted(_wanted(looked_up, kind))
    return (_rows(state_readings, state_table, wanted, missing, path),
            _rows(object_readings, object_table, wanted, missing, path))


def _rows(readings, table, wanted, missing, path):
    """(readings, D): the mean of each one's words, missing ones replaced as `missing` says."""
    known = np.array([table[word] for word in wanted if word in table])    # (words, D)
    if not len(known):
        raise ValueError(f"{path} has none of these names: nothing to take {missing} vectors from")
    rows = []
    for reading in readings:
        vectors = []
        for word, vector in reading:
            if vector is None:
                vector = _stand_in(word, known, missing)
            vectors.append(vector)
        rows.append(np.mean(vectors, axis=0))
    return np.stack(rows)


def _stand_in(word, known, missing):
    """A vector (D,) for a missing word: the mean of `known` (K, D), or a random one as long."""
    if missing == "mean":
        return known.mean(axis=0)
    dim = known.shape[1]
    random = np.random.default_rng(list(word.encode())).standard_normal(dim, dtype=np.float32)
    return random * np.linalg.norm(known, axis=1).mean() / dim**0.5


def _readings(name, kind):
    """The lists of words that may stand for a name, best first; kind: "glove", "text" or "npz"."""
    exceptions = EXCEPTIONS
    if kind == "glove":
        exceptions = EXCEPTIONS | EXCEPTIONS_OF_GLOVE
    phrase = exceptions.get(name.lower(), name)
    phrase = re.sub(r"\s+", "_", phrase.strip())
    parts = [part for part in re.split(r"[_.]+", phrase) if part] or [name]
    words = [word for word in re.split(r"[\W_]+", phrase) if word] or [name]
    bare = [word for word in words if word.lower() not in ("a", "and", "of", "to")] or words
    readings = [[phrase], parts, words, bare]
    if kind == "npz":
        return [[name], *readings]
    return readings


def _spellings(word, kind):
    """How a word may be written in a file, best first: published text has lower case alone."""
    if kind == "npz":
        written = [word, word.lower()]
    else:
        written = [word.lower(), word]
    if "_" not in word:
        written.append(word.title())
    return written


def _wanted(names, kind):
    """Every word, in every spelling, that could stand for one of the names."""
    wanted = set()
    for name in names:
        for words in _readings(name, kind):
            for word in words:
                wanted.update(_spellings(word, kind))
    return wanted


def _first_complete(name, table, kind):
    """The first reading with a vector for every word, else the last one.

    -> pairs of a word and its vector, None for a missing one.
    """
    for words in _readings(name, kind):
        reading = []
        for word in words:
            found = [table[spelling] for spelling in _spellings(word, kind) if spelling in table]
            reading.append((word, found[0] if found else None))
        if all(vector is not None for _, vector in reading):
            break
    return reading


def _text_table(path, names):
    """Text lines `word number ...` -> their kind, and {word: vector (D,)} for what names need."""
    table = {}
    try:
        with _opened(path) as file:
            kind, dim, start = _shape_of_text(file.read(HEAD), path)
            wanted = {word.encode(): word for word in _wanted(names, kind)}
            file.seek(start)
            first_number = 1 if kind == "glove" else 2
            for number, line in enumerate(file, first_number):
                if b"\t" in line:
                    line = line.replace(b"\t", b" ")
                word = line[:line.find(b" ")]
                if word not in wanted or wanted[word] in table:
                    continue
                entry, *numbers = line.rsplit(None, dim)
                if len(numbers) == dim and entry != word:
                    continue  # a longer entry with spaces in it, of which this is the first word
                table[wanted[word]] = _vector_of(numbers, dim, f"{path}, line {number}", word)
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{path} is cut off or damaged: {error}") from None
    return kind, table


def _vector_of(numbers, dim, where, word):
    """The numbers of a line (bytes) as (D,) float64."""
    try:
        return np.array([float(number) for number in numbers]).reshape(dim)
    except ValueError:
        text = b" ".join(numbers)[:40].decode(errors="replace")
        raise ValueError(f"{where}: {word.decode()!r} needs {dim} numbers, not {text!r}") from None


def _begins_with(path, magic):
    """Whether these bytes begin a file."""
    with open(path, "rb") as file:
        return file.read(len(magic)) == magic


def _opened(path):
    """The file in binary, unpacked on the way if it is gzip."""
    if _begins_with(path, b"\x1f\x8b"):
        return gzip.open(path)
    return open(path, "rb")


def _shape_of_text(head, path):
    """From a text file's first bytes: its kind, D, and where its vectors begin."""
    if not head.strip() or b"\0" in head:
        raise ValueError(f"{path} begins with {head[:20]!r}; expected text lines "
                         "`word number ...` or an .npz")
    start = 3 if head.startswith(b"\xef\xbb\xbf") else 0  # a byte order mark
    lines = head[start:].split(b"\n")
    counts = re.fullmatch(rb"(\d+)\s+(\d+)\s*", lines[0])
    if counts:
        dim = int(counts[2])
        if not 0 < dim < HEAD:
            raise ValueError(f"{path}: its first line says that a vector has {dim} numbers")
        return "text", dim, start + len(lines[0]) + 1
    if len(lines) > 1:
        lines.pop()  # what follows the last line end: nothing, or part of a line
    # Entries with spaces in them make their lines look longer: most lines have none.
    lines = [line for line in lines if line.strip()][:100]
    widths = Counter(len(line.split()) - 1 for line in lines)
    return "glove", max(widths.most_common(1)[0][0], 1), start


def _npz_tables(path):
    """An .npz of names and vectors -> {word: vector} for states and {word: vector} for objects."""
    arrays = _load_npz(path, [*ARRAYS, *ARRAYS.values()])
    tables = {}
    for names, vectors in ARRAYS.items():
        if names not in arrays or vectors not in arrays:
            continue
        rows = arrays[vectors]
        if rows.dtype.kind not in "fiu" or rows.ndim != 2 or arrays[names].shape != rows.shape[:1]:
            raise ValueError(f"{path}: {vectors} are {rows.dtype} {rows.shape}; expected numbers "
                             f"({arrays[names].size}, D) for {names}")
        tables[names] = {}
        for name, vector in zip(arrays[names].tolist(), rows.astype(np.float64)):
            tables[names].setdefault(name, vector)
    if not tables:
        raise ValueError(f"{path}: expected an .npz file with states, objects, state_vectors, "
                         "object_vectors, or with names, vectors")
    return _merged(tables, "states"), _merged(tables, "objects")


def _merged(tables, first):
    """One table for the names of one kind: its own, and what others of the same D add to it."""
    merged = dict(tables.get(first, {}))
    for table in tables.values():
        for name, vector in table.items():
            if not merged or vector.shape == next(iter(merged.values())).shape:
                merged.setdefault(name, vector)
    return merged


def _load_npz(path, keys):
    """{key: array} of those of the keys that an .npz has."""
    _check_plain(path)
    try:
        with np.load(path) as file:
            return {key: file[key] for key in keys if key in file.files}
    except OSError:
        raise
    except Exception as error:  # NumPy and zipfile have many ways to say that this is not the file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if "allow_pickle" in reason:  # NumPy's advice to load unsafely
            reason = "of no such form, or pickled objects, which are not loaded"
        raise ValueError(f"{path}: expected an .npz file with {', '.join(keys)} "
                         f"({reason})") from error


def _arrays(path, *keys):
    """The arrays of an .npz under all these keys."""
    arrays = _load_npz(path, keys)
    for key in keys:
        if key not in arrays:
            raise ValueError(f"{path}: expected an .npz file with {', '.join(keys)}; "
                             f"it has no {key}")
    return [arrays[key] for key in keys]


# ---- other files ----


def read_external(path, states, objects):
    """(S, O) for combine, from an .npz of `scores` and the names of its rows and columns.

    The rows are `states`, the columns `objects`. ValueError: arrays that do not fit each other, a
    name that is not there.
    """
    scores, rows, columns = _arrays(path, "scores", "states", "objects")
    if rows.ndim != 1 or columns.ndim != 1 or scores.shape != rows.shape + columns.shape:
        raise ValueError(f"{path}: scores are {scores.shape} for states {rows.shape} and objects "
                         f"{columns.shape}")
    if rows.dtype.kind != "U" or columns.dtype.kind != "U":
        raise ValueError(f"{path}: states are {rows.dtype}, objects {columns.dtype}; expected "
                         "names, as by np.array(names, str)")
    of_states = _indices(states, rows.tolist(), path)
    of_objects = _indices(objects, columns.tolist(), path)
    return scores[np.ix_(of_states, of_objects)]


def save_csv(path, feasibility, seen, states, objects):
    """Write a row `state,object,seen,feasibility` for each composition.

    `path` appears only once all is written; nothing is left behind otherwise, and an OSError names
    it.
    """
    part = Path(f"{path}.part")
    try:
        with open(part, "w", encoding="utf-8", newline="") as file:
            write_csv(file, feasibility, seen, states, objects)
        part.replace(path)
    except OSError as error:
        raise type(error)(error.errno, f"cannot write {path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def write_csv(file, feasibility, seen, states, objects):
    """The rows of `save_csv` into a text file that is open."""
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["state", "object", "seen", "feasibility"])
    for (s, o), score in np.ndenumerate(feasibility):
        rows.writerow([states[s], objects[o], int(seen[s, o]), f"{score:.6f}"])


def _read_json(path, expected, fits):
    """The object in a JSON file, {} without one; ValueError unless its values fit."""
    if not path:
        return {}
    _check_plain(path)
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, {expected} ({error})") from None
    if not isinstance(content, dict) or not all(fits(value) for value in content.values()):
        raise ValueError(f"{path} holds {json.dumps(content)[:60]}; expected {expected}")
    return content


def _is_word(value):
    """Whether it is what a JSON file gives for a name."""
    return isinstance(value, str)


def _is_table(value):
    """Whether it is {name: [most, least]} with at least one row, both of them lists of names."""
    if not isinstance(value, dict) or not value:
        return False
    for row in value.values():
        if not isinstance(row, list) or len(row) != 2:
            return False
        for names in row:
            if not isinstance(names, list) or not all(map(_is_word, names)):
                return False
    return True


def _indices(names, known, where):
    """Where each of the names is in the list `known`, which `where` describes."""
    index = {name: i for i, name in enumerate(known)}
    for name in names:
        if name not in index:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no {name!r} in {where}{hint}")
    return [index[name] for name in names]


# ---- how scores fit what is known ----


def agreement(scores, seen, states, objects, *, occurring=None, published=None, tables=None):
    """{figure: value} of how scores (S, O) fit what is known of the unseen compositions.

    As far as it is given: occurring (S, O) bool, those that exist; published (S, O), other scores;
    tables, ranked ones such as the paper's, {"objects" or "states": {name: [names of the most
    feasible partners, of the least]}}. Of a table, the figure is how many names are the same.
    ValueError: arrays that do not fit, an unknown kind of table, an unknown name in one.
    """
    figures = {}
    if published is not None:
        figures["rank correlation"] = rank_correlation(scores[~seen], published[~seen])
    if occurring is not None:
        figures["AUROC"] = auroc(scores, occurring, ~seen)
    for kind, table in (tables or {}).items():
        figures |= _table_agreement(scores, seen, states, objects, kind, table)
    return figures


def _table_agreement(scores, seen, states, objects, kind, table):
    """{figure: count} of the names that a ranked table shares with the ranking of the scores."""
    if kind == "objects":
        names, partners = objects, states
    elif kind == "states":
        names, partners = states, objects
    else:
        raise ValueError(f"unknown kind of table {kind!r}: expected 'objects' or 'states'")
    top = 1
    for most, least in table.values():
        top = max(top, len(most), len(least))
    ranking = getattr(ranked(scores, seen, top=top), kind)
    rows = _indices(table, names, f"the {kind}")

    figures = {}
    for end, title in enumerate(("most", "least")):
        total = 0
        shared = 0
        for row, ends in zip(rows, table.values()):
            theirs = set(ends[end])
            ours = {partners[k] for k in ranking[row][end]}
            total += len(theirs)
            shared += len(theirs & ours)
        figures[f"{kind}: {title} (of {total})"] = shared
    return figures


# ---- the script ----


def main(argv=None):
    """The command line; --help tells."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            _run(options)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


def _show_warning(message, *_):
    print(f"warning: {message}", file=sys.stderr)


def _parser():
    parser = argparse.ArgumentParser(
        description="Rank unseen compositions, explain them, compare with what is known.")
    add = parser.add_argument
    add("--pairs", required=True, metavar="FILE",
        help="the seen compositions, one `state object` a line (a tab or comma between names with "
        "spaces), or an images.csv or its folder, of which the training rows count")
    add("--vectors", required=True, metavar="FILE",
        help="text lines `word number ...`, as GloVe's, or an .npz of states, objects, "
        "state_vectors, object_vectors")
    add("--names", metavar="FILE",
        help='JSON of words to look up instead of names: {"Nubuck": "suede_leather"}')
    add("--missing", default="error", choices=["error", "random", "mean"],
        help="for words without vectors (default error)")
    add("--mix", default="mean", choices=MIXES,
        help="of the state term and the object term (default mean)")
    add("--combine", metavar="FILE",
        help="knowledge from elsewhere: an .npz of `scores` in [-1, 1], nan where unknown (S, O), "
        "and the names of its rows, `states` (S,), and columns, `objects` (O,)")
    add("--weight", type=float, help="of --combine, in [0, 1] (default 0.5)")
    add("--csv", metavar="FILE", help="also write all scores as state,object,seen,feasibility")
    add("--top", type=int, default=3, metavar="K", help="show so many of each (default 3)")
    add("--object", metavar="NAME", help="show only the states of this object")
    add("--state", metavar="NAME", help="show only the objects of this state")
    add("--explain", nargs=2, metavar=("STATE", "OBJECT"),
        help="show the seen compositions behind a score")
    add("--occur", nargs="+", default=[], metavar="FILE",
        help="check against lists of compositions that exist")
    add("--published", metavar="FILE",
        help="check against an .npz of `feasibility`, sorted states by sorted objects")
    add("--tables", metavar="FILE",
        help="check against ranked tables: JSON, {objects|states: {name: [most, least]}}")
    return parser


class Inputs(NamedTuple):
    """What the script has read: S sorted states, O sorted objects and what is said of them."""

    states: list
    objects: list
    seen: np.ndarray  # (S, O) bool
    occurring: np.ndarray | None  # (S, O) bool
    vectors: tuple  # (S, D), (O, D)
    external: np.ndarray | None  # (S, O)


def _run(options):
    """What main does once it knows the options."""
    if options.top < 1:
        raise ValueError(f"--top is {options.top}; expected at least 1")
    if options.weight is not None and not options.combine:
        raise ValueError(f"--weight {options.weight} is that of --combine FILE, which is not given")
    if options.explain and (options.object or options.state):
        raise ValueError("--explain names a composition itself: leave --object and --state out")
    inputs = _read_inputs(options)
    scores = _scored(inputs, inputs.vectors, options)
    if options.csv:
        save_csv(options.csv, scores, inputs.seen, inputs.states, inputs.objects)
    if options.explain:
        _print_explanation(scores, inputs, options)
    elif options.occur or options.published or options.tables:
        _print_agreement(scores, inputs, options)
    else:
        _print_tables(scores, inputs, options)


def _read_inputs(options):
    """Read the files that the options name -> Inputs."""
    seen_pairs = read_pairs(options.pairs, training=True)
    occurring_pairs = set()
    for path in options.occur:
        occurring_pairs |= read_pairs(path)
    all_pairs = seen_pairs | occurring_pairs
    states = sorted({state for state, _ in all_pairs})
    objects = sorted({object_ for _, object_ in all_pairs})
    words = _read_json(options.names, "{name: word}", _is_word)
    vectors = read_vectors(options.vectors, states, objects, words, missing=options.missing)
    occurring = None
    if options.occur:
        occurring = _marked(occurring_pairs, states, objects)
    external = None
    if options.combine:
        external = read_external(options.combine, states, objects)
    seen = _marked(seen_pairs, states, objects)
    return Inputs(states, objects, seen, occurring, vectors, external)


def _marked(pairs, states, objects):
    """(S, O) bool: the compositions that are among the pairs."""
    marked = np.zeros((len(states), len(objects)), bool)
    for s, state in enumerate(states):
        for o, object_ in enumerate(objects):
            marked[s, o] = (state, object_) in pairs
    return marked


@contextmanager
def _naming(path):
    """A ValueError inside is of what a file holds, and names it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _scored(inputs, vectors, options):
    """(S, O) scores of these vectors, with the knowledge from elsewhere if there is any."""
    with _naming(options.vectors):
        scores = feasibility_scores(*vectors, inputs.seen, mix=options.mix)
    if inputs.external is None:
        return scores
    weight = 0.5 if options.weight is None else options.weight
    with _naming(options.combine):
        mixed = combine(scores, inputs.external, weight=weight)
    return np.where(inputs.seen, 1, mixed)


def _print_explanation(scores, inputs, options):
    """The score of the composition asked for, and the seen compositions behind it."""
    state, object_ = options.explain
    s = _indices([state], inputs.states, "the states")[0]
    o = _indices([object_], inputs.objects, "the objects")[0]
    seen = ", seen" if inputs.seen[s, o] else ""
    print(f"{state} {object_}: feasibility {scores[s, o]:.2f}{seen}")
    explanation = explain(s, o, *inputs.vectors, inputs.seen)
    _print_lenders("state lent by", explanation.lend_state, inputs, options.top)
    _print_lenders("object lent by", explanation.lend_object, inputs, options.top)


def _print_lenders(title, lenders, inputs, top):
    """A line of the seen compositions that lend a primitive, most alike first."""
    shown = []
    for s, o, cosine in lenders[:top]:
        shown.append(f"{inputs.states[s]} {inputs.objects[o]} {cosine:.2f}")
    print(f"{title:14}  {'; '.join(shown) or 'none'}")


def _print_tables(scores, inputs, options):
    """The paper's three ranked tables, or the rows asked for."""
    states, objects = inputs.states, inputs.objects
    ranking = ranked(scores, inputs.seen, top=options.top)
    everything = not options.object and not options.state
    if everything:
        compositions = [f"{state} {object_}" for state in states for object_ in objects]
        overall = [ranking.overall]
        _print_table("composition", ["all"], [0], compositions, overall, scores.reshape(1, -1))
    if everything or options.object:
        chosen = range(len(objects))
        if options.object:
            chosen = _indices([options.object], objects, "the objects")
        _print_table("object", objects, chosen, states, ranking.objects, scores.T)
    if everything or options.state:
        chosen = range(len(states))
        if options.state:
            chosen = _indices([options.state], states, "the states")
        _print_table("state", states, chosen, objects, ranking.states, scores)


def _print_table(kind, names, chosen, partners, ranking, scores):
    """A row for each chosen index of names: its most and least feasible unseen partners.

    ranking holds a pair of arrays of partners for each name, scores (names, partners) theirs.
    """
    print(f"| {kind} | most feasible | least feasible |")
    print("| --- | --- | --- |")
    for i in chosen:
        cells = [names[i]]
        for end in ranking[i]:
            cells.append(", ".join(f"{partners[k]} {scores[i, k]:.2f}" for k in end))
        print(f"| {' | '.join(cells)} |")
    print()


def _print_agreement(scores, inputs, options):
    """How the scores fit what is known, beside scores of shuffled vectors and published ones."""
    expected = "{objects|states: {name: [most, least]}}, both lists of names"
    tables = _read_json(options.tables, expected, _is_table)
    published = None
    if options.published:
        published = _read_published(options.published, inputs.seen)

    shuffled = []
    for seed in range(10):
        random = np.random.default_rng(seed)
        vectors = [random.permutation(rows) for rows in inputs.vectors]
        shuffled.append(_scored(inputs, vectors, options))
    rows = {"these vectors": [scores], "shuffled vectors": shuffled}
    if published is not None:
        rows["published"] = [published]

    table = {}
    for title, runs in rows.items():
        table[title] = []
        for run in runs:
            table[title].append(agreement(
                run, inputs.seen, inputs.states, inputs.objects,
                occurring=inputs.occurring, published=published, tables=tables))
    _print_figures(table)


def _read_published(path, seen):
    """(S, O) published scores; a file may hold them as one row."""
    published, = _arrays(path, "feasibility")
    if published.shape not in (seen.shape, (seen.size,)):
        raise ValueError(f"{path}: feasibility is {published.shape}; expected {seen.shape}")
    with _naming(path):
        published = _numbers(published, "feasibility").reshape(seen.shape)
    if np.isnan(published[~seen]).any():
        raise ValueError(f"{path}: feasibility has nan among the unseen; expected numbers")
    return published


def _print_figures(table):
    """{title: [{figure: value}, ...]} as a table, mean ± std where a title has several."""
    figures = list(table["these vectors"][0])
    print(f"| scores of | {' | '.join(figures)} |")
    print("|" + " --- |" * (len(figures) + 1))
    for title, runs in table.items():
        cells = [title]
        for figure in figures:
            values = [run[figure] for run in runs]
            cell = f"{np.mean(values):.3g}"
            if len(values) > 1:
                cell += f" ± {np.std(values):.1g}"
            cells.append(cell)
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    try:
        from common import command  # quiet Ctrl-C, closed pipes; a copied file works without
        main = command(main)
    except ImportError:
        if hasattr(signal, "SIGPIPE"):  # Windows has none
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly once `| head` has enough
    main()
