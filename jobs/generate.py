"""`peagle generate`; also `python -m jobs.generate` for `ray job submit`."""

import argparse
import sys
from typing import Any

from jobs import flags
from jobs.output import DRY_RUN_HELP, console, print_forecast
from peagle.economics.price_options import PRICE_OPTIONS
from peagle.engine_options import MODEL_KEYS, SIZE_KEYS
from peagle.requests.sampling import SAMPLING_KEYS
from pipelines.batch.config import PROMPT_KEYS, GenerateConfig

HELP = """\
Generate text for every row of a corpus. Rows are committed exactly once; run the same command again to resume.

  peagle generate --input prompts.jsonl --output runs/first --max-tokens 128
  peagle generate --config job.yaml --output runs/second --engines 8 --precision fp8
  peagle generate --config job.yaml --dry-run
  RAY_AUTH_MODE=token ray job submit --working-dir . -- python -m jobs.generate --config job.yaml

Ctrl-C, SIGTERM, --budget-usd and --deadline stop the run: running units have --grace-s to be committed, and the command
to continue is printed. A second Ctrl-C stops immediately. Rows that fail go to OUTPUT/failed with a reason; the run
continues.
RAY_ADDRESS selects the cluster. It must require a token, unless RAY_AUTH_MODE=disabled is set. Without RAY_ADDRESS a
cluster is started on this machine, and stopped at the end.
"""
EPILOG = """\
each key may also be set in the YAML of --config, or in the environment as PEAGLE_<KEY>
exit codes: 0 all rows committed or failed, 1 error, 2 bad usage or configuration, 3 stopped early (resumable)
"""
_GROUPS = {
    "model": [*MODEL_KEYS, "tool_call_parser", "reasoning_parser"],
    "corpus": ["input", "input_format", "output", "output_format", "limit", "rows_per_unit", "retry_failed"],
    "prompts": list(PROMPT_KEYS),
    "sampling": [*SAMPLING_KEYS, "sampling_column"],
    "engines": [
        "engines", "nodes_per_engine", "accelerator_type", *SIZE_KEYS, "engine", "cluster_wait_s", "heartbeat_s",
        "lease_s",
    ],
    "stopping": ["budget_usd", "deadline", "max_failed_rows", "row_timeout_s", "engine_timeout_s", "grace_s"],
    "money": [*PRICE_OPTIONS, "tags", "draw_on"],
}  # fmt: skip
COMMON = (
    "input", "output", "model", "drafter", "prompt_template", "max_tokens", "temperature", "engines", "budget_usd",
    "deadline", "retry_failed", "config", "dry_run",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_flags(parser, GenerateConfig, _GROUPS, hidden=["fake"])
    parser.add_argument("--dry-run", action="store_true", help=DRY_RUN_HELP)


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    config = flags.load(GenerateConfig, args)
    from pipelines.batch.request import RunRequest

    request = RunRequest(config=config, command=args.command_line)
    if args.dry_run:
        from pipelines.batch.forecast import forecast

        return print_forecast(forecast(request, print))

    from peagle.economics.report.text import short_summary
    from peagle.runs.directory import RunDirectory
    from peagle.runs.export import describe_answers
    from peagle.runs.progress import RunProgress
    from pipelines.batch.run import generate

    outcome = generate(request, RunProgress(console(soft_wrap=True)))
    if outcome.was_already_finished:
        print(f"{config.output} is already finished.")
    print(short_summary(outcome.report))
    if answers := describe_answers(RunDirectory(config.output)):
        print(answers)
    if outcome.export is not None:
        print(f"exported {outcome.export.describe()}")
    print(f"report: {config.output / 'report.html'}, or peagle report {config.output}")
    return 0, outcome.report


if __name__ == "__main__":
    from jobs.cli import main

    main(["generate", *sys.argv[1:]])
