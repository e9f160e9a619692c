"""Speed and memory, each as a ratio to a baseline measured in the same run: `python benchmark.py NAME ...`, see --help.

Times on shared machines are noisy: a figure is the median of `--repeat` alternating runs of both sides, and only the
ratio is meant.
"""

import argparse
import time


def timed(*functions, repeat=5):
    """Median seconds of each function, called in turn `repeat` times so that noise hits all alike."""
    seconds = [[] for _ in functions]
    for _ in range(repeat):
        for function, taken in zip(functions, seconds):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [sorted(taken)[len(taken) // 2] for taken in seconds]


def bench_evaluate(repeat):
    """One exact evaluation at MIT-States size beside one argmax of the scores, the direct form, and 50 thresholds."""
    import tracemalloc

    import numpy as np

    from evaluate import BiasSweep, evaluate, threshold_sweep

    def direct(biases=21):  # one masked argmax pass a bias, in blocks
        for bias in np.linspace(-1, 1, biases, dtype=np.float32):
            offset = np.where(seen, np.float32(0), bias)
            for start in range(0, n, 64):
                (scores[start:start + 64] + offset).argmax(1)

    rng, n, p = np.random.default_rng(0), 12995, 28175
    scores = rng.random((n, p), dtype=np.float32)
    seen = np.zeros(p, bool)
    seen[rng.choice(p, 1262, replace=False)] = True
    target = np.where(rng.random(n) < 0.3, scores.argmax(1), rng.integers(p, size=n))
    feasibility, thresholds = rng.random(p), np.linspace(0, 1, 50)
    for kind in "random scores", "seen ahead in every row":
        one, whole, levels = timed(
            lambda: scores.argmax(axis=1), lambda: evaluate(scores, target, seen),
            lambda: threshold_sweep([(scores, target)], seen, feasibility, thresholds), repeat=repeat)
        print(f"evaluate {n:,} x {p:,}, {kind}: {whole * 1e3:.0f} ms, {whole / one:.1f} argmax passes "
              f"({one * 1e3:.0f} ms)")
        sweep = BiasSweep(seen)
        tracemalloc.start()
        sweep.update(scores, target)
        print(f"memory beside the scores: {tracemalloc.get_traced_memory()[1] / 1e6:.0f} MB")
        tracemalloc.stop()
        print(f"50 thresholds: {levels * 1e3:.0f} ms, {levels / whole:.1f} evaluations")
        scores[:, seen] += 0.5
    slow, whole, resampled = timed(direct, lambda: evaluate(scores, target, seen),
                                   lambda: sweep.report(confidence=0.95), repeat=1)
    print(f"direct form, 21 biases: {slow:.1f} s, {slow / whole:.0f} times as long")
    print(f"1,000 bootstrap resamples: {resampled:.1f} s")


def bench_feasibility(repeat):
    """Feasibility of every composition beside a double loop over them, on the real pair lists if they are at hand."""
    import tracemalloc
    from pathlib import Path

    import numpy as np

    from feasibility import feasibility_scores, read_pairs

    def plain(state_vectors, object_vectors, seen):
        states, objects = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (state_vectors, object_vectors))
        scores = np.ones(seen.shape)
        for s, o in np.argwhere(~seen):
            by_state = (states[seen[:, o]] @ states[s]).max(initial=-1)
            by_object = (objects[seen[s]] @ objects[o]).max(initial=-1)
            scores[s, o] = (by_state + by_object) / 2
        return scores

    rng = np.random.default_rng(0)
    for name, S, O, D, known in (("mit-states", 115, 245, 600, 1262), ("cgqa", 413, 674, 300, 5592)):
        lists = Path(__file__).parent / f"../shared/data/splits/{name}/train_pairs.txt"
        seen, source = np.zeros((S, O), bool), "random pairs"
        seen.flat[rng.choice(S * O, known, replace=False)] = True
        if lists.exists():
            pairs, source = read_pairs(lists), "real pairs"
            names = [sorted(set(column)) for column in zip(*pairs)]
            seen = np.array([[(state, object) in pairs for object in names[1]] for state in names[0]])
        case = rng.normal(size=(S, D)), rng.normal(size=(O, D)), seen
        tracemalloc.start()
        scores = feasibility_scores(*case)
        memory = tracemalloc.get_traced_memory()[1] - scores.nbytes
        tracemalloc.stop()
        fast, loop = timed(lambda: feasibility_scores(*case), lambda: plain(*case), repeat=repeat)
        print(f"feasibility, {name} ({S} x {O}, D {D}, {source}): {fast * 1e3:.1f} ms, {memory / 1e6:.1f} MB beside the "
              f"result; double loop {loop * 1e3:,.0f} ms, {loop / fast:.0f} times as long")


def bench_step(repeat):
    """An open-world training step at MIT-States size beside the plain form, and beside the parts no form can do without."""
    import torch
    import torch.nn.functional as nnf

    from compcos import CompCos, objective
    from features import pick_device
    from reference import plain_step
    from train import stepper

    S, O, D, F, B = 115, 245, 600, 512, 128
    device = pick_device()
    times = 50 if device.type == "cuda" else 3
    torch.manual_seed(0)
    features, seen = torch.randn(B, F, device=device), torch.rand(S, O, device=device) < .045
    target = seen.flatten().nonzero()[torch.randint(int(seen.sum()), (B,), device=device), 0]
    models = [CompCos(torch.randn(S, D), torch.randn(O, D), F).to(device) for _ in range(2)]
    adams = [torch.optim.Adam(model.parameters(), lr=5e-5, weight_decay=5e-5, fused=True, capturable=device.type == "cuda")
             for model in models]
    loss, after_epoch = objective(models[0], seen)
    after_epoch(15)
    step, _ = stepper(models[0], loss, adams[0], features, target, B)
    margin = .4 * torch.as_tensor(models[1].feasibility(seen), device=device).float()
    order = torch.arange(B, device=device)
    half, logits = torch.randn(B, D, device=device), torch.randn(B, S * O, device=device, requires_grad=True)

    def many(function):
        def run():
            for _ in range(times):
                function()
            if device.type == "cuda":
                torch.cuda.synchronize()
        run()
        return run

    def primitives():
        halves = models[0].compositions()[:2]
        torch.autograd.backward(halves, tuple(map(torch.ones_like, halves)))

    seconds = timed(*map(many, (
        lambda: step(order), lambda: plain_step(models[1], adams[1], features, target, scale=20.0, seen=seen, margin=margin),
        lambda: models[1].image_embedder(features).backward(half), primitives,
        lambda: nnf.cross_entropy(logits, target).backward())), repeat=repeat)
    ours, plain, omega, phi, softmax = (1e3 * taken / times for taken in seconds)
    print(f"step, {S} x {O}, D {D}, batch {B}, {device}: {ours:.2f} ms; plain form {plain:.1f} ms, {plain / ours:.0f} "
          f"times as long; ω {omega:.2f}, W on the primitives {phi:.2f}, cross-entropy of given logits {softmax:.2f} ms: "
          f"{ours / (omega + phi + softmax):.2f} times their sum")


def bench_run(repeat):
    """A whole open-world run of MIT-States' size on made-up features, all that an epoch has; on a CPU 2 of 300 epochs."""
    import tempfile
    from pathlib import Path

    import numpy as np
    import torch

    from compcos import CompCos, objective
    from features import pick_device
    from feasibility import read_pairs
    from train import fit, selection, sweep

    S, O, device = 115, 245, pick_device()
    random = np.random.default_rng(0)
    known, unseen = np.zeros(S * O, bool), None
    folder = Path(__file__).parent / "../shared/data/splits/mit-states"
    if folder.exists():
        lists = [read_pairs(folder / f"{name}_pairs.txt") for name in ("train", "all")]
        states, objects = (sorted(set(column)) for column in zip(*lists[1]))
        codes = [np.array([states.index(s) * O + objects.index(o) for s, o in pairs]) for pairs in lists]
        known[codes[0]] = True
        unseen = random.choice(np.setdiff1d(codes[1], codes[0]), 300, replace=False)
    else:
        known[random.choice(S * O, 1262, replace=False)] = True
        unseen = random.choice(np.flatnonzero(~known), 300, replace=False)
    targets = {"train": random.choice(np.flatnonzero(known), 30338),
               "val": random.choice([*np.flatnonzero(known), *unseen], 10420)}
    features = {phase: torch.randn(len(target), 512, device=device) for phase, target in targets.items()}
    seen, everything = known.reshape(S, O), dict(open=np.ones(S * O, bool))
    model = CompCos(random.normal(size=(S, 600)), random.normal(size=(O, 600)), 512).to(device)
    loss, after_epoch = objective(model, seen)
    epochs, moments = (300 if device.type == "cuda" else 2), [time.perf_counter()]

    def validate():
        value = selection(sweep(model, features["val"], targets["val"], seen, everything)["open"][0].report())
        moments.append(time.perf_counter())
        return value

    with tempfile.TemporaryDirectory() as out:
        fit(model, loss, features["train"], torch.as_tensor(targets["train"], device=device), validate, epochs=epochs,
            batch_size=128, lr=5e-5, weight_decay=5e-5, seed=0, out=Path(out), settings={}, after_epoch=after_epoch)
    moments.append(time.perf_counter())
    first, rest = moments[1] - moments[0], (moments[-2] - moments[1]) / (epochs - 1)
    print(f"run, MIT-States' size ({'real' if folder.exists() else 'random'} pairs), {device}: {epochs} epochs of 238 steps "
          f"in {moments[-1] - moments[0]:.1f} s (first {first:.2f} s, then {rest:.3f} s each)")


def bench_scale(repeat):
    """Open-world training and evaluation of large vocabularies: time and peak memory against S * O, a process each."""
    import subprocess
    import sys

    for S, O, D in ((115, 245, 600), (413, 674, 300), (2000, 5000, 300)):
        code = f"import benchmark; benchmark.large_vocabulary({S}, {O}, {D}, {repeat})"
        print(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout, end="")


def large_vocabulary(S, O, D, repeat, images=256):
    """Train a few steps, find τ and evaluate three candidate sets on made-up features; print time and peak memory."""
    import resource

    import numpy as np
    import torch

    from compcos import CompCos, objective
    from experiment import best_threshold
    from features import pick_device
    from feasibility import hard_mask
    from train import stepper, sweep

    device, random = pick_device(), np.random.default_rng(0)
    seen = np.zeros((S, O), bool)
    seen.flat[random.choice(S * O, 5592 if S < 2000 else 50_000, replace=False)] = True
    seen[np.arange(S), np.arange(S) % O] = seen[np.arange(O) % S, np.arange(O)] = True
    features = torch.randn(images, 512, device=device)
    target = random.choice(np.flatnonzero(seen), images)
    target[::2] = random.integers(0, S * O, len(target[::2]))
    model = CompCos(random.normal(size=(S, D)), random.normal(size=(O, D)), 512).to(device)
    loss, after_epoch = objective(model, seen)
    after_epoch(15)
    adam = torch.optim.Adam(model.parameters(), lr=5e-5, fused=True, capturable=device.type == "cuda")
    step, _ = stepper(model, loss, adam, features, torch.as_tensor(target, device=device), 128)
    order = torch.arange(128, device=device)
    for _ in range(4 if device.type == "cuda" else 1):  # warm up, and capture the step
        step(order)
    seconds, = timed(lambda: (step(order), torch.cuda.synchronize() if device.type == "cuda" else None), repeat=repeat)
    start = time.perf_counter()
    rho = model.feasibility(seen)
    tau, _ = best_threshold(model, features, target, seen, rho)
    sweep(model, features, target, seen, dict(open=np.ones(S * O, bool), masked=hard_mask(rho, seen, tau).ravel()))
    rate = images / (time.perf_counter() - start)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    gpu = f", {torch.cuda.max_memory_allocated() / 1e9:.2f} GB on the GPU" if device.type == "cuda" else ""
    print(f"scale, {S:,} x {O:,} = {S * O:,} compositions, D {D}, {device}: step of 128 images {1e3 * seconds:,.1f} ms, "
          f"feasibility, τ of 50 and two evaluations {rate:,.0f} images/s, peak memory {memory:.2f} GB{gpu}", flush=True)


def bench_words(repeat):
    """The vectors of 1,000 of 200,000 words from word2vec's and GloVe's formats, beside reading the file alone."""
    import tempfile
    from pathlib import Path

    import numpy as np

    from words import word_vectors

    def read(path):
        with open(path, "rb") as file:
            while file.read(1 << 20):
                pass

    vectors = np.random.default_rng(0).standard_normal((500, 300), dtype=np.float32)
    texts = [" ".join(f"{x:.5f}" for x in vector) + "\n" for vector in vectors]
    with tempfile.TemporaryDirectory() as folder:
        binary, text = Path(folder, "word2vec.bin"), Path(folder, "glove.txt")
        with open(binary, "wb") as first, open(text, "w") as second:
            first.write(b"200000 300\n")
            for i in range(200_000):
                first.write(b"word%d " % i + vectors[i % 500].tobytes())
                second.write(f"word{i} {texts[i % 500]}")
        names = [f"word{i}" for i in range(0, 200_000, 200)]
        for path in (binary, text):
            ours, alone = timed(lambda: word_vectors(names, path), lambda: read(path), repeat=repeat)
            print(f"words, {path.name} ({path.stat().st_size / 1e6:,.0f} MB): {ours:.2f} s; "
                  f"reading it alone {alone:.2f} s, ours {ours / alone:.1f} times as long")


def bench_features(repeat):
    """Extraction against decoding alone and the network alone: of their sum on a CPU, of the larger with a GPU."""
    import tempfile
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    import torch
    from PIL import Image

    import features

    device = features.pick_device()
    cpu, batch = device.type == "cpu", 64
    count = 2 * batch if cpu else 64 * batch
    network = features.resnet18().eval().to(device, memory_format=torch.channels_last)
    crops = torch.zeros((batch, 224, 224, 3), dtype=torch.uint8, pin_memory=device.type == "cuda")
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{number % 128}.jpg" for number in range(count)]
        for number, path in enumerate(paths[:128]):
            spots = np.random.default_rng(number).integers(0, 256, (38, 38, 3), dtype=np.uint8)
            Image.fromarray(spots).resize((300, 300)).save(path, quality=90)

        def decode():
            with ThreadPoolExecutor(features._cores()) as pool:
                for _ in pool.map(lambda path: features._decode(path, crops[0].numpy(), features._crop, False), paths):
                    pass

        def run():
            with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
                for _ in range(count // batch):
                    result = network(features._normalise(crops.to(device, non_blocking=True)))
                result.cpu()

        def both():
            features.extract(paths, backbone=network, device=device, batch_size=batch)

        both()
        first, second, together = timed(decode, run, both, repeat=repeat)
    bound, words = (first + second, "their sum") if cpu else (max(first, second), "the larger")
    print(f"features ({device}, {features._cores()} cores): images/s decoding {count / first:,.0f}, "
          f"network {count / second:,.0f}, both {count / together:,.0f}; {together / bound:.2f} times {words}")


def bench_baselines(repeat):
    """Scores of all 28,175 compositions of MIT-States for 128 images, and TMN's training step, beside the direct forms."""
    import resource

    import torch

    from baselines import MODELS
    from reference import DIRECT, direct_tmn_loss, published

    S, O, D, F, B = 115, 245, 300, 512, 128
    torch.manual_seed(0)
    features, seen = torch.randn(B, F), torch.zeros(S * O, dtype=torch.bool)
    seen[torch.randperm(S * O)[:1262]] = True
    models = {name: model(torch.randn(S, D), torch.randn(O, D), F, seen.view(S, O)) for name, model in MODELS.items()}
    torch.nn.init.normal_(models["tmn"].gates.weight, 0, 0.1)  # gates that differ
    pairs = torch.cartesian_prod(torch.arange(S), torch.arange(O))

    target = seen.nonzero()[torch.randint(1262, (B,)), 0]
    negatives = models["tmn"].negatives(target, 600)
    columns = torch.cat([target[:, None], negatives], 1)
    chosen = torch.stack([columns // O, columns % O], 2)

    def peak():
        return f"peak of the process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"

    with torch.no_grad():
        once = {name: model.eval().compositions() for name, model in models.items()}
        for name, model in models.items():
            model.score(features, once[name])
        print(f"all four have scored: {peak()}")
        for name, model in models.items():
            parameters, part = published(model), pairs[::100] if name == "tmn" else pairs  # all would take TMN minutes
            ours, direct, before = timed(lambda: model.score(features, once[name]),
                                         lambda: DIRECT[name](parameters, features, part), model.compositions, repeat=repeat)
            direct *= len(pairs) / len(part)
            print(f"{name} scores: {1e3 * ours:.0f} ms (compositions, once {1e3 * before:.0f}); direct {1e3 * direct:.0f} ms"
                  f"{'' if part is pairs else ', from 1 in 100 compositions'}: {direct / ours:.1f} times as long")
    model = models["tmn"].train()
    ours, direct = timed(lambda: model.loss(features, target, negatives).backward(),
                         lambda: direct_tmn_loss(published(model), features, chosen).backward(), repeat=repeat)
    print(f"tmn training step, 600 negatives: {ours:.2f} s; direct {direct:.2f} s: {direct / ours:.1f} times as long")


def main(argv=None):
    """Run the benchmarks named (all when none is)."""
    benchmarks = {name[6:]: function for name, function in globals().items() if name.startswith("bench_")}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(benchmarks)} (default: all)")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each side; the median counts (default 5)")
    options = parser.parse_args(argv)
    for name in options.names or benchmarks:
        if name not in benchmarks:
            parser.error(f"no benchmark {name!r}: choose from {', '.join(benchmarks)}")
        benchmarks[name](options.repeat)


if __name__ == "__main__":
    main()
