"""Read by pytest before any test imports torch: see common.wait_gently.

The tests' products are so small that a second thread costs more than it brings.
"""

import os

import common

os.environ.setdefault("OMP_NUM_THREADS", "1")
common.wait_gently()

import pytest

import drawings
import evaluate


@pytest.fixture(autouse=True)
def few_resamples(request, monkeypatch):
    """The interval that small runs report takes longer than they do: coarse ones, but in the tests
    of intervals themselves."""
    if request.module.__name__ not in ("test_evaluate", "evaluate"):
        monkeypatch.setattr(evaluate, "RESAMPLES", 20)


@pytest.fixture(scope="session")
def drawn(tmp_path_factory):
    """A --data-root with the built-in dataset in few images, which take seconds to draw; it is only
    read."""
    root = tmp_path_factory.mktemp("root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawings, "IMAGES", dict(train=16, seen=3, unseen=6))
        drawings.ensure(root / "shapes")
    return root
