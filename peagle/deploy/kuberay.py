"""KubeRay's objects for a configuration: a RayJob or RayCronJob for a bulk run, a RayService for an endpoint.

Fields are those of KubeRay 1.7 (`helm-chart/kuberay-operator/crds` of ray-project/kuberay). `authOptions` with a custom
Secret, and RayCronJob, need 1.6.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from peagle.deploy.pods import CONFIG_FOLDER, FOLDER, KEYS_FOLDER, PodOptions, ray_cluster
from peagle.deploy.workload import Workload, require_reachable, require_servable
from peagle.errors import ConfigError

# KubeRay appends 6 characters for a cluster, and 11 for each job of a RayCronJob (`MaxRayJobNameLength` and
# `MaxRayCronJobNameLength` in ray-operator/controllers/ray/utils/constant.go).
MAX_NAME_LENGTH, MAX_CRON_NAME_LENGTH = 47, 36
_API = "ray.io/v1"
_PRE_STOP_S = 15  # until Services no longer send requests to a terminating pod
_RUN = """\
# KubeRay retries a failed job in a new cluster: this continues a run with exit code 3 (stopped early). Code 2 (bad
# configuration) would repeat, so the job stops itself: a stopped job is not retried.
{nightly}peagle generate --config {folder}/job.yaml "$@" &
pid=$!
echo "$pid" > /tmp/peagle.pid
wait "$pid"
code=$?
rm -f /tmp/peagle.pid
if [ "$code" = 2 ]; then
  ray job stop --address http://127.0.0.1:8265 --no-wait {job}
  sleep 60
fi
exit "$code"
"""
# The RayJob's name, which its retries share, is the name of its cluster without the suffix.
_NIGHTLY = 'set -- --output {output}/"${{RAY_CLUSTER_NAME%-*}}" "$@"\n'
_STOP = """\
# Runs before the head's pod terminates: lets the run commit its units.
[ -f /tmp/peagle.pid ] || exit 0
pid=$(cat /tmp/peagle.pid)
kill -TERM "$pid"
while kill -0 "$pid" 2> /dev/null; do sleep 1; done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeRayOptions:
    """Options that are not in the configuration.

    Attributes:
        namespace: None for the client's own.
        retries: of a bulk run, each in a new cluster.
        schedule: in cron's format; None to run once, now.
        time_zone: of the schedule; None for the operator's.
        keys_secret: Secret with the endpoint's API keys as `keys.json`.
        env: environment of every pod.
    """

    pods: PodOptions
    namespace: str | None = None
    retries: int = 3
    schedule: str | None = None
    time_zone: str | None = None
    keys_secret: str = "peagle-keys"
    env: Mapping[str, str]


def manifests(workload: Workload, options: KubeRayOptions) -> list[dict[str, Any]]:
    """Return the objects in the order to apply them.

    Raises:
        ConfigError: the configuration has local paths, or is an endpoint without keys; or options do not fit it.
    """
    if options.retries < 0:
        raise ConfigError(f"--retries must be 0 or more, got {options.retries}")
    if options.schedule is None and options.time_zone is not None:
        raise ConfigError("--time-zone requires --schedule")
    if options.schedule is not None and not (options.schedule.startswith("@") or len(options.schedule.split()) == 5):
        raise ConfigError(
            f"--schedule {options.schedule!r}: cron needs five fields", hint='for every night at two: "0 2 * * *"'
        )
    if workload.command == "generate":
        return _bulk(workload, options)
    if options.schedule is not None:
        raise ConfigError("--schedule is for bulk runs, but the configuration is an endpoint's", hint="leave it out")
    return [_service(workload, options)]


def secrets_of(workload: Workload, options: KubeRayOptions) -> list[str]:
    """Return the commands that create the required Secrets."""
    space = f" -n {options.namespace}" if options.namespace else ""
    create = f"kubectl create secret generic{space}"
    token, keys = options.pods.token_secret, options.keys_secret
    needed = [f'{create} {token} --from-literal=auth_token="$(openssl rand -hex 32)"']
    if workload.command == "serve":
        needed.append(f"{create} {keys} --from-file=keys.json={workload.keys['keys']}")
    return needed + [f"{create} {name} --from-env-file=FILE" for name in options.pods.env_secrets]


def _bulk(workload: Workload, options: KubeRayOptions) -> list[dict[str, Any]]:
    require_reachable(workload.keys, ("input", "output", "model", "drafter"), FOLDER)
    nightly = _NIGHTLY.format(output=shlex.quote(str(workload.keys["output"]))) if options.schedule else ""
    name = f"{workload.name}-config"
    files = {
        "job.yaml": workload.yaml(),
        "run.sh": _RUN.format(folder=CONFIG_FOLDER, nightly=nightly, job=workload.name),
        "stop.sh": _STOP,
    }
    job = {
        "entrypoint": f"sh {CONFIG_FOLDER}/run.sh",
        "jobId": workload.name,  # a cluster has one job; the script needs the id
        "backoffLimit": options.retries,
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": ray_cluster(
            workload,
            options.pods,
            head={"lifecycle": {"preStop": {"exec": {"command": ["sh", f"{CONFIG_FOLDER}/stop.sh"]}}}},
            # `ray job stop` kills the driver after this time; it needs it to commit its units.
            env={**options.env, "RAY_JOB_STOP_WAIT_TIME_S": str(int(workload.grace_s))},
            volumes={CONFIG_FOLDER: {"configMap": {"name": name}}},
        ),
    }
    if options.schedule is None:
        run = _object("RayJob", workload.name, options, job)
    else:
        zone = {"timeZone": options.time_zone} if options.time_zone else {}
        run = _object("RayCronJob", workload.name, options, {"schedule": options.schedule, **zone, "jobTemplate": job})
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(name, options), "data": files}
    return [config, run]


def _service(workload: Workload, options: KubeRayOptions) -> dict[str, Any]:
    keys = workload.keys
    require_servable(keys, FOLDER)
    # A head without ports gets KubeRay's default ports, which include 8000.
    address = {"host": "0.0.0.0", "port": 8000}
    overrides = {"state": f"{FOLDER}/{workload.name}", "keys": f"{KEYS_FOLDER}/keys.json", **address}
    application = {
        "name": "peagle",
        "route_prefix": "/",
        "import_path": "pipelines.online.app:build",
        "args": {**keys, **overrides},
    }
    serve = {
        "proxy_location": "HeadOnly",
        "http_options": address,
        "logging_config": {"enable_access_log": False},
        "applications": [application],
    }
    spec = {
        "serveConfigV2": yaml.safe_dump(serve, sort_keys=False, allow_unicode=True, width=120),
        "rayClusterConfig": ray_cluster(
            workload,
            options.pods,
            head={"lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_PRE_STOP_S)]}}}},
            env=options.env,
            volumes={KEYS_FOLDER: {"secret": {"secretName": options.keys_secret, "defaultMode": 0o440}}},
        ),
    }
    return _object("RayService", workload.name, options, spec)


def _object(kind: str, name: str, options: KubeRayOptions, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": _API, "kind": kind, "metadata": _metadata(name, options), "spec": spec}


def _metadata(name: str, options: KubeRayOptions) -> dict[str, Any]:
    space = {"namespace": options.namespace} if options.namespace else {}
    return {"name": name, **space, "labels": {"app.kubernetes.io/name": "peagle"}}
