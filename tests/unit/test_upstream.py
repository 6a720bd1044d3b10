"""Private names of other packages are used only in some modules, and the table in docs/upstream.md lists each use.

The code and the tests that the table names exist.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterator

from source_tree import MODULES, ROOT, trees

TABLE = ROOT / "docs" / "upstream.md"
ALLOWED_MODULES = (
    "peagle.engine.vllm_internals",  # for processes with an engine
    "peagle.engine.vllm_plugin",  # changes inside vLLM's processes
    "peagle.engine.vllm_drafts",  # the same, for drafts
    "pipelines.cluster",  # Ray
    "pipelines.online.serve",  # Ray Serve, uvicorn, Starlette, FastAPI, vLLM's API server
)
OWN_PACKAGES = {"peagle", "pipelines", "jobs"}
# Names in these modules change without notice. Of vLLM's modules, only the documented ones are public.
INTERNAL = ("ray.llm", "ray.serve.context", "uvicorn.protocols")
_PUBLIC_MODULES = ("config", "exceptions", "platforms", "reasoning", "sampling_params", "tool_parsers")
PUBLIC_OF_VLLM = {"vllm", *(f"vllm.{module}" for module in _PUBLIC_MODULES)}
# Documented as public despite the underscore: by Python, and by jinja2 for subclasses of `Undefined`.
DOCUMENTED = {"os._exit", "self._fail_with_undefined_error"}
PUBLIC_VARIABLES = {
    *("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"),
    *("RAY_JOB_STOP_WAIT_TIME_S", "RAY_TMPDIR", "RAY_USE_TLS"),
}


def may_use_private_names(module: str) -> bool:
    return any(module == allowed or module.startswith(f"{allowed}.") for allowed in ALLOWED_MODULES)


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def is_foreign(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in OWN_PACKAGES and top not in sys.stdlib_module_names


def is_internal(module: str) -> bool:
    if not is_foreign(module):
        return False
    if module.split(".")[0] == "vllm":
        return module not in PUBLIC_OF_VLLM
    return any(map(is_private, module.split("."))) or any(
        module == internal or module.startswith(f"{internal}.") for internal in INTERNAL
    )


def imports(node: ast.AST) -> Iterator[tuple[str, str, bool]]:
    """Yield each name that this node imports from another package: local name, full name, and whether it is private."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if is_foreign(alias.name):
                yield alias.asname or alias.name.partition(".")[0], alias.name, is_internal(alias.name)
    elif isinstance(node, ast.ImportFrom) and node.module and is_foreign(node.module):
        for alias in node.names:
            full_name = f"{node.module}.{alias.name}"
            # `from vllm import envs` imports a module; the names of classes have capitals.
            is_module = node.module == "vllm" and alias.name.islower()
            private = is_private(alias.name) or is_internal(full_name if is_module else node.module)
            yield alias.asname or alias.name, full_name, private


def root_of(node: ast.expr) -> str | None:
    """Return `a` of the expression `a.b.c`, or None if it does not start with a name."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def own_members(tree: ast.Module) -> set[str]:
    """Return the attributes and methods that the module itself defines."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and root_of(node) in ("self", "cls"):
            own.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
    return own


def private_names_in(node: ast.AST, foreign: set[str], private: set[str], own: set[str]) -> Iterator[str]:
    """Yield the names of other packages in this node that are private or assigned to.

    Args:
        foreign: names that this module imports from other packages.
        private: the private names among them.
        own: attributes and methods that this module defines.
    """
    yield from (full_name for _, full_name, is_private_ in imports(node) if is_private_)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in private:
        yield node.id
    elif isinstance(node, ast.Attribute):
        is_foreign_member = is_private(node.attr) and node.attr not in own and ast.unparse(node) not in DOCUMENTED
        if is_foreign_member or node.attr == "__mro__":  # __mro__ is used to recognise a class by its name
            yield ast.unparse(node)
        elif isinstance(node.ctx, ast.Store) and root_of(node) in foreign:
            yield f"{ast.unparse(node)} ="
    elif isinstance(node, ast.keyword) and node.arg and is_private(node.arg):
        yield f"{node.arg}="
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
        member = node.args[1]
        if isinstance(member, ast.Constant) and is_private(str(member.value)) and root_of(node.args[0]) != "self":
            yield ast.unparse(node)
    elif isinstance(node, ast.Constant) and re.fullmatch(r"RAY_\w+", name := str(node.value)):
        yield from {name} - PUBLIC_VARIABLES


