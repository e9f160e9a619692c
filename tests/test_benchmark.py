"""The forms that lab/benchmark.py times are the same function, and it runs."""

import numpy as np
import torch

import compcos
from lab import benchmark


def test_the_forms_of_a_step_agree():
    """Their losses and gradients, with margins."""
    seen = benchmark.random_seen(np.random.default_rng(0), 6, 7)
    target = torch.as_tensor(np.flatnonzero(seen)[:5])
    results = []
    for kind in (compcos.CompCos, benchmark.Plain):
        torch.manual_seed(0)
        model = kind(torch.randn(6, 8), torch.randn(7, 8), 10).eval().prepare(seen)
        model.after_epoch(15)
        loss = model.backward(torch.randn(5, 10), target)
        results.append([loss, *(weight.grad for weight in model.parameters())])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_command_prints_ratios(capsys):
    benchmark.main(["step", "--size", "4", "5", "--repeat", "1"])
    assert "step, 4 x 5, D 600, batch 128" in capsys.readouterr().out
