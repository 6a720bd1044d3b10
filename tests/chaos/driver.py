"""A run of `peagle generate` in a process, and its corpus. The same command starts and continues the run."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.ray_nodes import ROOT

REAL_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run: its folder, corpus and flags."""

    folder: Path
    num_rows: int
    is_fake: bool
    flags: tuple[str, ...] = ()

    @property
    def output(self) -> Path:
        return self.folder / "run"

    @property
    def corpus(self) -> Path:
        return self.folder / "prompts.jsonl"

    def prompt(self, row: int) -> str:
        """Return the unique prompt of a row."""
        return f"Say the number {row}."

    def write_corpus(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"prompt": self.prompt(row)}) + "\n" for row in range(self.num_rows))
        self.corpus.write_text("".join(lines))

    def command(self) -> list[str]:
        """The command line of every attempt."""
        fake = ["--engine", "fake", "--fake", '{"token_s": 0.03, "has_core": true}']
        engine = fake if self.is_fake else ["--model", REAL_MODEL, "--enforce-eager"]
        arguments = ["generate", *engine, "--input", str(self.corpus), "--output", str(self.output), *self.flags]
        return [sys.executable, "-m", "jobs.cli", *arguments]


class Driver:
    """A process of `peagle generate`: one attempt to finish the run.

    Args:
        number: number of the attempt; its output goes to `driver-NUMBER.log`.
        environment: environment variables. Without RAY_ADDRESS, the driver starts a local cluster.
    """

    def __init__(self, job: Job, number: int, environment: Mapping[str, str] | None = None) -> None:
        environment = dict(environment or {**os.environ, "PYTHONPATH": str(ROOT)})
        self._log = job.folder / f"driver-{number}.log"
        with self._log.open("wb") as log_file:
            self.process = subprocess.Popen(job.command(), env=environment, stdout=log_file, stderr=subprocess.STDOUT)

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the driver runs."""
        return self.process.poll()

    def wait(self, timeout_s: float) -> int:
        """Wait for the driver, and return its exit code. After the timeout, kill it; the exit code is then -9."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            return self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def read_output(self) -> str:
        """Return the driver's output so far."""
        return self._log.read_text(errors="replace")

    def last_message(self) -> str:
        """Return the output's error message, or else its last line."""
        lines = [line.strip() for line in self.read_output().splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("peagle generate:")]
        return (errors or lines or [""])[-1][:300]


def report_of(job: Job) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((job.output / "report.json").read_text())
    return report
