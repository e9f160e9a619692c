"""README and the notebook: what they show runs, and every file and option that they name is
there."""

import contextlib
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

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    """The fenced blocks of a language in README."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_pythons_examples_run(capsys):
    first, *others = blocks("python")
    exec(first, {})
    assert 0 < float(capsys.readouterr().out) < 1
    for block in others:
        compile(block, "README.md", "exec")


def commands():
    """The commands of README that call a script of the project, without their comments."""
    lines = [
        line.partition("  #")[0].strip() for block in blocks("bash") for line in block.splitlines()
    ]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [part for part in parts if part.startswith("python ") and ".py" in part]


@pytest.mark.parametrize("command", commands())
def test_commands_are_understood(command, capsys, monkeypatch):
    """Each script is there and knows each option: with --help at the end it ends well."""
    _, script, *arguments = shlex.split(command)
    module = __import__(script.removesuffix(".py"))
    known = [word for word in arguments if word.startswith("--")]
    with pytest.raises(SystemExit) as end, contextlib.suppress(ValueError):
        module.main(["--help"])
    printed = capsys.readouterr().out
    assert end.value.code == 0
    for option in known:
        assert re.search(rf"{re.escape(option)}\b", printed), f"{script} has no {option}"


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_tables_figures_stand_in_the_report():
    """Each row of the table of results that was made here is that of the report."""
    report = json.loads((ROOT / "results/fashion/report.json").read_text(encoding="utf-8"))
    rows = re.findall(r"\| \*\*here\*\*, fashion: (.*?) \|(.*)\|", README)
    assert len(rows) == 4
    for label, figures in rows:
        cells = report["recipes"]["recipes_open"][label]["published"]
        shown = [f"{100 * cells[name]['mean']:.1f}" for name in ("S", "U", "HM", "AUC")]
        assert [figure.split()[0] for figure in figures.split("|")] == shown, label
    theirs = json.loads((ROOT / "results/paper/published_code.json").read_text(encoding="utf-8"))
    cells = theirs["fashion"]["open model, open world"]
    shown = " | ".join(str(cells[name][0]) for name in ("S", "U", "HM", "AUC"))
    assert f"| *published code*, fashion: CompCos (1 seed) | {shown} |" in README


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
    """PIL image -> (3, 4, 4)."""
    return torch.from_numpy(np.array(image.resize((4, 4)), np.float32)).permute(2, 0, 1)


def create_model_and_transforms(model_name, pretrained=None, load_weights=True, precision="fp32",
                                device="cpu", jit=False, force_quick_gelu=False):
    """As open_clip 3.3.0, which only warns where the activation is not that of the weights."""
    is_quick = force_quick_gelu or model_name.endswith("-quickgelu")
    if is_quick != (pretrained == "openai"):
        raise UserWarning("QuickGELU mismatch between model and weights")
    return Clip(), None, transform


def get_tokenizer(model_name="", context_length=None, cache_dir=None):
    """As that of open_clip 3.3.0: texts -> tokens (B, 77)."""
    return lambda texts: torch.tensor([[len(text)] * 77 for text in texts])


def test_the_recipe_for_timm_and_open_clip(tmp_path, monkeypatch):
    block = next(block for block in blocks("text") if "open_clip" in block)
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
    exec(block, {})

    command = "python compcos.py --dataset photos --features clip.npz --vectors clip_words.npz"
    assert command in README
    compcos.main([*command.split()[2:], "--epochs", "1", "--members", "1", "--device", "cpu"])
    settings = json.loads(Path("runs/photos-compcos-open/metrics.json").read_text())["settings"]
    assert settings["vectors"] == ["clip_words.npz"] and "clip.npz" in settings["backbone"]
    for name in ("dino", "clip"):
        assert data.read_features(f"{name}.npz")["features"].shape == (24, 6)


# ---- the notebook ----


def test_the_notebook_runs(drawn, tmp_path, monkeypatch):
    """From top to bottom, with one epoch in place of many."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(drawn, target_is_directory=True)
    notebook = json.loads((ROOT / "compcos.ipynb").read_text(encoding="utf-8"))
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("epochs=40", "epochs=1").replace('"10"', '"1"')
            exec(compile(source, "compcos.ipynb", "exec"), names)
    assert (tmp_path / "runs/photos-run/best.pt").exists()
