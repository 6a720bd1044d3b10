"""The generated pages of docs/reference: the options of commands, on the command line and in YAML."""

import os
from pathlib import Path

import pytest

from jobs.cli import GROUPS, parser_of
from jobs.configurations import MODELS, model_of
from peagle.tables import markdown

FOLDER = Path(__file__).parents[3] / "docs" / "reference"
GENERATED = "<!-- written by `make docs-reference` -->\n"


def commands_page():
    lines = [GENERATED, "# Commands\n", "The text of `peagle COMMAND --help=all`.\n"]
    for group, commands in GROUPS.items():
        lines.append(f"## {group}\n")
        for command in commands:
            text = parser_of(command).format_group("all").strip()
            lines.append(f"### peagle {command}\n\n```text\n{text}\n```\n")
    return "\n".join(lines)


def default_of(field):
    if field.is_required():
        return "required"
    if field.default_factory is not None or field.default is None or not isinstance(field.default, str | int | float):
        return ""
    return f"`{field.default}`"


def configuration_page():
    lines = [
        GENERATED,
        "# Configuration\n",
        "The keys of each command's YAML (`--config FILE`). Each is also a flag, `max_tokens` as `--max-tokens`, an",
        "environment variable, `PEAGLE_MAX_TOKENS`, and an option of the [Python API](python.md). Flags win over the",
        "environment, which wins over the YAML. `peagle config schema COMMAND` prints the JSON schema.\n",
    ]
    for command in MODELS:
        rows = [("key", "default", "meaning")]
        for name, field in model_of(command).model_fields.items():
            if name != "fake":  # only for tests of peagle itself
                rows.append((f"`{name}`", default_of(field), (field.description or "").replace("\n", " ")))
        lines.append(f"## {command}\n\n" + "\n".join(markdown(rows)) + "\n")
    return "\n".join(lines)


@pytest.mark.parametrize(("name", "make"), [("commands.md", commands_page), ("configuration.md", configuration_page)])
def test_generated_page_is_up_to_date(name, make):
    text = make()
    if os.environ.get("WRITE_DOCS"):
        (FOLDER / name).write_text(text)
    assert (FOLDER / name).read_text() == text, f"docs/reference/{name} is out of date: run `make docs-reference`"
