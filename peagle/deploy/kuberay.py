"""KubeRay's objects for a configuration.

A bulk run is a RayJob or a RayCronJob, an endpoint a RayService.

Their fields are those of KubeRay 1.7 (`helm-chart/kuberay-operator/crds` of ray-project/kuberay); `authOptions` with a
Secret of one's own, and RayCronJob, exist since 1.6. Pure: nothing is written, and no cluster is asked.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from peagle.deploy.pods import CONFIG_FOLDER, FOLDER, KEYS_FOLDER, PodOptions, ray_cluster
from peagle.deploy.workload import Workload, require_reachable, require_servable
from peagle.errors import ConfigError

# KubeRay adds a suffix of 6 letters for a cluster, and 11 for each job of a RayCronJob
# (`MaxRayJobNameLength`, `MaxRayCronJobNameLength` in ray-operator/controllers/ray/utils/constant.go).
MOST_OF_NAME, MOST_OF_CRON_NAME = 47, 36
_API = "ray.io/v1"
_PRE_STOP_S = 15  # until no Service sends requests to a pod that ends
_RUN = """\
# A job that failed is retried by KubeRay, in a new cluster: exit code 3 (stopped early) is continued there. Code 2 (bad
# configuration) would come again, so the job stops itself then: one that was stopped is not retried.
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
# The name of the RayJob, which its retries share, is that of its cluster without the suffix.
_NIGHTLY = 'set -- --output {output}/"${{RAY_CLUSTER_NAME%-*}}" "$@"\n'
_STOP = """\
# Before the head's pod ends: units under way are committed.
[ -f /tmp/peagle.pid ] || exit 0
pid=$(cat /tmp/peagle.pid)
kill -TERM "$pid"
while kill -0 "$pid" 2> /dev/null; do sleep 1; done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeRayOptions:
    """Choices that the configuration does not have.

    Attributes:
        namespace: None for the one that the client has.
        retries: of a bulk run, each in a new cluster.
        schedule: of a nightly run, as cron has it; None for a run now.
        time_zone: of the schedule; None is the operator's own.
        keys_secret: the Secret with the endpoint's file of keys, under `keys.json`.
        env: of every pod, in which Ray is started.
    """

    pods: PodOptions
    namespace: str | None = None
    retries: int = 3
    schedule: str | None = None
    time_zone: str | None = None
    keys_secret: str = "peagle-keys"
    env: Mapping[str, str]


def manifests(workload: Workload, options: KubeRayOptions) -> list[dict[str, Any]]:
    """The objects, in the order in which they are applied.

    Raises:
        ConfigError: the configuration names what no pod has, or an endpoint without keys; an option means nothing.
    """
    if options.retries < 0:
        raise ConfigError(f"--retries {options.retries}: a run is retried 0 times or more")
    if options.schedule is None and options.time_zone is not None:
        raise ConfigError("--time-zone requires --schedule")
    if options.schedule is not None and not (options.schedule.startswith("@") or len(options.schedule.split()) == 5):
        raise ConfigError(
            f"--schedule {options.schedule!r}: cron has five fields", hint='every night at two: --schedule "0 2 * * *"'
        )
    if workload.command == "generate":
        return _bulk(workload, options)
    if options.schedule is not None:
        raise ConfigError("a schedule is for bulk runs, and the configuration is an endpoint's", hint="leave it out")
    return [_service(workload, options)]


def secrets_of(workload: Workload, options: KubeRayOptions) -> list[str]:
    """The Secrets that must be there, each with the command that makes it."""
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
        "job.yaml": workload.with_keys(),
        "run.sh": _RUN.format(folder=CONFIG_FOLDER, nightly=nightly, job=workload.name),
        "stop.sh": _STOP,
    }
    job = {
        "entrypoint": f"sh {CONFIG_FOLDER}/run.sh",
        "jobId": workload.name,  # a cluster has one job, so the script knows its own
        "backoffLimit": options.retries,
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": ray_cluster(
            workload,
            options.pods,
            head={"lifecycle": {"preStop": {"exec": {"command": ["sh", f"{CONFIG_FOLDER}/stop.sh"]}}}},
            # `ray job stop` kills after it, so it is what the driver needs to commit units under way.
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
    # Without ports of its own a head has KubeRay's usual ones, this one among them; with some it has no others.
    address = {"host": "0.0.0.0", "port": 8000}
    ours = {"state": f"{FOLDER}/{workload.name}", "keys": f"{KEYS_FOLDER}/keys.json", **address}
    application = {
        "name": "peagle",
        "route_prefix": "/",
        "import_path": "pipelines.online.app:build",
        "args": {**keys, **ours},
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
