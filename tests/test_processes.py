"""Several processes: how they share work, that their numbers are those of one, and how they end.

Two processes on the CPU, started by torchrun, whose own store chooses free ports.
"""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import compcos
import two_processes
from toy import make_toy

ROOT = Path(__file__).parent.parent
PATIENCE = 300  # seconds until processes that do not end are ended


def start(commands, folder):
    """Start two_processes.py in a folder."""
    given = {name: list(map(str, arguments)) for name, arguments in commands.items()}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                "2", two_processes.__file__, json.dumps(given)]
    environment = dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    return subprocess.Popen(torchrun, cwd=folder, text=True,
                            env=os.environ | environment, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            start_new_session=True)


def finish(running):
    """Return exit status, stdout and stderr of what was started."""
    out, error = running.communicate(timeout=PATIENCE)
    return running.returncode, out, error


def end(running):
    """Kill what was started."""
    for pid in workers(running.pid):
        os.kill(pid, signal.SIGKILL)
    running.kill()


def wait_for(path, running):
    """Wait until a file is there, or all that could write it has ended, or it takes too long."""
    for _ in range(10 * PATIENCE):
        if path.exists() or running.poll() is not None:
            break
        time.sleep(0.1)


def workers(pid):
    """Return the numbers of the processes that torchrun started."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def run_one(arguments):
    """Return stdout of a command in this process, with as many threads as torchrun gives each."""
    threads = torch.get_num_threads()
    out = io.StringIO()
    torch.set_num_threads(1)
    try:
        with redirect_stdout(out):
            compcos.main([str(argument) for argument in arguments[1:]])
    finally:
        torch.set_num_threads(threads)
    return out.getvalue()


def compcos_options(toy, *more):
    """Return the arguments of a short training by the paper's recipe."""
    return ["compcos.py", "--dataset", toy, "--recipe", "paper", "--epochs", 3, "--lr", 1e-2,
            "--batch-size", 32, "--min-epoch-steps", 4, "--device", "cpu", *more]


def endless(toy, out, epochs=100_000):
    """Return the arguments of a long training, the last command for two_processes.py."""
    return compcos_options(toy, "--out", out, "--patience", 0, "--epochs", epochs)


def seeds_options(toy, folder):
    """Return the arguments of three seeds on pixels of the photos."""
    return compcos_options(toy, "--epochs", 2, "--seed", 0, 1, 2, "--features", "pixels",
                           "--out", folder / "seeds")


def metrics_of(folder):
    """Return metrics.json as text, without the versions, which name the processes."""
    metrics = json.loads((folder / "metrics.json").read_text())
    del metrics["versions"]
    return json.dumps(metrics)


# ---- the commands ----


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Make data with features, vectors and photos."""
    folder = make_toy(tmp_path_factory.mktemp("data") / "toy")
    (folder / "images").mkdir()
    random = np.random.default_rng(0)
    for name in np.load(folder / "features.npz")["files"]:
        photo = Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8))
        photo.save(folder / "images" / name)
    return folder


@pytest.fixture(scope="module")
def jobs(toy, tmp_path_factory):
    """Return (folder, exit status, stdout, stderr) of two jobs of two processes each.

    The first job ran all of two_processes.py, and was interrupted in its last training. The second
    ran only that training, and one of its processes was killed.
    """
    folder = tmp_path_factory.mktemp("done")
    other = tmp_path_factory.mktemp("killed")
    commands = dict(
        wrong=compcos_options(toy, "--features", "nowhere.npz"),
        seeds=seeds_options(toy, folder),
        one=compcos_options(toy),
        report=["reproduce.py", "--dataset", toy, "--seed", 0, "--only", "masking", "--device",
                "cpu", "--epochs", 1, "--tmn=--lr 1e30", "--out", folder / "report"],
        endless=endless(toy, folder / "endless"))
    interrupted = start(commands, folder)
    killed = start(dict(endless=endless(toy, other / "endless")), other)
    try:
        wait_for(other / "endless/last.pt", killed)
        os.kill(max(workers(killed.pid)), signal.SIGKILL)
        wait_for(folder / "endless/last.pt", interrupted)
        interrupted.send_signal(signal.SIGINT)
        return (folder, *finish(interrupted)), (other, *finish(killed))
    finally:
        end(interrupted)
        end(killed)


@pytest.fixture(scope="module")
def done(jobs):
    """The folder of the first job."""
    return jobs[0][0]


def said_by(done, name):
    """Return the first process's text of a part that went well in both; the second was silent."""
    for rank in (0, 1):
        assert (done / f"{name}-{rank}.ended").exists(), (done / f"{name}-{rank}.txt").read_text()
    assert (done / f"{name}-1.txt").read_text() == ""
    return (done / f"{name}-0.txt").read_text()


