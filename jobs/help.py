"""Command parsers whose help is short unless the user names a group of options: `--help=GROUP`, `--help=all`."""

import argparse
import contextlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

_NUM_EXAMPLES = 3  # in the short help
_MAX_NAMES_CHARS = 60  # for the option names of a group in the short help


class CommandParser(argparse.ArgumentParser):
    """The parser of one command.

    Args:
        common: destinations of the options that the short help shows; if empty, it shows all.
        description: summary, blank line, indented examples, blank line, details. The short help leaves out the details
            and all but three examples.
    """

    def __init__(self, prog: str, *, description: str, epilog: str, common: Sequence[str] = ()) -> None:
        super().__init__(prog, description=description, epilog=epilog, add_help=False)
        self._common = common
        self.add_argument(
            "-h",
            "--help",
            nargs="?",
            const="",
            metavar="GROUP",
            action=_HelpAction,
            help="show the most used options; with a group, its options; with all, every option",
        )

    def format_usage(self) -> str:
        formatter = _Formatter(self.prog)
        positional = [action for action in self._actions_of_all_groups() if not action.option_strings]
        formatter.add_usage(None, positional, [])
        return f"{formatter.format_help().rstrip()} [options]\n"

    def options(self) -> list[str]:
        """Return all options that begin with two dashes and are shown in the help."""
        actions = [action for action in self._actions_of_all_groups() if action.help != argparse.SUPPRESS]
        return [name for action in actions for name in action.option_strings if name.startswith("--")]

    def format_group(self, name: str) -> str:
        """Return the help of one group, of everything ("all"), or of the common options ("")."""
        groups = self._groups()
        if name not in groups and name not in ("", "all"):
            self.error(f"--help={name}: unknown group; choose from all, {', '.join(groups)}")
        if not name and self._common:
            return self._short_help(groups)
        formatter = _Formatter(self.prog)
        if name in groups:
            formatter.add_section(name, groups[name])
            return formatter.format_help()
        formatter.add_text(self.description)
        for title, actions in groups.items():
            formatter.add_section(title, actions)
        formatter.add_text(self.epilog)
        return f"{self.format_usage()}\n{formatter.format_help()}"

    def _short_help(self, groups: dict[str, list[argparse.Action]]) -> str:
        summary, examples, *_ = (self.description or "").split("\n\n")
        actions = {action.dest: action for action in self._actions_of_all_groups()}
        formatter = _Formatter(self.prog)
        formatter.add_section("most used options", [_shorten_option(actions[name]) for name in self._common])
        lines = [
            f"  --help={title:<13} {_option_names(group)}"
            for title, group in groups.items()
            if title not in _UNLISTED_GROUPS
        ]
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

    def _groups(self) -> dict[str, list[argparse.Action]]:
        """Return the actions by group title, as argparse passes them to the formatter of its own help."""
        collector = _GroupCollector(self.prog)
        self.formatter_class = lambda *, prog: collector
        self.format_help()
        return {title: actions for title, actions in collector.groups.items() if actions}

    def _actions_of_all_groups(self) -> list[argparse.Action]:
        return [action for actions in self._groups().values() for action in actions]


class _GroupCollector(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self.groups: dict[str, list[argparse.Action]] = {}

    def start_section(self, heading: str | None) -> None:
        self.groups[heading or ""] = []
        super().start_section(heading)

    def add_arguments(self, actions: Iterable[argparse.Action]) -> None:
        next(reversed(self.groups.values())).extend(actions)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=110)

    def add_section(self, title: str, actions: Iterable[argparse.Action]) -> None:
        self.start_section(title)
        self.add_arguments(actions)
        self.end_section()


_UNLISTED_GROUPS = ("options", "positional arguments")  # argparse's own groups


class _HelpAction(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        assert isinstance(parser, CommandParser)
        with contextlib.suppress(OSError):  # the output is a closed pipe
            sys.stdout.write(parser.format_group(str(arguments[1])))
        parser.exit()


def _first_examples(text: str) -> list[str]:
    """Return the lines of the first examples. A line that ends with a backslash is continued."""
    lines: list[str] = []
    num_complete = 0
    for line in text.splitlines():
        lines.append(line)
        num_complete += not line.endswith("\\")
        if num_complete == _NUM_EXAMPLES:
            break
    return lines


def _shorten_option(action: argparse.Action) -> argparse.Action:
    """Return a copy of an option for the short help: only the first clause of its help, and without the --no- form."""
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


def _option_names(actions: list[argparse.Action]) -> str:
    """Return the first options of a group, as many as fit into one line."""
    names = [max(action.option_strings, key=len) for action in actions]
    names = [name.removeprefix("--no-") if name.startswith("--no-") else name.removeprefix("--") for name in names]
    joined = ", ".join(names)
    if len(joined) <= _MAX_NAMES_CHARS:
        return joined
    return joined[:_MAX_NAMES_CHARS].rpartition(",")[0] + ", ..."
