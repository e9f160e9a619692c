"""Feasibility of unseen compositions, from how alike their states and objects are to seen ones.

This file stands alone: copy it into any project that has NumPy. The method is that of Mancini et
al., "Open World Compositional Zero-Shot Learning", CVPR 2021. It scores compositions, makes masks
of the scores, explains and ranks them. As a script it prints the paper's tables for a pair list
and word vectors (copied alone, of an .npz; beside words.py and compcos.py, of GloVe's files, too):

    python feasibility.py --pairs train_pairs.txt --vectors vectors.npz [--explain wet cat]

S states, O objects, D the size of their vectors; the composition (s, o) is entry [s, o] of an
(S, O) array. Arrays are anything NumPy understands, and torch tensors.
"""

import argparse
import csv
import signal
import sys
import warnings
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
    if mix not in MIXES:
        raise ValueError(f"unknown mix {mix!r}: choose from {', '.join(MIXES)}")

    # ρ_obj looks along a state's row for the objects seen with it. ρ_state looks along an
    # object's column for the states seen with it: the same with rows and columns exchanged.
    object_term = _closest(object_cosines, seen)        # (S, O)
    state_term = _closest(state_cosines, seen.T).T      # (S, O)

    scores = MIXES[mix](state_term, object_term)
    scores[seen] = 1
    return scores


class Explanation(NamedTuple):
    """The seen compositions behind a score, as (state, object, cosine), most alike first."""

    same_state: list  # the same state with other objects: the first cosine is ρ_obj
    same_object: list  # the same object with other states: the first cosine is ρ_state


def explain(state, object, state_vectors, object_vectors, seen):
    """Why the composition with these two indices has its score: its seen relatives -> Explanation.

    Arrays and errors as in feasibility_scores. A seen composition does not explain itself: its
    lists leave it out.

    >>> seen = np.array([[True, False], [True, True]])
    >>> explain(0, 1, [[1, 0], [0.6, 0.8]], [[1, 0], [0.8, 0.6]], seen)
    Explanation(same_state=[(0, 0, 0.8)], same_object=[(1, 1, 0.6)])
    """
    state_cosines, object_cosines, seen = _checked(state_vectors, object_vectors, seen)
    other_objects = _most_alike(object_cosines[object], seen[state], object)
    other_states = _most_alike(state_cosines[state], seen[:, object], state)
    return Explanation([(state, other, cosine) for other, cosine in other_objects],
                       [(other, object, cosine) for other, cosine in other_states])


def _most_alike(cosines, marked, own):
    """(A,) cosines, (A,) bool -> (index, cosine) of the marked ones but `own`, greatest first."""
    order = np.argsort(-cosines, kind="stable").tolist()
    return [(other, float(cosines[other])) for other in order if marked[other] and other != own]


class Ranking(NamedTuple):
    """Unseen compositions as pairs of index arrays: (most feasible first, least feasible first)."""

    objects: list  # a pair of arrays of states for each object
    states: list  # a pair of arrays of objects for each state
    overall: tuple  # one pair of arrays of compositions s * O + o


