"""Measure speed as a ratio to a baseline that is measured in the same run.

`python -m lab.benchmark NAME ...`; --help lists the names. Times on shared machines are noisy:
each figure is the median of `--repeat` runs, taken in turns with its baseline. Compare ratios, not
times.

Shapes: B images of a batch, S states, O objects, C = S*O compositions, D numbers of an embedding.
Data is made up.
"""

import argparse
import time

from lab import shell

if __name__ == "__main__":
    shell.wait_gently()  # before torch is imported

import numpy as np
import torch

import compcos
from evaluate import evaluate, threshold_sweep

MIT_STATES = (115, 245)  # states, objects


def timed(*functions, repeat):
    """Return the median seconds of each function, after a first call that is not timed.

    They are called in turns, `repeat` times, so that noise hits all.
    """
    for function in functions:
        function()  # a device starts, memory is taken, a step is captured
    seconds = [[] for _ in functions]
    for _ in range(repeat):
        for function, taken in zip(functions, seconds):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [float(np.median(taken)) for taken in seconds]


def random_seen(random, S, O):
    """Return a mask (S, O) of one in 22 compositions, as in MIT-States, and one of each object."""
    seen = random.random((S, O)) < 1 / 22
    seen[np.arange(O) % S, np.arange(O)] = True
    return seen


# ---- evaluation ----


def bench_evaluate(options):
    """Time an exact evaluation beside one argmax, and 50 thresholds of the mask beside it.

    As with a trained model, the best composition of every row is a seen one.
    """
    random = np.random.default_rng(0)
    seen = random_seen(random, *MIT_STATES).ravel()
    n = 12995  # test images of MIT-States
    p = len(seen)
    scores = random.random((n, p), dtype=np.float32)
    target = np.where(random.random(n) < 0.3, scores.argmax(1), random.integers(p, size=n))
    scores[:, seen] += 1
    feasibility = random.random(p)
    thresholds = np.linspace(0, 1, 50)
    argmax, whole, levels = timed(
        lambda: scores.argmax(axis=1),
        lambda: evaluate(scores, target, seen),
        lambda: threshold_sweep([(scores, target)], seen, feasibility, thresholds),
        repeat=options.repeat)
    print(f"evaluate {n:,} x {p:,}: {1e3 * whole:.0f} ms, {whole / argmax:.1f} argmax passes "
          f"({1e3 * argmax:.0f} ms); 50 thresholds: {1e3 * levels:.0f} ms, "
          f"{levels / whole:.1f} evaluations")


# ---- training ----


class Plain(compcos.CompCos):
    """The plain form: Eq. 1 as it is written, every composition embedded by W [φ(s); φ(o)]."""

    def backward(self, features, target):
        """Add the gradients of the loss of all scores (B, S, O) at once."""
        loss = self.loss_of(*self.products(features, self.compositions()), target)
        loss.backward()
        return loss

    def compositions(self):
        """Return all embeddings, (C, D)."""
        columns = torch.arange(self.seen.numel(), device=self.seen.device)
        objects = self.seen.shape[1]
        return self.embed_compositions(torch.stack([columns // objects, columns % objects], 1))

    def products(self, features, compositions):
        """Return the cosines (B, C) of images (B, F), and nothing else that is needed."""
        return self.embed_images(features) @ compositions.T, None, None

    def composition_scores(self, cosines, *_):
        """Return the cosines (B, C) as (B, S, O); there are no chosen pairs here."""
        return cosines.view(-1, *self.seen.shape)


def bench_step(options):
    """Time an open-world training step beside the plain form; on CUDA both are captured."""
    S, O = options.size
    device = compcos.pick_device()
    calls = 50 if device.type == "cuda" else 3
    random = np.random.default_rng(0)
    seen = random_seen(random, S, O)
    features = torch.randn(128, 512, device=device)
    target = torch.as_tensor(random.choice(np.flatnonzero(seen), 128), device=device)
    order = torch.arange(128, device=device)

    def steps_of(kind):
        model = kind(torch.randn(S, 600), torch.randn(O, 600), 512).to(device).prepare(seen)
        model.after_epoch(15)  # from now on all compositions compete, with margins
        step, total = compcos.make_step(model, compcos.adam(model, device), features, target)

        def run():
            for _ in range(calls):
                step(order)
            float(total)  # waits for a GPU

        return run

    ours, plain = timed(steps_of(compcos.CompCos), steps_of(Plain), repeat=options.repeat)
    print(f"step, {S} x {O}, D 600, batch 128, {device}: {1e3 * ours / calls:.2f} ms; the plain "
          f"form {plain / ours:.1f} times as long")


# ---- the command ----


BENCHMARKS = {
    "evaluate": bench_evaluate,
    "step": bench_step,
}


def main(argv=None):
    """Run the named benchmarks, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=BENCHMARKS, default=list(BENCHMARKS),
                        help="what to measure (default: all)")
    parser.add_argument("--repeat", type=int, default=5,
                        help="timed runs of each side, of which the median is taken (default 5)")
    parser.add_argument("--size", type=int, nargs=2, default=MIT_STATES, metavar=("S", "O"),
                        help="states and objects of `step` (default: 115 245, MIT-States)")
    options = parser.parse_args(argv)
    for name in options.names:
        BENCHMARKS[name](options)


if __name__ == "__main__":
    main()
