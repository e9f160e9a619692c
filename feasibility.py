"""Estimate the feasibility of unseen compositions from word vectors and the seen compositions.

This file stands alone: copy it into any project that has NumPy. The method is that of Mancini et
al., "Open World Compositional Zero-Shot Learning", CVPR 2021. The functions score compositions,
make masks of the scores, explain them and rank them. The script prints the paper's tables for a
list of pairs and word vectors:

    python feasibility.py --pairs train_pairs.txt --vectors vectors.npz [--explain wet cat]

A copy of this file alone reads vectors from an .npz; beside lab/words.py it also reads the files of
GloVe, word2vec and fastText.

S is the number of states, O that of objects, D the size of their vectors. The composition of state
s and object o is entry [s, o] of an (S, O) array. Arrays may be anything that NumPy understands, or
torch tensors.
"""

import argparse
import csv
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

# g of Eq. 5 by name, a function of ρ_state and ρ_obj, (S, O) each: the paper's mean, and its
# ablation. Another g is another line here; `mix` and `--mix` then take its name.
MIXES = {
    "mean": lambda of_state, of_object: (of_state + of_object) / 2,
    "max": np.maximum,
    "state": lambda of_state, of_object: of_state,
    "object": lambda of_state, of_object: of_object,
}


def feasibility_scores(state_vectors, object_vectors, seen, *, mix="mean"):
    """Return the feasibility ρ of every composition (Eq. 3 to 5).

    ρ_obj(s, o) is the greatest cosine of o to an object seen with s. ρ_state(s, o) is the greatest
    cosine of s to a state seen with o. A term is -1 where no seen composition supports it. The
    paper's g mixes the two terms to ρ. The feasibility of a seen composition is 1.

    Args:
        state_vectors: (S, D) finite numbers of any type, no row zero.
        object_vectors: (O, D) finite numbers of any type, no row zero.
        seen: (S, O) bool, at least one True.
        mix: the name of a g in MIXES. A further g is one line there: a function of two (S, O)
            arrays, ρ_state and ρ_obj, that returns a finite (S, O) array.

    Returns:
        (S, O) float64 array, in [-1, 1] for the four mixes given here.

    Raises:
        ValueError: shapes or types that do not fit, a vector that is zero or not finite, no seen
            composition, an unknown mix, a mix that returns anything but a finite (S, O) array.

    A cat is like the dog of a wet dog (0.8), and wet is like the small of a small cat (0.6), so a
    wet cat is feasible by 0.7:

    >>> states, objects = [[1, 0], [0.6, 0.8]], [[1, 0], [0.8, 0.6]]  # wet, small; dog, cat
    >>> seen = np.array([[True, False], [True, True]])
    >>> feasibility_scores(states, objects, seen)
    array([[1. , 0.7],
           [1. , 1. ]])
    """
    state_cosines, object_cosines, seen = _checked(state_vectors, object_vectors, seen)
    if mix not in list(MIXES):  # the dictionary itself would refuse a list by a TypeError
        raise ValueError(f"mix must be one of {', '.join(MIXES)}, got {mix!r}")

    # ρ_obj looks along a state's row for the objects seen with it. ρ_state looks along an
    # object's column for the states seen with it: the same with rows and columns exchanged.
    object_term = _closest(object_cosines, seen)        # (S, O)
    state_term = _closest(state_cosines, seen.T).T      # (S, O)

    scores = MIXES[mix](state_term, object_term)
    scores = _finite(scores, f"the result of mix {mix!r}", seen.shape)
    scores[seen] = 1
    return scores


class Explanation(NamedTuple):
    """The seen compositions behind a score, as (state, object, cosine), most similar first."""

    same_state: list  # the same state with other objects: the first cosine is ρ_obj
    same_object: list  # the same object with other states: the first cosine is ρ_state


