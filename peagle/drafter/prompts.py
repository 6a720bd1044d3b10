"""The built-in training prompts: code, and other text tasks.

A source consists of materials, and there are several wordings of a request for each material. Code prompts are made
from signatures and docstrings of the standard library or of an installed package, which is parsed but not imported. The
other prompts use passages from package descriptions and Python's reference, a list of topics, and generated tables and
puzzles. A fifth of this content is held out for evaluation.
"""

import ast
import hashlib
import random
import re
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from peagle.errors import ConfigError

T = TypeVar("T")


def split_by_hash(items: Iterable[T], share: float, *, text: Callable[[T], str]) -> tuple[list[T], list[T]]:
    """Split items by a hash of their text; the second list gets about `share` of them.

    An item's list does not depend on the other items.
    """
    parts: tuple[list[T], list[T]] = ([], [])
    for item in items:
        fraction = int.from_bytes(hashlib.sha256(text(item).encode()).digest()[:4]) / 2**32
        parts[fraction < share].append(item)
    return parts


MAX_DOCSTRING_CHARS = 1200
MIN_DOCSTRING_CHARS = 24
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "config-3", "idlelib_test"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """The signature and docstring of a function."""

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
        return len(CODE_WORDINGS)

    def wording(self, seed: int, index: int) -> tuple[str, str]:
        """Shuffle the wordings by `seed`, and return the category and text of the prompt in the wording at `index`."""
        # A random order by weight (Efraimidis and Spirakis: sort by u ** (1 / weight)).
        rng = random.Random(f"{seed}/{self.module}/{self.name}/{self.docstring}")
        chosen = sorted(CODE_WORDINGS, key=lambda wording: -(rng.random() ** (1 / wording.weight)))[index]
        text = chosen.text.format(code=self.code, name=self.name, args=self.arguments, summary=self.summary)
        return "code", text


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeWording:
    text: str
    weight: float


