"""Several processes: what they share out, that their numbers are those of one, and how they end.

Two processes on the CPU, started by torchrun, whose own store chooses free ports.
"""

import csv
import io
import json
import os
import re
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
import data
import features
import train
from test_features import colours, make_dataset, mean_colour
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
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{HERE}",
                          "CUDA_VISIBLE_DEVICES": ""},
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


def wait_for(path, running):
    """Wait until a file is there, or all that could write it has ended, or it takes too long."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)


def workers(pid):
    """The processes that torchrun started."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


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
            "--batch-size", 32, "--device", "cpu", "--out", out, *more]


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
    assert list(common.take_turns(3)) == [0, 1, 2]


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


def test_who_is_ended_by_torchrun_says_so(monkeypatch, capsys):
    """As where seeds are spread and one process is killed: the others know nothing of it."""

    @common.command
    def main(argv=None):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 143
    assert "torchrun has ended all" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("part", ["one_model", "turns", "progress", "unshared"])
def test_parts_of_two_processes(done, part):
    """One model trained together is one process's to 1e-10 in float64; seeds and turns are done
    once each; progress is of both; a folder that is not shared is named."""
    said_by(done, part)


@pytest.mark.parametrize("part, shown", [
    ("waiting", "(?m)^all 2 seeds 3/4, .* epochs/s, [0-9]+ s left$"),
    ("waiting_for_runs", "(?m)^runs 1/2, [0-9]+ s left$"),
    ("broken_photos", "(?m)^extracting (8|9|10|11)/12, .* left, 2 cannot be read$")])
def test_who_waits_for_the_other_shows_how_far_both_are(done, part, shown):
    assert re.search(shown, said_by(done, part)), said_by(done, part)


def test_two_processes_share_the_images(done):
    said_by(done, "extraction")
    dataset = make_dataset(done / "photos", 12)
    for rank in (0, 1):
        with np.load(done / f"made-{rank}.npz") as made:
            assert made["calls"] == 6
            for phase in data.PHASES:
                np.testing.assert_allclose(made[phase], colours(dataset, phase), atol=1e-5)
    names = sorted(path.name for path in dataset.folder.iterdir())
    assert names == ["cheap.pth", "features.npz", "images"]
    with np.load(dataset.folder / "features.npz") as stored:
        assert len(stored["files"]) == 12


def test_another_number_of_processes_goes_on(done, monkeypatch):
    """One process does what two that were ended have left of an extraction."""
    said_by(done, "killed_extraction")
    folder = done / "killed"
    dataset = make_dataset(folder, 12)
    assert (folder / "features.partial-1.npz").exists() and not (folder / "features.npz").exists()
    decoded = []
    decode = features._decode

    def noted(path, *rest):
        decoded.append(path)
        return decode(path, *rest)

    monkeypatch.setattr(features, "_decode", noted)
    monkeypatch.setattr(features, "load_backbone", lambda path: lambda x: 2 * mean_colour(x))
    _, made, _ = features.load_features(dataset, weights=folder / "cheap.pth", device="cpu")
    assert 0 < len(decoded) <= 8  # not the two photos of either process again
    for phase in data.PHASES:
        np.testing.assert_allclose(made[phase], colours(dataset, phase), atol=1e-5)
    assert sorted(path.name for path in folder.iterdir()) == ["cheap.pth", "features.npz", "images"]


# ---- the commands ----


SEEDS = ["--members", 2, "--seed", 0, 1, 2]
ONE_SEED = ["--dropout", 0, "--save-scores"]


def baseline_options(toy, out):
    """A short training of two classifiers, of which the weight decay is chosen, too."""
    return ["baselines.py", "--model", "apart", "--dataset", toy, "--epochs", 2, "--device", "cpu",
            "--out", out]


def reproduce_options(toy, out):
    """A report in quick form, of which the run `tmn` fails."""
    return ["reproduce.py", "--dataset", toy, "--quick", "--seeds", 0, "--only", "masking",
            "--device", "cpu", "--tmn=--lr 1e30", "--out", out]


@pytest.fixture(scope="module")
def job(toy, tmp_path_factory):
    """(folder, exit status, stdout, stderr) of two processes that have done there all that
    two_processes.py does, until an interrupt in the midst of its last training."""
    folder = tmp_path_factory.mktemp("done")
    commands = dict(wrong=compcos_options(toy, folder / "wrong", "--epochs", 0),
                    seeds=compcos_options(toy, folder / "seeds", *SEEDS),
                    together=compcos_options(toy, folder / "together", *ONE_SEED),
                    baseline=baseline_options(toy, folder / "baseline"),
                    report=reproduce_options(toy, folder / "report"),
                    endless=compcos_options(toy, folder / "endless", "--epochs", 100_000))
    for name in "photos", "broken", "killed":
        make_dataset(folder / name, 12)
        (folder / name / "cheap.pth").write_text("2")
    given = {name: list(map(str, arguments)) for name, arguments in commands.items()}
    running = start(HERE / "two_processes.py", json.dumps(given), folder=folder)
    wait_for(folder / "endless/last.pt", running)
    running.send_signal(signal.SIGINT)
    return folder, *finish(running)


@pytest.fixture(scope="module")
def done(job):
    """The folder of `job`."""
    folder, _, _, error = job
    (folder / "stderr.txt").write_text(error)
    return folder


def said_by(done, name):
    """What the first process said in a part that went well in both; the second one said nothing."""
    for rank in (0, 1):
        assert (done / f"{name}-{rank}.ended").exists(), (done / "stderr.txt").read_text()
    assert (done / f"{name}-1.txt").read_text() == ""
    return (done / f"{name}-0.txt").read_text()


