"""The documented ways to change the project: edits of a copy, a model, a dataset."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from lab import baselines, results
from toy import SHORT, metrics_of, numbers

ROOT = Path(__file__).parent.parent
EDITS = {  # file -> (line before which text goes, text)
    "compcos.py": [
        ("    margin: float = setting(",
         '    slack: float = setting(0.0, 0.1, "what it does", least=0, below=1)\n'),
        ('    "shapes": dict(', '    "plants": dict(scale=50.0),\n')],
    "evaluate.py": [
        ("def _bias_of_entry", "_plain_metrics = _metrics\n\n\ndef _metrics(*given):\n"
         "    values = _plain_metrics(*given)\n"
         "    return values | dict(gap=values['best_seen'] - values['best_unseen'])\n\n\n")],
    "feasibility.py": [("def feasibility_scores(", 'MIXES["least"] = np.minimum\n\n\n')],
    "data.py": [("DOWNLOADED = ", 'FOLDERS["plants"] = "toy"\n')],
    "lab/results.py": [
        ('        "open_masked": hard', '        "seen_only": seen.ravel().copy(),\n'),
        ("def table(", 'COLUMNS["Gap"] = "gap"\n\n\n')],
    "lab/baselines.py": [("# What datasets change", 'MODELS["mine"] = VisProd\n\n')]}
UNHARMED = ["tests/test_results.py", "tests/test_answers.py", "tests/test_arguments.py",
            "test_compcos.py"]
CHOICE = "table or says_of or files_of or saved_scores or one_line"


def insert(path, anchor, text):
    """Insert text before the one line of a file that begins with the anchor."""
    before = path.read_text(encoding="utf-8")
    assert before.count(f"\n{anchor}") == 1, anchor
    path.write_text(before.replace(f"\n{anchor}", f"\n{text}{anchor}"), encoding="utf-8")


@pytest.fixture
def copied(tmp_path, toy):
    """A copy of the project with all edits, beside small data."""
    folder = tmp_path / "project"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", "runs", "data", "results"))
    (folder / "tests/data").symlink_to(ROOT / "tests/data")
    for name, edits in EDITS.items():
        for anchor, text in edits:
            insert(folder / name, anchor, text)
    return folder


def called(folder, *arguments):
    """Call Python in a folder; return what it printed."""
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=folder, text=True,
                          capture_output=True, env=os.environ | dict(OMP_NUM_THREADS="1"))
    return done.stdout + done.stderr


def test_documented_edits_work_and_break_no_test(copied, toy, tmp_path):
    """--resume compares a setting; --predict takes a candidate set; a dataset keeps its recipe."""
    given = ["--dataset", "plants", "--data-root", tmp_path, "--device", "cpu", *SHORT]
    command = ["compcos.py", *given, "--out", "run", "--mix", "least"]
    printed = called(copied, *command, "--slack", 0.2)
    assert "\nseen_only " in printed and "    Gap" in printed, printed
    settings = metrics_of(copied / "run")["settings"]
    assert (settings["slack"], settings["mix"], settings["recipe"]) == (0.2, "least", "strong")
    printed = called(copied, "compcos.py", "--checkpoint", "run", "--candidates", "seen_only",
                     "--features", toy / "features.npz")
    assert "  (seen)" in printed and "  (unseen)" not in printed
    refused = called(copied, *command, "--slack", 0.1, "--resume")
    assert "it was trained with slack=0.2, this command has slack=0.1" in refused
    printed = called(copied, "-m", "pytest", "-k", CHOICE, *UNHARMED)
    assert " passed" in printed and "failed" not in printed and "error" not in printed, printed


class Mine(baselines.BaselineModel):
    """A system of one's own."""

    def __init__(self, state_vectors, object_vectors, feature_dim, settings):
        super().__init__(state_vectors, object_vectors, feature_dim, settings)
        self.to_state = nn.Linear(feature_dim, len(self.states))
        self.to_object = nn.Linear(feature_dim, len(self.objects))

    def score(self, features, compositions=None):
        return self.to_state(features)[:, :, None] + self.to_object(features)[:, None]

    def loss(self, features, target):
        return nnf.cross_entropy(self.score(features).flatten(1), target)


def test_a_model_of_ones_own_runs(toy, tmp_path, monkeypatch):
    """Training, resuming, all candidate sets, best.pt; test_reproduce.py has such a report."""
    monkeypatch.setattr(baselines, "MODELS", dict(mine=Mine))
    for out, epochs, more in (("whole", 4, []), ("part", 2, []), ("part", 4, ["--resume"])):
        baselines.main(["--model", "mine", "--dataset", str(toy), "--device", "cpu", "--vectors",
                        "random", "--epochs", str(epochs), "--out", str(tmp_path / out), *more])
    assert numbers(tmp_path / "part") == numbers(tmp_path / "whole")
    assert tuple(numbers(tmp_path / "part")["test"]) == results.CANDIDATE_SETS
    contents = torch.load(tmp_path / "part/best.pt", weights_only=True)
    assert len(contents["weights"]["to_state.weight"]) == 5


