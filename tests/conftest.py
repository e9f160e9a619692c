"""Fixtures of all tests. pytest reads this file before any test imports torch.

The tests' products are so small that a second thread costs more than it brings.
"""

import hashlib
import os
import signal
import zlib

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell that starts pytest in the background lets it ignore Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy as np
import pytest
import torch

import evaluate
from lab import drawings, features
from toy import make_toy


@pytest.fixture(autouse=True)
def few_resamples(request, monkeypatch):
    """Draw few resamples, since intervals take longer than small runs; not in evaluate.py."""
    if request.module.__name__ != "evaluate":
        monkeypatch.setattr(evaluate, "RESAMPLES", 20)


@pytest.fixture
def toy(tmp_path):
    """Own data with features in a folder of this test."""
    return make_toy(tmp_path / "toy")


@pytest.fixture(scope="session")
def drawn(tmp_path_factory):
    """Draw the built-in dataset in few images into a --data-root, which tests only read."""
    root = tmp_path_factory.mktemp("root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawings, "IMAGES", dict(train=16, seen=3, unseen=6))
        drawings.ensure(root / "shapes")
    return root


def golden_parameter(name, like):
    """Return a parameter by the golden recipe; BatchNorm's counter, not in it, stays as it is."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    shape = tuple(like.shape)
    if name.endswith("num_batches_tracked"):
        return like
    if name.endswith("running_var") or name.endswith("weight") and len(shape) == 1:
        value = random.uniform(0.5, 1.5, shape)
    elif name.endswith(("running_mean", "bias")):
        value = random.uniform(-0.1, 0.1, shape)
    else:
        deviation = np.sqrt(2 / np.prod(shape[1:])) if len(shape) == 4 else 0.01
        value = random.standard_normal(shape) * deviation
    return torch.from_numpy(value.astype(np.float32))


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """Write torchvision's state dict with its classifier, under a name that ends in its hash."""
    like = features.resnet18().state_dict()
    like["fc.weight"] = torch.zeros(1000, 512)
    like["fc.bias"] = torch.zeros(1000)
    path = tmp_path_factory.mktemp("weights") / "small.pth"
    torch.save({name: golden_parameter(name, value) for name, value in like.items()}, path)
    digits = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    return path.rename(path.with_name(f"resnet18-{digits}.pth"))
