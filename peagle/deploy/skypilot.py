"""SkyPilot's files: a managed job for a bulk run, a service for an endpoint.

Their fields are those of SkyPilot 0.14 (`sky/utils/schemas.py` of skypilot-org/skypilot). The names of machines and
providers in the price table are SkyPilot's own. Pure: nothing is written, and no account is asked.
"""

import re
import shlex
from collections.abc import Sequence
from typing import Any

from peagle.deploy.workload import Workload, require_reachable, require_servable
from peagle.errors import ConfigError

_CONFIG, _KEYS = "~/peagle.yaml", "~/keys.json"
_PORT = 8000
_DISK_GB = 500
_START_S = 3600  # until a replica answers: its environment is installed and its weights are fetched
_ANSWER_S = 600  # `request_timeout_s`, where the configuration has none; both sides are told
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_END = "END-OF-CONFIGURATION"
# SkyPilot's images have its own uv and, on AWS since 0.14, NVIDIA's driver 580 with CUDA 13 (`sky/clouds/aws.py`).
_SETUP = """\
set -e
sudo apt-get update -q && sudo apt-get install -qy g++ libnuma1 make
~/.local/bin/uv python install 3.12
make setup LOCK={lock} PYTHON="$(~/.local/bin/uv python find 3.12)"
umask 077
cat > {config} <<'{end}'
{text}{end}
.venv/bin/peagle doctor
"""
# SkyPilot has a Ray of its own on the machine, on ports of its own, which is neither to be joined nor stopped.
_RUN = "unset RAY_ADDRESS\n.venv/bin/peagle {command} --config {config}\n"
# It runs on each machine, and the job has succeeded where all of them end with 0. Ray's nodes end a minute after their
# head: one that ends while the head is up has failed.
_RUN_ON_SEVERAL = """\
umask 077; ulimit -n 65536
set -a; . deploy/ray.env; set +a
export PATH="$PWD/.venv/bin:$PATH" RAY_ADDRESS="$(echo "$SKYPILOT_NODE_IPS" | head -n1):6379"
is_up() {{ ray status --address "$RAY_ADDRESS" > /dev/null 2>&1; }}
if [ "$SKYPILOT_NODE_RANK" != 0 ]; then
  until is_up; do sleep 5; done
  ray start --address="$RAY_ADDRESS" --block
  if is_up; then exit 1; else exit 0; fi
fi
ray start --head --port=6379 --dashboard-host=127.0.0.1 --block & ray=$!
until is_up; do kill -0 "$ray" || exit 1; sleep 5; done
until python -c 'import ray, sys; ray.init(log_to_driver=False); sys.exit(len(ray.nodes()) < int(sys.argv[1]))' \\
    "$SKYPILOT_NUM_NODES"; do sleep 5; done
peagle generate --config {config}; code=$?
kill "$ray"; wait "$ray"
exit "$code"
"""
_TOKEN = "RAY_AUTH_TOKEN"


def task(workload: Workload, *, secrets: Sequence[str] = ()) -> dict[str, Any]:
    """The content of the file.

    Args:
        secrets: names of environment variables whose values `--secret` takes from the shell that launches.

    Raises:
        ConfigError: it needs paths of this machine, is an endpoint without keys or on several machines, or a secret is
            not a name.
    """
    for name in secrets:
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(
                "--secret takes the name of an environment variable, whose value stays in your shell",
                hint="export HF_TOKEN=..., and --secret HF_TOKEN",
            )
    offer, keys = workload.offer, workload.keys
    place = f"{offer.provider}/{keys['region']}" if keys.get("region") else offer.provider
    accelerators = {"accelerators": {offer.accelerator: offer.num_accelerators}} if offer.accelerator else {}
    resources: dict[str, Any] = {
        "infra": place,
        "instance_type": offer.instance_type,
        **accelerators,
        "use_spot": workload.market == "spot",
        "disk_size": _DISK_GB,
    }
    if workload.command == "generate":
        require_reachable(keys, ("input", "output", "model", "drafter"), None)
        fewest, _ = workload.num_machines
        further: dict[str, Any] = {"num_nodes": fewest} if fewest > 1 else {}
        text = workload.with_keys()
    else:
        _require_one_machine(workload)
        further, text = _endpoint(workload)
        resources["ports"] = _PORT
    return {
        "name": workload.name,
        "workdir": ".",
        "resources": resources,
        **further,
        **({"secrets": dict.fromkeys(secrets)} if secrets else {}),
        "setup": _SETUP.format(
            lock="cuda" if offer.num_accelerators else "cpu",
            config=_CONFIG,
            text=text,
            end=_END,
        ),
        "run": _run(workload),
    }


