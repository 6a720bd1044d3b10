"""The tree of modules: their size and their imports.

Which folder may import which is in `pyproject.toml`, for `lint-imports`.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter

from source_tree import MODULES, trees

MOST_LINES = 600
LONGEST_CHAIN = 20


def imported(nodes: list[ast.stmt], *, in_functions: bool) -> Iterator[str]:
    """The modules of ours that are imported there; imports for types alone do not count."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported(node.orelse, in_functions=in_functions)
        elif in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imported(children(node), in_functions=in_functions)


def children(node: ast.AST) -> list[ast.stmt]:
    """The statements right below a statement, in whichever of its blocks."""
    below: list[ast.stmt] = []
    for child in ast.iter_child_nodes(node):
        below += [child] if isinstance(child, ast.stmt) else children(child)
    return below


def imports(*, in_functions: bool) -> dict[str, set[str]]:
    return {
        name: {one for one in imported(tree.body, in_functions=in_functions) if one in MODULES and one != name}
        for name, tree in trees().items()
    }


def test_module_length() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_no_import_circles() -> None:
    TopologicalSorter(imports(in_functions=True)).prepare()  # raises CycleError, which names the circle


def test_length_of_import_chains() -> None:
    graph = imports(in_functions=False)
    chains: dict[str, list[str]] = {}
    for name in TopologicalSorter(graph).static_order():
        chains[name] = [name, *max((chains[below] for below in graph[name]), key=len, default=[])]
    longest = max(chains.values(), key=len)
    assert len(longest) <= LONGEST_CHAIN, " > ".join(longest)


def test_public_class_names_are_unique():
    homes = defaultdict(list)
    for name, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
