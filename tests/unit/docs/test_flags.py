"""Every `peagle` command and flag in README, docs and examples exists."""

import re
from pathlib import Path

import pytest

from jobs.cli import parser_of, split_command

ROOT = Path(__file__).parents[3]
GENERATED = {"commands.md", "bad-inputs.md"}
PAGES = [
    page
    for page in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").glob("*.yaml")),
    ]
    if page.name not in GENERATED
]
HIDDEN = {"--fake"}


def commands(text):
    """Return the words of each `peagle` command in code blocks and between backticks, without comments."""
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = [
        line
        for language, block in blocks
        if language in ("", "bash")
        for line in re.sub(r"\\\n *", "", block).splitlines()
    ]
    lines += re.findall(r"`([^`\n]+)`", text) + re.findall(r"^# +(peagle .*)$", text, re.MULTILINE)
    parts = [part for line in lines for part in line.split(" && ")]
    starts = [re.match(r" *(?:\$ |[A-Z_]+=\S+ )*(?:\S+/)?peagle (?![a-z ]+:)([a-z].*)", part) for part in parts]
    ends = [re.split(r" #| [|>&] |; ", re.sub(r"\$\([^)]*\)", "", start[1]))[0] for start in starts if start]
    return [end.split() for end in ends]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_and_flags_exist(page):
    for words in commands(page.read_text()):
        name, rest = split_command(words)
        if name is None:  # in prose: a group of commands, such as `peagle deploy`
            assert len(words) == 1, f"peagle {' '.join(words)}"
            continue
        parser = parser_of(name)
        if getattr(parser.get_default("module"), "FORWARDS_ARGS", False):
            continue
        known = {*re.findall(r"(?<![\w-])--?[a-z][a-z-]*", parser.format_group("all")), *HIDDEN}
        unknown = set(re.findall(r"(?<= )--?[a-z][a-z-]*", " ".join([name, *rest]))) - known
        assert not unknown, f"peagle {' '.join(words)}: {unknown}"


def test_commands_are_found_in_a_page():
    page = "```\nA=b c/peagle show \\\n  d --failed  # e\npeagle up && peagle down -f | g\n```\nh `peagle runs` i\n"
    assert commands(page) == [["show", "d", "--failed"], ["up"], ["down", "-f"], ["runs"]]