def uses(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield pairs of a module's top-level definition and a private name that the definition uses."""
    imported = [item for node in ast.walk(tree) for item in imports(node)]
    foreign, private = {name for name, *_ in imported}, {name for name, _, is_private_ in imported if is_private_}
    own = own_members(tree)
    for statement in tree.body:
        for node in ast.walk(statement):
            yield from ((name_of(statement), used) for used in private_names_in(node, foreign, private, own))


@functools.cache
def all_uses() -> dict[str, list[tuple[str, str]]]:
    return {module: list(uses(tree)) for module, tree in trees().items()}


def name_of(statement: ast.stmt) -> str:
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement
    return str(getattr(target, "name", None) or getattr(target, "id", ""))


def test_private_names_are_only_used_in_allowed_modules() -> None:
    forbidden = {
        f"{module}: {name}"
        for module, names in all_uses().items()
        if not may_use_private_names(module)
        for _, name in names
    }
    assert forbidden == set()


def rows() -> list[dict[str, str]]:
    """Return the table of docs/upstream.md, by column."""
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(head, cells, strict=True)) for cells in body]


def names_in_column(column: str) -> list[tuple[str, str]]:
    """Return each `a:b` or `a::b` of a column."""
    pattern = re.compile(r"`([\w./]+?)::?(\w[\w.]*)`")
    names_by_row = [(row["what"], pattern.findall(row[column])) for row in rows()]
    assert [what for what, names in names_by_row if not names] == []
    return [name for _, names in names_by_row for name in names]


def defined(tree: ast.Module) -> set[str]:
    """Return top-level names, and methods as Class.method."""
    names = {name_of(statement) for statement in tree.body}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name_of(statement)}" for statement in node.body}
    return names


def test_table_names_existing_code() -> None:
    assert [
        (module, name)
        for module, name in names_in_column("where")
        if module not in MODULES or name not in defined(trees()[module])
    ] == []


def test_table_names_existing_tests() -> None:
    missing = [
        f"{path}::{name}"
        for path, name in names_in_column("fails when upstream changes")
        if not (ROOT / path).is_file() or not re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M)
    ]
    assert missing == []


def test_table_has_upstream_link_and_versions() -> None:
    assert [
        row["what"] for row in rows() if not re.search(r"\(https://github\.com/|^none found", row["upstream"])
    ] == []
    assert [row["what"] for row in rows() if not re.search(r"\d\.\d+", row["holds for"])] == []


def test_every_private_use_is_in_the_table() -> None:
    used = {
        (module, owner)
        for module, names in all_uses().items()
        if may_use_private_names(module)
        for owner, _ in names
        if owner
    }
    listed = {(module, name.partition(".")[0]) for module, name in names_in_column("where")}
    assert used - listed == set()
    assert len(used) > 20  # the search finds private names at all
    text = TABLE.read_text(encoding="utf-8")
    variables = {name for names in all_uses().values() for _, name in names if name.startswith("RAY_")}
    assert [name for name in variables if f"`{name}`" not in text] == []


def test_every_workaround_module_is_in_the_table() -> None:
    """Modules of `pipelines.cluster` are not checked, because not all of them have workarounds."""
    modules = {module for module in MODULES if module.startswith("pipelines.online.serve.")}
    assert modules - {module for module, _ in names_in_column("where")} == set()
