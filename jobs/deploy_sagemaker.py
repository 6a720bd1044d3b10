"""`peagle deploy sagemaker`: create or delete a SageMaker endpoint of a catalog model."""

import argparse
import json
from typing import Any

from jobs import flags
from jobs.output import say
from peagle.deploy.sagemaker import SageMakerOptions, known_offer, make_requests, preset
from peagle.economics.report.figures import format_duration, format_usd
from peagle.errors import ConfigError

HELP = """\
Serve a catalog model with its drafter preset from a SageMaker endpoint, and wait until it is in service.

  peagle deploy sagemaker qwen3-coder-30b-a3b-instruct --instance-type ml.g7e.2xlarge --image IMAGE --role ROLE
  peagle deploy sagemaker qwen3-coder-30b-a3b-instruct ... --dry-run
  peagle deploy sagemaker --down qwen3-coder-30b-a3b-instruct

Creates a model, an endpoint configuration and an endpoint with the same name. If this fails or is interrupted, the
created resources are deleted. The endpoint costs money until `--down`, with or without requests. docs/deploy.md
describes the image, the role and the permissions.
"""
_GROUPS = {
    "endpoint": ["instance_type", "instances", "image", "role", "name", "region", "ami_version", "usd_per_hour"],
    "model": ["concurrency", "max_model_len", "model_data", "head_data", "variables"],
}
COMMON = (
    "instance_type", "image", "role", "region", "concurrency", "max_model_len", "name", "down", "dry_run", "config",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="catalog name or hub id")
    parser.add_argument(
        "--down",
        metavar="NAME",
        help="delete this endpoint instead, with its configuration and its model",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the requests without sending them")
    flags.add_flags(parser, SageMakerOptions, _GROUPS)


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    if (args.model is None) == (args.down is None):
        raise ConfigError(
            "name a model to deploy, or an endpoint to delete with --down", hint="peagle models lists them"
        )
    return _down(args) if args.down else _up(args)


def _up(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.catalog.cards import load_catalog
    from peagle.deploy.sagemaker_api import SageMaker

    options, card = flags.load(SageMakerOptions, args), load_catalog().get(args.model)
    drafter_preset = preset(
        card,
        instance_type=options.instance_type,
        concurrency=options.concurrency,
        has_model_data=options.model_data is not None,
        has_head_data=options.head_data is not None,
    )
    requests = make_requests(card, options, drafter_preset)
    say(f"drafter: {drafter_preset.drafter}")
    if known_offer(options) is None:
        say(f"{options.instance_type} is not in the price table, so it is unknown whether {card.name} fits")
    say(f"{format_usd(requests.usd_per_hour)} an hour while it exists ({requests.price})")
    if args.dry_run:
        say(json.dumps(requests.to_dict(), indent=2))
        return 0, requests.to_dict()
    arn = SageMaker(options.region, say=say).create(requests)
    down_command = f"`peagle deploy sagemaker --down {requests.name}`"
    say(f"{requests.name} is in service; {down_command} deletes it and stops the charges")
    return 0, {**requests.to_dict(), "arn": arn}


def _down(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.deploy.sagemaker_api import SageMaker

    removed = SageMaker(getattr(args, "region", None), say=say).remove(args.down)
    cost = ""
    if removed.lifetime_s is not None:
        cost = f"; it existed for {format_duration(removed.lifetime_s)}"
        if removed.usd_per_hour is not None:
            cost += f", about {format_usd(removed.usd_per_hour * removed.lifetime_s / 3600)}"
    say(f"{args.down}: deleted {', '.join(removed.kinds)}{cost}")
    for remaining in removed.remains:
        say(f"not deleted: {remaining}")
    return 0, {"name": args.down, "deleted": list(removed.kinds), "remains": list(removed.remains)}
