"""README, docs/ and the notebook: examples run; commands, files, names and figures are there."""

import argparse
import importlib
import json
import re
import shlex
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import compcos
import data
import evaluate
from lab import baselines

ROOT = Path(__file__).parent.parent
COLUMNS = ("S", "U", "HM", "AUC")
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def blocks(page, language):
    """Return the fenced blocks of a language in a page."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


# ---- text ----


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_short_and_their_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (230 if page.name == "README.md" else 80)
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (page.parent / target).exists(), target


def test_the_names_that_stand_beside_files_are_there():
    text = PAGES[0].read_text(encoding="utf-8")
    found = re.findall(r"`([\w/]+\.py)`: ([a-z ]*`\w+`(?:, `\w+`)*)", text)
    assert len(found) > 12
    for file, names in found:
        code = (ROOT / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^ *((def|class) )?{name}\b", code, re.MULTILINE), (file, name)


def test_the_tables_figures_stand_in_the_reports():
    text = PAGES[0].read_text(encoding="utf-8")
    report = json.loads((ROOT / "results/fashion/report.json").read_text(encoding="utf-8"))
    rows = report["table1"]["open"] | report["recipes"]["recipes_open"]
    for label, *figures in re.findall(r"here\*\*: (.*?) \|" + 4 * r" (\S+)[^|]*\|", text):
        cells = rows[label]["published"]
        assert figures == [f"{100 * cells[name]['mean']:.1f}" for name in COLUMNS], label
    theirs = json.loads((ROOT / "results/paper/published_code.json").read_text(encoding="utf-8"))
    cells = theirs["fashion"]["open model, open world"]
    figures = " | ".join(str(cells[name][0]) for name in COLUMNS)
    assert f"up to 300 epochs) | {figures} |" in text and text.count("**here**") == 6


# ---- commands ----


class Understood(BaseException):
    """Raised in place of the work that follows a parsed command line."""


def commands():
    """Return the pages' commands that run a file or a module of the project."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found += re.findall(r"`(python [^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        for line in "\n".join(blocks(page, "bash")).splitlines():
            parts = [part.strip() for part in line.partition("  #")[0].split("&&")]
            found += [part for part in parts if ".py" in part or "-m lab." in part]
    return [command for command in dict.fromkeys(found) if command.split()[-1] != "lab.NAME"]


@pytest.mark.parametrize("command", commands())
def test_commands_are_understood(command, monkeypatch):
    """Each file or module is there, and its parser takes the arguments."""
    name, arguments = re.search(r"(lab\.\w+|\w+(?=\.py))(?:\.py)?(.*)", command).groups()
    module = importlib.import_module(name)
    real_parse = argparse.ArgumentParser.parse_args

    def parse(*given):
        raise Understood(real_parse(*given))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(Understood):
        module.main(shlex.split(arguments))


# ---- examples ----


