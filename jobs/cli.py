"""The `peagle` command, a table of subcommands.

The module of the command "models add" is jobs/models_add.py. It has HELP, `add_arguments(parser)` and
`run(args) -> (exit code, result for --json)`; COMMON lists the options in its short help. Modules are imported only
when their command runs, so `peagle --help` loads neither torch nor Ray.

Exit codes: 0 done, 1 error, 2 bad usage or configuration, 3 stopped early (rerun to resume), 141 output pipe closed.
"""

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs import removed
from jobs.help import CommandParser
from jobs.output import broken_pipe, human_output, is_unicode, prints_unicode, standard_streams
from peagle import __version__
from peagle.errors import ConfigError, PeagleError
from peagle.files import write_json
from peagle.plain_json import to_json
from peagle.private import restrict_new_files
from peagle.signals import STOPPED_CODE, install_signal_handlers, signals_as_interrupts

GROUPS = {
    "Generate": {
        "demo": "generate with the embedded model, with and without speculation, and compare",
        "generate": "generate text in bulk for a corpus of prompts",
        "runs": "list runs with their state and cost",
        "show": "print the responses and failed rows of a run",
        "status": "show a run's progress, from another terminal or machine",
        "report": "report on runs: tokens per dollar, acceptance, costs",
        "export": "write a run's rows as Parquet, JSON lines or OpenAI batch files",
        "audit": "check a run's files, and compare a sample of its rows with the target without the drafter",
    },
    "Serve": {
        "serve": "serve models through OpenAI's API, with keys, limits and cost",
        "serve keys": "create, list and revoke the endpoint's API keys",
        "serve budgets": "set, list and remove budgets of tags and of the whole endpoint",
        "up": "start an endpoint in the background, or list endpoints",
        "down": "stop an endpoint that `peagle up` started",
    },
    "Measure": {
        "bench": "compare methods of speculation, K and concurrency",
        "tune": "find the best method, K, concurrency and precision for a model, prompts and hardware",
        "evaluate": "measure drafters in vLLM: acceptance by K, by position, by category",
    },
    "Drafters": {
        "train": "train a drafter head for a model",
        "prompts": "write the built-in prompts for training a drafter",
        "quantize-drafter": "convert a drafter head to FP8, or an FP8 head to bf16",
        "models": "list the catalog, or show one model's card",
        "models add": "add a drafter head to your catalog",
    },
    "Money": {
        "cost": "show what runs and endpoints cost in a period, by key, model, tag or day",
        "plan": "estimate machines, hours and dollars for your tokens, from measured speeds",
        "prices": "list the prices of machines, each with its date and source",
        "ledger compact": "merge the small files of a ledger, even while it is being written",
    },
    "Deploy": {
        "deploy sagemaker": "serve a catalog model from a SageMaker endpoint, or delete that endpoint",
        "deploy kuberay": "write the Kubernetes objects for a bulk run or an endpoint, and apply them",
        "deploy cluster": "write the `ray up` file for a bulk run's cluster on AWS, and start the cluster",
    },
    "Set-up": {
        "doctor": "show what this machine can run",
        "config show": "print each value of a configuration, and where it came from",
        "config schema": "print the JSON schema of a command's YAML, for editors",
        "completion": "print the shell completion for bash or zsh",
    },
}
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
_COMMANDS_WRITING_SHARED_FILES = ("models add", "quantize-drafter")  # all users may read the catalog and its heads
_JSON_HELP = "write the result as JSON to FILE, or to standard output; other output then goes to standard error"
_EXIT_CODES = "exit codes: 0 done, 1 error, 2 bad usage or configuration, 3 stopped early (rerun to resume)"
_HELP_FLAGS = ("-h", "--help")


def main(argv: Sequence[str] | None = None) -> None:
    install_signal_handlers()
    with standard_streams() as streams:
        streams.code = run(sys.argv[1:] if argv is None else list(argv))
    sys.exit(streams.code)


def run(argv: Sequence[str]) -> int:
    for argument in argv:
        if not is_unicode(argument):
            hint = "  if it is a path, rename the file"
            print(f"peagle: the argument {os.fsencode(argument)!r} is not UTF-8\n{hint}", file=sys.stderr)
            return 2
    command, arguments = split_command(argv)
    if command is None:
        return _run_without_command(argv)
    parser = parser_of(command)
    args = _parse_arguments(parser, arguments)
    args.command_line = ["peagle", *argv]
    try:
        with signals_as_interrupts():
            return _run_command(args)
    except KeyboardInterrupt:
        print(f"peagle {args.command}: interrupted", file=sys.stderr)
        return STOPPED_CODE
    except BrokenPipeError as error:
        return broken_pipe(f"peagle {args.command}: {error}")
    except OSError as error:  # a file that cannot be read or written
        print(f"peagle {args.command}: {error}", file=sys.stderr)
        return 1


