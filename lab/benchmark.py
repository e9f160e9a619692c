"""Speed and memory, each as a ratio to a baseline that is measured in the same run.

`python benchmark.py NAME ...`; --help lists the names. Times on shared machines are noisy: a figure
is the median of `--repeat` runs of each side, taken in turn, and only the ratio is meant.

Legend: N images, B images of a batch, S states, O objects, C = S*O compositions, D numbers of an
embedding, F features of an image. Data is made up.
"""

import argparse
import io
import tempfile
import time
import tracemalloc
from contextlib import redirect_stdout

from lab import shell

if __name__ == "__main__":
    shell.wait_gently()  # before torch is imported

import numpy as np
import torch

import compcos
from lab import run as experiment
import train
from evaluate import BiasSweep, evaluate, threshold_sweep
from feasibility import feasibility_scores
from lab.features import pick_device

MIT_STATES = (115, 245)  # states, objects


def timed(*functions, repeat):
    """Median seconds of each function, called in turn `repeat` times so that noise hits all."""
    seconds = [[] for _ in functions]
    for _ in range(repeat):
        for function, taken in zip(functions, seconds):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [float(np.median(taken)) for taken in seconds]


def random_seen(random, S, O):
    """(S, O) bool: one of 22 compositions, as of MIT-States, and one more of each object."""
    seen = random.random((S, O)) < 1 / 22
    seen[np.arange(O) % S, np.arange(O)] = True
    return seen


# ---- evaluation ----


def bench_evaluate(options):
    """One exact evaluation at MIT-States' size beside one argmax of the scores; 50 thresholds of
    the hard mask beside one evaluation."""
    random = np.random.default_rng(0)
    seen = random_seen(random, *MIT_STATES).ravel()
    n = 12995  # test images
    p = len(seen)
    scores = random.random((n, p), dtype=np.float32)
    target = np.where(random.random(n) < 0.3, scores.argmax(1), random.integers(p, size=n))
    feasibility = random.random(p)
    thresholds = np.linspace(0, 1, 50)
    for kind in ("random scores", "seen ahead in every row"):
        argmax, whole, levels = timed(
            lambda: scores.argmax(axis=1),
            lambda: evaluate(scores, target, seen),
            lambda: threshold_sweep([(scores, target)], seen, feasibility, thresholds),
            repeat=options.repeat)
        tracemalloc.start()
        BiasSweep(seen).update(scores, target)
        memory = tracemalloc.get_traced_memory()[1]  # at its peak
        tracemalloc.stop()
        print(f"evaluate {n:,} x {p:,}, {kind}: {1e3 * whole:.0f} ms, {whole / argmax:.1f} argmax "
              f"passes ({1e3 * argmax:.0f} ms); {memory / 1e6:.0f} MB beside the scores; 50 "
              f"thresholds: {1e3 * levels:.0f} ms, {levels / whole:.1f} evaluations")
        scores[:, seen] += 1


# ---- feasibility ----


def bench_feasibility(options):
    """Feasibility of every composition beside a double loop over them."""
    random = np.random.default_rng(0)
    for S, O, D in ((*MIT_STATES, 600), (413, 674, 300)):
        case = (random.normal(size=(S, D)), random.normal(size=(O, D)), random_seen(random, S, O))
        fast, loop = timed(lambda: feasibility_scores(*case), lambda: plain_feasibility(*case),
                           repeat=options.repeat)
        print(f"feasibility, {S} x {O}, D {D}: {1e3 * fast:.1f} ms; double loop {1e3 * loop:,.0f} "
              f"ms, {loop / fast:.0f} times as long")


def plain_feasibility(state_vectors, object_vectors, seen):
    """Eq. 3 to 5, a composition at a time: (S, D), (O, D), (S, O) bool -> (S, O)."""
    states = state_vectors / np.linalg.norm(state_vectors, axis=1, keepdims=True)
    objects = object_vectors / np.linalg.norm(object_vectors, axis=1, keepdims=True)
    scores = np.ones(seen.shape)
    for s, o in np.argwhere(~seen):
        by_state = (states[seen[:, o]] @ states[s]).max(initial=-1)
        by_object = (objects[seen[s]] @ objects[o]).max(initial=-1)
        scores[s, o] = (by_state + by_object) / 2
    return scores


