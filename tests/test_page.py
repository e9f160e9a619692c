"""README and the notebook: what they show runs, and every file and option that they name is
there."""

import contextlib
import json
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    """The fenced blocks of a language in README."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_no_line_is_wide():
    assert not [line for line in README.splitlines() if len(line) > 100 and "](" not in line]


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
    """Each row of the first table that was made here is that of the report of the recipes."""
    report = json.loads((ROOT / "results/fashion/report.json").read_text())
    rows = re.findall(r"\| \*\*here\*\*, fashion: (.*?) \|(.*)\|", README)
    assert len(rows) >= 3
    for label, figures in rows:
        cells = report["strong"]["open"][label]["published"]
        shown = [f"{100 * cells[name]['mean']:.1f}" for name in ("S", "U", "HM", "AUC")]
        assert [figure.split()[0] for figure in figures.split("|")] == shown, label
    theirs = json.loads((ROOT / "results/paper/published_code.json").read_text(encoding="utf-8"))
    cells = theirs["fashion"]["open model, open world"]
    shown = " | ".join(str(cells[name][0]) for name in ("S", "U", "HM", "AUC"))
    assert f"| *published code*, fashion: CompCos (1 seed) | {shown} |" in README
    fresh = json.loads((ROOT / "results/fashion/fresh_seeds.json").read_text(encoding="utf-8"))
    figures = []
    for row in fresh["members"].values():
        mean, deviation = row["test"]["exact"]["auc"]
        figures.append(f"{100 * mean:.1f} ± {100 * deviation:.1f}")
    one, four, sixteen = figures
    assert f"{one}, {four} and {sixteen} with 1, 4 and 16 members" in " ".join(README.split())


def test_the_notebook_runs(drawn, tmp_path, monkeypatch):
    """From top to bottom, with three epochs in place of forty."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(drawn, target_is_directory=True)
    notebook = json.loads((ROOT / "compcos.ipynb").read_text(encoding="utf-8"))
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("epochs=40", "epochs=3").replace('"60"', '"2"')
            exec(compile(source, "compcos.ipynb", "exec"), names)
    assert (tmp_path / "runs/photos-run/best.pt").exists()
