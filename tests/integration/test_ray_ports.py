"""The ports that Ray opens if it is started as documented, and what is accessible without the token."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from unauthenticated_calls import grpc_status, port_protection

from peagle.ports import free_port
from tests.chaos.processes import descendants, kill

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
START_S = 150  # timeout

pytestmark = pytest.mark.timeout(2 * START_S + 60)

# Part of the command line or title of each Ray process, and its name in docs/security.md.
PROCESSES = {
    "gcs_server": "GCS",
    "raylet/raylet": "raylet",
    "ray::DashboardAgent": "dashboard agent",
    "ray::RuntimeEnvAgent": "runtime environment agent",
    "dashboard/dashboard.py": "dashboard",
    "autoscaler/_private/monitor.py": "autoscaler",
    "ray.util.client.server": "client server",
    "ray::IDLE": "worker",
    "ray::wait": "worker",
}


def environment_of(home, *, uses_token=True):
    """Return this process's environment with another home, and without Ray's variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**environment, "HOME": str(home), "PATH": f"{BIN}:{environment['PATH']}", "PYTHONPATH": str(ROOT)} | (
        {} if uses_token else {"RAY_AUTH_MODE": "disabled"}
    )


class Node:
    """A head node on free ports, started with the commands in deploy/ray.env."""

    def __init__(self, home, *, uses_token):
        self.environment = environment_of(home, uses_token=uses_token)
        self.ports = {name: free_port("") for name in ("gcs", "dashboard", "agent", "client")}
        create_token, start = re.findall(r"^#   (.*ray .*)$", (ROOT / "deploy" / "ray.env").read_text(), re.MULTILINE)
        if not uses_token:
            # `true` is the shell command that does nothing.
            create_token, start = "true", start.replace("set +a;", "set +a; export RAY_AUTH_MODE=disabled;")
        options = (
            f" --block --port={self.ports['gcs']} --dashboard-port={self.ports['dashboard']} --num-cpus=2"
            f" --dashboard-agent-listen-port={self.ports['agent']} --ray-client-server-port={self.ports['client']}"
            " --min-worker-port=0 --max-worker-port=0 --object-store-memory=100000000 --disable-usage-stats"
        )
        script = f"{create_token.split('#')[0]} && {start} {options}"
        self._log = home / "ray.log"
        with self._log.open("wb") as sink:
            self._shell = subprocess.Popen(
                ["sh", "-c", script], cwd=ROOT, env=self.environment, stdout=sink, stderr=subprocess.STDOUT
            )
        self.address = ""

    def wait_until_up(self):
        deadline = time.monotonic() + START_S
        while "Ray runtime started." not in (output := self._log.read_text(errors="replace")):
            assert self._shell.poll() is None, output[-3000:]
            assert time.monotonic() < deadline, output[-3000:]
            time.sleep(0.2)
        self.host = re.search(r"Local node IP\W*(?:\x1b\[\d+m)*: (?:\x1b\[\d+m)*([0-9.]+)", output)[1]
        self.address = f"{self.host}:{self.ports['gcs']}"
        urls = self.agent_url, self.dashboard_url
        while None in map(self.status_of, urls) or not self._has_client_server():
            assert time.monotonic() < deadline, "a server of Ray did not come up"
            time.sleep(0.5)
        return self

    def _has_client_server(self):
        with contextlib.suppress(OSError), socket.create_connection((self.host, self.ports["client"]), timeout=5):
            return True
        return False

    @property
    def agent_url(self):
        return f"http://{self.host}:{self.ports['agent']}/api/job_agent/jobs/"

    @property
    def dashboard_url(self):
        return f"http://127.0.0.1:{self.ports['dashboard']}/api/jobs/"

    def status_of(self, url, body=None):
        """Return the status of an HTTP request without a token, or None if there is no answer."""
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def sockets(self):
        """Return (process, address, port) of each listening TCP socket of the node's processes."""
        result = set()
        for pid in descendants(self._shell.pid):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                title = " ".join(process.cmdline())
                name = next((name for part, name in PROCESSES.items() if part in title), title)
                result |= {
                    (name, *connection.laddr)
                    for connection in process.net_connections("tcp")
                    if connection.status == "LISTEN"
                }
        return result

    def stop(self):
        kill(*descendants(self._shell.pid), self._shell.pid)
        self._shell.wait()


@contextlib.contextmanager
def start_node(home, *, uses_token=True):
    node = Node(home, uses_token=uses_token)
    try:
        yield node.wait_until_up()
    finally:
        node.stop()


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with start_node(tmp_path_factory.mktemp("home")) as node:
        yield node


