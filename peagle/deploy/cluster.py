"""The file for `ray up`: a Ray cluster on AWS for a bulk run.

The head node, which has no GPU, runs the driver. Machines with engines exist only while there is work.
"""

from dataclasses import dataclass
from typing import Any

import yaml

from peagle.deploy.workload import Workload, require_reachable
from peagle.errors import ConfigError

REPLACE_ME = "REPLACE-ME"
MAX_NAME_LENGTH = 50  # characters of the cluster's name
SHARED_FOLDER = "/mnt/peagle"  # docs/security.md shows how to mount it
_HOME = "/home/ubuntu/peagle"
_RAY = f"{_HOME}/.venv/bin/ray"
_HEAD_FLAGS = "--port=6379 --dashboard-host=127.0.0.1 --autoscaling-config=~/ray_bootstrap_config.yaml"
# vLLM compiles with g++, against Python's headers; its CPU build loads libnuma.
_PACKAGES = "g++ libnuma1 make python3-dev python3-venv"


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsNames:
    """Names in the AWS account; docs/deploy.md has the commands that create them.

    Attributes:
        image: an AMI with NVIDIA's driver and Python 3.12.
        security_group: admits traffic from its members, and SSH from one address.
        head_profile, worker_profile: ARNs of instance profiles.
    """

    image: str = f"ami-{REPLACE_ME}"
    security_group: str = f"sg-{REPLACE_ME}"
    head_profile: str = f"arn:aws:iam::{REPLACE_ME}:instance-profile/peagle-head"
    worker_profile: str = f"arn:aws:iam::{REPLACE_ME}:instance-profile/peagle-worker"

    @property
    def missing(self) -> list[str]:
        """The flags of names that are not set."""
        flags = {
            "--ami": self.image,
            "--security-group": self.security_group,
            "--head-profile": self.head_profile,
            "--worker-profile": self.worker_profile,
        }
        return [flag for flag, value in flags.items() if REPLACE_ME in value]


def cluster_file(workload: Workload, names: AwsNames, *, config: str, output: str) -> str:
    """Return the text of the cluster file for a workload, with the commands to run as a comment at the top.

    `config` and `output` are the paths of the configuration and the cluster file in these commands.
    """
    offer = workload.offer
    if workload.command == "serve":
        raise ConfigError(
            "`ray up` does not set up a folder that all nodes share, which an endpoint needs for its state",
            hint="peagle deploy kuberay, or `peagle serve` on a cluster with a shared folder (docs/online.md)",
        )
    if offer.provider != "aws":
        raise ConfigError(
            f"{offer.instance_type} is a machine of {offer.provider}, but the file is for AWS",
            hint="use an instance_type of AWS, or start Ray on the machines yourself (docs/deploy.md)",
        )
    require_reachable(workload.settings, ("input", "output", "model", "drafter"), SHARED_FOLDER)
    text = yaml.safe_dump(cluster(workload, names), sort_keys=False, width=10_000)  # a line per command
    return "\n".join(_header_comment(workload, config=config, output=output)) + "\n" + text


