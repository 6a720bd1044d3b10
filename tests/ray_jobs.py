"""Run `ray job` commands on a cluster."""

import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RAY = str(Path(sys.executable).with_name("ray"))
_FINAL_STATES = "succeeded|failed|was stopped"


@dataclass(frozen=True)
class RayJobs:
    """The jobs of one cluster.

    Attributes:
        environment: environment variables, with the token and RAY_API_SERVER_ADDRESS.
    """

    environment: Mapping[str, str]

    @property
    def address(self) -> str:
        return self.environment["RAY_API_SERVER_ADDRESS"]

    def call(self, action: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run `ray job ACTION ARGUMENTS` in the root of the repository."""
        return subprocess.run(
            [RAY, "job", action, *arguments], cwd=ROOT, env={**self.environment, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip

    def submit(self, *arguments: str) -> str:
        """Submit a job. Return the output of `ray job submit`, which includes the job's output without `--no-wait`."""
        while True:
            process = self.call("submit", *arguments)
            if "No available agent" not in process.stderr:
                break
            time.sleep(2)  # the job server is up before it can run jobs
        assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
        return process.stdout

    def wait_until_ended(self, name: str) -> str:
        """Wait until a job has ended, and return Ray's message."""
        while True:
            output = self.call("status", name).stdout
            if re.search(rf"Job '{name}' ({_FINAL_STATES})", output):
                return output
            time.sleep(1)