# ---- training ----


class Unchunked(compcos.CompCos):
    """The factorised form, all images of a batch at once."""

    def loss(self, features, target):
        """Eq. 7 of all scores (B, S, O)."""
        scores = self.score(features, self.compositions())
        return compcos.compcos_loss(scores, target, **self.loss_arguments)


class Plain(Unchunked):
    """The plain form: Eq. 1 as it is written, every composition embedded by W [φ(s); φ(o)]."""

    def compositions(self):
        """All embeddings, (C, D)."""
        columns = torch.arange(self.seen.numel(), device=self.seen.device)
        objects = self.seen.shape[1]
        return self.embed_compositions(torch.stack([columns // objects, columns % objects], 1))

    def score(self, features, compositions):
        """(B, F), (C, D) -> (B, S, O)."""
        return (self.embed_images(features) @ compositions.T).view(-1, *self.seen.shape)


def bench_step(options):
    """An open-world training step beside the plain form, and the factorised one without chunks.

    On CUDA all three are captured, as train.py does.
    """
    S, O = options.size
    device = pick_device()
    calls = 50 if device.type == "cuda" else 3
    random = np.random.default_rng(0)
    seen = random_seen(random, S, O)
    features = torch.randn(128, 512, device=device)
    target = torch.as_tensor(random.choice(np.flatnonzero(seen), 128), device=device)
    order = torch.arange(128, device=device)

    def steps_of(kind):
        model = kind(torch.randn(S, 600), torch.randn(O, 600), 512).to(device).prepare(seen)
        model.after_epoch(15)  # from now on all compositions compete, with margins
        step, total = train.make_step(model, train.adam(model, 5e-5, 5e-5, device), features, target)

        def run():
            for _ in range(calls):
                step(order)
            float(total)  # waits for a GPU

        run()  # warms up, and captures
        return run

    runs = [steps_of(kind) for kind in (compcos.CompCos, Plain, Unchunked)]
    ours, plain, whole = timed(*runs, repeat=options.repeat)
    print(f"step, {S} x {O}, D 600, batch 128, {device}: {1e3 * ours / calls:.2f} ms; the plain "
          f"form {plain / ours:.1f} times as long; factorised, without chunks {whole / ours:.2f} "
          "times")


# ---- whole trainings ----


def bench_members(options):
    """Training and all evaluation on the built-in data: the strong recipe with 1, 4 and 16 members
    beside the paper's. Two cores need minutes."""
    with tempfile.TemporaryDirectory() as folder:
        paper = time_run(folder, "paper", 1)
        for members in (1, 4, 16):
            seconds = time_run(folder, "strong", members)
            print(f"strong recipe, members {members}: {seconds:.1f} s, {seconds / paper:.1f} times "
                  "the paper's")


def time_run(folder, recipe, members, epochs=40):
    """Seconds of so many epochs and all evaluation on the built-in data below a folder."""
    parser = argparse.ArgumentParser()
    compcos.add_options(parser)
    with tempfile.TemporaryDirectory() as out, redirect_stdout(io.StringIO()):
        options = parser.parse_args([
            "--data-root", folder, "--recipe", recipe, "--members", str(members),
            "--epochs", str(epochs), "--patience", "0", "--out", out])
        prepared = experiment.prepare(options, "compcos", compcos.defaults(recipe))
        start = time.perf_counter()
        experiment.experiment(lambda: compcos.make_model(prepared), prepared)
        return time.perf_counter() - start


# ---- the command ----


BENCHMARKS = {
    "evaluate": bench_evaluate,
    "feasibility": bench_feasibility,
    "step": bench_step,
    "members": bench_members,
}


def main(argv=None):
    """Run the benchmarks named (all when none is)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=BENCHMARKS, default=list(BENCHMARKS),
                        help="default: all")
    parser.add_argument("--repeat", type=int, default=5,
                        help="runs of each side; the median counts (default 5)")
    parser.add_argument("--size", type=int, nargs=2, default=MIT_STATES, metavar=("S", "O"),
                        help="of `step`: states and objects (default 115 245)")
    options = parser.parse_args(argv)
    for name in options.names:
        BENCHMARKS[name](options)


if __name__ == "__main__":
    main()
