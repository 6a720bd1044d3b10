"""KubeRay's objects for a configuration: a RayJob or RayCronJob for a bulk run, a RayService for an endpoint.

Fields are those of KubeRay 1.7 (`helm-chart/kuberay-operator/crds` of ray-project/kuberay). `authOptions` with a custom
Secret, and RayCronJob, need at least 1.6.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from peagle.deploy.workload import Workload, require_reachable, require_servable
from peagle.economics.prices import Offer
from peagle.errors import ConfigError

# KubeRay appends 6 characters for a cluster, and 11 for each job of a RayCronJob (`MaxRayJobNameLength` and
# `MaxRayCronJobNameLength` in ray-operator/controllers/ray/utils/constant.go).
MAX_NAME_LENGTH, MAX_CRON_NAME_LENGTH = 47, 36
FOLDER = "/mnt/peagle"  # mount path of the shared volume, for weights and files of the configuration
CONFIG_FOLDER, KEYS_FOLDER = "/etc/peagle", "/etc/peagle-keys"
RAY_VERSION = "2.60.0"
_HEAD_RESOURCES = {"cpu": "4", "memory": "16Gi"}  # of the Ray head's pod
# A worker's share of its machine; the remainder is for Ray's agents, the kubelet and the pods that run on every node.
_CPU_SHARE, _MEMORY_SHARE = 0.9, 0.85
_SHM_SHARE = 0.3  # of a pod's memory: Ray's object store and communication between ranks
_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
_GROUP_ID = 1000  # owns the shared volume and the secrets, whatever the image's user is
# For each cloud: labels of spot nodes (a node has at least one of them), and the taint that keeps other pods off.
_SPOT: dict[str, tuple[dict[str, str], str | None]] = {
    "aws": ({"eks.amazonaws.com/capacityType": "SPOT", "karpenter.sh/capacity-type": "spot"}, None),
    "gcp": ({"cloud.google.com/gke-spot": "true"}, "cloud.google.com/gke-spot"),
}
_RUN_SCRIPT = """\
# KubeRay retries a failed job in a new cluster, which continues a run that ended with exit code 3 (stopped early). Code
# 2 (bad configuration) would only occur again, so the job stops itself: a stopped job is not retried.
{set_output}peagle generate --config {folder}/job.yaml "$@" &
pid=$!
echo "$pid" > /tmp/peagle.pid
wait "$pid"
code=$?
rm -f /tmp/peagle.pid
if [ "$code" = 2 ]; then
  # Not --address: Ray prefers RAY_ADDRESS, which it sets in jobs.
  RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265 ray job stop --no-wait {job}
  sleep 60