def test_seeds_are_spread_bit_for_bit(toy, done, tmp_path):
    one = run_one(*compcos_options(toy, tmp_path / "seeds", *SEEDS))
    two = said_by(done, "seeds")
    assert two.replace(str(done), str(tmp_path)) == one  # every table once, in order
    for name in "seed0", "seed1", "seed2", ".":
        ours, made_by = metrics_of(done / "seeds" / name)
        expected, _ = metrics_of(tmp_path / "seeds" / name)
        assert json.dumps(ours) == json.dumps(expected)
        assert made_by["processes"] == (2 if name == "." else 1)
    for name in "best.pt", "predictions.csv", "feasibility.csv":
        ours = (done / "seeds/seed2" / name).read_bytes()
        assert ours == (tmp_path / "seeds/seed2" / name).read_bytes()


def test_progress_is_of_all_seeds(toy, tmp_path, capsys, monkeypatch):
    """Epochs of an earlier start count."""
    monkeypatch.setattr(common, "BATCH_SECONDS", 0)
    for epochs, shown in (3, range(1, 7)), (4, (4, 8)):
        run_one(*compcos_options(toy, tmp_path / "out", "--seed", 0, 1, "--epochs", epochs,
                                 "--resume"))
        lines = re.findall("(?m)^epoch .* all 2 seeds ([0-9]+)/([0-9]+), .* left$",
                           capsys.readouterr().err)
        assert lines == [(str(done), str(2 * epochs)) for done in shown]


def test_one_seed_together_leads_where_one_process_does(toy, done, tmp_path):
    """Three epochs in float32, the AUC to 1e-3; the files are one run's; one process may go on."""
    run_one(*compcos_options(toy, tmp_path / "one", *ONE_SEED))
    two = said_by(done, "together")
    assert two.count("(test, %)") == 1 and two.count("written to") == 1
    ours, made_by = metrics_of(done / "together")
    expected, _ = metrics_of(tmp_path / "one")
    assert made_by["processes"] == 2
    for candidates, reports in expected["test"].items():
        auc = ours["test"][candidates]["exact"]["auc"]
        assert auc == pytest.approx(reports["exact"]["auc"], abs=1e-3)
    folders = (tmp_path / "one", done / "together")
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    scores = [np.load(folder / "scores.npy") for folder in folders]
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-3)
    images = []
    for folder in folders:
        with open(folder / "predictions.csv", newline="") as file:
            images.append([row["image"] for row in csv.DictReader(file)])
    assert images[0] == images[1]

    shutil.copytree(done / "together", tmp_path / "two")
    run_one(*compcos_options(toy, tmp_path / "two", *ONE_SEED, "--epochs", 5, "--resume"))
    assert (tmp_path / "two/log.csv").read_text().count("\n") == 6
    assert metrics_of(tmp_path / "two")[1]["processes"] == 1


def test_baselines_are_not_split(toy, done, tmp_path):
    run_one(*baseline_options(toy, tmp_path / "one"))
    two = said_by(done, "baseline")
    assert two.count("(test, %)") == 1 and two.count("with nothing to train for 1 of them") == 1
    assert metrics_of(done / "baseline")[0] == metrics_of(tmp_path / "one")[0]


def test_what_all_find_wrong_is_said_once(done):
    """The second process, which torchrun ends as soon as the first one has failed, is silent."""
    said = (done / "wrong-0.txt").read_text()
    assert said.count("error: --epochs is 0") == 1 and said.endswith("\nexit status 2\n")
    assert (done / "wrong-1.txt").read_text() == "exit status 2\n"


def test_interrupt_ends_all_and_keeps_the_epochs(job):
    folder, status, out, error = job
    assert status != 0 and out == ""
    assert error.count("stopped: epoch ") == 1
    assert (folder / "endless/last.pt").exists()


LONG = """
import sys
import compcos, train
train.SAVE_SECONDS = 0.2
compcos.main(sys.argv[1:])
"""


def test_a_process_that_dies_ends_all(toy, tmp_path):
    """The first one says so and keeps the last epoch; one process goes on from there."""
    out = tmp_path / "out"
    (tmp_path / "long.py").write_text(LONG)
    options = compcos_options(toy, out, "--epochs", 100_000)[1:]
    running = start(tmp_path / "long.py", *options)
    wait_for(out / "last.pt", running)
    os.kill(max(workers(running.pid)), signal.SIGKILL)
    status, _, error = finish(running)
    assert status != 0 and error.count("is kept in") == 1, error
    epoch = torch.load(out / "last.pt", weights_only=True)["epoch"]
    run_one(*compcos_options(toy, out, "--epochs", epoch + 1, "--resume"))
    assert metrics_of(out)[1]["processes"] == 1


def test_runs_of_reproduce_are_spread(done):
    """A run that fails is named with its log; the others are there; one report."""
    said = said_by(done, "report")
    assert said.endswith("exit status 1\n")
    assert said.count("output.txt") == 2 and "tmn" in said and "lower --lr" in said
    report = json.loads((done / "report/report.json").read_text())
    assert report["failed"] == ["tmn, seed 0"] and "CompCos" in report["masking"]
    runs = [path.parents[1].name for path in done.glob("report/runs/*/seed0/metrics.json")]
    assert sorted(runs) == ["aop", "apart", "closed", "full", "leplus", "symnet"]
    assert said.count(": trained") == len(runs) and said.count("written to") == 1


def test_benchmark_runs_on_a_cpu(done):
    seconds = json.loads(said_by(done, "benchmark").strip().split("\n")[-1])
    assert len(seconds) == 5 and min(seconds.values()) > 0