def explain(state, object, state_vectors, object_vectors, seen):
    """Return the seen compositions that support the feasibility of one composition.

    A seen composition does not support itself: its lists leave it out.

    Args:
        state: the index of its state, from 0 to S - 1.
        object: the index of its object, from 0 to O - 1.
        state_vectors: (S, D) as in `feasibility_scores`.
        object_vectors: (O, D) as in `feasibility_scores`.
        seen: (S, O) bool, at least one True.

    Returns:
        An Explanation: two lists of (state, object, cosine).

    Raises:
        ValueError: an index out of range, or arrays that `feasibility_scores` refuses.

    >>> seen = np.array([[True, False], [True, True]])
    >>> explain(0, 1, [[1, 0], [0.6, 0.8]], [[1, 0], [0.8, 0.6]], seen)
    Explanation(same_state=[(0, 0, 0.8)], same_object=[(1, 1, 0.6)])
    """
    state_cosines, object_cosines, seen = _checked(state_vectors, object_vectors, seen)
    state = _number(state, "state", 0, len(state_cosines) - 1, "whole numbers")
    object = _number(object, "object", 0, len(object_cosines) - 1, "whole numbers")
    other_objects = _most_similar(object_cosines[object], seen[state], object)
    other_states = _most_similar(state_cosines[state], seen[:, object], state)
    return Explanation([(state, other, cosine) for other, cosine in other_objects],
                       [(other, object, cosine) for other, cosine in other_states])


def _most_similar(cosines, marked, own):
    """Return (index, cosine) of those marked (A,) except `own`, by descending cosines (A,)."""
    order = np.argsort(-cosines, kind="stable").tolist()
    return [(other, float(cosines[other])) for other in order if marked[other] and other != own]


class Ranking(NamedTuple):
    """Unseen compositions as pairs of index arrays: (most feasible first, least feasible first)."""

    objects: list  # a pair of arrays of states for each object
    states: list  # a pair of arrays of objects for each state
    overall: tuple  # one pair of arrays of compositions s * O + o


def ranked(feasibility, seen, *, top=3):
    """Return the paper's ranked lists: the most and the least feasible unseen compositions.

    Args:
        feasibility: (S, O) finite numbers.
        seen: (S, O) bool.
        top: the length of each list, at least 1. A list is shorter where fewer are unseen.

    Returns:
        A Ranking: per object, per state and overall. Ties keep the order of the indices.

    Raises:
        ValueError: shapes or types that do not fit, or `top` not a whole number of at least 1.
    """
    feasibility, seen = _scores(feasibility, seen)
    top = _number(top, "top", 1, np.inf, "whole numbers")
    objects = [_ends(scores, known, top) for scores, known in zip(feasibility.T, seen.T)]
    states = [_ends(scores, known, top) for scores, known in zip(feasibility, seen)]
    overall = _ends(feasibility.ravel(), seen.ravel(), top)
    return Ranking(objects, states, overall)


def _ends(scores, seen, top):
    """Return the indices of the `top` best and of the `top` worst unseen scores, of (K,) each."""
    unseen = np.flatnonzero(~seen)
    ascending = np.argsort(scores[unseen], kind="stable")
    descending = np.argsort(-scores[unseen], kind="stable")  # not the reverse: ties keep order
    return unseen[descending[:top]], unseen[ascending[:top]]


def hard_mask(feasibility, seen, threshold):
    """Return the hard mask (Eq. 6): the seen compositions and those of at least this feasibility.

    The paper writes ρ > τ. With ρ >= τ, a composition whose own feasibility is τ is kept.

    Args:
        feasibility: (S, O) finite numbers of any type, compared in float64 as in the evaluation.
        seen: (S, O) bool.
        threshold: τ, one number. -inf keeps every composition, inf only the seen ones.

    Returns:
        (S, O) bool array, for the candidates of an evaluation. Never multiply scores by it: a 0
        would win against negative scores.

    Raises:
        ValueError: shapes or types that do not fit, or a threshold that is nan or not a number.
    """
    feasibility, seen = _scores(feasibility, seen)
    threshold = _number(threshold, "threshold", -np.inf, np.inf)
    return seen | (feasibility >= threshold)