@pytest.mark.parametrize("part", ["spread", "unshared"])
def test_parts_of_two_processes(done, part):
    said_by(done, part)


def test_photos_and_seeds_are_spread_bit_for_bit(toy, done, tmp_path):
    (toy / "pixels_cache.npz").unlink()  # the cache, so that one process makes them anew
    one = run_one(seeds_options(toy, tmp_path))
    two = said_by(done, "seeds")
    assert two.replace(str(done), str(tmp_path)) == one  # every table once, in order
    for name in "seed0", "seed1", "seed2", ".":
        assert metrics_of(done / "seeds" / name) == metrics_of(tmp_path / "seeds" / name)
    for name in "predictions.csv", "feasibility.csv":
        ours = (done / "seeds/seed2" / name).read_bytes()
        assert ours == (tmp_path / "seeds/seed2" / name).read_bytes()
    ours = compcos.load(done / "seeds/seed2/best.pt").state_dict()
    for name, weight in compcos.load(tmp_path / "seeds/seed2/best.pt").state_dict().items():
        assert torch.equal(ours[name], weight)


def test_one_seed_is_trained_by_one(toy, done, tmp_path):
    """The folder, which was not given, is one; the numbers are one process's."""
    said_by(done, "one")
    assert [path.name for path in (done / "runs").iterdir()] == ["toy-compcos-open"]
    run_one(compcos_options(toy, "--out", tmp_path / "one"))
    assert metrics_of(done / "runs/toy-compcos-open") == metrics_of(tmp_path / "one")


def test_runs_of_reproduce_are_spread(done):
    """A run that fails is named with its log; the others are there; one report."""
    said = said_by(done, "report")
    assert said.endswith("exit status 1\n") and "output.txt" in said and "tmn" in said
    report = json.loads((done / "report/report.json").read_text())
    assert "CompCos" in str(report)
    runs = {path.parents[1].name for path in done.glob("report/runs/*/seed0/metrics.json")}
    assert {"closed", "full", "symnet"} <= runs and "tmn" not in runs
    assert said.count(": trained") == len(runs)


def test_what_all_find_wrong_is_said_once(done):
    """The second process, which torchrun ends as soon as the first one has failed, is silent."""
    said = (done / "wrong-0.txt").read_text()
    assert said.count("error: ") == 1 and "nowhere.npz" in said
    assert said.endswith("\nexit status 2\n")
    assert not (done / "wrong-1.txt").read_text().replace("exit status 2\n", "")


# ---- how they end ----


def test_interrupt_ends_all_and_keeps_the_epochs(jobs):
    folder, status, _, error = jobs[0]
    assert status != 0
    assert error.count("stopped: ") == 1
    assert (folder / "endless/last.pt").exists()


def test_a_process_that_dies_ends_all(toy, jobs):
    """The first one says so and keeps the last epoch; one process goes on from there."""
    folder, status, _, error = jobs[1]
    out = folder / "endless"
    assert status != 0 and error.count("--resume to continue") == 1, error
    epoch = torch.load(out / "last.pt", weights_only=True)["epoch"]
    run_one([*endless(toy, out, epoch + 1), "--resume"])
    assert (out / "metrics.json").exists()
