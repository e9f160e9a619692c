"""Speed and memory, each as a ratio to a baseline that is measured in the same run.

`python benchmark.py NAME ...`; --help lists the names. Times on shared machines are noisy: a figure
is the median of `--repeat` runs of each side, taken in turn, and only the ratio is meant.

Legend: N images, B images of a batch, S states, O objects, C = S*O compositions, D numbers of an
embedding, F features of an image. Data is made up.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as nnf

# The parts of the project are imported where they are measured, so that each benchmark needs only
# the files that it is about.

MIT_STATES = (115, 245)  # states, objects
MIT_STATES_SEEN = 1262  # compositions


def timed(*functions, repeat=5):
    """Median seconds of each function, called in turn `repeat` times so that noise hits all."""
    seconds = [[] for _ in functions]
    for _ in range(repeat):
        for function, taken in zip(functions, seconds):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [sorted(taken)[len(taken) // 2] for taken in seconds]


def peak_memory(function):
    """The most bytes that Python and NumPy held while the function ran; its result."""
    tracemalloc.start()
    result = function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, result


def random_seen(random, S, O, count):
    """(S, O) bool with `count` seen compositions, and some more: each state and object is seen."""
    seen = np.zeros((S, O), bool)
    seen.flat[random.choice(S * O, count, replace=False)] = True
    seen[np.arange(S), np.arange(S) % O] = True
    seen[np.arange(O) % S, np.arange(O)] = True
    return seen


def wait(device):
    """A GPU works on while Python goes on: wait until it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---- evaluation ----


def bench_evaluate(repeat):
    """One exact evaluation at MIT-States size beside one argmax of the scores.

    Then 50 thresholds beside one evaluation, and the direct form: an argmax for each bias.
    """
    from evaluate import evaluate

    random = np.random.default_rng(0)
    n = 12995  # test images
    p = MIT_STATES[0] * MIT_STATES[1]
    scores = random.random((n, p), dtype=np.float32)
    seen = random_seen(random, *MIT_STATES, MIT_STATES_SEEN).ravel()
    right = random.random(n) < 0.3
    target = np.where(right, scores.argmax(1), random.integers(p, size=n))

    time_evaluation("random scores", scores, target, seen, repeat)
    scores[:, seen] += 0.5
    time_evaluation("seen ahead in every row", scores, target, seen, repeat)
    scores[:, seen] += 0.5

    slow, whole = timed(lambda: direct_sweep(scores, seen, biases=21),
                        lambda: evaluate(scores, target, seen), repeat=1)
    print(f"direct form, 21 biases: {slow:.1f} s, {slow / whole:.0f} times as long")
    time_resamples(scores, target, seen)


def time_evaluation(kind, scores, target, seen, repeat):
    """Print time and memory of evaluating scores (N, P), and the time of 50 thresholds."""
    from evaluate import BiasSweep, evaluate, threshold_sweep

    n, p = scores.shape
    feasibility = np.random.default_rng(1).random(p)
    thresholds = np.linspace(0, 1, 50)
    argmax, whole, levels = timed(
        lambda: scores.argmax(axis=1),
        lambda: evaluate(scores, target, seen),
        lambda: threshold_sweep([(scores, target)], seen, feasibility, thresholds),
        repeat=repeat)
    print(f"evaluate {n:,} x {p:,}, {kind}: {whole * 1e3:.0f} ms, {whole / argmax:.1f} argmax "
          f"passes ({argmax * 1e3:.0f} ms)")
    sweep = BiasSweep(seen)
    memory, _ = peak_memory(lambda: sweep.update(scores, target))
    print(f"memory beside the scores: {memory / 1e6:.0f} MB")
    print(f"50 thresholds: {levels * 1e3:.0f} ms, {levels / whole:.1f} evaluations")


def direct_sweep(scores, seen, biases):
    """What an evaluation would do without the sweep: one argmax of all scores for each bias."""
    for bias in np.linspace(-1, 1, biases, dtype=np.float32):
        offset = np.where(seen, np.float32(0), bias)
        for start in range(0, len(scores), 64):
            (scores[start:start + 64] + offset).argmax(1)