def ranked(feasibility, seen, *, top=3):
    """The paper's ranked tables: most and least feasible unseen partners -> Ranking.

    feasibility (S, O), seen (S, O) bool. `top` of each per object, per state and overall; fewer
    where fewer are unseen; ties keep index order. ValueError: shapes or types that do not fit.
    """
    feasibility, seen = _scores(feasibility, seen)
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
    ValueError: shapes or types that do not fit.
    """
    feasibility, seen = _scores(feasibility, seen)
    # A threshold of float32 may lie beside the feasibility it was taken from.
    return seen | (feasibility >= float(threshold))


def median_mask(feasibility, seen, *, inverse=False):
    """The appendix's check on the hard mask -> (S, O) bool: seen, or upper half of the unseen.

    The upper half are the unseen from their median up; there must be some. `inverse` keeps the
    others, those below it: if feasibility means anything, that is much the worse mask. ValueError
    as in hard_mask.
    """
    feasibility, seen = _scores(feasibility, seen)
    upper = feasibility >= np.median(feasibility[~seen])
    return seen | (~upper if inverse else upper)


HIDDEN_SHARE = 0.05  # of the unseen that can exist: what a mask may be expected to hide


def conformal_threshold(unseen_feasibility):
    """The greatest τ expected to hide at most 5 % of what can exist; -inf: too little to tell.

    unseen_feasibility (n,): ρ of the unseen compositions that validation shows. τ is at most the
    k-th smallest of these, k = ⌊0.05 (n + 1)⌋, and below n = 19 there is none. This is a conformal
    bound: if another composition that exists is drawn as these were, its rank among the n + 1 is
    uniform, so it lies below the k-th smallest of the n with a chance of at most k / (n + 1) <=
    0.05.
    """
    rank = int(HIDDEN_SHARE * (len(unseen_feasibility) + 1) + 1e-9)
    if rank < 1:
        return -np.inf
    return np.sort(unseen_feasibility)[rank - 1]


def blend(feasibility, external, *, weight):
    """Feasibility with knowledge from elsewhere (a knowledge base, a language model).

    feasibility (S, O), external (S, O) in [-1, 1] or nan where it knows nothing, weight in [0, 1]
    -> (S, O) float64: (1 - weight) · feasibility + weight · external, or the feasibility alone
    where external is nan. Seen compositions are mixed like all others; margins, masks and rankings
    pass them by anyway. ValueError: shapes, types or values other than these.
    """
    feasibility = _finite(feasibility, "feasibility", 2)
    external = _array(external, "external", feasibility.shape)
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
    positive = _array(positive, "positive", among.shape, "bool")[among]
    n = int(positive.sum())
    others = positive.size - n
    if n == 0 or others == 0:
        return float("nan")
    # Mann and Whitney: the positives' ranks count whom each beats, itself and other positives too.
    wins = _ranks(feasibility[among])[positive].sum() - n * (n + 1) / 2
    return float(wins / (n * others))


def rank_correlation(a, b):
    """Spearman's rank correlation of two (N,) arrays, ties sharing their mean rank.

    nan where one is constant. ValueError unless both are finite numbers, of one length.
    """
    a = _finite(a, "a", 1)
    b = _finite(b, "b", a.shape)
    with np.errstate(invalid="ignore"):  # 0 / 0: one is constant
        return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def agreement(scores, seen, *, occurring=None, published=None):
    """{figure: value} of how scores (S, O) fit what is known of the unseen compositions.

    As far as it is given: occurring (S, O) bool, those that exist; published (S, O), other scores.
    ValueError: arrays that do not fit.
    """
    figures = {}
    if published is not None:
        figures["rank correlation"] = rank_correlation(scores[~seen], published[~seen])
    if occurring is not None:
        figures["AUROC"] = auroc(scores, occurring, ~seen)
    return figures


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
    seen = _array(seen, "seen", (len(state_cosines), len(object_cosines)), "bool")
    if not seen.any():
        raise ValueError("no composition is seen: mark those of the training images True")
    return state_cosines, object_cosines, seen


def _cosines(vectors, name):
    """(A, D) -> (A, A) float64 cosines of all rows."""
    vectors = _finite(vectors, name, 2)
    largest = np.abs(vectors).max(axis=1, keepdims=True, initial=0)    # (A, 1)
    if not largest.all():
        raise ValueError(f"{name}: row {largest.argmin()} is zero; give each a direction")
    # First by a power of two, for the square of 1e200 is infinite and that of 1e-200 zero.
    vectors *= 2.0 ** -np.frexp(largest)[1]  # a copy of what was given
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors @ vectors.T
    np.clip(cosines, -1, 1, out=cosines)  # in place: a second array takes as long as the product
    return cosines


def _array(value, name, shape, kind="numbers"):
    """The value as an array, float64 or bool as its kind is; ValueError unless it fits.

    shape: a tuple, or how many dimensions; kind: one of KINDS.
    """
    if hasattr(value, "detach"):  # a torch tensor of any device, with a gradient or without
        value = value.numpy(force=True)
    array = np.asarray(value)
    if array.dtype.kind not in KINDS[kind] or shape not in (array.shape, array.ndim):
        raise ValueError(f"{name} is {array.dtype} {array.shape}; expected {kind} of shape "
                         f"(or dimensions) {shape}")
    return array if kind == "bool" else array.astype(np.float64)


KINDS = {"numbers": "fiu", "bool": "b"}  # NumPy's letters for them


def _finite(value, name, shape):
    """An array of numbers none of which is nan or infinite; ValueError says where one is."""
    array = _array(value, name, shape)
    finite = np.isfinite(array)
    if not finite.all():
        first = np.argwhere(~finite)[0].tolist()
        raise ValueError(f"{name} {array.shape} is not finite, first at {first}")
    return array


def _scores(feasibility, mask, name="seen"):
    """-> both as (S, O) arrays, float64 and bool, checked."""
    feasibility = _finite(feasibility, "feasibility", 2)
    return feasibility, _array(mask, name, feasibility.shape, "bool")


# ---- files ----


def read_pairs(path):
    """The (state, object) of a text file with one pair a line -> list in the file's order.

    A tab, a comma or a semicolon parts names that have blanks, else a blank parts the two. Blanks
    and quotes around names, empty lines and a first line `state object` (`attr obj`) are passed
    over. ValueError names the file and the line that is no pair or no UTF-8; OSError: no such file.
    """
    text = Path(path).read_text(encoding="utf-8-sig", errors="replace")
    pairs = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        separator = next((sign for sign in "\t,;" if sign in line), None)  # None: any blanks
        pair = tuple(" ".join(cell.strip(' "').split()) for cell in line.split(separator))
        if not line or (number == 1 and pair in HEADINGS):
            continue
        if len(pair) != 2 or "" in pair or "\ufffd" in line:  # it stands for what is no UTF-8
            raise ValueError(f"{path}, line {number}: expected `state object` in UTF-8 (a tab or a "
                             f"comma between them where names have blanks), found {line[:60]!r}")
        pairs.append(pair)
    if not pairs:
        raise ValueError(f"{path} is empty: expected `state object` a line")
    return pairs


HEADINGS = ("state", "object"), ("attr", "obj")


def write_csv(file, feasibility, seen, states, objects):
    """A row `state,object,seen,feasibility` for each composition, into a text file that is open."""
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["state", "object", "seen", "feasibility"])
    for (s, o), score in np.ndenumerate(feasibility):
        rows.writerow([states[s], objects[o], int(seen[s, o]), f"{score:.6f}"])


# ---- the script ----


def main(argv=None):
    """The command line; --help tells."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        _run(options)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