def median_mask(feasibility, seen, *, inverse=False):
    """Return the appendix's check on the hard mask: the seen and the upper half of the unseen.

    The upper half are the unseen compositions from their median up. If feasibility means anything,
    the inverse mask is much the worse one.

    Args:
        feasibility: (S, O) finite numbers.
        seen: (S, O) bool.
        inverse: whether to keep the unseen compositions below the median instead.

    Returns:
        (S, O) bool array, all True where no composition is unseen.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    feasibility, seen = _scores(feasibility, seen)
    if seen.all():
        return seen.copy()
    upper = feasibility >= np.median(feasibility[~seen])
    return seen | (~upper if inverse else upper)


def conformal_threshold(unseen_feasibility):
    """Return the greatest τ that is expected to hide at most 5 % of the existing compositions.

    τ is the k-th smallest of the n values, k = ⌊0.05 (n + 1)⌋. This is a conformal bound: if
    another existing composition is drawn as these were, its rank among the n + 1 is uniform, so it
    lies below the k-th smallest of the n with a chance of at most k / (n + 1) <= 0.05.

    Args:
        unseen_feasibility: (n,) finite numbers, the feasibility of the unseen compositions that
            validation shows.

    Returns:
        τ, or -inf where n is below 19, which is too few to tell.

    Raises:
        ValueError: values other than these.
    """
    values = _finite(unseen_feasibility, "unseen_feasibility", 1)
    rank = (len(values) + 1) // 20  # k = ⌊0.05 (n + 1)⌋
    return np.append(-np.inf, np.sort(values))[rank]


def blend(feasibility, external, *, weight):
    """Mix feasibility with knowledge from elsewhere (a knowledge base, a language model).

    Seen compositions are mixed like all others, because margins, masks and rankings do not use
    their scores.

    Args:
        feasibility: (S, O) finite numbers.
        external: (S, O) numbers in [-1, 1], or nan where nothing is known.
        weight: the weight of `external`, in [0, 1].

    Returns:
        (S, O) float64 array: (1 - weight) · feasibility + weight · external, or the feasibility
        alone where `external` is nan.

    Raises:
        ValueError: shapes, types or values other than these.
    """
    feasibility = _finite(feasibility, "feasibility", 2)
    external = _array(external, "external", feasibility.shape)
    weight = _number(weight, "weight", 0, 1)
    if np.any(np.abs(external) > 1):
        raise ValueError("external must be in [-1, 1], or nan where nothing is known")
    mixed = (1 - weight) * feasibility + weight * external
    return np.where(np.isnan(external), feasibility, mixed)


def auroc(feasibility, positive, among):
    """Measure how well feasibility ranks the `positive` compositions above the rest of `among`.

    The number of times that states and objects occur explains a part of the figure: compare it with
    the figure of shuffled vectors.

    Args:
        feasibility: (S, O) finite numbers.
        positive: (S, O) bool.
        among: (S, O) bool. Compositions outside do not count.

    Returns:
        The share of (positive, other) pairs in which the positive one scores higher, ties counting
        half: 1 is perfect, 0.5 is chance, nan means no positives or no others.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    feasibility, among = _scores(feasibility, among, "among")
    positive = _array(positive, "positive", among.shape, "bool")
    scores = feasibility[among & positive]             # (n,)
    others = np.sort(feasibility[among & ~positive])   # (m,)
    if not (scores.size and others.size):
        return np.nan
    # For each positive one, the others below it and half of those that equal it.
    below = np.searchsorted(others, scores, "left")
    up_to = np.searchsorted(others, scores, "right")
    wins = (below + up_to).sum() / 2
    return float(wins / (scores.size * others.size))


def _closest(similarity, seen):
    """Return (B, A): the greatest similarity (A, A) of each to those that a row of `seen` marks.

    It is -1 where the row marks none.
    """
    closest = np.empty(seen.shape)
    for marked, row in zip(seen, closest):
        # A row at a time fits the processor's cache, one maximum over a (B, A, A) array does not.
        candidates = similarity.take(marked.nonzero()[0], axis=0)    # (marked, A)
        np.maximum.reduce(candidates, axis=0, initial=-1, out=row)
    return closest


# ---- checks ----


def _checked(state_vectors, object_vectors, seen):
    """Return the (S, S) and (O, O) cosines and `seen`, after a check that all three fit."""
    state_cosines = _cosines(state_vectors, "state_vectors")
    object_cosines = _cosines(object_vectors, "object_vectors")
    seen = _array(seen, "seen", (len(state_cosines), len(object_cosines)), "bool")
    if not seen.any():
        raise ValueError("seen has no True: mark the compositions of the training images")
    return state_cosines, object_cosines, seen


