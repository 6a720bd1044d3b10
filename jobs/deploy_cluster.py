"""`peagle deploy cluster`: write the `ray up` file for a bulk run's cluster on AWS."""

import argparse
from typing import Any

from jobs.deploying import add_common_arguments, read_workload, result_of, run_client, write_file
from peagle.deploy.cluster import MAX_NAME_LENGTH
from peagle.errors import ConfigError

HELP = """\
Write a file for `ray up`: a Ray cluster on AWS for a bulk run, with machines of the configured instance_type.

  peagle deploy cluster examples/job.yaml > cluster.yaml
  peagle deploy cluster job.yaml --ami ami-0abc --security-group sg-0abc --head-profile ARN --worker-profile ARN \\
      --output cluster.yaml --apply

The comment at the top of the file shows how to submit the run. With market: spot, the cluster uses spot machines in the
configuration's region. docs/deploy.md has the commands that create the account's resources.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, client="ray up")
    names = parser.add_argument_group("resources of the account")
    names.add_argument("--ami", metavar="ID", help="image with NVIDIA's driver and Python 3.12")
    names.add_argument(
        "--security-group", metavar="ID", help="allows traffic within the group, and SSH from one address"
    )
    names.add_argument("--head-profile", metavar="ARN", help="instance profile of the head node")
    names.add_argument("--worker-profile", metavar="ARN", help="instance profile of the worker nodes")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Write the file, and start the cluster with --apply."""
    from peagle.deploy.cluster import AwsNames, cluster, cluster_file

    names_from_options = {
        "image": args.ami,
        "security_group": args.security_group,
        "head_profile": args.head_profile,
        "worker_profile": args.worker_profile,
    }
    names = AwsNames(**{name: value for name, value in names_from_options.items() if value})
    if args.apply and names.missing:
        raise ConfigError(
            f"--apply requires {', '.join(names.missing)}", hint="docs/deploy.md shows how to create them"
        )
    if args.apply and args.output is None:
        raise ConfigError("--apply requires --output: `ray down` needs the file later", hint="--output cluster.yaml")
    workload = read_workload(args.config, args.name, max_name_length=MAX_NAME_LENGTH)
    text = cluster_file(workload, names, config=str(args.config), output=str(args.output or "cluster.yaml"))
    write_file(text, args.output)
    if args.apply:
        run_client(["ray", "up", "--yes", str(args.output)], "", hint="install Ray here, or run: ray up FILE")
    return 0, result_of(workload, cluster=cluster(workload, names), is_applied=args.apply)