@pytest.fixture(scope="module")
def trained(drawn, tmp_path_factory):
    """Return a folder in which the built-in data are trained on for an epoch."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "data").symlink_to(drawn, target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(evaluate, "RESAMPLES", 20)
        compcos.main(["--epochs", "1", "--device", "cpu"])
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "backbones.md"],
                         ids=lambda page: page.name)
def test_examples_print_what_their_comments_say(page, trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    monkeypatch.setattr(baselines, "MODELS", dict(baselines.MODELS))
    # The comments are of a CPU, which other devices do not equal.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    code = "\n".join(blocks(page, "python"))
    exec(compile(code, page.name, "exec"), dict(__name__="example"))
    told = " ".join(re.findall(r"print\(.*\)  +#(.*)", code))
    told, printed = [list(map(float, re.findall(r"-?\d\.\d+", text)))
                     for text in (told, capsys.readouterr().out)]
    assert printed == pytest.approx(told, abs=0.03)
    if "mine" in baselines.MODELS:
        baselines.main(["--model", "mine", "--epochs", "1", "--device", "cpu"])


def test_the_page_on_files_names_all_of_a_run(trained):
    page = (ROOT / "docs/files.md").read_text(encoding="utf-8")
    run = trained / "runs/shapes-compcos-open"
    names = [path.name for path in run.glob("[a-z]*")]
    names += json.loads((run / "metrics.json").read_text())
    for table in run.glob("*.csv"):
        columns = table.read_text().split("\n")[0]
        names += re.sub("closed|open(_masked)?", "NAME", columns).split(",")
    assert [name for name in names if name not in page] == []


# ---- the recipe for another backbone ----


class Clip(torch.nn.Module):
    """A stand-in for a model of open_clip: images (B, 3, 4, 4) or tokens (B, 77) -> (B, 6)."""

    def __init__(self):
        super().__init__()
        self.visual = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 6))
        self.token_embedding = torch.nn.Embedding(99, 6)

    def encode_text(self, tokens):
        assert not self.training, "a tower in training mode drops some of its numbers"
        return self.token_embedding(tokens).mean(1)


def transform(image):
    """Return a PIL image as a tensor (3, 4, 4)."""
    return torch.from_numpy(np.array(image.resize((4, 4)), np.float32)).permute(2, 0, 1)


def create_model_and_transforms(model_name, pretrained=None, load_weights=True, precision="fp32",
                                device="cpu", jit=False, force_quick_gelu=False):
    """Return what open_clip 3.3.0 does, which only warns of another activation than the weights'.
    """
    is_quick = force_quick_gelu or model_name.endswith("-quickgelu")
    if is_quick != (pretrained == "openai"):
        raise UserWarning("QuickGELU mismatch between model and weights")
    return Clip(), None, transform


def get_tokenizer(model_name="", context_length=None, cache_dir=None):
    """Return a tokenizer as open_clip 3.3.0 does: texts -> tokens (B, 77)."""
    return lambda texts: torch.tensor([[len(text)] * 77 for text in texts])


def test_the_recipe_for_timm_and_open_clip(tmp_path, monkeypatch):
    for state in ("wet", "dry"):
        for name in ("dog", "cat", "hat"):
            folder = tmp_path / "photos" / state / name
            folder.mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (9, 8), (len(state), number, 9)).save(folder / f"{number}.png")
    data.make_split(tmp_path / "photos")
    timm_data = types.SimpleNamespace(resolve_model_data_config=lambda model: dict(crop_pct=1.0),
                                      create_transform=lambda crop_pct: transform)
    stand_ins = dict(
        timm=dict(create_model=lambda name, pretrained, num_classes: Clip().visual, data=timm_data),
        open_clip=dict(create_model_and_transforms=create_model_and_transforms,
                       get_tokenizer=get_tokenizer))
    for name, functions in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**functions))
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/backbones.md"
    exec("\n".join(blocks(page, "python")), {})

    training, prediction = [shlex.split(line)[2:] for line in blocks(page, "bash")]
    compcos.main([*training, "--epochs", "1", "--members", "1", "--device", "cpu"])
    assert json.loads(Path("runs/photos-compcos-open/metrics.json").read_text())["settings"][
        "vectors"] == ["clip_words.npz"]
    Path("clip.npz").rename("new.npz")
    compcos.main([*prediction, "--csv", "answers.csv"])
    assert data.read_features("dino.npz")["features"].shape == (24, 6)


# ---- the notebook ----


def test_the_notebook_runs(drawn, tmp_path, monkeypatch):
    """From top to bottom, with one epoch in place of many."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(drawn, target_is_directory=True)
    text = (ROOT / "compcos.ipynb").read_text(encoding="utf-8")
    assert str(ROOT) not in text
    names = {}
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":
            assert cell["execution_count"]  # stored as executed
            source = "".join(cell["source"]).replace('paper("shapes"', 'paper("shapes", epochs=1')
            source = source.replace("range(1, 11)", "range(1, 2)").replace('"10"', '"1"')
            exec(compile(source, "compcos.ipynb", "exec"), names)
    assert (tmp_path / "runs/photos-run/best.pt").exists()
