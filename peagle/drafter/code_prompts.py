"""Code prompts from Python sources: signatures and docstrings as chat requests.

The standard library is installed everywhere, documented, and disjoint from evaluation sets, so a head for code can be
trained without downloads. Installed packages add other kinds of functions. Modules are parsed, never imported.
"""

import ast
import random
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_DOCSTRING_CHARS = 1200
MIN_DOCSTRING_CHARS = 24
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "config-3", "idlelib_test"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    module: str
    name: str
    arguments: str
    returns: str
    docstring: str

    @property
    def code(self) -> str:
        arrow = f" -> {self.returns}" if self.returns else ""
        lines = self.docstring.split("\n")
        body = '"""' + self.docstring + ('\n"""' if len(lines) > 1 else '"""')
        return f"def {self.name}({self.arguments}){arrow}:\n{textwrap.indent(body, '    ')}\n"

    @property
    def summary(self) -> str:
        """The docstring on one line, for requests without a signature."""
        return " ".join(self.docstring.split())

    @property
    def text(self) -> str:
        return self.code

    @property
    def num_wordings(self) -> int:
        return len(FORMS)

    def wording(self, seed: int, index: int) -> tuple[str, str]:
        # Shuffled by weight (Efraimidis and Spirakis: sort by u ** (1 / weight)).
        rng = random.Random(f"{seed}/{self.module}/{self.name}/{self.docstring}")
        forms = sorted(FORMS, key=lambda form: -(rng.random() ** (1 / form.weight)))
        return "code", forms[index].put(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A wording of a request, drawn in proportion to `weight`."""

    text: str
    weight: float

    def put(self, snippet: Snippet) -> str:
        return self.text.format(code=snippet.code, name=snippet.name, args=snippet.arguments, summary=snippet.summary)


# The first is the most common form of an evaluation prompt.
FORMS: tuple[Form, ...] = (
    Form(
        weight=10,
        text="Complete the following Python function. Answer with the code only.\n\n```python\n{code}\n```",
    ),
    Form(weight=3, text="Complete this function:\n\n```python\n{code}```"),
    Form(weight=2, text="Implement the following function in Python.\n\n{code}"),
    Form(weight=2, text="Write the body of this Python function.\n\n```python\n{code}```\n"),
    Form(weight=1, text="{code}"),
    Form(
        weight=2,
        text="Write a Python function `{name}({args})` that does the following:\n{summary}\nReturn only the code.",
    ),
    Form(weight=1, text="Write a Python function named {name}. {summary}"),
    Form(weight=1, text="Implement this function and explain briefly how it works.\n\n```python\n{code}```"),
    Form(
        weight=1,
        text="Show how this Python function is used, with two short examples.\n\n```python\n{code}```",
    ),
)


def folder_snippets(root: Path) -> list[Snippet]:
    """Return every distinct documented function below `root`, ordered by path and line.

    Functions with equal name, arguments and docstring count once.
    """
    distinct: dict[tuple[str, str, str], Snippet] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not _SKIPPED_FOLDERS.isdisjoint(relative.parts):
            continue
        for snippet in _snippets_of(path, ".".join(relative.with_suffix("").parts)):
            distinct.setdefault((snippet.name, snippet.arguments, snippet.docstring), snippet)
    return list(distinct.values())


def _snippets_of(path: Path, module: str) -> Iterator[Snippet]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # the library's tests contain invalid files
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = (ast.get_docstring(node) or "").strip()
            if MIN_DOCSTRING_CHARS <= len(docstring) <= MAX_DOCSTRING_CHARS and '"""' not in docstring:
                yield Snippet(
                    module=module,
                    name=node.name,
                    arguments=_arguments(node.args),
                    returns=ast.unparse(node.returns) if node.returns else "",
                    docstring=docstring,
                )


def _arguments(arguments: ast.arguments) -> str:
    """Return the argument list without `self` or `cls`."""
    for group in (arguments.posonlyargs, arguments.args):
        if group and group[0].arg in {"self", "cls"}:
            del group[0]
            break
    return ast.unparse(arguments)
