"""The size of modules, their imports, and unique class names.

`lint-imports` checks which folder may import which (`pyproject.toml`).
"""

import ast
from collections import defaultdict
from graphlib import TopologicalSorter

from source_tree import MODULES, trees

MAX_LINES = 600


def imported_modules(tree: ast.Module) -> set[str]:
    """Return the modules of this repository that a module imports, including imports in functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= members & MODULES.keys() or {node.module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & MODULES.keys()


def test_modules_are_short() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_there_are_no_import_cycles() -> None:
    imports = {name: imported_modules(tree) - {name} for name, tree in trees().items()}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules


def test_names_of_public_classes_are_unique() -> None:
    modules = defaultdict(list)
    for name, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(name)
    assert {name: places for name, places in modules.items() if len(places) > 1} == {}