def _run_command(args: argparse.Namespace) -> int:
    """Run the command, write its result or error as JSON, and return its exit code."""
    try:
        if args.command not in _COMMANDS_WRITING_SHARED_FILES:
            restrict_new_files()
        with human_output(args):
            code, result = args.module.run(args)
    except PeagleError as error:
        print(f"peagle {args.command}: {error}", file=sys.stderr)
        code = error.exit_code
        if code == ConfigError.exit_code and (variables := getattr(args, "variables", {})):
            print(f"  set by environment variables: {', '.join(dict.fromkeys(variables.values()))}", file=sys.stderr)
        result = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    if args.json and str(args.json) == "-":
        print(to_json(result, indent=2, ensure_ascii=not prints_unicode()))
    elif args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.json, result)
    return int(code)


def _run_without_command(argv: Sequence[str]) -> int:
    """Print the help, the version or an error for an unknown command; return the exit code."""
    if argv and argv[0] in _HELP_FLAGS:
        print(format_help())
        return 0
    if argv and argv[0] == "--version":
        print(f"peagle {__version__}")
        return 0
    if not argv or argv[0].startswith("-"):
        print(format_help(), file=sys.stderr)
        return 2
    name = " ".join(argv[:2])
    if replacement := removed.COMMANDS.get(name):
        print(f"peagle: the command `{name}` was removed: {replacement}", file=sys.stderr)
        return 2
    subcommands = [command for command in COMMANDS if command.startswith(f"{argv[0]} ")]
    similar = difflib.get_close_matches(name, COMMANDS, n=1) or difflib.get_close_matches(argv[0], COMMANDS, n=1)
    hint = f"did you mean {similar[0]}?" if similar else "see peagle --help"
    if subcommands:
        hint = f"choose {' or '.join(subcommands)}"
    print(f"peagle: unknown command {argv[0]!r}\n  {hint}", file=sys.stderr)
    return 2


def format_help() -> str:
    """Return the help of `peagle`: every command in its group."""
    lines = [
        "usage: peagle COMMAND [options]",
        "",
        "Generate text in bulk and online with P-EAGLE parallel drafters on Ray and vLLM, priced in tokens per dollar.",
    ]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:<17} {summary}" for name, summary in commands.items())]
    return "\n".join([*lines, "", "`peagle COMMAND --help` shows examples and options.", _EXIT_CODES])


def _parse_arguments(parser: CommandParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command. For an unknown flag, suggest the most similar flag and exit."""
    args, unknown = parser.parse_known_args(argv)
    if getattr(args.module, "FORWARDS_ARGS", False):
        args.forwarded = unknown
    elif unknown:
        flag = unknown[0].partition("=")[0]
        if replacement := removed.KEYS.get(flag.lstrip("-").replace("-", "_")):
            parser.error(f"{flag} was removed: {replacement}")
        similar = difflib.get_close_matches(flag, parser.options(), n=1)
        parser.error(f"unknown argument {flag}" + (f": did you mean {similar[0]}?" if similar else ""))
    return args


def split_command(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split `argv` into the longest command name at its start, or None, and the remaining arguments."""
    for num_words in (2, 1):
        if (command := " ".join(argv[:num_words])) in COMMANDS:
            return command, list(argv[num_words:])
    return None, list(argv)


def parser_of(command: str) -> CommandParser:
    """Import the module of a command, and return its parser."""
    module: Any = importlib.import_module(f"jobs.{re.sub('[ -]', '_', command)}")
    parser = CommandParser(
        f"peagle {command}",
        description=module.HELP,
        epilog=getattr(module, "EPILOG", _EXIT_CODES),
        common=getattr(module, "COMMON", ()),
    )
    module.add_arguments(parser)
    parser.add_argument("--json", nargs="?", const="-", type=Path, metavar="FILE", help=_JSON_HELP)
    parser.set_defaults(module=module, command=command)
    return parser


if __name__ == "__main__":
    main()
