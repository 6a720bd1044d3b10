"""`peagle serve` with the fake engine as a process, and its child processes (Linux only)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from peagle.engine.fake import CORE_NAME
from peagle.ports import free_port
from pipelines.online.serve.deployment import requests_in_flight
from tests.chaos.processes import command_line, descendants
from tests.chaos.ray_nodes import ROOT

MODEL = "fake"
_STOP_TIMEOUT_S = 90.0
# The parts that are killed, and text in their command lines.
PARTS = {
    "the engine's process": CORE_NAME,
    "a replica": f"ServeReplica:peagle:PeagleServer:{MODEL}",
    "the ingress": "ServeReplica:peagle:PeagleIngress",
    "the proxy": "ray::ProxyActor",
    "the controller": "ray::ServeController",
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """The endpoint's capacity, and the size of its requests.

    Attributes:
        slots: requests that an engine decodes concurrently.
        queued: requests that can wait for a slot.
        token_s: seconds per token.
        tokens: output tokens of each request.
    """

    min_replicas: int = 2
    max_replicas: int = 2
    slots: int = 8
    queued: int = 24
    token_s: float = 0.05
    tokens: int = 40

    @property
    def admitted(self) -> int:
        """Concurrent requests that all engines together accept."""
        return self.max_replicas * requests_in_flight(self.slots)

    @property
    def capacity_per_s(self) -> float:
        """Requests per second that all engines together can answer."""
        return self.admitted / (self.tokens * self.token_s)

    def flags(self) -> list[str]:
        """Return the flags of `peagle serve`."""
        return [
            "--engine", "fake", "--fake", json.dumps({"token_s": self.token_s, "has_core": True}),
            "--num-speculative-tokens", "3", "--usd-per-hour", "1",
            "--min-replicas", str(self.min_replicas), "--max-replicas", str(self.max_replicas),
            "--max-num-seqs", str(self.slots), "--max-queued-requests", str(self.queued),
            "--heartbeat-s", "1", "--drain-s", "10",
        ]  # fmt: skip


class Endpoint:
    """A process of `peagle serve`. Its output is in `serve.log` in the folder."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.state = folder / "state"
        self._log = folder / "serve.log"
        command = [sys.executable, "-m", "jobs.cli", "serve", *flags, "--port", str(port), "--state", str(self.state)]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with self._log.open("wb") as log_file:
            self.process = subprocess.Popen(
                command, env=environment | {"PYTHONPATH": str(ROOT)}, stdout=log_file, stderr=subprocess.STDOUT
            )

    def wait_until_up(self, timeout_s: float) -> None:
        """Wait until the endpoint prints its address."""
        deadline = time.monotonic() + timeout_s
        while f"{self.url}/v1" not in self._log.read_text(errors="replace"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the endpoint did not start; see {self._log}")
            time.sleep(0.2)

    def pids(self, part: str) -> list[int]:
        """Return the processes of one of `PARTS`, oldest first."""
        return sorted(pid for pid in descendants(self.process.pid) if PARTS[part] in command_line(pid))

    def load(self, model: str = MODEL) -> dict[str, Any] | None:
        """Return a model's load from `/v1/live`, or None if the endpoint does not answer."""
        try:
            answer = httpx.get(f"{self.url}/v1/live", timeout=10)
            load: dict[str, Any] = answer.raise_for_status().json()["load"][model]
        except (httpx.HTTPError, ValueError, KeyError):
            return None
        return load

    def wait_until_complete(self, num_replicas: int, timeout_s: float) -> float | None:
        """Wait until every part and `num_replicas` engines run; return the seconds, or None after the timeout."""
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            load, numbers = self.load(), [len(self.pids(part)) for part in PARTS]
            is_running = load is not None and load["num_running_replicas"] == num_replicas
            if is_running and numbers == [num_replicas, num_replicas, 1, 1, 1]:
                return time.monotonic() - started
            time.sleep(0.5)
        return None

    def stop(self) -> None:
        """Stop the endpoint with SIGTERM; kill it if that takes too long."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def serving(folder: Path, flags: list[str], *, start_s: float) -> Iterator[Endpoint]:
    """Run an endpoint until the `with` block ends."""
    endpoint = Endpoint(folder, flags)
    try:
        endpoint.wait_until_up(start_s)
        yield endpoint
    finally:
        endpoint.stop()
