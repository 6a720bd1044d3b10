"""A Ray cluster with several nodes on this machine. Nodes can be killed and replaced.

The head has no CPUs; drivers connect to it, and engines run on the other nodes.
"""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from peagle.ports import free_port
from tests.chaos import processes

ROOT = Path(__file__).parents[2]
_RAY = str(Path(sys.executable).with_name("ray"))
# Detect a lost node within seconds instead of Ray's half minute.
_SYSTEM_CONFIG = (
    '{"health_check_initial_delay_ms": 3000, "health_check_period_ms": 1000, "health_check_timeout_ms": 5000}'
)
_START_S = 120
_START_MESSAGE = b"Ray runtime started."


class RayNodes:
    """A cluster, as a context manager.

    Args:
        num_nodes: number of nodes, without the head.
        num_cpus: logical CPUs of each node.
        logs: folder for the output of `ray start`.
        environment: additional environment variables of each node.
        has_job_server: whether to start a job server, for `ray job submit`. Each node then has its own loopback
            address, as in a cluster of machines.
    """

    def __init__(
        self,
        num_nodes: int,
        num_cpus: int,
        logs: Path,
        *,
        environment: Mapping[str, str] | None = None,
        has_job_server: bool = False,
    ) -> None:
        self._num_nodes, self._num_cpus, self._logs = num_nodes, num_cpus, logs
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._log_of: dict[int, Path] = {}
        self._addresses = (f"127.0.0.{number}" for number in range(2, 255)) if has_job_server else None
        host = next(self._addresses) if self._addresses else "127.0.0.1"
        self.address, self._dashboard_port = f"{host}:{free_port(host)}", free_port(host)
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._environment = {**os.environ, **(environment or {}), **token, "PYTHONPATH": str(ROOT)}

    @property
    def _head_host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a driver that joins the cluster."""
        return {**self._environment, "RAY_ADDRESS": self.address}

    @property
    def jobs_environment(self) -> dict[str, str]:
        """Environment variables for `ray job`."""
        return {**self._environment, "RAY_API_SERVER_ADDRESS": f"http://{self._head_host}:{self._dashboard_port}"}

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._head = self._start_head()
        try:
            self._wait_for(self._head)
            for _ in range(self._num_nodes):
                self.add()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        for node in [*self._nodes, self._head]:
            processes.kill(*_tree(node))
            node.wait()

    def replace_lost(self) -> None:
        """Start the missing nodes; they join a few seconds later."""
        self._nodes = [node for node in self._nodes if node.poll() is None]
        while len(self._nodes) < self._num_nodes:
            self._nodes.append(self._start_node())

    def add(self) -> None:
        """Start one node and wait for it, because simultaneous starts may fail."""
        self._nodes.append(self._start_node())
        self._wait_for(self._nodes[-1])

    def replace_head(self) -> None:
        """Kill the head, and start another one on the same address.

        Ray stores the address of a local cluster in a file, and refuses to start a head at that address while local
        nodes are still connected to it.
        """
        from ray._common.utils import reset_ray_address

        tree = _tree(self._head)
        processes.kill(*tree)
        self._head.wait()
        deadline = time.monotonic() + _START_S
        while any(map(processes.command_line, tree)):  # until the process that holds the port has ended
            if time.monotonic() > deadline:
                raise TimeoutError("processes of the killed head still run")
            time.sleep(0.1)
        reset_ray_address()
        self._head = self._start_head()
        self._wait_for(self._head)

    def num_running(self) -> int:
        """Return the number of running nodes, without the head."""
        return sum(node.poll() is None for node in self._nodes)

    def node_numbers_of(self, pids: list[int]) -> list[int]:
        """Return the numbers of the nodes that run any of these processes."""
        trees = enumerate(set(_tree(node)) for node in self._nodes)
        return [number for number, tree in trees if tree.intersection(pids)]

    def kill_node(self, number: int) -> bool:
        """Kill all processes of a node, as if its machine had failed; return False if the node had already ended."""
        node = self._nodes[number]
        tree = _tree(node)
        raylets = processes.raylets(node.pid)
        was_running = processes.kill(*raylets, *(pid for pid in tree if pid not in raylets))
        node.wait()
        return was_running

    def _start_head(self) -> "subprocess.Popen[bytes]":
        port = self.address.rpartition(":")[2]
        dashboard = ["--include-dashboard=false"]
        if self._addresses:
            host = self._head_host
            dashboard = [
                "--include-dashboard=true", f"--dashboard-host={host}", f"--dashboard-port={self._dashboard_port}",
                f"--node-ip-address={host}",
            ]  # fmt: skip
        return self._start("--head", f"--port={port}", "--num-cpus=0", *dashboard, f"--system-config={_SYSTEM_CONFIG}")

    def _start_node(self) -> "subprocess.Popen[bytes]":
        address_flag = [f"--node-ip-address={next(self._addresses)}"] if self._addresses else []
        return self._start(f"--address={self.address}", f"--num-cpus={self._num_cpus}", *address_flag)

    def _start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        log = self._logs / f"ray-{time.monotonic_ns()}.log"
        # Free ports, because another cluster on this machine may use Ray's defaults.
        command = [
            _RAY, "start", "--block", *arguments, "--min-worker-port=0", "--max-worker-port=0",
            f"--dashboard-agent-listen-port={free_port()}", "--object-store-memory=100000000", "--disable-usage-stats",
        ]  # fmt: skip
        with log.open("wb") as log_file:
            node = subprocess.Popen(command, env=self._environment, stdout=log_file, stderr=subprocess.STDOUT)
        self._log_of[node.pid] = log
        return node

    def _wait_for(self, node: "subprocess.Popen[bytes]") -> None:
        deadline, log = time.monotonic() + _START_S, self._log_of[node.pid]
        while _START_MESSAGE not in log.read_bytes():
            if node.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"a Ray node did not start: see {log}")
            time.sleep(0.2)


def _tree(node: "subprocess.Popen[bytes]") -> list[int]:
    """Return the processes of a node, or nothing if it has ended."""
    return [*processes.descendants(node.pid), node.pid] if node.poll() is None else []
