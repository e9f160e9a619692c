"""Tests of feasibility.py: the definition written out, the golden file, closed forms, the published scores."""

from pathlib import Path

import numpy as np
import pytest

import feasibility as F

HERE = Path(__file__).parent


def plain(states, objects, seen, mix):
    """Eq. 3 to 5 word for word."""
    def cos(a, b):
        return a @ b / np.sqrt((a @ a) * (b @ b))

    scores = np.ones(seen.shape)
    for s, o in np.argwhere(~seen):
        by_object = max([cos(objects[o], objects[other]) for other in np.flatnonzero(seen[s])], default=-1)
        by_state = max([cos(states[s], states[other]) for other in np.flatnonzero(seen[:, o])], default=-1)
        scores[s, o] = {"mean": (by_state + by_object) / 2, "max": max(by_state, by_object), "state": by_state, "object": by_object}[mix]
    return scores


def random_case(seed, density):
    rng = np.random.default_rng(seed)
    S, O, D = rng.integers(1, 9, 3)
    seen = rng.random((S, O)) < density
    seen[rng.integers(S), rng.integers(O)] = True
    return rng.normal(size=(S, D)), rng.normal(size=(O, D)), seen


@pytest.mark.parametrize("density", [0, 0.1, 0.4, 0.9, 1])  # a single seen composition, empty rows and columns, ..., all seen
@pytest.mark.parametrize("mix", F.MIXES)
def test_scores_equal_the_plain_double_loop(density, mix):
    for seed in range(20):
        case = random_case(seed, density)
        np.testing.assert_allclose(F.feasibility_scores(*case, mix=mix), plain(*case, mix), atol=1e-12)


def test_scores_equal_the_published_models():
    golden = np.load(HERE / "testdata/model.npz")
    scores = F.feasibility_scores(golden["param/attr_embedder.weight"], golden["param/obj_embedder.weight"], golden["seen"])
    unseen = ~golden["seen"]
    np.testing.assert_allclose(scores[unseen], golden["feasibility"][unseen], atol=1e-6)