def _parser():
    parser = argparse.ArgumentParser(
        description="Rank unseen compositions, explain them, compare with what is known.")
    add = parser.add_argument
    add("--pairs", required=True, metavar="FILE",
        help="the seen compositions, one `state object` a line (a tab or comma between names with "
        "blanks)")
    add("--vectors", required=True, metavar="FILE",
        help="an .npz of names (N,) and vectors (N, D); beside compcos.py also what its --vectors "
        "takes: a file of GloVe, word2vec or fastText")
    add("--missing", default="error", choices=["error", "random", "mean"],
        help="for words that a file other than .npz lacks (default error)")
    add("--mix", default="mean", choices=MIXES,
        help="of the state term and the object term (default mean)")
    add("--combine", metavar="FILE",
        help="knowledge from elsewhere: an .npz of `scores` in [-1, 1], nan where unknown (S, O), "
        "and the names of its rows, `states` (S,), and columns, `objects` (O,)")
    add("--weight", type=float, default=0.5, help="of --combine, in [0, 1] (default 0.5)")
    add("--csv", metavar="FILE", help="also write all scores as state,object,seen,feasibility")
    add("--top", type=int, default=3, metavar="K", help="show so many of each (default 3)")
    add("--explain", nargs=2, metavar=("STATE", "OBJECT"),
        help="show the seen compositions behind a score")
    add("--occur", nargs="+", default=[], metavar="FILE",
        help="check against lists of compositions that exist")
    add("--published", metavar="FILE",
        help="check against an .npz of `feasibility`, sorted states by sorted objects")
    return parser