# The first wording has the most weight, because it is the most common one in evaluation prompts.
CODE_WORDINGS: tuple[CodeWording, ...] = (
    CodeWording(
        weight=10,
        text="Complete the following Python function. Answer with the code only.\n\n```python\n{code}\n```",
    ),
    CodeWording(weight=3, text="Complete this function:\n\n```python\n{code}```"),
    CodeWording(weight=2, text="Implement the following function in Python.\n\n{code}"),
    CodeWording(weight=2, text="Write the body of this Python function.\n\n```python\n{code}```\n"),
    CodeWording(weight=1, text="{code}"),
    CodeWording(
        weight=2,
        text="Write a Python function `{name}({args})` that does the following:\n{summary}\nReturn only the code.",
    ),
    CodeWording(weight=1, text="Write a Python function named {name}. {summary}"),
    CodeWording(weight=1, text="Implement this function and explain briefly how it works.\n\n```python\n{code}```"),
    CodeWording(
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
                for parameters in (node.args.posonlyargs, node.args.args):
                    if parameters and parameters[0].arg in {"self", "cls"}:
                        del parameters[0]
                        break
                yield Snippet(
                    module=module,
                    name=node.name,
                    arguments=ast.unparse(node.args),
                    returns=ast.unparse(node.returns) if node.returns else "",
                    docstring=docstring,
                )


MIN_PASSAGE_CHARS, MAX_PASSAGE_CHARS = 240, 1200
PASSAGES_PER_DOCUMENT = 4
NUM_TABLES, NUM_PUZZLES = 160, 160
HELD_OUT_SHARE = 0.2

_PROSE: dict[str, tuple[str, ...]] = {
    "summary": (
        "Summarize the following text in two sentences.\n\n{text}",
        "Give the main points of this text as a short list.\n\n{text}",
        "What is this text about? Answer in one paragraph.\n\n{text}",
    ),
    "rewriting": (
        "Rewrite the following text in simpler words.\n\n{text}",
        "Rewrite this text as a formal email to a colleague.\n\n{text}",
        "Shorten this text to half its length and keep its meaning.\n\n{text}",
    ),
    "question": (
        "Answer the question with the text alone.\n\nText: {text}\n\nQuestion: What does it say about {name}?",
        "Read the text and write three questions that it answers, with their answers.\n\n{text}",
    ),
    "extraction": (
        "List the five most important terms of this text, one on a line.\n\n{text}",
        "Extract all names of products and people from this text as a JSON list.\n\n{text}",
    ),
}
_TOPIC: dict[str, tuple[str, ...]] = {
    "explanation": (
        "Explain {name} to somebody who has never heard of it.",
        "What are the advantages and disadvantages of {name}?",
    ),
    "writing": (
        "Write a short blog post about {name}.",
        "Write an email to a friend about {name}.",
        "Write the opening paragraph of an essay on {name}.",
    ),
    "ideas": ("Give me ten ideas for a talk about {name}.", "What should I know before I begin with {name}?"),
}
_TABLE: dict[str, tuple[str, ...]] = {
    "table": (
        "Which row of this table has the largest number in its last column? Say why.\n\n{text}",
        "Describe this table in words.\n\n{text}",
        "Sort the rows of this table by the last column, the largest first.\n\n{text}",
    ),
    "extraction": ("Write this table as a JSON list of objects.\n\n{text}",),
}
_SUM: dict[str, tuple[str, ...]] = {
    "mathematics": ("{text}", "{text} Solve it step by step.", "{text} Answer with the number and one sentence."),
}
_HELD_OUT_TASKS: dict[str, dict[str, tuple[str, ...]]] = {
    "prose": {
        "translation": (
            "Translate the following text into French.\n\n{text}",
            "Translate the following text into German.\n\n{text}",
            "Translate into Spanish:\n\n{text}",
        ),
        "classification": (
            "Is the tone of this text neutral, positive or negative? Give a reason.\n\n{text}",
            "Who is this text written for: beginners, users or experts? Give a reason.\n\n{text}",
        ),
    },
    "topic": {
        "story": ("Write a short story in which {name} plays a part.", "Write a poem about {name}."),
        "dialogue": ("Write a conversation between two people who disagree about {name}.",),
    },
    "table": {"comparison": ("Compare the first two rows of this table.\n\n{text}",)},
    "sum": {"puzzle": ("{text} Make another puzzle of the same kind, and solve it.",)},
}
_TRAINED = {"prose": _PROSE, "topic": _TOPIC, "table": _TABLE, "sum": _SUM}

_TOPICS = (
    "baking bread", "learning the guitar", "growing tomatoes", "public libraries", "night trains", "bicycle repair",
    "keeping bees", "solar power", "the water cycle", "renting a flat", "a first job interview", "remote work",
    "the Roman roads", "the printing press", "coral reefs", "volcanoes", "the moon landing", "chess openings",
    "long-distance running", "meditation", "knitting", "photography at night", "budgeting", "compound interest",
    "vaccines", "sleep", "black holes", "whales", "recycling", "city parks", "jazz", "street markets",
    "learning a language", "small talk", "time zones", "the calendar", "maps", "bridges", "tea", "cheese",
    "board games", "camping in the rain", "first aid", "moving to another city", "a school play",
    "pets in a small flat", "electric cars", "rail freight", "open source software", "version control", "passwords",
    "backups", "the history of zero", "prime numbers", "probability", "weather forecasts", "lighthouses",
    "glaciers", "deserts", "migrating birds", "honey", "the piano", "opera", "science fiction", "detective novels",
    "proverbs", "handwriting", "museums", "volunteering", "elections", "juries", "patents", "insurance",
    "supply chains", "coffee", "spices", "breakfast around the world", "swimming", "skiing", "the Olympic Games",
)  # fmt: skip
_COLUMNS = (
    (("City", "Country", "Population"), ("Lima", "Oslo", "Kyoto", "Perth", "Turin", "Porto", "Quito", "Riga")),
    (("Employee", "Department", "Salary"), ("Ada", "Ben", "Chloe", "David", "Elif", "Farid", "Grace", "Hugo")),
    (("Product", "Category", "Units sold"), ("lamp", "desk", "chair", "shelf", "clock", "rug", "mirror", "vase")),
    (("Team", "League", "Points"), ("Rovers", "United", "Athletic", "Wanderers", "Rangers", "Harriers", "Albion")),
)
_MIDDLE_COLUMN = (
    ("Peru", "Norway", "Japan", "Italy"),
    ("sales", "support", "research"),
    ("home", "office", "garden"),
    ("north", "south"),
)
_PUZZLES = (
    "A shop sells {a} boxes of {b} apples each and {c} single apples. How many apples does it sell?",
    "A train travels {a} kilometres in {b} hours. How far does it travel in {c} hours at the same speed?",
    "{a} friends share a bill of {b} dollars and leave a tip of {c} dollars. What does each pay?",
    "A tank holds {a} litres and loses {b} litres a day. How much is left after {c} days?",
    "A book has {a} pages. Ann reads {b} pages a day and has read {c} pages. How many days does she need?",
    "A rectangle is {a} metres long and {b} metres wide. How much does a fence around it cost at {c} dollars a metre?",
)

_NOT_PROSE = re.compile(r"https?:|!\[|\]\(|::|``|[|<>{}=*#_~^\\]")
_SENTENCE = re.compile(r"[A-Z][^.!?]{20,}[.!?]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A passage, topic, table or sum (an arithmetic puzzle), with its prompts."""

    group: str  # "prose", "topic", "table" or "sum"
    module: str  # the package or reference that contains the text; otherwise the group
    name: str
    text: str
    held_out: bool  # whether to use the tasks that are held out from training

    @property
    def num_wordings(self) -> int:
        return len(self._wordings())

    def wording(self, seed: int, index: int) -> tuple[str, str]:
        """Shuffle the wordings by `seed`, and return the category and text of the prompt in the wording at `index`."""
        wordings = self._wordings()
        random.Random(f"{seed}/{self.module}/{self.name}/{self.text}").shuffle(wordings)
        category, template = wordings[index]
        return category, template.format(text=self.text, name=self.name)

    def _wordings(self) -> list[tuple[str, str]]:
        tasks = (_HELD_OUT_TASKS if self.held_out else _TRAINED)[self.group]
        return [(category, template) for category, templates in tasks.items() for template in templates]


def content_materials(*, held_out: bool) -> list[Content]:
    """Return the materials for training, or those held out. They depend only on the installed packages."""
    distinct: dict[str, Content] = {}  # packages of one project share passages
    topics = (("topic", "topic", name, name) for name in _TOPICS)
    for group, module, name, text in (*_passages(), *topics, *_tables(), *_sums()):
        distinct.setdefault(text, Content(group=group, module=module, name=name, text=text, held_out=held_out))
    return split_by_hash(distinct.values(), HELD_OUT_SHARE, text=lambda content: content.text)[held_out]


def _passages() -> Iterator[tuple[str, str, str, str]]:
    """Yield prose of package descriptions and of Python's reference."""
    from pydoc_data.topics import topics  # imported late: half a megabyte

    metadata = {(package.metadata["Name"] or "").lower(): package.read_text("METADATA") for package in distributions()}
    for name in sorted(filter(None, metadata)):
        for passage in prose((metadata[name] or "").partition("\n\n")[2]):
            yield "prose", name, name, passage
    for name in sorted(topics):
        for passage in prose(topics[name]):
            yield "prose", "python", name, passage


def prose(text: str) -> list[str]:
    """Return the first paragraphs of prose; paragraphs with markup, code or links are skipped.

    >>> prose("# Title\\n\\n" + "This is a sentence of several plain words. " * 8)[0][:42]
    'This is a sentence of several plain words.'
    """
    passages = []
    for paragraph in re.split(r"\n\s*\n", text):
        joined = " ".join(paragraph.split())
        is_passage = MIN_PASSAGE_CHARS <= len(joined) <= MAX_PASSAGE_CHARS and joined[0].isupper()
        if is_passage and not _NOT_PROSE.search(joined) and len(_SENTENCE.findall(joined)) > 1:
            passages.append(joined)
    return passages[:PASSAGES_PER_DOCUMENT]


def _tables() -> Iterator[tuple[str, str, str, str]]:
    for number in range(NUM_TABLES):
        rng = random.Random(f"table/{number}")
        kind = number % len(_COLUMNS)
        header, names = _COLUMNS[kind]
        rows = [
            (name, rng.choice(_MIDDLE_COLUMN[kind]), f"{rng.randrange(10, 99_999):,}")
            for name in rng.sample(names, rng.randint(3, 6))
        ]
        lines = ["| " + " | ".join(row) + " |" for row in (header, ("---",) * 3, *rows)]
        yield "table", "table", f"table {number}", "\n".join(lines)


def _sums() -> Iterator[tuple[str, str, str, str]]:
    for number in range(NUM_PUZZLES):
        rng = random.Random(f"sum/{number}")
        text = _PUZZLES[number % len(_PUZZLES)].format(
            a=rng.randrange(120, 900), b=rng.randrange(3, 30), c=rng.randrange(2, 12)
        )
        yield "sum", "sum", f"sum {number}", text


STDLIB = "stdlib"
PACKAGE = "package:"
CONTENT = "content"
HELD_OUT = "content:held-out"


Material = Snippet | Content


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPrompt:
    """A chat request and its origin."""

    id: str
    prompt: str
    module: str
    name: str
    category: str  # the kind of task, such as "code" or "summary"


def is_built_in_source(source: str) -> bool:
    return source in (STDLIB, CONTENT, HELD_OUT) or source.startswith(PACKAGE)


def source_materials(source: str) -> Sequence[Material]:
    if source in (CONTENT, HELD_OUT):
        return content_materials(held_out=source == HELD_OUT)
    if source == STDLIB:
        return folder_snippets(Path(sysconfig.get_paths()["stdlib"]))
    name = source.removeprefix(PACKAGE)
    spec = find_spec(name) if source.startswith(PACKAGE) and name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{source}: unknown source of prompts",
            hint="use stdlib, content, content:held-out, or package:NAME with the import name of an installed package",
        )
    return folder_snippets(Path(next(iter(spec.submodule_search_locations))))


def num_available(materials: Sequence[Material]) -> int:
    return sum(material.num_wordings for material in materials)


def generate_prompts(
    materials: Sequence[Material], *, source: str = STDLIB, seed: int = 0, limit: int | None = None
) -> Iterator[TrainingPrompt]:
    """Yield up to `limit` prompts, in an order that depends only on `seed` and the materials.

    Every material is used once before any material is used again in another wording.
    """
    available = num_available(materials)
    if limit is not None and limit > available:
        raise ConfigError(f"--limit {limit:,}: the source has only {available:,} prompts", hint="decrease --limit")
    num_left = available if limit is None else limit
    for round_index in range(max((material.num_wordings for material in materials), default=0)):
        indices = [index for index, material in enumerate(materials) if round_index < material.num_wordings]
        random.Random(f"{seed}/{round_index}").shuffle(indices)
        for index in indices[:num_left]:
            material = materials[index]
            category, text = material.wording(seed, round_index)
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            yield TrainingPrompt(
                id=f"{source.removeprefix(PACKAGE).replace(':', '-')}-{digest}",
                prompt=text,
                module=material.module,
                name=material.name,
                category=category,
            )
        num_left -= min(num_left, len(indices))