def _cosines(vectors, name):
    """Return the (A, A) float64 cosines between all rows of the vectors (A, D)."""
    vectors = _finite(vectors, name, 2)
    largest = np.abs(vectors).max(axis=1, keepdims=True, initial=0)    # (A, 1)
    if not largest.all():
        raise ValueError(f"{name}: row {largest.argmin()} is zero; give each row a direction")
    # The square of 1e200 is infinite and that of 1e-200 zero, so divide each row by a power of two
    # first: the greatest up to its largest entry, which float64 can always hold.
    vectors = vectors / np.ldexp(1.0, np.frexp(largest)[1] - 1)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors @ vectors.T
    return np.clip(cosines, -1, 1, out=cosines)  # a second array takes as long as the product


KINDS = {"numbers": "fiu", "whole numbers": "iu", "bool": "b"}  # the letters of NumPy's types


def _array(value, name, shape, kind="numbers"):
    """Return the value as an array of a kind in KINDS, numbers as float64.

    The shape to check is a tuple or a number of dimensions.
    """
    if hasattr(value, "detach"):  # a torch tensor of any device, with a gradient or without
        value = value.numpy(force=True)
    array = np.asarray(value)
    if array.dtype.kind not in KINDS[kind] or shape not in (array.shape, array.ndim):
        raise ValueError(f"{name} is {array.dtype} {array.shape}: expected {kind} of dimensions "
                         f"{shape}")
    return np.asarray(array, np.float64) if kind == "numbers" else array


def _finite(value, name, shape):
    """Return the value as an array of numbers, none of which is nan or infinite."""
    array = _array(value, name, shape)
    finite = np.isfinite(array)
    if not finite.all():
        raise ValueError(f"{name} must be finite, got nan or infinity first at "
                         f"{np.argwhere(~finite)[0].tolist()}")
    return array


def _number(value, name, least, most, kind="numbers"):
    """Return the value as a Python number, after a check that it is one from least to most."""
    number = np.asarray(value)
    is_number = number.shape == () and number.dtype.kind in KINDS[kind]
    if not is_number or not least <= number <= most:
        raise ValueError(f"{name} must be one of the {kind} from {least} to {most}, got {value!r}")
    return number.item()


def _scores(feasibility, mask, name="seen", shape=2):
    """Return both as (S, O) arrays, float64 and bool, after a check that they fit."""
    feasibility = _finite(feasibility, "feasibility", shape)
    return feasibility, _array(mask, name, feasibility.shape, "bool")


# ---- files ----


HEADINGS = ("state", "object"), ("attr", "obj")


def read_pairs(path):
    """Read a text file with one pair of state and object a line.

    A tab, a comma or a semicolon separates names that contain spaces; otherwise spaces separate
    the two names. Spaces and quotes around names, empty lines and a first line `state object` or
    `attr obj` are ignored.

    Args:
        path: the file, in UTF-8.

    Returns:
        A list of (state, object), in the file's order.

    Raises:
        ValueError: a line that is not a pair or not UTF-8, or no pair at all.
        OSError: no such file, or it cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8-sig", errors="replace")
    pairs = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        separator = next((sign for sign in "\t,;" if sign in line), None)  # None: any spaces
        pair = tuple(" ".join(cell.strip(' "').split()) for cell in line.split(separator))
        if not line or (number == 1 and pair in HEADINGS):
            continue
        if len(pair) != 2 or "" in pair or "\ufffd" in line:  # it stands for what is no UTF-8
            raise ValueError(f"{path}, line {number}: expected `state object` in UTF-8, got "
                             f"{line[:60]!r}: separate names that contain spaces by a tab or comma")
        pairs.append(pair)
    if not pairs:
        raise ValueError(f"{path} contains no pairs: write `state object` on each line")
    return pairs


def write_csv(file, feasibility, seen, states, objects):
    """Write a header and a row `state,object,seen,feasibility` for each composition.

    Args:
        file: a text file that is open for writing.
        feasibility: (S, O) finite numbers, written with six decimals.
        seen: (S, O) bool, written as 0 or 1.
        states: the S names of the rows.
        objects: the O names of the columns.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    feasibility, seen = _scores(feasibility, seen, shape=(len(states), len(objects)))
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["state", "object", "seen", "feasibility"])
    for (s, o), score in np.ndenumerate(feasibility):
        rows.writerow([states[s], objects[o], int(seen[s, o]), f"{score:.6f}"])


