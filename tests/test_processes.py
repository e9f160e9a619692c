"""Several processes: what they share out, that their numbers are those of one, and how they end.

Two processes on the CPU, started by torchrun, whose own store chooses free ports.
"""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch

import baselines
import common
import compcos
import train
from test_reproduce import make

HERE = Path(__file__).parent
ROOT = HERE.parent
SCRIPTS = {"compcos.py": compcos.main, "baselines.py": baselines.main}
PATIENCE = 300  # seconds until processes that do not end are ended


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Own data with features and vectors."""
    return make(tmp_path_factory.mktemp("data") / "toy", images=False)


def start(*arguments, folder=ROOT):
    """Start a script on two processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return subprocess.Popen(
        [*torchrun, "2", *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{HERE}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(running):
    """(exit status, stdout, stderr) of what was started; it is ended if it takes too long."""
    try:
        out, error = running.communicate(timeout=PATIENCE)
        return running.returncode, out, error
    finally:
        for pid in workers(running.pid):
            os.kill(pid, signal.SIGKILL)
        running.kill()


def workers(pid):
    """The processes that torchrun started."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def run_two(*arguments, folder=ROOT):
    """stdout of a script that ends well on two processes."""
    status, out, error = finish(start(*arguments, folder=folder))
    assert status == 0, error
    return out


def run_one(script, *arguments):
    """stdout of a script in this process alone, with as many threads as torchrun gives each."""
    threads = torch.get_num_threads()
    out = io.StringIO()
    torch.set_num_threads(1)
    try:
        with redirect_stdout(out):
            SCRIPTS[script](list(map(str, arguments)))
    finally:
        torch.set_num_threads(threads)
    return out.getvalue()


def compcos_options(toy, out, *more):
    """A short training by the published recipe."""
    return ["compcos.py", "--dataset", toy, "--recipe", "published", "--epochs", 3, "--lr", 1e-2,
            "--batch-size", 32, "--out", out, *more]


def metrics_of(folder):
    """(metrics.json without versions, versions)."""
    metrics = json.loads((folder / "metrics.json").read_text())
    return metrics, metrics.pop("versions")


# ---- the parts ----


def test_without_torchrun_there_is_one_process(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")  # as some clusters set it
    assert (common.rank(), common.processes()) == (0, 1)
    assert common.gather("mine") == ["mine"] and common.share(5) == slice(0, 5)
    assert list(common.spread([3, 4], lambda item: item**2)) == [(3, 9), (4, 16)]
    assert list(common.take_turns(3, "numbers")) == [0, 1, 2]


@pytest.mark.parametrize("count", [0, 1, 2, 5, 12])
def test_shares_are_all_rows_in_order(monkeypatch, count):
    monkeypatch.setenv("WORLD_SIZE", "5")
    rows = []
    for rank in range(5):
        monkeypatch.setenv("RANK", str(rank))
        rows += range(count)[common.share(count)]
        with common.alone():
            assert common.share(count) == slice(0, count) and common.rank() == 0
    assert rows == list(range(count))


def test_orders_are_those_of_one_process_and_other_draws_differ(monkeypatch):
    expected = train.draw_order(50, 2, 3, 7)
    assert sorted(expected.tolist()) == sorted([*range(50)] * 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    draws = []
    for rank in "0", "1", "0":
        monkeypatch.setenv("RANK", rank)
        assert torch.equal(train.draw_order(50, 2, 3, 7), expected)
        draws.append(torch.rand(4))
    assert torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[1])


TOGETHER = """
import os, sys
from pathlib import Path
import numpy as np, torch
import common, experiment, train
from compcos import CompCos

torch.set_num_threads(1)
out = Path(sys.argv[1])
random = np.random.default_rng(0)
seen = np.zeros((4, 5), bool)
seen.flat[random.permutation(20)[:12]] = True
seen[range(4), range(4)] = True
targets = random.choice(np.flatnonzero(seen), 67)  # 7 batches of 19 in two passes, and one image
features = random.normal(size=(67, 8))
shown = random.integers(0, 20, 31)
validation = torch.as_tensor(random.normal(size=(31, 8)))
vectors = random.normal(size=(9, 6))


def fresh():
    torch.manual_seed(0)
    model = CompCos(vectors[:4], vectors[4:], 8, hidden=16, dropout=0.0).double()
    return model.set_training(seen, warmup=2)


def trained(folder, epochs):
    model = fresh()
    folder.mkdir(parents=True, exist_ok=True)

    def validate():
        swept, _ = train.sweep(model, validation, shown, seen, dict(open=np.ones(20, bool)))["open"]
        return swept.report()["auc"]

    history = train.fit(model, torch.as_tensor(features), torch.as_tensor(targets), validate,
                        epochs=epochs, batch_size=19, lr=1e-3, weight_decay=1e-3, seed=5,
                        average=0.9, passes=2, out=folder, settings={})
    return model, history


def difference(ours, theirs):
    return max(float((a - b).abs().max()) for a, b in
               zip(ours.state_dict().values(), theirs.state_dict().values()))


# one epoch of two passes, with margins from the second epoch on
for epochs in 1, 2:
    split, own = trained(out / f"together{epochs}", epochs)
    with common.alone():
        whole, other = trained(out / f"alone{epochs}-{os.environ['LOCAL_RANK']}", epochs)
        assert difference(whole, fresh()) > 1e-3
    assert difference(split, whole) < 1e-10, difference(split, whole)
    for mine, one in zip(own, other):
        assert abs(mine["loss"] - one["loss"]) < 1e-10
        assert abs(mine["validation"] - one["validation"]) < 1e-10
assert sorted(path.name for path in (out / "together2").iterdir()) == ["last.pt", "log.csv"]

# what is measured: every number, in the order of the images; also of fewer images than processes
rho = whole.feasibility(seen)
for count in 31, 1:
    case = (whole, validation[:count], shown[:count], seen)
    masks = dict(open=np.ones(20, bool), half=seen.ravel() | (np.arange(20) % 2 == 0))
    shared = train.sweep(*case, masks)
    shared_curve = experiment.best_threshold(*case, rho)[1]
    with common.alone():
        expected = train.sweep(*case, masks)
        curve = experiment.best_threshold(*case, rho)[1]
    for name in masks:
        for mine, one in zip(shared[name][1], expected[name][1]):
            np.testing.assert_allclose(mine, one, rtol=0, atol=1e-12)
    for name in curve:
        np.testing.assert_allclose(shared_curve[name], curve[name], rtol=0, atol=1e-12)

# seeds and turns: each once, in order, alone
rank = common.rank()
done = list(common.spread(range(5), lambda item: (item, rank, common.processes())))
assert done == [(item, (item, item % 2, 1)) for item in range(5)], done
turns = common.gather(list(common.take_turns(7, "turns")))
assert sorted(turns[0] + turns[1]) == list(range(7)), turns

# a folder that only one process sees
common.check_shared(out)
os.chdir(out / f"alone1-{rank}")
try:
    common.check_shared("results")
except OSError as error:
    assert "process 1 of 2 does not see" in str(error)
else:
    assert False
"""


def test_one_model_together_equals_one_process(tmp_path):
    """To 1e-10 in float64; and each process is where the other is."""
    (tmp_path / "worker.py").write_text(TOGETHER)
    run_two(tmp_path / "worker.py", tmp_path / "out")


# ---- the commands ----


SEVERAL = """
import contextlib, json, os, sys
import baselines, benchmark, compcos

rank = os.environ["RANK"]
for name, script, arguments in json.loads(sys.argv[1]):
    main = {"compcos.py": compcos.main, "baselines.py": baselines.main}[script]
    said = open(f"{name}-{rank}.txt", "w")
    with said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        main(arguments)
benchmark.ON_CPU = benchmark.Sizes(8, 50, 1, 20, 30, 8, 2)
with open(f"benchmark-{rank}.txt", "w") as said, contextlib.redirect_stdout(said):
    benchmark.time_processes(1)
"""
SEEDS = ["--members", 2, "--seed", 0, 1, 2]
ONE_SEED = ["--dropout", 0, "--save-scores"]


def baseline_options(toy, out):
    """A short training of two classifiers, of which the weight decay is chosen, too."""
    return ["baselines.py", "--model", "apart", "--dataset", toy, "--epochs", 2, "--out", out]


@pytest.fixture(scope="module")
def trained(toy, tmp_path_factory):
    """A folder where two processes have trained `seeds`, `together` and `baseline` and run a small
    benchmark, all in one start; what each process said is in NAME-RANK.txt."""
    folder = tmp_path_factory.mktemp("trained")
    commands = dict(seeds=compcos_options(toy, folder / "seeds", *SEEDS),
                    together=compcos_options(toy, folder / "together", *ONE_SEED),
                    baseline=baseline_options(toy, folder / "baseline"))
    listed = [(name, script, list(map(str, arguments)))
              for name, (script, *arguments) in commands.items()]
    (folder / "several.py").write_text(SEVERAL)
    run_two(folder / "several.py", json.dumps(listed), folder=folder)
    for name in commands:
        assert (folder / f"{name}-1.txt").read_text() == ""
    return folder


def test_seeds_are_spread_bit_for_bit(toy, trained, tmp_path):
    one = run_one(*compcos_options(toy, tmp_path / "seeds", *SEEDS))
    two = (trained / "seeds-0.txt").read_text()
    assert two.replace(str(trained), str(tmp_path)) == one  # every table once, in order
    for name in "seed0", "seed1", "seed2", ".":
        ours, made_by = metrics_of(trained / "seeds" / name)
        expected, _ = metrics_of(tmp_path / "seeds" / name)
        assert json.dumps(ours) == json.dumps(expected)
        assert made_by["processes"] == (2 if name == "." else 1)
    for name in "best.pt", "predictions.csv", "feasibility.csv":
        ours = (trained / "seeds/seed2" / name).read_bytes()
        assert ours == (tmp_path / "seeds/seed2" / name).read_bytes()


def test_one_seed_together_leads_where_one_process_does(toy, trained, tmp_path):
    """Three epochs in float32, the AUC to 1e-3; the files are one run's; one process may go on."""
    run_one(*compcos_options(toy, tmp_path / "one", *ONE_SEED))
    two = (trained / "together-0.txt").read_text()
    assert two.count("(test, %)") == 1 and two.count("written to") == 1
    ours, made_by = metrics_of(trained / "together")
    expected, _ = metrics_of(tmp_path / "one")
    assert made_by["processes"] == 2
    for candidates, reports in expected["test"].items():
        auc = ours["test"][candidates]["exact"]["auc"]
        assert auc == pytest.approx(reports["exact"]["auc"], abs=1e-3)
    folders = (tmp_path / "one", trained / "together")
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    scores = [np.load(folder / "scores.npy") for folder in folders]
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-3)
    images = []
    for folder in folders:
        with open(folder / "predictions.csv", newline="") as file:
            images.append([row["image"] for row in csv.DictReader(file)])
    assert images[0] == images[1]

    shutil.copytree(trained / "together", tmp_path / "two")
    run_one(*compcos_options(toy, tmp_path / "two", *ONE_SEED, "--epochs", 5, "--resume"))
    assert (tmp_path / "two/log.csv").read_text().count("\n") == 6
    assert metrics_of(tmp_path / "two")[1]["processes"] == 1


def test_baselines_are_not_split(toy, trained, tmp_path):
    run_one(*baseline_options(toy, tmp_path / "one"))
    two = (trained / "baseline-0.txt").read_text()
    assert two.count("(test, %)") == 1 and two.count("1 of them have nothing to train") == 1
    assert metrics_of(trained / "baseline")[0] == metrics_of(tmp_path / "one")[0]


def test_what_all_find_wrong_is_said_once(toy, tmp_path):
    status, out, error = finish(start(*compcos_options(toy, tmp_path / "out", "--epochs", 0)))
    assert status != 0 and out == ""
    assert error.count("error: --epochs is 0") == 1 and "process 1:" not in error


LONG = """
import sys
import compcos, train
train.SAVE_SECONDS = 1
compcos.main(sys.argv[1:])
"""


def started_training(toy, tmp_path):
    """torchrun with two processes in the midst of a long training, some epochs after its start."""
    (tmp_path / "long.py").write_text(LONG)
    out = tmp_path / "out"
    options = compcos_options(toy, out, "--epochs", 100_000)[1:]
    running = start(tmp_path / "long.py", *options)
    deadline = time.monotonic() + PATIENCE
    while not (out / "last.pt").exists():
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.1)
    time.sleep(0.5)
    return running


