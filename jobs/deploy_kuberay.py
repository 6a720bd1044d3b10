"""`peagle deploy kuberay`: a bulk run or an endpoint as KubeRay's objects."""

import argparse
import sys
from typing import Any

from jobs.deploying import add_common_arguments, as_yaml, read_workload, result_of, run_client, write_file

HELP = """\
Write the Kubernetes objects of a configuration for KubeRay 1.6 or newer: a RayJob for a bulk run, a RayCronJob with
--schedule, a RayService for an endpoint.

  peagle deploy kuberay examples/job.yaml --image registry.example/peagle:cuda > job.k8s.yaml
  peagle deploy kuberay job.yaml --image registry.example/peagle:cuda --env-secret peagle-aws --apply
  peagle deploy kuberay job.yaml --image registry.example/peagle:cuda --schedule "0 2 * * *" --time-zone Etc/UTC
  peagle deploy kuberay serve.yaml --image registry.example/peagle:cuda --namespace team --apply

There is one pod per machine, sized by the configuration's instance_type. Secrets are referenced by name and never read;
the commands that create them are printed to standard error. docs/how-to/kubernetes.md shows the whole procedure.
"""
COMMON = ("image", "name", "namespace", "output", "env_secret", "keys_secret", "schedule", "apply")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, client="kubectl apply")
    parser.add_argument("--image", required=True, metavar="IMAGE", help="container image with peagle installed")
    parser.add_argument("--namespace", metavar="TEXT", help="namespace of the objects (default: kubectl's own)")
    parser.add_argument(
        "--claim",
        default="peagle",
        metavar="TEXT",
        help="PersistentVolumeClaim (ReadWriteMany) for weights and an endpoint's ledger (default: %(default)s)",
    )
    secrets = parser.add_argument_group("secrets")
    secrets.add_argument(
        "--env-secret",
        action="append",
        default=[],
        metavar="TEXT",
        help="Secret with environment variables such as AWS_ACCESS_KEY_ID or HF_TOKEN; may be repeated",
    )
    secrets.add_argument("--service-account", metavar="TEXT", help="service account of the pods, instead of AWS keys")
    secrets.add_argument(
        "--token-secret",
        default="peagle-ray",
        metavar="TEXT",
        help="Secret whose key auth_token is Ray's token (default: %(default)s)",
    )
    secrets.add_argument(
        "--keys-secret",
        default="peagle-keys",
        metavar="TEXT",
        help="Secret whose key keys.json has the API keys (default: %(default)s)",
    )
    bulk = parser.add_argument_group("bulk")
    bulk.add_argument(
        "--retries", type=int, default=3, metavar="N", help="retries of a run that ended early (default: 3)"
    )
    bulk.add_argument("--schedule", metavar="CRON", help="start runs at these times, each in a new folder below output")
    bulk.add_argument("--time-zone", metavar="NAME", help="time zone of the schedule (default: the operator's)")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Write the objects, and apply them with --apply."""
    from peagle.deploy.kuberay import (
        MAX_CRON_NAME_LENGTH,
        MAX_NAME_LENGTH,
        KubeRayOptions,
        PodOptions,
        manifests,
        secret_commands,
    )
    from pipelines.cluster.ray import NODE_ENVIRONMENT
    from pipelines.online.serve.proxy import ENVIRONMENT

    max_name_length = MAX_CRON_NAME_LENGTH if args.schedule else MAX_NAME_LENGTH
    workload = read_workload(args.config, args.name, max_name_length=max_name_length)
    options = KubeRayOptions(
        pods=PodOptions(
            image=args.image,
            claim=args.claim,
            env_secrets=args.env_secret,
            service_account=args.service_account,
            token_secret=args.token_secret,
        ),
        namespace=args.namespace,
        retries=args.retries,
        schedule=args.schedule,
        time_zone=args.time_zone,
        keys_secret=args.keys_secret,
        env={**NODE_ENVIRONMENT, **ENVIRONMENT},
    )
    objects = manifests(workload, options)
    text = as_yaml(objects)
    write_file(text, args.output)
    secrets = secret_commands(workload, options)
    print("create these Secrets once:", *secrets, sep="\n  ", file=sys.stderr)
    if args.apply:
        hint = "install kubectl, or copy the file to a machine that has it and run: kubectl apply -f FILE"
        run_client(["kubectl", "apply", "-f", "-"], text, hint=hint)
    return 0, result_of(workload, objects=objects, secrets=secrets, is_applied=args.apply)
