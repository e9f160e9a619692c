"""README, docs/ and the notebook: examples run, and commands, files, names and figures are there."""

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
from lab import baselines, teaser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def blocks(page, language):
    """Return the fenced blocks of a language in a page."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


# ---- text ----


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_short_and_their_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (230 if page.name == "README.md" else 80)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / target).exists(), target


def test_the_names_that_stand_beside_files_are_there():
    text = PAGES[0].read_text(encoding="utf-8")
    found = re.findall(r"`([\w/]+\.py)`: ((?:an entry in |a line of |one line in )?`\w+`(?:, `\w+`)*)",
                       text)
    assert len(found) > 12
    for file, names in found:
        code = (ROOT / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^ *((def|class) )?{name}\b", code, re.MULTILINE), (file, name)


def test_the_tables_figures_stand_in_the_report():
    """Each row of the table of results that was made here is that of the report."""
    text = PAGES[0].read_text(encoding="utf-8")
    report = json.loads((ROOT / "results/fashion/report.json").read_text(encoding="utf-8"))
    rows = re.findall(r"\| \*\*here\*\*: (.*?) \|(.*)\|", text)
    assert len(rows) == 4
    for label, figures in rows:
        cells = report["recipes"]["recipes_open"][label]["published"]
        shown = [f"{100 * cells[name]['mean']:.1f}" for name in ("S", "U", "HM", "AUC")]
        assert [figure.split()[0] for figure in figures.split("|")] == shown, label
    theirs = json.loads((ROOT / "results/paper/published_code.json").read_text(encoding="utf-8"))
    cells = theirs["fashion"]["open model, open world"]
    shown = " | ".join(str(cells[name][0]) for name in ("S", "U", "HM", "AUC"))
    assert f"| *published code*: CompCos (1 seed) | {shown} |" in text


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
    words = shlex.split(command)
    place = next(i for i, word in enumerate(words) if word.startswith("lab.") or ".py" in word)
    module = importlib.import_module(words[place].removesuffix(".py"))
    real_parse = argparse.ArgumentParser.parse_args

    def parse(*arguments):
        raise Understood(real_parse(*arguments))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    if module is compcos:
        module = importlib.import_module("lab.run")
    main = getattr(module.main, "__wrapped__", module.main)  # without the handling of errors
    with pytest.raises(Understood):
        main(words[place + 1:])


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
    code = "\n".join(blocks(page, "python"))
    exec(compile(code, page.name, "exec"), dict(__name__="example"))
    number = r"-?\d\.\d+|True|False"
    told = re.findall(number, " ".join(re.findall(r"print\(.*\)  +#(.*)", code)))
    printed = re.findall(number, capsys.readouterr().out)
    assert [eval(word) for word in printed] == pytest.approx([eval(word) for word in told], abs=0.03)
    if "mine" in baselines.MODELS:
        baselines.main(["--model", "mine", "--epochs", "1", "--device", "cpu"])


def test_the_teaser_is_drawn(trained, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(trained)
    Path("results").mkdir()
    teaser.main()
    with Image.open("results/teaser.png") as picture, Image.open(ROOT / "results/teaser.png") as own:
        assert picture.size == own.size


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
    timm = types.ModuleType("timm")
    timm.create_model = lambda name, pretrained, num_classes: Clip().visual
    timm.data = types.SimpleNamespace(resolve_model_data_config=lambda model: dict(crop_pct=1.0),
                                      create_transform=lambda crop_pct: transform)
    open_clip = types.ModuleType("open_clip")
    open_clip.create_model_and_transforms = create_model_and_transforms
    open_clip.get_tokenizer = get_tokenizer
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "open_clip", open_clip)
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/backbones.md"
    exec("\n".join(blocks(page, "python")), {})

    training, prediction = [shlex.split(line)[2:] for line in blocks(page, "bash")]
    compcos.main([*training, "--epochs", "1", "--members", "1", "--device", "cpu"])
    settings = json.loads(Path("runs/photos-compcos-open/metrics.json").read_text())["settings"]
    assert settings["vectors"] == ["clip_words.npz"] and "clip.npz" in settings["backbone"]
    Path("clip.npz").rename("new.npz")
    compcos.main([*prediction, "--csv", "answers.csv"])
    for name in ("dino", "new"):
        assert data.read_features(f"{name}.npz")["features"].shape == (24, 6)


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
            assert cell["outputs"] or cell["execution_count"] == 1  # stored as executed
            source = "".join(cell["source"]).replace('paper("shapes"', 'paper("shapes", epochs=1')
            source = source.replace("range(1, 11)", "range(1, 2)").replace('"10"', '"1"')
            exec(compile(source, "compcos.ipynb", "exec"), names)
    assert (tmp_path / "runs/photos-run/best.pt").exists()