def time_resamples(scores, target, seen):
    """Print the time of the 1,000 resamples behind an interval, and behind a comparison."""
    from evaluate import BiasSweep, compare

    sweep = BiasSweep(seen)
    sweep.update(scores, target)
    other = BiasSweep(seen)
    other.update(scores[:, ::-1], target)
    interval, comparison = timed(lambda: sweep.report(confidence=0.95),
                                 lambda: compare(sweep, other), repeat=1)
    print(f"1,000 bootstrap resamples of {len(scores):,} images: {interval:.1f} s; "
          f"of two systems, compared: {comparison:.1f} s")


# ---- feasibility ----


def bench_feasibility(repeat):
    """Feasibility of every composition beside a double loop over them."""
    from feasibility import feasibility_scores

    random = np.random.default_rng(0)
    for name, S, O, D, count in (
        ("mit-states", *MIT_STATES, 600, MIT_STATES_SEEN),
        ("cgqa", 413, 674, 300, 5592),
    ):
        seen = random_seen(random, S, O, count)
        state_vectors = random.normal(size=(S, D))
        object_vectors = random.normal(size=(O, D))
        case = (state_vectors, object_vectors, seen)
        memory, scores = peak_memory(lambda: feasibility_scores(*case))
        memory -= scores.nbytes
        fast, loop = timed(lambda: feasibility_scores(*case), lambda: plain_feasibility(*case),
                           repeat=repeat)
        print(f"feasibility, {name} ({S} x {O}, D {D}): {fast * 1e3:.1f} ms, "
              f"{memory / 1e6:.1f} MB beside the result; double loop {loop * 1e3:,.0f} ms, "
              f"{loop / fast:.0f} times as long")


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


def bench_step(repeat):
    """An open-world training step at MIT-States size beside the plain form.

    And beside the parts that no form can do without: ω, W on the primitives, and a cross-entropy of
    logits that are given.
    """
    from compcos import CompCos
    from features import pick_device
    from reference import plain_step
    from train import adam, stepper

    S, O = MIT_STATES
    D = 600
    F = 512
    B = 128
    device = pick_device()
    torch.manual_seed(0)
    features = torch.randn(B, F, device=device)
    random = np.random.default_rng(0)
    seen = random_seen(random, S, O, MIT_STATES_SEEN)
    target = torch.as_tensor(random.choice(np.flatnonzero(seen), B), device=device)

    # Two models, so that each form trains one of its own.
    model = CompCos(torch.randn(S, D), torch.randn(O, D), F).to(device)
    plain_model = CompCos(torch.randn(S, D), torch.randn(O, D), F).to(device)
    for each in (model, plain_model):
        each.set_training(seen)
    model.after_epoch(15)
    step, _ = stepper(model, adam(model, 5e-5, 5e-5, device), features, target)
    plain_optimizer = adam(plain_model, 5e-5, 5e-5, device)
    margin = .4 * torch.as_tensor(plain_model.feasibility(seen), device=device).float()
    seen = torch.as_tensor(seen, device=device)
    order = torch.arange(B, device=device)

    def run_plain():
        plain_step(plain_model, plain_optimizer, features, target,
                   scale=20.0, seen=seen, margin=margin)

    functions = [lambda: step(order), run_plain, *needed_parts(model, features, target)]
    ours, plain, omega, primitives, softmax = milliseconds(functions, device, repeat)
    needed = omega + primitives + softmax
    print(f"step, {S} x {O}, D {D}, batch {B}, {device}: {ours:.2f} ms; plain form {plain:.1f} ms, "
          f"{plain / ours:.0f} times as long; ω {omega:.2f}, W on the primitives {primitives:.2f}, "
          f"cross-entropy of given logits {softmax:.2f} ms: {ours / needed:.2f} times their sum")


def needed_parts(model, features, target):
    """What any training step does, forwards and backwards: three functions.

    ω of the images (B, F), W on the primitives, a cross-entropy of (B, C) logits that are given.
    """
    batch = len(features)
    size = len(model.states) * len(model.objects)
    gradient = torch.randn_like(model.image_embedder(features))               # (B, D)
    logits = torch.randn(batch, size, device=features.device, requires_grad=True)

    def run_primitives():
        halves = model.compositions()[:2]
        torch.autograd.backward(halves, tuple(torch.ones_like(half) for half in halves))

    return (lambda: model.image_embedder(features).backward(gradient),
            run_primitives,
            lambda: nnf.cross_entropy(logits, target).backward())


