"""Read by pytest before any test imports torch: see common.wait_gently."""

import common

common.wait_gently()

import pytest

import evaluate


@pytest.fixture(autouse=True)
def few_resamples(request, monkeypatch):
    """The interval that small runs report takes longer than they do: coarse ones, but in the tests
    of intervals themselves."""
    if request.module.__name__ not in ("test_evaluate", "evaluate", "test_processes"):
        monkeypatch.setattr(evaluate, "RESAMPLES", 20)