def _run(options):
    """What main does once it knows the options."""
    if options.top < 1:
        raise ValueError(f"--top is {options.top}; expected at least 1")
    pairs = read_pairs(options.pairs)
    occurring = []
    for path in options.occur:
        occurring += read_pairs(path)
    states = sorted({state for state, _ in pairs + occurring})
    objects = sorted({object_ for _, object_ in pairs + occurring})
    seen = _marked(pairs, states, objects)
    vectors = _read_vectors(options.vectors, [*states, *objects], options.missing)
    vectors = np.split(vectors, [len(states)])    # (S, D), (O, D)
    external = np.full(seen.shape, np.nan)
    if options.combine:
        external = _read_external(options.combine, states, objects)

    def score(state_vectors, object_vectors):
        """(S, O) scores of these vectors, with the knowledge from elsewhere if there is any."""
        scores = feasibility_scores(state_vectors, object_vectors, seen, mix=options.mix)
        return np.where(seen, 1, blend(scores, external, weight=options.weight))

    scores = score(*vectors)
    if options.csv:
        part = Path(f"{options.csv}.part")  # the file appears once all is written
        try:
            with open(part, "w", encoding="utf-8", newline="") as file:
                write_csv(file, scores, seen, states, objects)
            part.replace(options.csv)
        finally:
            part.unlink(missing_ok=True)
    if options.explain:
        _print_explanation(options, scores, states, objects, vectors, seen)
    elif options.occur or options.published:
        known = {}
        if options.occur:
            known["occurring"] = _marked(occurring, states, objects)
        if options.published:
            row, = _read_arrays(options.published, "feasibility")  # (S, O), or all in one row
            row = _finite(row.ravel(), f"{options.published}: feasibility", (seen.size,))
            known["published"] = row.reshape(seen.shape)
        _print_agreement(score, vectors, seen, known)
    else:
        for kind, rows in ranked_tables(scores, seen, states, objects, top=options.top).items():
            _print_table([kind, "most feasible", "least feasible"], rows)


def _marked(pairs, states, objects):
    """(S, O) bool: the compositions that are among the pairs."""
    marked = np.zeros((len(states), len(objects)), bool)
    for state, object_ in pairs:
        marked[states.index(state), objects.index(object_)] = True
    return marked


def _places(names, known, where):
    """The index of each name among the known; ValueError says all that are not `where`."""
    absent = [name for name in names if name not in known]
    if absent:
        raise ValueError(f"{where}: no {', '.join(absent)}")
    return [known.index(name) for name in names]


def _read_arrays(path, *keys):
    """The arrays of an .npz under all these keys."""
    try:
        with np.load(path) as file:
            return [file[key] for key in keys]
    except OSError:
        raise
    except Exception:  # NumPy and zipfile have many ways to say that this is not the file
        raise ValueError(f"{path}: expected an .npz file with the arrays {', '.join(keys)}, whole "
                         "and without Python objects (names as by np.array(names, str))") from None


def _read_vectors(path, names, missing):
    """(N, D) vectors of the names; ValueError: names without any, a file that is not read here."""
    if path.endswith(".npz"):
        known, vectors = _read_arrays(path, "names", "vectors")
        vectors = _array(vectors, f"{path}: vectors", (known.size, *vectors.shape[1:]))
        return vectors[_places(names, known.tolist(), path)]
    if not Path(__file__).with_name("compcos.py").exists():  # then words.py is not ours
        raise ValueError(f"{path} is no .npz, and without words.py and compcos.py beside it this "
                         "script reads only an .npz of `names` (N,) and `vectors` (N, D)")
    from lab.words import word_vectors
    return word_vectors(names, path, missing=missing)