def ranked_tables(feasibility, seen, states, objects, *, top=3):
    """Return the paper's ranked lists as rows of text.

    Args:
        feasibility: (S, O) finite numbers.
        seen: (S, O) bool.
        states: the S names of the rows.
        objects: the O names of the columns.
        top: the length of each list, at least 1.

    Returns:
        A dict of the rows under "overall", "objects" and "states". A row is a name, its most
        feasible unseen partners and its least feasible ones. Each partner is named once.

    Raises:
        ValueError: shapes or types that do not fit, or `top` not a whole number of at least 1.
    """
    feasibility, seen = _scores(feasibility, seen, shape=(len(states), len(objects)))
    ranking = ranked(feasibility, seen, top=top)
    compositions = [f"{state} {object_}" for state in states for object_ in objects]
    return {
        "overall": _rows(["all"], compositions, [ranking.overall], feasibility.reshape(1, -1)),
        "objects": _rows(objects, states, ranking.objects, feasibility.T),
        "states": _rows(states, objects, ranking.states, feasibility),
    }


def _rows(names, partners, ends, scores):
    """Return a row of text for each name, from its scores (K,) and both ends of its ranking."""
    rows = []
    for name, (most, least), row in zip(names, ends, scores):
        cells = [name]
        least = least[~np.isin(least, most)]  # where few are unseen, name each once
        for chosen in (most, least):
            cells.append(", ".join(f"{partners[k]} {row[k]:.2f}" for k in chosen))
        rows.append(cells)
    return rows


def markdown(header, rows):
    """Return the lines of a Markdown table, the last one empty.

    Args:
        header: the names of the columns.
        rows: lists of text, each as long as the header.

    Returns:
        A list of lines.
    """
    lines = []
    for row in (header, ["---" for _ in header], *rows):
        lines.append(f"| {' | '.join(row)} |")
    return [*lines, ""]


# ---- the script ----


def main(argv=None):
    """Run the command line (see --help).

    Args:
        argv: the arguments, by default those of the process.

    Raises:
        SystemExit: with status 2 after an error.
    """
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Estimate how feasible unseen compositions are: from -1 to 1, 1 for the seen.",
        epilog="example:\n  python feasibility.py --pairs train_pairs.txt --vectors vectors.npz "
        "--explain wet cat")
    add = parser.add_argument
    add("--pairs", required=True, metavar="FILE",
        help="the seen compositions, one `state object` a line (a tab or comma between names that "
        "contain spaces)")
    add("--vectors", required=True, metavar="FILE",
        help="word vectors: an .npz of names (N,) and vectors (N, D); beside lab/words.py also a "
        "file of GloVe, word2vec or fastText")
    add("--missing", default="error", choices=["error", "random", "mean"],
        help="for words without a vector in a file other than .npz: stop and list them (error), or "
        "take a random vector or the mean of the vectors found (default error)")
    add("--mix", default="mean", choices=MIXES,
        help="how the score is made from the state term (greatest cosine of the state to one seen "
        "with the object) and the object term (greatest cosine of the object to one seen with the "
        "state): their mean, the greater one (max), or one term alone (default mean)")
    add("--csv", metavar="FILE", help="also write all scores as state,object,seen,feasibility")
    add("--top", type=int, default=3, metavar="K", help="length of each list (default 3)")
    add("--explain", nargs=2, metavar=("STATE", "OBJECT"),
        help="show the seen compositions behind the score of this one, in place of the ranking")
    add("--occur", nargs="+", default=[], metavar="FILE",
        help="lists of pairs that exist: show the AUROC of the unseen ones against all other "
        "unseen compositions (1 is perfect, 0.5 is chance), in place of the ranking")
    try:
        _run(parser.parse_args(argv))
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


