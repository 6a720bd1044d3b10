"""Faults other than crashes: a full disk, a read-only output, two drivers, a driver that hangs, clock jumps.

Each driver runs the fake engine in its own local Ray cluster. A scene that needs its own file system runs in a
user and mount namespace, which does not need root. If namespaces are forbidden, the scene is skipped.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peagle.runs.directory import RunDirectory
from tests.chaos.audit import audit
from tests.chaos.driver import Driver, Job
from tests.chaos.ray_nodes import ROOT

_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
_TIMEOUT_S = 300.0
_FLAGS = ("--rows-per-unit", "4", "--max-num-seqs", "4", "--heartbeat-s", "0.5")


class Scene:
    """A run with a fault. `problems` lists failed checks; `facts` are observations for the report."""

    def __init__(self, folder: Path, *flags: str, num_rows: int = 100) -> None:
        self.job = Job(folder=folder, num_rows=num_rows, is_fake=True, flags=(*_FLAGS, *flags))
        self.job.write_corpus()
        self.run = RunDirectory(self.job.output)
        self.problems: list[str] = []
        self.facts: list[str] = []
        self._drivers: list[Driver] = []

    def start(self, environment: dict[str, str] | None = None) -> Driver:
        """Start a driver; every driver has the same command."""
        driver = Driver(self.job, len(self._drivers), environment)
        self._drivers.append(driver)
        return driver

    def wait_for_units(self, driver: Driver, count: int) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while len(self.run.committed()) < count and driver.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self.expect(len(self.run.committed()) >= count, f"no {count} units were committed: {driver.last_message()}")

    def expect_exit(self, driver: Driver, code: int, text: str) -> None:
        exit_code = driver.wait(_TIMEOUT_S)
        self.facts.append(f"exit code {exit_code}: {driver.last_message()}")
        self.expect(exit_code == code, f"a driver ended with {exit_code} instead of {code}: {driver.last_message()}")
        self.expect(text in driver.read_output(), f"a driver did not print {text!r}: {driver.last_message()}")
        self.expect("Traceback" not in driver.read_output(), "a driver printed a traceback")

    def expect(self, condition: bool, problem: str) -> None:
        if not condition:
            self.problems.append(problem)

    def finish(self, environment: dict[str, str] | None = None) -> None:
        """Finish the run with the same command, and audit it."""
        self.expect_exit(self.start(environment), 0, "report:")
        self.audit()

    def audit(self) -> None:
        if not self.problems:
            result = audit(self.job)
            self.problems += result.problems
            self.facts.append(f"{result.num_rows} rows, lost {result.num_lost}, doubled {result.num_doubled}")

    def kill_drivers(self) -> None:
        """Kill the drivers that are still running."""
        for driver in self._drivers:
            driver.end()


def full_disk(folder: Path) -> Scene:
    """The disk fills up while units are committed. Once there is space again, the same command finishes the run."""
    scene = Scene(folder)
    with _mounted(scene.job.output, "-t", "tmpfs", "-o", "size=8m", "tmpfs"):
        driver = scene.start()
        scene.wait_for_units(driver, 3)
        filler = scene.job.output / "filler"  # a file that fills the disk
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        scene.expect_exit(driver, 1, "No space left on device")
        units_before = scene.run.committed()
        scene.expect_exit(scene.start(), 2, "No space left on device")
        scene.expect(scene.run.committed() == units_before, "committed units changed while the disk was full")
        filler.unlink()
        scene.finish()
    return scene


def read_only_output(folder: Path) -> Scene:
    """The output is read-only when the run starts; in a second run, it becomes read-only during the run."""
    scene = Scene(folder)
    output = scene.job.output
    with _mounted(output, "-t", "tmpfs", "-o", "ro", "tmpfs"):
        scene.expect_exit(scene.start(), 2, "cannot be written")
    scene.run.data.mkdir(parents=True)
    with _mounted(scene.run.data, "-t", "tmpfs", "tmpfs"):
        driver = scene.start()
        scene.wait_for_units(driver, 3)
        _remount(scene.run.data, "ro")
        scene.expect_exit(driver, 1, "Read-only file system")
        _remount(scene.run.data, "rw")
        scene.finish()
    return scene


def two_drivers(folder: Path) -> Scene:
    """Of two drivers that start simultaneously in a new run directory, one is refused."""
    scene = Scene(folder)
    drivers = [scene.start(), scene.start()]
    codes = [driver.wait(_TIMEOUT_S) for driver in drivers]
    scene.facts.append(f"exit codes {codes}")
    scene.expect(sorted(codes) == [0, 1], f"two drivers ended with {codes}")
    refused = drivers[codes.index(1)] if 1 in codes else drivers[0]
    scene.expect(
        "is in use by" in refused.read_output(), f"the second driver was not refused: {refused.last_message()}"
    )
    scene.audit()
    return scene


def hanging_driver(folder: Path) -> Scene:
    """A driver hangs past its lease, is replaced, and resumes while its replacement runs."""
    scene = Scene(folder, "--lease-s", "2", num_rows=200)
    first = scene.start()
    scene.wait_for_units(first, 3)
    os.kill(first.pid, signal.SIGSTOP)
    second = scene.start()
    num_sessions = len(scene.run.sessions())
    deadline = time.monotonic() + _TIMEOUT_S
    while len(scene.run.sessions()) == num_sessions and second.exit_code() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGCONT)
    scene.expect_exit(first, 1, "was taken over by another driver")
    scene.expect_exit(second, 0, "report:")
    scene.audit()
    return scene


def jumping_clock(folder: Path) -> Scene:
    """The wall clock jumps by up to two hours every two seconds; the driver is killed and restarted."""
    scene = Scene(folder)
    python_path = f"{ROOT / 'tests' / 'chaos' / 'jumping_clock'}{os.pathsep}{ROOT}"
    environment = {**os.environ, "PYTHONPATH": python_path}
    started_at = time.time()
    driver = scene.start(environment)
    scene.wait_for_units(driver, 3)
    driver.end()
    scene.finish(environment)
    starts = [session.started_at for session in scene.run.sessions()]
    scene.expect(any(start < started_at or start > time.time() for start in starts), "no clock jumped")
    offsets_s = ", ".join(f"{start - started_at:.0f}" for start in starts)
    scene.facts.append(f"seconds from the scene's start to the start of each engine, by the jumping clock: {offsets_s}")
    return scene


FAULTS: dict[str, Callable[[Path], Scene]] = {
    "full-disk": full_disk,
    "read-only-output": read_only_output,
    "two-drivers": two_drivers,
    "hanging-driver": hanging_driver,
    "jumping-clock": jumping_clock,
}
_NEED_MOUNTS = {"full-disk", "read-only-output"}


def inject(name: str, folder: Path) -> dict[str, Any]:
    """Play a scene in a separate process; return its facts and problems, or why it was skipped."""
    folder.mkdir(parents=True)
    description = " ".join((FAULTS[name].__doc__ or "").split())
    if name in _NEED_MOUNTS and (reason := _namespace_error()):
        return {"fault": name, "what": description, "skipped": reason, "facts": [], "problems": []}
    prefix = _NAMESPACE if name in _NEED_MOUNTS else []
    result_file = folder / "outcome.json"
    command = [*prefix, sys.executable, "-m", "tests.chaos.faults", name, str(folder), str(result_file)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not result_file.exists():
        problem = f"the scene crashed: {process.stderr[-2000:]}"
        return {"fault": name, "what": description, "facts": [], "problems": [problem]}
    return {"fault": name, "what": description, **json.loads(result_file.read_text())}


def _namespace_error() -> str:
    """Return why this machine cannot mount a private file system, or an empty string if it can."""
    try:
        command = [*_NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"a private file system is not possible here: {error}"
    return f"a private file system is not possible here: {process.stderr.strip()}" if process.returncode else ""


@contextlib.contextmanager
def _mounted(folder: Path, *arguments: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", *arguments, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _remount(folder: Path, mode: str) -> None:
    """Remount a file system; retry while a file is open for writing."""
    deadline = time.monotonic() + _TIMEOUT_S
    command = ["mount", "-o", f"remount,{mode}", str(folder)]
    while subprocess.run(command, capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, f"{folder} stays busy"
        time.sleep(0.01)


def _main(name: str, folder: Path, result_file: Path) -> None:
    scene = FAULTS[name](folder)
    scene.kill_drivers()
    result_file.write_text(json.dumps({"facts": scene.facts, "problems": scene.problems}))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
