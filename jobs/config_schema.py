"""`peagle config schema`: the JSON schema of a command's YAML."""

import argparse
from typing import Any

from jobs.configurations import MODELS, model_of
from peagle.plain_json import to_json

HELP = """\
Print the JSON schema of a command's YAML, with which an editor completes, checks and explains keys.

  peagle config schema generate > job.schema.json

With the YAML language server, the first line of job.yaml is then: # yaml-language-server: $schema=job.schema.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("of", choices=MODELS, metavar="COMMAND", help=f"one of {', '.join(MODELS)}")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    schema = model_of(args.of).model_json_schema()
    print(to_json(schema, indent=2))
    return 0, schema
