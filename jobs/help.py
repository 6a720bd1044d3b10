"""Parsers of commands, whose help is short unless a group of options is named: `--help=GROUP`, `--help=all`."""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

_NUM_EXAMPLES = 3
_MAX_NAMES_CHARS = 60


class CommandParser(argparse.ArgumentParser):
    """The parser of one command.

    Args:
        common: destinations of the options that the short help shows; if empty, it shows all.
        description: summary, blank line, indented examples, blank line, details. The short help leaves out the details
            and all but three examples.
    """

    def __init__(self, prog: str, *, description: str, epilog: str, common: Sequence[str] = ()) -> None:
        super().__init__(
            prog,
            description=description,
            epilog=epilog,
            add_help=False,
            formatter_class=_Formatter,
        )
        self._common = common
        self.add_argument(
            "-h",
            "--help",
            nargs="?",
            const="",
            metavar="GROUP",
            action=_Help,
            help="show the most used options; all: everything; or the name of a group",
        )

    def format_usage(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(None, self._get_positional_actions(), [])
        return f"{formatter.format_help().rstrip()} [options]\n"

    def options(self) -> list[str]:
        """Return all options that begin with two dashes and are shown in the help."""
        actions = [action for action in self._get_optional_actions() if action.help != argparse.SUPPRESS]
        return [name for action in actions for name in action.option_strings if name.startswith("--")]

    def format_group(self, name: str) -> str:
        """Return the help of one group, of everything ("all"), or of the common options ("")."""
        groups = {group.title: group for group in self._action_groups if group._group_actions}
        if name not in groups and name not in ("", "all"):
            self.error(f"--help={name}: there is no such group: use all, {', '.join(filter(None, groups))}")
        if name in groups:
            return self._formatted(groups[name], groups[name]._group_actions)
        if name == "all" or not self._common:
            formatter = self._get_formatter()
            formatter.add_text(self.description)
            for group in groups.values():
                formatter.start_section(group.title)
                formatter.add_arguments(group._group_actions)
                formatter.end_section()
            formatter.add_text(self.epilog)
            return f"{self.format_usage()}\n{formatter.format_help()}"
        return self._short_help(groups)

    def _formatted(self, group: Any, actions: list[argparse.Action]) -> str:
        formatter = self._get_formatter()
        formatter.start_section(group.title)
        formatter.add_arguments(actions)
        formatter.end_section()
        return formatter.format_help()

    def _short_help(self, groups: dict[str | None, Any]) -> str:
        summary, examples, *_ = (self.description or "").split("\n\n")
        formatter = self._get_formatter()
        formatter.start_section("most used options")
        for destination in self._common:
            action = next(action for action in self._actions if action.dest == destination)
            formatter.add_argument(_brief(action))
        formatter.end_section()
        lines = [f"  --help={title:<13} {_names(group)}" for title, group in groups.items() if title not in _UNNAMED]
        lines.append(f"  --help={'all':<13} every option, with more about this command")
        return "\n".join(
            [
                self.format_usage(),
                summary,
                "",
                *_first_examples(examples),
                "",
                formatter.format_help(),
                "more options:",
                *lines,
                "",
                (self.epilog or "").strip(),
                "",
            ]
        )


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=110)


_UNNAMED = ("options", "positional arguments")


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        assert isinstance(parser, CommandParser)
        parser._print_message(parser.format_group(str(arguments[1])), sys.stdout)
        parser.exit()


def _first_examples(text: str) -> list[str]:
    """Return the first examples; an example continues after a line that ends with a backslash."""
    lines: list[str] = []
    num_complete = 0
    for line in text.splitlines():
        lines.append(line)
        num_complete += not line.endswith("\\")
        if num_complete == _NUM_EXAMPLES:
            break
    return lines


def _brief(action: argparse.Action) -> argparse.Action:
    """Return a copy of an option for the short help: its long name and the first clause of its help."""
    default = re.search(r" \(default: [^)]*\)$", action.help or "")
    clause = (action.help or "").removesuffix(default.group() if default else "").split(";")[0]
    names = [name for name in action.option_strings if not name.startswith("--no-")]
    return argparse.Action(
        names,
        action.dest,
        nargs=action.nargs,
        metavar=action.metavar,
        default=action.default,
        help=clause + (default.group() if default else ""),
    )


def _names(group: Any) -> str:
    """Return the first options of a group, as many as fit into one line."""
    names = [max(action.option_strings, key=len) for action in group._group_actions]
    names = [name.removeprefix("--no-") if name.startswith("--no-") else name.removeprefix("--") for name in names]
    text = ", ".join(names)
    if len(text) <= _MAX_NAMES_CHARS:
        return text
    return text[:_MAX_NAMES_CHARS].rpartition(",")[0] + ", ..."
