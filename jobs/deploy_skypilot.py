"""`peagle deploy skypilot`: a bulk run or an endpoint as SkyPilot's file."""

import argparse
from typing import Any

from jobs.deploying import add_common_arguments, as_yaml, read_workload, result_of, run_client, write_file
from peagle.errors import ConfigError

HELP = """\
Write the file that SkyPilot takes for a configuration: a managed job for a bulk run, a service for an endpoint.

  peagle deploy skypilot examples/job.yaml --secret HF_TOKEN > job.sky.yaml
  peagle deploy skypilot job.yaml --output job.sky.yaml --apply
  peagle deploy skypilot serve.yaml --output serve.sky.yaml --apply

The machine is the configuration's instance_type, in its region or in any; with market: spot a machine that is taken
away is replaced, and the run goes on. The file's first lines have its commands. docs/deploy.md shows all of it.
"""
_MOST_OF_NAME = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `peagle deploy skypilot`."""
    add_common_arguments(parser, client="sky jobs launch, or sky serve up")
    parser.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="environment variable, as HF_TOKEN; its value comes from the shell that launches; may be repeated",
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Write the file, and launch it where that is asked for."""
    from peagle.deploy.skypilot import head_of, launch, secrets_of, task

    if args.apply and args.output is None:
        raise ConfigError("--apply needs --output: SkyPilot reads a file", hint="--output job.sky.yaml")
    workload = read_workload(args.config, args.name, most_of_name=_MOST_OF_NAME)
    secrets = secrets_of(workload, args.secret)
    content = task(workload, secrets=secrets)
    output = str(args.output or f"{args.config.stem}.sky.yaml")
    head = head_of(workload, config=str(args.config), output=output, secrets=secrets)
    write_file(head + as_yaml([content]), args.output)
    if args.apply:
        run_client(
            [*launch(workload, output, secrets=secrets), "--yes"],
            "",
            hint="pip install 'skypilot[aws]' in an environment of its own, or carry the file to where it is",
        )
    return 0, result_of(workload, task=content, is_applied=args.apply)
