"""Pods of a Ray cluster on Kubernetes: a head, and a worker per machine. Secrets are referenced by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.deploy.workload import Workload
from peagle.economics.prices import Offer

FOLDER = "/mnt/peagle"
"""Mount path of the shared volume: weights, and what the configuration stores there."""
CONFIG_FOLDER, KEYS_FOLDER = "/etc/peagle", "/etc/peagle-keys"
RAY_VERSION = "2.60.0"
_HEAD = {"cpu": "4", "memory": "16Gi"}
# The rest is for the machine's agents, the kubelet and the pods of every node.
_CPU_SHARE, _MEMORY_SHARE = 0.9, 0.85
_SHM_SHARE = 0.3  # of a pod's memory: Ray's object store and communication between ranks
_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
_GROUP = 1000  # owns the shared volume and the secrets, for any user of the image
# Labels of a cloud's spot nodes (any of them), and the taint that keeps other pods off them.
_SPOT: dict[str, tuple[dict[str, str], str | None]] = {
    "aws": ({"eks.amazonaws.com/capacityType": "SPOT", "karpenter.sh/capacity-type": "spot"}, None),
    "gcp": ({"cloud.google.com/gke-spot": "true"}, "cloud.google.com/gke-spot"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOptions:
    """Options of all pods of a cluster.

    Attributes:
        image: container image with peagle installed.
        claim: PersistentVolumeClaim of the shared volume, ReadWriteMany.
        env_secrets: Secrets whose entries become environment variables (AWS credentials, HF_TOKEN).
        service_account: of the pods; None for the namespace's default.
        token_secret: Secret with Ray's token as `auth_token`.
    """

    image: str
    claim: str
    env_secrets: Sequence[str]
    service_account: str | None
    token_secret: str


def ray_cluster(
    workload: Workload,
    options: PodOptions,
    *,
    head: Mapping[str, Any],
    env: Mapping[str, str],
    volumes: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the spec of a RayCluster.

    Args:
        head: additional keys of the head's container.
        env: additional environment variables of every pod.
        volumes: additional volumes of every pod, by mount path.
    """
    fewest, most = workload.num_machines
    scales = {"enableInTreeAutoscaling": True} if fewest != most else {}
    return {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token", "secretName": options.token_secret},
        **scales,
        "headGroupSpec": {
            "rayStartParams": {"num-gpus": "0"},  # its pod may land on a machine with GPUs
            "template": _template(
                options,
                {"name": "ray-head", "resources": {"limits": _HEAD, "requests": _HEAD}, **head},
                env=env,
                volumes={**volumes, "/dev/shm": _shm(_HEAD["memory"])},
                grace_s=workload.grace_s,
            ),
        },
        "workerGroupSpecs": [
            {
                "groupName": "engines",
                "replicas": fewest,
                "minReplicas": fewest,
                "maxReplicas": most,
                "rayStartParams": {},
                "template": _worker(workload, options, env, volumes),
            }
        ],
    }


def _worker(
    workload: Workload, options: PodOptions, env: Mapping[str, str], volumes: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    offer = workload.offer
    sizes = _sizes(offer)
    template = _template(
        options,
        {"name": "ray-worker", "resources": {"limits": sizes, "requests": sizes}},
        env=env,
        volumes={**volumes, "/dev/shm": _shm(sizes["memory"])},
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


def _sizes(offer: Offer) -> dict[str, str]:
    """Return the resources of a worker, which has a machine to itself."""
    assert offer.memory_gib is not None, "the packaged price table has it"
    sizes = {
        "cpu": str(max(1, int(offer.num_vcpus * _CPU_SHARE))),
        "memory": f"{max(1, int(offer.memory_gib * _MEMORY_SHARE))}Gi",
    }
    if offer.num_accelerators:
        sizes["nvidia.com/gpu"] = str(offer.num_accelerators)
    return sizes


def _shm(memory: str) -> dict[str, Any]:
    gib = max(1, int(float(memory.removesuffix("Gi")) * _SHM_SHARE))
    return {"emptyDir": {"medium": "Memory", "sizeLimit": f"{gib}Gi"}}


def _template(
    options: PodOptions,
    container: Mapping[str, Any],
    *,
    env: Mapping[str, str],
    volumes: Mapping[str, Mapping[str, Any]],
    grace_s: float,
) -> dict[str, Any]:
    everywhere = {**volumes, FOLDER: {"persistentVolumeClaim": {"claimName": options.claim}}}
    names = {path: path.strip("/").replace("/", "-") for path in everywhere}
    variables = {"HF_HOME": f"{FOLDER}/huggingface", "PEAGLE_HOME": f"{FOLDER}/home", **env}
    account = {"serviceAccountName": options.service_account} if options.service_account else {}
    return {
        "metadata": {"labels": {"app.kubernetes.io/name": "peagle"}},
        "spec": {
            **account,
            "terminationGracePeriodSeconds": int(grace_s),
            "securityContext": {"fsGroup": _GROUP},
            "containers": [
                {
                    **container,
                    "image": options.image,
                    "securityContext": _SECURITY,
                    "env": [{"name": name, "value": value} for name, value in variables.items()],
                    "envFrom": [{"secretRef": {"name": name}} for name in options.env_secrets],
                    "volumeMounts": [{"name": names[path], "mountPath": path} for path in everywhere],
                }
            ],
            "volumes": [{"name": names[path], **volume} for path, volume in everywhere.items()],
        },
    }