@pytest.fixture(scope="module")
def open_node(tmp_path_factory):
    """A node without a token."""
    with start_node(tmp_path_factory.mktemp("open"), uses_token=False) as node:
        yield node


def documented_ports():
    """Return, for each process, the pairs (address, protection of the port) in the table in docs/security.md."""
    text = (ROOT / "docs" / "security.md").read_text()
    table = text[text.index("| process | port |") :].split("\n\n")[0].splitlines()[2:]
    result = {}
    for line in table:
        process, _, addresses, required, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        protection = "metrics" if required.startswith("nothing; serves metrics") else required
        result.setdefault(process, set()).update((address.strip(), protection) for address in addresses.split(","))
    return result


def test_listening_ports_are_documented_and_need_the_token(node):
    def address_kind(ip):
        if ip in ("0.0.0.0", "::"):
            return "all"
        return "loopback" if ip.removeprefix("::ffff:").startswith("127.") else "node"

    result = {}
    for process, ip, port in node.sockets():
        host = "127.0.0.1" if address_kind(ip) == "loopback" else node.host
        result.setdefault(process, set()).add((address_kind(ip), port_protection(host, port)))
    table = documented_ports()
    assert {"GCS", "raylet", "dashboard", "dashboard agent"} <= result.keys()
    assert {process: ports - table.get(process, set()) for process, ports in result.items()} == {
        process: set() for process in result
    }


def test_commands_need_the_token(node, tmp_path):
    created_file = tmp_path / "created"
    job = json.dumps({"entrypoint": f"touch {created_file}"}).encode()
    assert [node.status_of(node.agent_url, job), node.status_of(node.dashboard_url, job)] == [401, 401]
    assert grpc_status(f"{node.host}:{node.ports['client']}", "/ray.rpc.RayletDriver/ClusterInfo") == "UNAUTHENTICATED"
    assert grpc_status(node.address, "/ray.rpc.JobInfoGcsService/GetNextJobID") == "UNAUTHENTICATED"
    assert not created_file.exists()


def test_commands_run_on_a_node_without_a_token(open_node, tmp_path):
    """The previous test proves something, because its first call succeeds on a node without a token."""
    created_file = tmp_path / "created"
    job = json.dumps({"entrypoint": f"touch {created_file}"}).encode()
    assert open_node.status_of(open_node.agent_url, job) == 200
    deadline = time.monotonic() + 60
    while not created_file.exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert created_file.exists()


def generate(address, environment, corpus, output):
    command = [sys.executable, "-m", "jobs.generate", "--engine", "fake", "--input", corpus, "--output", output]
    return subprocess.run(
        command, cwd=ROOT, env={**environment, "RAY_ADDRESS": address}, capture_output=True, text=True, check=False
    )


def test_cluster_without_a_token_is_refused_unless_allowed(open_node, write_jsonl, tmp_path):
    corpus, output = write_jsonl([{"prompt": "a"}]), tmp_path / "run"
    refused = generate(open_node.address, environment_of(tmp_path), corpus, output)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert f"{open_node.address} requires no token" in refused.stderr
    assert not output.exists()
    allowed = generate(open_node.address, environment_of(tmp_path, uses_token=False), corpus, output)
    assert allowed.returncode == 0, allowed.stdout + allowed.stderr


def test_run_sends_the_users_token(node, write_jsonl, tmp_path):
    result = generate(node.address, node.environment, write_jsonl([{"prompt": "a"}]), tmp_path / "run")
    assert result.returncode == 0, result.stdout + result.stderr
    home = Path(node.environment["HOME"])
    assert [(home / ".ray" / name).stat().st_mode & 0o777 for name in ("", "auth_token")] == [0o700, 0o600]


def test_run_without_the_clusters_token_is_refused(node, write_jsonl, tmp_path):
    result = generate(node.address, environment_of(tmp_path), write_jsonl([{"prompt": "a"}]), tmp_path / "run")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "its token is here (~/.ray/auth_token, or RAY_AUTH_TOKEN)" in result.stderr


LOCAL_CLUSTER_SCRIPT = """
import json, psutil
from pipelines.cluster.ray import ray_cluster
with ray_cluster():
    import ray
    ray.get(ray.remote(lambda: None).remote())
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    sockets = [socket for process in processes for socket in process.net_connections("tcp")]
    print(json.dumps([socket.laddr.ip for socket in sockets if socket.status == "LISTEN"]))
"""


def test_local_ray_listens_only_on_this_machine(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", LOCAL_CLUSTER_SCRIPT],
        cwd=ROOT,
        env=environment_of(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert {ip.removeprefix("::ffff:") for ip in json.loads(result.stdout.splitlines()[-1])} == {"127.0.0.1"}