def test_interrupt_ends_all_and_keeps_the_epochs(toy, tmp_path):
    running = started_training(toy, tmp_path)
    running.send_signal(signal.SIGINT)
    status, out, error = finish(running)
    assert status != 0 and out == ""
    assert error.count("stopped: epoch ") == 1
    assert (tmp_path / "out/last.pt").exists()


def test_a_process_that_dies_ends_all(toy, tmp_path):
    """The first one says so and keeps the last epoch; one process goes on from there."""
    out = tmp_path / "out"
    running = started_training(toy, tmp_path)
    os.kill(max(workers(running.pid)), signal.SIGKILL)
    status, _, error = finish(running)
    assert status != 0 and error.count("is kept in") == 1, error
    epoch = torch.load(out / "last.pt", weights_only=True)["epoch"]
    run_one(*compcos_options(toy, out, "--epochs", epoch + 1, "--resume"))
    assert metrics_of(out)[1]["processes"] == 1


def test_runs_of_reproduce_are_spread(toy, tmp_path):
    """A run that fails is named with its log; the others are there; one report."""
    status, out, error = finish(start(
        "reproduce.py", "--dataset", toy, "--quick", "--seeds", 0, "--only", "masking",
        "--tmn=--lr -1", "--out", tmp_path / "out"))
    assert status != 0, error
    assert error.count("output.txt") == 2 and "tmn" in error and "--lr is -1.0" in error
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["failed"] == ["tmn, seed 0"] and "CompCos" in report["masking"]
    runs = [path.parents[1].name for path in tmp_path.glob("out/runs/*/seed0/metrics.json")]
    assert sorted(runs) == ["aop", "apart", "closed", "full", "leplus", "symnet"]
    assert out.count(": trained") == len(runs) and out.count("written to") == 1


def test_benchmark_runs_on_a_cpu(trained):
    seconds = json.loads((trained / "benchmark-0.txt").read_text().strip().split("\n")[-1])
    assert len(seconds) == 5 and min(seconds.values()) > 0