def _run(options):
    """Print, and write, what the options ask for."""
    pairs = read_pairs(options.pairs)
    occurring = []
    for path in options.occur:
        occurring += read_pairs(path)
    states = sorted({state for state, _ in pairs + occurring})
    objects = sorted({object_ for _, object_ in pairs + occurring})
    seen = _marked(pairs, states, objects)
    vectors = _read_vectors(options.vectors, states + objects, options.missing)
    vectors = np.split(vectors, [len(states)])    # (S, D), (O, D)
    scores = feasibility_scores(*vectors, seen, mix=options.mix)

    if options.csv:
        with open(options.csv, "w", encoding="utf-8", newline="") as file:
            write_csv(file, scores, seen, states, objects)
    if options.explain:
        _print_explanation(options, scores, states, objects, vectors, seen)
    elif options.occur:
        _print_auroc(options.mix, scores, vectors, seen, _marked(occurring, states, objects))
    else:
        for kind, rows in ranked_tables(scores, seen, states, objects, top=options.top).items():
            print("\n".join(markdown([kind, "most feasible", "least feasible"], rows)))


def _marked(pairs, states, objects):
    """Return an (S, O) bool array that is True for the compositions among the pairs."""
    marked = np.zeros((len(states), len(objects)), bool)
    for state, object_ in pairs:
        marked[states.index(state), objects.index(object_)] = True
    return marked


def _indices(names, known, where):
    """Return the index of each name among the known names."""
    absent = [name for name in names if name not in known]
    if absent:
        raise ValueError(f"{where} lacks {', '.join(absent)}: add them, or check the spelling")
    return [known.index(name) for name in names]


def _read_vectors(path, names, missing):
    """Return the vectors (N, D) of the names (N) from an .npz or a file that lab.words reads."""
    if not path.endswith(".npz"):
        if not (Path(__file__).parent / "lab/words.py").exists():
            raise ValueError(f"{path} is not an .npz: without lab/words.py beside it, this script "
                             "reads only an .npz of `names` (N,) and `vectors` (N, D)")
        from lab.words import word_vectors
        return word_vectors(names, path, missing=missing)
    try:
        with np.load(path) as file:
            known = file["names"]
            vectors = file["vectors"]
    except OSError:
        raise
    except Exception:  # NumPy and zipfile have many ways to say that this is not the file
        raise ValueError(f"{path} cannot be read: expected an .npz file with the arrays `names` "
                         "and `vectors`, whole and without Python objects; save the names by "
                         "np.array(names, str)") from None
    vectors = _array(vectors, f"{path}: vectors", (known.size, *vectors.shape[1:]))
    return vectors[_indices(names, known.astype(str).tolist(), path)]


def _print_explanation(options, scores, states, objects, vectors, seen):
    """Print the score of a composition and the seen compositions that support it."""
    state, object_ = options.explain
    s, = _indices([state], states, options.pairs)
    o, = _indices([object_], objects, options.pairs)
    print(f"{state} {object_}: feasibility {scores[s, o]:.2f}{', seen' if seen[s, o] else ''}")

    # States seen with the same object support the state, objects seen with the same state the
    # object.
    explanation = explain(s, o, *vectors, seen)
    terms = {"state term": explanation.same_object, "object term": explanation.same_state}
    for term, compositions in terms.items():
        shown = [f"{states[a]} {objects[b]} {cosine:.2f}" for a, b, cosine in compositions]
        print(f"{term}, cosines of seen compositions: {', '.join(shown[:options.top]) or 'none'}")


def _print_auroc(mix, scores, vectors, seen, occurring):
    """Print the AUROC of the occurring compositions, and that of shuffled vectors."""
    value = auroc(scores, occurring, ~seen)
    if np.isnan(value):
        raise ValueError("--occur must list some of the unseen compositions, but not all of them")
    shuffled = []
    for seed in range(10):
        random = np.random.default_rng(seed)
        permuted = [random.permutation(rows) for rows in vectors]
        permuted_scores = feasibility_scores(*permuted, seen, mix=mix)
        shuffled.append(auroc(permuted_scores, occurring, ~seen))
    print(f"AUROC: {value:.3g}")
    print("AUROC of vectors shuffled 10 times, mean ± standard deviation: "
          f"{np.mean(shuffled):.3g} ± {np.std(shuffled, ddof=1):.2g}")


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # a closed pipe ends the script silently; Windows has none
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if sys.stdout:  # None if it was closed before the start
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals of ASCII
    main()