def milliseconds(functions, device, repeat):
    """Median time of one call of each function; many calls are timed together on a GPU."""
    calls = 50 if device.type == "cuda" else 3

    def many(function):
        def run():
            for _ in range(calls):
                function()
            wait(device)
        return run

    runs = [many(function) for function in functions]
    for run in runs:  # warm up
        run()
    return [1e3 * seconds / calls for seconds in timed(*runs, repeat=repeat)]


def bench_members(repeat):
    """The strong recipe with 1, 4 and 16 members on made-up features of fashion's size, training
    and evaluation; then 300 epochs of the published recipe. On a CPU a tenth of the epochs."""
    from features import pick_device

    device = pick_device()
    time_recipe("strong", 1, device)  # the first run of a process warms it up
    for members in (1, 4, 16):
        seconds, epochs = time_recipe("strong", members, device)
        if members == 1:
            strong = seconds
        print(f"strong recipe, fashion's size, {device}, members {members}: {epochs} epochs and "
              f"evaluation in {seconds:.1f} s, {seconds / strong:.1f} times as long as one")
    seconds, epochs = time_recipe("published", 1, device)
    print(f"published recipe, fashion's size, {device}: {epochs} epochs and evaluation in "
          f"{seconds:.1f} s")


def time_recipe(recipe, members, device):
    """(seconds, epochs) of training and all evaluation of a recipe at fashion's size."""
    import compcos
    import experiment

    prepared = prepare_recipe(recipe, members, device)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        experiment.one_seed(lambda: compcos.make_model(prepared), prepared.dataset,
                            prepared.features, settings=prepared.settings, device=device,
                            out=Path(out), resume=False, save_scores=False)
    wait(device)
    return time.perf_counter() - start, prepared.settings["epochs"]


def prepare_recipe(recipe, members, device, divisor=1):
    """What `experiment.prepare` would give of a recipe at fashion's size; with a divisor of part of
    the images and, on a CPU, of the epochs."""
    import compcos
    import experiment

    dataset, features = made_up_fashion(divisor)
    settings = compcos.defaults(recipe)["utzappos"] | dict(
        model="compcos", members=members, seed=0, world="open", rivals="all", mask="published")
    settings.pop("vectors")
    experiment.steps_to_epochs(settings, len(features["train"]))
    settings["patience"] = None  # nothing is learnt here, and all the epochs are to be timed
    if device.type == "cpu":
        settings["epochs"] = max(1, settings["epochs"] // (10 * divisor))
    state_count = len(dataset.states)
    vectors = np.random.default_rng(0).normal(size=(state_count + len(dataset.objects), 100))
    return experiment.Prepared(dataset, features, vectors[:state_count], vectors[state_count:],
                               device, settings, None)


def made_up_fashion(divisor):
    """A Dataset of 36 x 71 compositions, 490 seen and 130 and 165 unseen ones in validation and
    test, and as many random features as fashion has, over `divisor`."""
    import data

    random = np.random.default_rng(0)
    S = 36
    O = 71
    seen, val, test = np.split(random.permutation(S * O)[:785], [490, 620])
    shown = dict(train=seen, val=np.concatenate([seen, val]), test=np.concatenate([seen, test]))
    sizes = dict(train=8355, val=4967, test=6555)
    pairs = {}
    images = {}
    targets = {}
    features = {}
    for phase, size in sizes.items():
        size //= divisor
        pairs[phase] = np.stack(np.divmod(np.sort(shown[phase]), O), axis=1)
        images[phase] = [f"{phase}{i}.jpg" for i in range(size)]
        targets[phase] = random.choice(shown[phase], size)
        features[phase] = random.normal(size=(size, 512)).astype(np.float32)
    states = [f"state{i}" for i in range(S)]
    objects = [f"object{i}" for i in range(O)]
    dataset = data.Dataset("made up", Path(), states, objects, pairs, images, targets, None, [])
    return dataset, features


def bench_scale(repeat):
    """Open-world training and evaluation of large vocabularies: time and peak memory against S*O.

    Each vocabulary has a process of its own, for a process never tells a smaller peak again.
    """
    for S, O, D in ((*MIT_STATES, 600), (413, 674, 300), (2000, 5000, 300)):
        code = f"import benchmark; benchmark.large_vocabulary({S}, {O}, {D}, {repeat})"
        ended = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE,
                               text=True, cwd=Path(__file__).parent)
        print(ended.stdout, end="", flush=True)


