"""The laboratory: data, features, runs and reports around the method, whose files lie beside it."""

from importlib.util import find_spec
from pathlib import Path

# `evaluate` and `data` are names that other projects use, too.
for _name in ("compcos", "data", "evaluate", "feasibility"):
    _ours = Path(__file__).parent.parent / f"{_name}.py"
    _spec = find_spec(_name)  # of the module that is imported already, or would be
    if _spec is None or Path(_spec.origin or "").resolve() != _ours.resolve():
        raise ImportError(f"{_ours} is needed, but `import {_name}` gives "
                          f"{_spec and _spec.origin}: put {_ours.parent} first in sys.path and "
                          "restart Python")
