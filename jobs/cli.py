"""The `peagle` command, a table of subcommands.

"models add" is jobs/models_add.py. A command's module has HELP, `add_arguments(parser)` and
`run(args) -> (exit code, result for --json)`, and is imported when needed: `peagle --help` loads neither torch nor Ray.

Exit codes: 0 done, 1 error, 2 bad usage or configuration, 3 stopped early and resumable, 141 broken output pipe.
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
from jobs.output import broken_pipe, human_output, is_unicode, prints_unicode, standard_streams
from peagle import __version__
from peagle.errors import ConfigError, PeagleError
from peagle.files import write_json
from peagle.plain_json import to_json
from peagle.private import keep_private
from peagle.signals import STOPPED_CODE, interrupt_on_signal, interrupted_by_signal

COMMANDS = {
    "demo": "generate with the embedded model, with and without speculation, and compare",
    "generate": "generate text in bulk for a corpus of prompts",
    "status": "show a run's progress, from another terminal or machine",
    "audit": "check a run's files, and compare a sample of its rows with the target without the drafter",
    "serve": "serve models through OpenAI's API, with keys, limits and cost",
    "up": "start an endpoint in the background, or list them",
    "down": "stop an endpoint that `peagle up` started",
    "deploy sagemaker": "serve a catalog model from a SageMaker endpoint, or delete that endpoint",
    "serve keys": "create, list and revoke the endpoint's API keys",
    "serve budgets": "set, list and remove budgets of tags and of the whole endpoint",
    "export": "write a run's rows as Parquet, JSON lines or OpenAI batch files",
    "report": "report on runs: tokens per dollar, acceptance, costs",
    "cost": "show what runs and endpoints cost in a period, by key, model, tag or day",
    "ledger compact": "merge the small files of a ledger, even while it is being written",
    "prices": "list the prices of machines, each with its date and source",
    "models": "list the catalog, or show one model's card",
    "models add": "add a drafter head to your catalog",
    "prompts": "write the built-in prompts for training a drafter",
    "train": "train a drafter head for a target",
    "evaluate": "measure drafters in vLLM: acceptance by K, by position, by category",
    "bench": "compare methods of speculation, K and concurrency",
    "tune": "find the best method, K, concurrency and precision for a target, prompts and hardware",
    "plan": "estimate machines, hours and dollars for your tokens, from measured speeds",
    "quantize-drafter": "convert a drafter head to FP8, or an FP8 head to bf16",
    "deploy kuberay": "write the Kubernetes objects for a bulk run or an endpoint, and apply them",
    "deploy cluster": "write the `ray up` file for a bulk run's cluster on AWS, and start the cluster",
    "config show": "print each value of a configuration, and where it came from",
    "config schema": "print the JSON schema of a command's YAML, for editors",
    "doctor": "show what this machine can run",
}
_SHARED = ("models add", "quantize-drafter")  # all users of a machine may read the catalog and its heads
_JSON_HELP = "write the result as JSON ('-' for standard output; other output then goes to standard error)"
_EXIT_CODES = "exit codes: 0 done, 1 error, 2 bad usage or configuration, 3 stopped early (the same command continues)"


def main(argv: Sequence[str] | None = None) -> None:
    interrupt_on_signal()
    with standard_streams() as streams:
        streams.code = run(sys.argv[1:] if argv is None else list(argv))
    sys.exit(streams.code)


def run(argv: Sequence[str]) -> int:
    for argument in argv:
        if not is_unicode(argument):
            print(f"peagle: the argument {os.fsencode(argument)!r} is not UTF-8: rename the file", file=sys.stderr)
            return 2
    command, rest = _split(argv)
    if command is None and (instead := removed.COMMANDS.get(" ".join(argv[:2]))):
        print(f"peagle: the command `{' '.join(argv[:2])}` was removed: {instead}", file=sys.stderr)
        return 2
    args = _parsed(_parser(command), [command, *rest] if command else rest)
    args.command_line = ["peagle", *argv]
    try:
        with interrupted_by_signal():
            return _run(args)
    except KeyboardInterrupt:
        print(f"peagle {args.command}: interrupted", file=sys.stderr)
        return STOPPED_CODE
    except BrokenPipeError as error:
        return broken_pipe(f"peagle {args.command}: {error}")
    except OSError as error:  # a file that cannot be read or written
        print(f"peagle {args.command}: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    """Run the command, write its result or error as JSON, and return its exit code."""
    try:
        if args.command not in _SHARED:
            keep_private()
        with human_output(args):
            code, result = args.module.run(args)
    except PeagleError as error:
        print(f"peagle {args.command}: {error}", file=sys.stderr)
        code = error.exit_code
        if code == ConfigError.exit_code and (variables := getattr(args, "variables", {})):
            print(f"  set in the environment: {', '.join(dict.fromkeys(variables.values()))}", file=sys.stderr)
        result = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    if args.json and str(args.json) == "-":
        print(to_json(result, indent=2, ensure_ascii=not prints_unicode()))
    elif args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.json, result)
    return int(code)


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse, or exit with a message that suggests the nearest flag."""
    args, unknown = parser.parse_known_args(argv)
    if getattr(args.module, "FORWARDS_ARGS", False):
        args.forwarded = unknown
    elif unknown:
        flag = unknown[0].partition("=")[0]
        if instead := removed.KEYS.get(flag.lstrip("-").replace("-", "_")):
            parser.error(f"{flag} was removed: {instead}")
        near = difflib.get_close_matches(flag, re.findall(r"--[a-z-]+", args.usage), n=1)
        parser.error(f"unknown argument {flag}" + (f": did you mean {near[0]}?" if near else ""))
    return args


def _split(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split `argv` into the longest command name at its start (None if there is none) and the rest."""
    for num_words in (2, 1):
        if (command := " ".join(argv[:num_words])) in COMMANDS:
            return command, list(argv[num_words:])
    return None, list(argv)


def _parser(command: str | None) -> argparse.ArgumentParser:
    """Return the parser. Imports only the module of `command`."""
    parser = argparse.ArgumentParser(
        prog="peagle",
        description="Generate in bulk with P-EAGLE parallel drafters on Ray and vLLM, priced in tokens per dollar.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"peagle {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        if name != command:
            commands.add_parser(name, help=summary)
            continue
        module: Any = importlib.import_module(f"jobs.{re.sub('[ -]', '_', name)}")
        sub = commands.add_parser(
            name,
            help=summary,
            description=module.HELP,
            epilog=getattr(module, "EPILOG", _EXIT_CODES),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        sub.add_argument("--json", type=Path, metavar="FILE", help=_JSON_HELP)
        sub.set_defaults(module=module, usage=sub.format_usage())
    return parser


if __name__ == "__main__":
    main()