def large_vocabulary(S, O, D, repeat, images=256):
    """Train a few steps, find τ and evaluate two candidate sets; print time and peak memory."""
    from compcos import CompCos
    from experiment import best_threshold
    from features import pick_device
    from feasibility import hard_mask
    from train import adam, stepper, sweep

    device = pick_device()
    random = np.random.default_rng(0)
    seen = random_seen(random, S, O, 5592 if S < 2000 else 50_000)
    features = torch.randn(images, 512, device=device)
    target = random.choice(np.flatnonzero(seen), images)
    target[::2] = random.integers(0, S * O, len(target[::2]))  # most of these are unseen

    model = CompCos(random.normal(size=(S, D)), random.normal(size=(O, D)), 512).to(device)
    model.set_training(seen)
    model.after_epoch(15)
    labels = torch.as_tensor(target, device=device)
    step, _ = stepper(model, adam(model, 5e-5, 0.0, device), features, labels)
    order = torch.arange(128, device=device)
    for _ in range(4 if device.type == "cuda" else 1):  # warm up, and capture the step
        step(order)

    def finished_step():
        step(order)
        wait(device)

    seconds, = timed(finished_step, repeat=repeat)
    start = time.perf_counter()
    rho = model.feasibility(seen)
    tau, _ = best_threshold(model, features, target, seen, rho)
    candidate_sets = {"open": np.ones(S * O, bool), "masked": hard_mask(rho, seen, tau).ravel()}
    sweep(model, features, target, seen, candidate_sets)
    rate = images / (time.perf_counter() - start)
    memory = f"{process_peak():.2f} GB"
    if device.type == "cuda":
        memory += f", {torch.cuda.max_memory_allocated() / 1e9:.2f} GB on the GPU"
    print(f"scale, {S:,} x {O:,} = {S * O:,} compositions, D {D}, {device}: step of 128 images "
          f"{1e3 * seconds:,.1f} ms, feasibility, τ of 50 and two evaluations {rate:,.0f} "
          f"images/s, peak memory {memory}", flush=True)


def process_peak():
    """The most memory that this process has had, in GB."""
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":  # where it is in bytes and not in KiB
        return peak / 1e9
    return peak * 1024 / 1e9


# ---- reading ----


def bench_words(repeat):
    """The vectors of 1,000 of 200,000 words from two formats, beside reading the file alone."""
    from words import word_vectors

    count = 200_000
    names = [f"word{i}" for i in range(0, count, 200)]
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "word2vec.bin")
        text = Path(folder, "glove.txt")
        write_vectors(binary, text, count)
        for path in (binary, text):
            ours, alone = timed(lambda: word_vectors(names, path), lambda: read_all(path),
                                repeat=repeat)
            megabytes = path.stat().st_size / 1e6
            print(f"words, {path.name} ({megabytes:,.0f} MB): {ours:.2f} s; reading it alone "
                  f"{alone:.2f} s, ours {ours / alone:.1f} times as long")


def write_vectors(binary, text, count):
    """The same made-up vectors, D 300, in word2vec's and in GloVe's format."""
    vectors = np.random.default_rng(0).standard_normal((500, 300), dtype=np.float32)
    lines = []
    for vector in vectors:
        lines.append(" ".join(f"{number:.5f}" for number in vector) + "\n")
    with open(binary, "wb") as binary_file, open(text, "w") as text_file:
        binary_file.write(f"{count} 300\n".encode())
        for i in range(count):
            binary_file.write(f"word{i} ".encode() + vectors[i % 500].tobytes())
            text_file.write(f"word{i} {lines[i % 500]}")


