"""The syntax trees of all modules in peagle, pipelines and jobs."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def _name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    _name_of(path): path for top in ("peagle", "pipelines", "jobs") for path in sorted((ROOT / top).rglob("*.py"))
}


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax trees by module name. Parsing takes seconds, so it happens at the first call."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
