"""The layout: which file imports which, that three files travel alone, who is in the way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
METHOD = {"compcos", "evaluate", "feasibility"}
OWN = {}  # file -> module
for file in (*ROOT.glob("*.py"), *ROOT.glob("lab/*.py")):
    OWN[file] = ".".join(file.relative_to(ROOT).with_suffix("").parts)


def imports_of(path):
    """(module, whether it stands inside a function) of each import of the project's own files."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            inside.update(ast.walk(node))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name in OWN.values():
                yield name, node in inside


PRODUCT = {name: list(imports_of(path)) for path, name in OWN.items()
           if not path.name.startswith(("test_", "__init__"))}


def test_the_root_holds_five_python_files():
    names = {path.name for path in ROOT.glob("*.py")}
    assert names == {"compcos.py", "evaluate.py", "feasibility.py", "data.py", "test_compcos.py"}


def test_the_method_imports_nothing_of_the_laboratory():
    assert PRODUCT["evaluate"] == []
    assert set(PRODUCT["feasibility"]) <= {("lab.words", True)}
    outside = {name for name, inside in PRODUCT["compcos"] if not inside}
    assert outside == {"evaluate", "feasibility"}
    assert {name for name, inside in PRODUCT["compcos"] if inside} == {"lab.run"}


def test_imports_run_downwards_without_a_circle():
    """Those of `main` in compcos.py and of the script of feasibility.py start a command."""
    below = {name: {module for module, inside in found
                    if not (inside and name in METHOD)} for name, found in PRODUCT.items()}
    placed = set()
    while len(placed) < len(below):
        ready = {name for name in below.keys() - placed if below[name] <= placed}
        assert ready, f"a circle among {sorted(below.keys() - placed)}"
        placed |= ready


def test_only_commands_import_inside_functions():
    for name, found in PRODUCT.items():
        hidden = {module for module, inside in found if inside}
        assert not hidden or name in METHOD, f"{name} imports {hidden} inside a function"


WORD_VECTORS = "from lab.words import word_vectors\nprint(word_vectors(['wet'], 'random').shape)"


def print_word_vectors(before, folder, after=WORD_VECTORS):
    """Print the shape of word vectors in a process of its own, after a line of Python."""
    program = f"{before}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n{after}"
    return subprocess.run([sys.executable, "-c", program], cwd=folder, text=True,
                          capture_output=True)


@pytest.mark.parametrize("name", ["evaluate", "data", "compcos"])
def test_a_file_in_the_way_is_named(name, tmp_path):
    (tmp_path / f"{name}.py").write_text("x = 1\n")
    last = print_word_vectors(f"import {name}", tmp_path).stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {ROOT / name}.py is needed")
    assert str(tmp_path / f"{name}.py") in last and "put" in last


def test_a_foreign_evaluate_is_named_by_compcos(tmp_path):
    (tmp_path / "evaluate.py").touch()
    error = print_word_vectors("import evaluate", tmp_path, "import compcos").stderr
    assert str(tmp_path / "evaluate.py") in error and "put the folder of compcos.py" in error


def test_word_vectors_from_any_folder(tmp_path):
    assert print_word_vectors("", tmp_path).stdout == "(1, 300)\n"