def secrets_of(workload: Workload, named: Sequence[str]) -> list[str]:
    """The named secrets, and Ray's token, which several machines must share."""
    return [*named, *([_TOKEN] if workload.num_machines[0] > 1 and _TOKEN not in named else [])]


def launch(workload: Workload, output: str, *, secrets: Sequence[str]) -> list[str]:
    """The command that runs the file."""
    named = [word for name in secrets for word in ("--secret", name)]
    if workload.command == "generate":
        return ["sky", "jobs", "launch", "--detach-run", *named, output]
    return ["sky", "serve", "up", "--service-name", workload.name, *named, output]


def head_of(workload: Workload, *, config: str, output: str, secrets: Sequence[str]) -> str:
    """The comment lines at the head of the file, with its commands."""
    offer, name = workload.offer, workload.name
    has = f" with {offer.num_accelerators} {offer.accelerator}" if offer.accelerator else ""
    if workload.command == "generate":
        kind, after = (
            "managed job",
            ["sky jobs queue", f"sky jobs logs --name {name}", f"sky jobs cancel --name {name}"],
        )
    else:
        kind, after = "service", [f"sky serve status {name}", f"sky serve logs {name} 1", f"sky serve down {name}"]
    count = workload.num_machines[0] if workload.num_machines[0] > 1 else "one"
    make = [f"export {_TOKEN}=$(openssl rand -hex 32)"] if _TOKEN in secrets else []
    lines = [
        f"SkyPilot's {kind} for {config}: {count} {offer.instance_type}{has} ({workload.market.replace('_', '-')}).",
        "A test checks such files against SkyPilot's schema; none was run on a cloud yet.",
        "From a checkout of peagle, whose folder is copied to the machine:",
        "",
        *(f"  {command}" for command in [*make, shlex.join(launch(workload, output, secrets=secrets)), *after]),
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _endpoint(workload: Workload) -> tuple[dict[str, Any], str]:
    """The parts of the file that only an endpoint has, and its configuration."""
    keys = workload.keys
    require_servable(
        keys,
        None,
        reached_by="SkyPilot's balancer is reached by everybody",
        with_certificate=ConfigError(
            "tls_cert: SkyPilot's balancer has the certificate, and reaches the endpoint without one",
            hint="leave tls_cert and tls_key out, and write service.tls into the file",
        ),
    )
    timeout_s = keys.get("request_timeout_s", _ANSWER_S)
    service = {
        "readiness_probe": {"path": "/health", "initial_delay_seconds": _START_S},
        "load_balancer": {"stream_timeout_seconds": timeout_s},
        "replicas": 1,
    }
    ours = {
        "host": "0.0.0.0",
        "port": _PORT,
        "keys": _KEYS,
        "state": "runs/serve",
        "request_timeout_s": timeout_s,
    }
    return {"service": service, "file_mounts": {_KEYS: keys["keys"]}}, workload.with_keys(**ours)


def _run(workload: Workload) -> str:
    if workload.num_machines[0] > 1:
        return _RUN_ON_SEVERAL.format(config=_CONFIG)
    return _RUN.format(command=workload.command, config=_CONFIG)


def _require_one_machine(workload: Workload) -> None:
    fewest, _ = workload.num_machines
    if fewest > 1:
        raise ConfigError(
            f"its engines take {fewest} machines of type {workload.offer.instance_type}, and an endpoint's ledger is in"
            " a folder that SkyPilot's machines do not share",
            hint="name a larger instance_type or fewer engines, or use `peagle deploy kuberay`",
        )