fi
exit "$code"
"""
# The name of the cluster without its suffix is the name of the RayJob, which is the same for all retries.
_SET_OUTPUT = 'set -- --output {output}/"${{RAY_CLUSTER_NAME%-*}}" "$@"\n'
_STOP_SCRIPT = """\
# Runs before the head's pod terminates: lets the run commit its units.
[ -f /tmp/peagle.pid ] || exit 0
pid=$(cat /tmp/peagle.pid)
kill -TERM "$pid"
while kill -0 "$pid" 2> /dev/null; do sleep 1; done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOptions:
    """Options of all pods of a cluster.

    Attributes:
        image: container image with peagle installed.
        claim: PersistentVolumeClaim of the shared volume, ReadWriteMany.
        env_secrets: Secrets whose entries become environment variables (AWS credentials, HF_TOKEN).
        service_account: None means the namespace's default.
        token_secret: Secret whose key `auth_token` is Ray's token.
    """

    image: str
    claim: str
    env_secrets: Sequence[str]
    service_account: str | None
    token_secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeRayOptions:
    """Options that are not in the configuration.

    Attributes:
        namespace: None means the client's namespace.
        time_zone: None means the operator's time zone.
        retries: maximum number of retries of a bulk run, each in a new cluster.
        schedule: in cron's format; None means to run once, immediately.
        keys_secret: Secret whose key `keys.json` has the endpoint's API keys.
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
    """Return the objects in the order to apply them."""
    if options.retries < 0:
        raise ConfigError(f"--retries must be 0 or more, got {options.retries}")
    if options.schedule is None and options.time_zone is not None:
        raise ConfigError("--time-zone requires --schedule")
    if options.schedule is not None and not (options.schedule.startswith("@") or len(options.schedule.split()) == 5):
        raise ConfigError(
            f"--schedule {options.schedule!r}: cron needs five fields", hint='for every night at two: "0 2 * * *"'
        )
    if workload.command == "generate":
        return _job_objects(workload, options)
    if options.schedule is not None:
        raise ConfigError("--schedule is for bulk runs, but the configuration is for an endpoint", hint="omit it")
    return [_service(workload, options)]


def secret_commands(workload: Workload, options: KubeRayOptions) -> list[str]:
    """Return the commands that create the required Secrets."""
    namespace_flag = f" -n {options.namespace}" if options.namespace else ""
    create = f"kubectl create secret generic{namespace_flag}"
    token_name, keys_name = options.pods.token_secret, options.keys_secret
    commands = [f'{create} {token_name} --from-literal=auth_token="$(openssl rand -hex 32)"']
    if workload.command == "serve":
        commands.append(f"{create} {keys_name} --from-file=keys.json={workload.settings['keys']}")
    return commands + [f"{create} {name} --from-env-file=FILE" for name in options.pods.env_secrets]


def _job_objects(workload: Workload, options: KubeRayOptions) -> list[dict[str, Any]]:
    require_reachable(workload.settings, ("input", "output", "model", "drafter"), FOLDER)
    set_output = _SET_OUTPUT.format(output=shlex.quote(str(workload.settings["output"]))) if options.schedule else ""
    name = f"{workload.name}-config"
    files = {
        "job.yaml": yaml.safe_dump(dict(workload.settings), sort_keys=False, allow_unicode=True, width=120),
        "run.sh": _RUN_SCRIPT.format(folder=CONFIG_FOLDER, set_output=set_output, job=workload.name),
        "stop.sh": _STOP_SCRIPT,
    }
    job = {
        "entrypoint": f"sh {CONFIG_FOLDER}/run.sh",
        "jobId": workload.name,  # fixed because the script needs it; a cluster has only one job
        "backoffLimit": options.retries,
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": _ray_cluster(
            workload,
            options.pods,
            head={"lifecycle": {"preStop": {"exec": {"command": ["sh", f"{CONFIG_FOLDER}/stop.sh"]}}}},
            # `ray job stop` kills the driver after this time, which the driver needs to commit its units.
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
    settings = workload.settings
    require_servable(settings, FOLDER)
    # A Ray head without ports gets KubeRay's default ports, which include 8000.
    address = {"host": "0.0.0.0", "port": 8000}
    overrides = {"state": f"{FOLDER}/{workload.name}", "keys": f"{KEYS_FOLDER}/keys.json", **address}
    application = {
        "name": "peagle",
        "route_prefix": "/",
        "import_path": "pipelines.online.app:build",
        "args": {**settings, **overrides},
    }
    serve = {
        "proxy_location": "HeadOnly",
        "http_options": address,
        "logging_config": {"enable_access_log": False},
        "applications": [application],
    }
    spec = {
        "serveConfigV2": yaml.safe_dump(serve, sort_keys=False, allow_unicode=True, width=120),
        "rayClusterConfig": _ray_cluster(
            workload,
            options.pods,
            # Wait until Services no longer send requests to the terminating pod.
            head={"lifecycle": {"preStop": {"exec": {"command": ["sleep", "15"]}}}},
            env=options.env,
            volumes={KEYS_FOLDER: {"secret": {"secretName": options.keys_secret, "defaultMode": 0o440}}},
        ),
    }
    return _object("RayService", workload.name, options, spec)


def _object(kind: str, name: str, options: KubeRayOptions, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": _metadata(name, options), "spec": spec}


def _metadata(name: str, options: KubeRayOptions) -> dict[str, Any]:
    namespace = {"namespace": options.namespace} if options.namespace else {}
    return {"name": name, **namespace, "labels": {"app.kubernetes.io/name": "peagle"}}


# --- the pods: a Ray head, and a worker per machine


def _ray_cluster(
    workload: Workload,
    options: PodOptions,
    *,
    head: Mapping[str, Any],
    env: Mapping[str, str],
    volumes: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the spec of a RayCluster.

    Args:
        head: additional fields of the Ray head's container.
        env: variables of all containers.
        volumes: additional volumes of all pods, by mount path.
    """
    min_machines, max_machines = workload.num_machines
    autoscaling = {"enableInTreeAutoscaling": True} if min_machines != max_machines else {}
    return {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token", "secretName": options.token_secret},
        **autoscaling,
        "headGroupSpec": {
            "rayStartParams": {"num-gpus": "0"},  # the head's pod might land on a machine with GPUs
            "template": _pod_template(
                options,
                {"name": "ray-head", "resources": {"limits": _HEAD_RESOURCES, "requests": _HEAD_RESOURCES}, **head},
                env=env,
                volumes={**volumes, "/dev/shm": _shared_memory(_HEAD_RESOURCES["memory"])},
                grace_s=workload.grace_s,
            ),
        },
        "workerGroupSpecs": [
            {
                "groupName": "engines",
                "replicas": min_machines,
                "minReplicas": min_machines,
                "maxReplicas": max_machines,
                "rayStartParams": {},
                "template": _worker_template(workload, options, env, volumes),
            }
        ],
    }