def read_all(path):
    """Read a file to its end and do nothing with it."""
    with open(path, "rb") as file:
        while file.read(1 << 20):
            pass


def bench_features(repeat):
    """Extraction against decoding alone and the network alone.

    Of their sum on a CPU, where both use the same cores; of the larger with a GPU.
    """
    import features

    device = features.pick_device()
    on_cpu = device.type == "cpu"
    batch = 64
    count = 2 * batch if on_cpu else 64 * batch
    network = features.resnet18().eval().to(device, memory_format=torch.channels_last)
    crops = torch.zeros((batch, 224, 224, 3), dtype=torch.uint8, pin_memory=device.type == "cuda")

    def decode(path):
        return features._decode(path, features._crop, False)

    def run_decoding():
        with ThreadPoolExecutor(features._cores()) as pool:
            for _ in pool.map(decode, paths):
                pass

    def run_network():
        settings = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
        with torch.inference_mode(), settings:
            for _ in range(count // batch):
                result = network(features._normalise(crops.to(device, non_blocking=True)))
            result.cpu()  # waits for a GPU

    def run_both():
        features.extract(paths, backbone=network, device=device, batch_size=batch)

    with tempfile.TemporaryDirectory() as folder:
        paths = write_photos(folder, count)
        run_both()  # warm up
        decoding, forward, both = timed(run_decoding, run_network, run_both, repeat=repeat)
    if on_cpu:
        bound = decoding + forward
        what = "their sum"
    else:
        bound = max(decoding, forward)
        what = "the larger"
    cores = features.data.count(features._cores(), "core")
    print(f"features ({device}, {cores}): images/s decoding {count / decoding:,.0f}, network "
          f"{count / forward:,.0f}, both {count / both:,.0f}; {both / bound:.2f} times {what}")


def write_photos(folder, count, different=128):
    """`count` paths of JPEG files of 300 x 300 pixels, of which so many are different."""
    paths = [f"{folder}/{number % different}.jpg" for number in range(count)]
    for number, path in enumerate(paths[:different]):
        random = np.random.default_rng(number)
        spots = random.integers(0, 256, (38, 38, 3), dtype=np.uint8)
        Image.fromarray(spots).resize((300, 300)).save(path, quality=90)
    return paths


# ---- the compared systems ----


def bench_baselines(repeat):
    """Scores of all 28,175 compositions of MIT-States for 128 images beside the direct forms.

    And TMN's training step with 600 negatives.
    """
    from baselines import MODELS

    S, O = MIT_STATES
    D = 300
    F = 512
    B = 128
    torch.manual_seed(0)
    features = torch.randn(B, F)
    random = np.random.default_rng(0)
    seen = random_seen(random, S, O, MIT_STATES_SEEN)
    models = {}
    for name, model in MODELS.items():
        models[name] = model(torch.randn(S, D), torch.randn(O, D), F, seen)
    torch.nn.init.normal_(models["tmn"].gates.weight, 0, 0.1)  # gates that differ

    target = torch.as_tensor(random.choice(np.flatnonzero(seen), B))
    with torch.no_grad():
        compositions = {}
        for name, model in models.items():
            compositions[name] = model.eval().compositions()
            model.score(features, compositions[name])
        print(f"all systems have scored: peak of the process {process_peak():.2f} GB")
        for name, model in models.items():
            time_scores(name, model, features, compositions[name], repeat)
    time_tmn_step(models["tmn"].train(), features, target, repeat)


def time_scores(name, model, features, compositions, repeat):
    """Print how long a model takes to score every composition, and the direct form of it."""
    from reference import DIRECT, published

    S, O = MIT_STATES
    pairs = torch.cartesian_prod(torch.arange(S), torch.arange(O))
    chosen = pairs
    note = ""
    if name == "tmn":  # all would take minutes
        chosen = pairs[::100]
        note = ", from 1 in 100 compositions"
    parameters = published(model)
    ours, direct, once = timed(
        lambda: model.score(features, compositions),
        lambda: DIRECT[name](parameters, features, chosen),
        model.compositions,
        repeat=repeat)
    direct *= len(pairs) / len(chosen)
    print(f"{name} scores: {1e3 * ours:.0f} ms (compositions, once {1e3 * once:.0f}); direct "
          f"{1e3 * direct:.0f} ms{note}: {direct / ours:.1f} times as long")


def time_tmn_step(model, features, target, repeat):
    """Print how long loss and gradients of TMN take with 600 negatives, and the direct form."""
    from reference import direct_tmn_loss, published

    O = MIT_STATES[1]
    negatives = model.negatives(target, 600)                            # (B, 600)
    columns = torch.cat([target[:, None], negatives], 1)                # (B, 1 + 600)
    pairs = torch.stack([columns // O, columns % O], 2)                 # (B, 1 + 600, 2)
    ours, direct = timed(
        lambda: model.loss(features, target, negatives).backward(),
        lambda: direct_tmn_loss(published(model), features, pairs).backward(),
        repeat=repeat)
    print(f"tmn training step, 600 negatives: {ours:.2f} s; direct {direct:.2f} s: "
          f"{direct / ours:.1f} times as long")


# ---- several processes ----


class Sizes(NamedTuple):
    """How much work `time_processes` does."""

    photos: int
    divisor: int     # of the images of a run at fashion's size
    members: int     # of that run
    states: int      # of the large vocabulary
    objects: int
    batch: int
    steps: int       # an epoch


ON_GPU = Sizes(16_384, 1, 4, 2000, 5000, 512, 100)
ON_CPU = Sizes(192, 10, 1, 200, 500, 64, 3)
WORTH = 1.2  # times as fast, from which on a second GPU is worth it


def bench_processes(repeat):
    """Two processes beside one, on a GPU each or on half of a CPU's cores."""
    alone = seconds_of(1, repeat)
    together = seconds_of(2, repeat)
    for work, seconds in alone.items():
        ratio = seconds / together[work]
        verdict = "" if ratio >= WORTH else ": not worth it"
        print(f"processes, {work}: one {seconds:.3g} s, two {together[work]:.3g} s, "
              f"{ratio:.2f} times as fast{verdict}", flush=True)


def seconds_of(processes, repeat):
    """{work: seconds} of `time_processes` on so many processes, which torchrun starts."""
    from features import _cores

    threads = max(1, _cores() // processes)
    code = f"import benchmark; benchmark.time_processes({repeat})"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [*torchrun, str(processes), "--no-python", sys.executable, "-c", code]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True,
                           cwd=Path(__file__).parent,
                           env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    return json.loads(ended.stdout.strip().split("\n")[-1])


def time_processes(repeat):
    """Print, as JSON, how many seconds these processes need for each work: {work: seconds}."""
    import common
    from features import pick_device

    device = pick_device()
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    seconds = {}

    def report(work, taken):
        seconds[work] = taken
        if common.rank() == 0:
            print(f"processes: {common.processes()}, {work}: {taken:.3g} s", file=sys.stderr,
                  flush=True)

    with tempfile.TemporaryDirectory() as own:
        folder = Path(common.gather(own)[0])
        if common.rank() == 0:
            write_photo_dataset(folder / "photos", sizes.photos)
        common.gather("the photos are there")
        large = f"one seed at {sizes.states:,} x {sizes.objects:,}, batch {sizes.batch}"
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            report(f"extraction of {sizes.photos:,} photos",
                   time_extraction(folder, device, repeat))
            report("four seeds at fashion's size", time_seeds(folder, sizes, 4, device, repeat))
            report("one seed of it", time_seeds(folder, sizes, 1, device, repeat))
        step, epoch = time_large(folder, sizes, device, repeat)
        report(f"a step of {large}", step)
        report(f"an epoch of {large}, {sizes.steps} steps", epoch)
        common.gather("all is done")
    if common.rank() == 0:
        print(json.dumps(seconds))


def median_together(function, device, repeat):
    """Median seconds from when all processes begin until the last one has ended; once to warm up.

    `function` is called with 0, 1, ...
    """
    import common

    taken = []
    for number in range(repeat + 1):
        common.gather("ready")
        start = time.perf_counter()
        function(number)
        wait(device)
        common.gather("done")
        taken.append(time.perf_counter() - start)
    return sorted(taken[1:])[repeat // 2]


def write_photo_dataset(folder, count):
    """A dataset of photos, many under several names, and a ResNet-18's made-up parameters."""
    import features

    (folder / "images").mkdir(parents=True)
    rows = []
    for number, path in enumerate(write_photos(folder, count)):
        os.link(path, folder / "images" / f"{number}.jpg")
        split = ("train", "train", "val", "test")[number % 4]
        rows.append([f"{number}.jpg", f"s{number % 4}", f"o{number // 4 % 4}", split])
    with open(folder / "images.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "state", "object", "split"])
        writer.writerows(rows)
    torch.manual_seed(0)
    torch.save(features.resnet18().state_dict(), folder / "weights.pth")


def time_extraction(folder, device, repeat):
    """Seconds of an extraction, decoding included, into a new cache."""
    import data
    import features

    dataset = data.load(folder / "photos")

    def extract(number):
        cache = folder / f"cache{number}"
        cache.mkdir(exist_ok=True)
        features.load_features(dataset, weights=folder / "photos" / "weights.pth", device=device,
                               cache=cache)

    return median_together(extract, device, repeat)


def time_seeds(folder, sizes, seeds, device, repeat):
    """Seconds of the strong recipe with so many seeds at fashion's size."""
    import compcos
    import experiment

    prepared = prepare_recipe("strong", sizes.members, device, sizes.divisor)

    def train(number):
        settings = prepared.settings
        if number == 0:  # to warm up
            settings = settings | dict(epochs=1)
        experiment.experiment(
            lambda: compcos.make_model(prepared), prepared.dataset, prepared.features,
            settings=settings, seeds=list(range(seeds)), device=device,
            out=folder / f"runs{seeds}", splits=True)

    return median_together(train, device, repeat)


def time_large(folder, sizes, device, repeat):
    """Median seconds of a step and of a whole epoch, with all that follows it, of a large
    vocabulary."""
    from compcos import CompCos
    from train import adam, fit, selection, stepper, sweep

    S = sizes.states
    O = sizes.objects
    count = sizes.batch * sizes.steps
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    seen = random_seen(random, S, O, S * O // 200)
    targets = torch.as_tensor(random.choice(np.flatnonzero(seen), count), device=device)
    features = torch.randn(count, 512, device=device)
    shown = random.integers(0, S * O, count // 10)  # most of these are unseen
    validation = torch.randn(len(shown), 512, device=device)
    everything = dict(open=np.ones(S * O, bool))
    model = CompCos(random.normal(size=(S, 300)), random.normal(size=(O, 300)), 512).to(device)
    model.set_training(seen)

    step, _ = stepper(model, adam(model, 5e-5, 0.0, device), features, targets)
    batch = torch.arange(sizes.batch, device=device)
    steps = 10 if device.type == "cuda" else 1

    def train(number):
        for _ in range(steps):
            step(batch)

    def validate():
        swept, _ = sweep(model, validation, shown, seen, everything)["open"]
        return selection(swept.report())

    one_step = median_together(train, device, repeat) / steps
    history = fit(model, features, targets, validate, epochs=1 + repeat, batch_size=sizes.batch,
                  lr=5e-5, weight_decay=5e-5, seed=0, out=folder, settings={})
    return one_step, sorted(row["seconds"] for row in history[1:])[repeat // 2]


BENCHMARKS = {
    "evaluate": bench_evaluate,
    "feasibility": bench_feasibility,
    "step": bench_step,
    "members": bench_members,
    "scale": bench_scale,
    "words": bench_words,
    "features": bench_features,
    "baselines": bench_baselines,
    "processes": bench_processes,
}


def main(argv=None):
    """Run the benchmarks named (all when none is)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=f"which: {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--repeat", type=int, default=5,
                        help="runs of each side; the median counts (default 5)")
    options = parser.parse_args(argv)
    if options.repeat < 1:
        parser.error(f"--repeat is {options.repeat}: expected at least 1")
    for name in options.names:
        if name not in BENCHMARKS:
            parser.error(f"no benchmark {name!r}: choose from {', '.join(BENCHMARKS)}")
    for name in options.names or BENCHMARKS:
        BENCHMARKS[name](options.repeat)


if __name__ == "__main__":
    main()
