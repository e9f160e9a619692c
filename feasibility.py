"""Feasibility of unseen compositions from the similarity of their primitives: scores, masks, explanations, ranked tables.

This file stands alone: copy it into any project that has NumPy. The method is Mancini et al., "Open World Compositional
Zero-Shot Learning", CVPR 2021. S states, O objects, D the size of their vectors; composition (s, o) is entry [s, o] of an (S, O) array.
"""

import argparse
import sys
from typing import NamedTuple

import numpy as np

MIXES = {
    "mean": lambda state, object: (state + object) / 2,
    "max": np.maximum,
    "state": lambda state, object: state,
    "object": lambda state, object: object,
}


def feasibility_scores(state_vectors, object_vectors, seen, *, mix="mean"):
    """Feasibility ρ of every composition (Eq. 3 to 5): how alike its primitives are to those they would replace in seen compositions.

    state_vectors (S, D), object_vectors (O, D) of any float type, seen (S, O) bool -> (S, O) float64 in [-1, 1]:
    g(ρ_state, ρ_obj), where ρ_obj(s, o) is the greatest cosine of o to an object seen with s, ρ_state(s, o) that of s to a state seen with o,
    and g is `mix`: their "mean" or "max", or "state" or "object" alone. A term without a supporting seen composition is -1; seen compositions are 1.
    ValueError: shapes that do not fit, vectors that are zero or not finite, a mask that is not bool or marks nothing, an unknown mix.

    >>> states, objects = np.array([[1, 0], [0.6, 0.8]]), np.array([[1, 0], [0.8, 0.6]])  # wet, small; dog, cat
    >>> feasibility_scores(states, objects, np.array([[True, False], [True, True]]))  # wet cat, from wet dog 0.8 and small cat 0.6
    array([[1. , 0.7],
           [1. , 1. ]])
    """
    states, objects = _cosines(state_vectors, "state_vectors"), _cosines(object_vectors, "object_vectors")
    seen = _mask(seen, (len(states), len(objects)))
    if not seen.any():
        raise ValueError("no composition is seen: feasibility needs at least one True in `seen`, the training compositions")
    if mix not in MIXES:
        raise ValueError(f"unknown mix {mix!r}: choose from {', '.join(MIXES)}")
    scores = MIXES[mix](_closest(states, seen.T).T, _closest(objects, seen))
    scores[seen] = 1
    return scores


def hard_mask(feasibility, seen, threshold):
    """Compositions that may be predicted under the hard mask (Eq. 6): (S, O) bool, seen or of at least this feasibility.

    Give it to the evaluation as its candidates; scores are never multiplied by it, since 0 can win against negative scores.
    """
    feasibility = _scores(feasibility)
    return _mask(seen, feasibility.shape) | (feasibility >= threshold)


def _cosines(vectors, name):
    """(A, D) -> (A, A) float64 cosines of all rows."""
    vectors = np.asarray(vectors, np.float64)
    if vectors.ndim != 2 or not vectors.size:
        raise ValueError(f"{name} has shape {vectors.shape}; expected one row a name, (number of names, vector size)")
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    bad = np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))
    if len(bad):
        raise ValueError(f"{name} row {bad[0]} ({len(bad)} in all) is zero or not finite, so it has no direction: give it a vector")
    unit = vectors / lengths
    return np.clip(unit @ unit.T, -1, 1)


def _closest(similarity, seen):
    """(A, A), (B, A) bool -> (B, A): the greatest similarity of each to those marked in the row, -1 where none is."""
    return np.stack([similarity[marked].max(axis=0, initial=-1) for marked in seen])


def _mask(mask, shape, name="seen"):
    mask = np.asarray(mask)
    if mask.dtype != bool or mask.shape != shape:
        raise ValueError(f"{name} is {mask.dtype} of shape {mask.shape}; expected bool of shape {shape}, states by objects")
    return mask


def _scores(scores, name="feasibility"):
    scores = np.asarray(scores)
    if scores.ndim != 2:
        raise ValueError(f"{name} has shape {scores.shape}; expected (S, O), states by objects")
    return scores