def _worker_template(
    workload: Workload, options: PodOptions, env: Mapping[str, str], volumes: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    offer = workload.offer
    resources = _worker_resources(offer)
    template = _pod_template(
        options,
        {"name": "ray-worker", "resources": {"limits": resources, "requests": resources}},
        env=env,
        volumes={**volumes, "/dev/shm": _shared_memory(resources["memory"])},
        grace_s=workload.grace_s,
    )
    template["spec"] |= {"nodeSelector": {"node.kubernetes.io/instance-type": offer.instance_type}}
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if workload.market == "spot" and offer.provider in _SPOT:
        labels, taint = _SPOT[offer.provider]
        terms = [
            {"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]} for key, value in labels.items()
        ]
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        template["spec"] |= {"affinity": {"nodeAffinity": required}}
        if taint:
            tolerations.append({"key": taint, "operator": "Exists", "effect": "NoSchedule"})
    template["spec"] |= {"tolerations": tolerations}
    return template


def _worker_resources(offer: Offer) -> dict[str, str]:
    """Return the resources of a worker, the only one on its machine."""
    assert offer.memory_gib is not None, "the packaged price table has the memory of every machine"
    resources = {
        "cpu": str(max(1, int(offer.num_vcpus * _CPU_SHARE))),
        "memory": f"{max(1, int(offer.memory_gib * _MEMORY_SHARE))}Gi",
    }
    if offer.num_accelerators:
        resources["nvidia.com/gpu"] = str(offer.num_accelerators)
    return resources


def _shared_memory(memory: str) -> dict[str, Any]:
    gib = max(1, int(float(memory.removesuffix("Gi")) * _SHM_SHARE))
    return {"emptyDir": {"medium": "Memory", "sizeLimit": f"{gib}Gi"}}


def _pod_template(
    options: PodOptions,
    container: Mapping[str, Any],
    *,
    env: Mapping[str, str],
    volumes: Mapping[str, Mapping[str, Any]],
    grace_s: float,
) -> dict[str, Any]:
    all_volumes = {**volumes, FOLDER: {"persistentVolumeClaim": {"claimName": options.claim}}}
    volume_names = {path: path.strip("/").replace("/", "-") for path in all_volumes}
    variables = {"HF_HOME": f"{FOLDER}/huggingface", "PEAGLE_HOME": f"{FOLDER}/home", **env}
    account = {"serviceAccountName": options.service_account} if options.service_account else {}
    return {
        "metadata": {"labels": {"app.kubernetes.io/name": "peagle"}},
        "spec": {
            **account,
            "terminationGracePeriodSeconds": int(grace_s),
            "securityContext": {"fsGroup": _GROUP_ID},
            "containers": [
                {
                    **container,
                    "image": options.image,
                    "securityContext": _SECURITY,
                    "env": [{"name": name, "value": value} for name, value in variables.items()],
                    "envFrom": [{"secretRef": {"name": name}} for name in options.env_secrets],
                    "volumeMounts": [{"name": volume_names[path], "mountPath": path} for path in all_volumes],
                }
            ],
            "volumes": [{"name": volume_names[path], **volume} for path, volume in all_volumes.items()],
        },
    }