def cluster(workload: Workload, names: AwsNames) -> dict[str, Any]:
    """Return the content of the cluster file as data that conforms to Ray's `ray-schema.json`."""
    offer, (min_machines, max_machines) = workload.offer, workload.num_machines
    # With an accelerator type and a time to wait for the cluster, the run itself requests machines from the autoscaler.
    requests_machines = bool(workload.settings.get("accelerator_type") and workload.settings.get("cluster_wait_s"))
    resources: dict[str, int] = {"CPU": offer.num_vcpus}
    if offer.num_accelerators:
        resources["GPU"] = offer.num_accelerators
    if (kind := workload.settings.get("accelerator_type")) and kind != "any":
        resources[f"accelerator_type:{kind}"] = 1
    market = {"InstanceMarketOptions": {"MarketType": "spot"}} if workload.market == "spot" else {}
    return {
        "cluster_name": workload.name,
        "max_workers": max_machines,
        "idle_timeout_minutes": 5,
        "provider": {"type": "aws", "region": offer.region, "cache_stopped_nodes": False},
        "auth": {"ssh_user": "ubuntu"},
        "available_node_types": {
            "head": {
                # No GPU, so that no engine runs there; the driver needs little memory.
                "resources": {"CPU": 4, "GPU": 0},
                "node_config": _node_config(names, "m7i.xlarge", names.head_profile, disk_gb=200),
            },
            "engines": {
                "min_workers": 0 if requests_machines else min_machines,
                "max_workers": max_machines,
                "resources": resources,
                "node_config": _node_config(names, offer.instance_type, names.worker_profile, disk_gb=500) | market,
            },
        },
        "head_node_type": "head",
        "file_mounts": {_HOME: ".", "/home/ubuntu/.ray/auth_token": "~/.ray/auth_token"},
        "rsync_exclude": [".venv", ".git", "runs", "keys.json"],
        "setup_commands": [
            "chmod 700 ~/.ray && chmod 600 ~/.ray/auth_token",
            f"sudo apt-get update -q && sudo apt-get install -qy {_PACKAGES}",
            f"cd {_HOME} && make setup LOCK={'cuda' if offer.num_accelerators else 'cpu'} PYTHON=python3.12",
        ],
        "head_start_ray_commands": [f"{_RAY} stop", _start_command(workload, f"--head {_HEAD_FLAGS}")],
        "worker_start_ray_commands": [f"{_RAY} stop", _start_command(workload, "--address=$RAY_HEAD_IP:6379")],
    }


def _node_config(names: AwsNames, instance_type: str, profile: str, *, disk_gb: int) -> dict[str, Any]:
    """Return a node's configuration, with an encrypted disk and credentials only for its own processes."""
    disk = {"VolumeSize": disk_gb, "VolumeType": "gp3", "Encrypted": True}
    return {
        "ImageId": names.image,
        "InstanceType": instance_type,
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "SecurityGroupIds": [names.security_group],
        "IamInstanceProfile": {"Arn": profile},
        "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": disk}],
    }


def _start_command(workload: Workload, arguments: str) -> str:
    """Return the command that starts Ray, with a token required."""
    environment = [
        f". {_HOME}/deploy/ray.env",
        f"RAY_JOB_STOP_WAIT_TIME_S={int(workload.grace_s)}",
        f"PATH={_HOME}/.venv/bin:$PATH",  # jobs run `python`
    ]
    return f"ulimit -n 65536; umask 077; set -a; {'; '.join(environment)}; set +a; {_RAY} start {arguments}"


def _header_comment(workload: Workload, *, config: str, output: str) -> list[str]:
    offer, (min_machines, max_machines) = workload.offer, workload.num_machines
    count_text = f"{min_machines}" if min_machines == max_machines else f"{min_machines} to {max_machines}"
    accelerators_text = f" with {offer.num_accelerators} {offer.accelerator} each" if offer.accelerator else ""
    return [
        f"# A Ray cluster on AWS for {config}: a CPU head for the driver, and {count_text} x "
        f"{offer.instance_type}{accelerators_text}",
        f"# ({workload.market.replace('_', '-')}), which exist only while there is work.",
        f"# Written by: peagle deploy cluster {config}",
        "# Checked against Ray's schema by a test; not yet run on AWS.",
        "#",
        "#   (umask 077; ray get-auth-token --generate > /dev/null)   # once; each node gets a copy",
        f"#   ray up {output}",
        f"#   ray dashboard {output}        # forwards the head's port 8265; leave it open",
        "#   RAY_AUTH_MODE=token RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265 ray job submit --working-dir . -- \\",
        f"#       python -m jobs.generate --config {config}",
        f"#   ray down {output}",
        "#",
        f"# Replace {REPLACE_ME} with names of your account; docs/deploy.md has the commands that create them: an",
        "# image with NVIDIA's driver and Python 3.12, a security group that admits its members and SSH from your",
        "# address, and two instance profiles. Ray's defaults would open SSH to everyone and give the head full",
        "# access to EC2 and S3.",
    ]