def _read_external(path, states, objects):
    """(S, O) for blend, from an .npz of `scores` and the names of its rows and columns.

    The rows are `states`, the columns `objects`. ValueError: arrays that do not fit each other, a
    name that is not there.
    """
    scores, rows, columns = _read_arrays(path, "scores", "states", "objects")
    scores = _array(scores, f"{path}: scores", rows.shape + columns.shape)
    of_states = _places(states, rows.tolist(), path)
    of_objects = _places(objects, columns.tolist(), path)
    return scores[np.ix_(of_states, of_objects)]


def markdown(header, rows):
    """The lines of a table of Markdown, from a header and rows of texts, and an empty one."""
    lines = []
    for row in (header, ["---" for _ in header], *rows):
        lines.append(f"| {' | '.join(row)} |")
    return [*lines, ""]


def _print_table(header, rows):
    """Print a table of Markdown."""
    print("\n".join(markdown(header, rows)))


def _print_explanation(options, scores, states, objects, vectors, seen):
    """The score of a composition, and the seen compositions behind it."""
    state, object_ = options.explain
    s, = _places([state], states, options.pairs)
    o, = _places([object_], objects, options.pairs)
    print(f"{state} {object_}: feasibility {scores[s, o]:.2f}{', seen' if seen[s, o] else ''}")

    # A state is supported by states seen with the same object, an object by objects seen with the
    # same state.
    explanation = explain(s, o, *vectors, seen)
    supports = {f"the state {state}": explanation.same_object,
                f"the object {object_}": explanation.same_state}
    rows = []
    for what, compositions in supports.items():
        cells = []
        for other_s, other_o, cosine in compositions[:options.top]:
            cells.append(f"{states[other_s]} {objects[other_o]} {cosine:.2f}")
        rows.append([what, ", ".join(cells) or "none"])
    _print_table(["supported", "by the seen compositions"], rows)


def ranked_tables(feasibility, seen, states, objects, *, top=3):
    """The paper's ranked lists in words: {kind: rows}, of "overall", "objects" and "states".

    A row is a name and two texts, its `top` most and least feasible unseen partners.
    """
    ranking = ranked(feasibility, seen, top=top)
    compositions = [f"{state} {object_}" for state in states for object_ in objects]
    tables = {
        # kind: names of the rows, of partners, their indices, scores (rows, partners)
        "overall": (["all"], compositions, [ranking.overall], feasibility.reshape(1, -1)),
        "objects": (objects, states, ranking.objects, feasibility.T),
        "states": (states, objects, ranking.states, feasibility),
    }
    found = {}
    for kind, (names, partners, ends, scores) in tables.items():
        found[kind] = []
        for name, (most, least), row in zip(names, ends, scores):
            cells = [name]
            least = least[~np.isin(least, most)]  # of few each is named once
            for chosen in (most, least):
                cells.append(", ".join(f"{partners[k]} {row[k]:.2f}" for k in chosen))
            found[kind].append(cells)
    return found


def _print_agreement(score, vectors, seen, known):
    """How the scores fit what is known, beside scores of shuffled vectors and published ones.

    known: what `agreement` takes by keyword.
    """
    shuffled = []
    for seed in range(10):
        random = np.random.default_rng(seed)
        shuffled.append(score(*(random.permutation(rows) for rows in vectors)))
    runs_of = {"these vectors": [score(*vectors)], "shuffled (± deviation, n - 1)": shuffled}
    if "published" in known:
        runs_of["published"] = [known["published"]]

    rows = []
    for title, runs in runs_of.items():
        figures = [agreement(run, seen, **known) for run in runs]
        cells = [title]
        for figure in figures[0]:
            values = [of_run[figure] for of_run in figures]
            cell = f"{np.mean(values):.3g}"
            if len(values) > 1:
                cell += f" ± {np.std(values, ddof=1):.2g}"
            cells.append(cell)
        rows.append(cells)
    _print_table(["scores of", *figures[0]], rows)


if __name__ == "__main__":
    for name in ("SIGINT", "SIGPIPE"):  # Ctrl-C and a closed pipe end it without a word
        if hasattr(signal, name):  # Windows has no SIGPIPE
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    sys.stdout.reconfigure(errors="backslashreplace")  # for terminals of ASCII
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    main()
