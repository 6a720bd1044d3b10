"""Faults that kill nobody: a full disk, a read-only output, two drivers, a driver that hangs, a clock that jumps.

Each is a scene with the fake engine on clusters of the drivers' own. Where a scene needs a file system of its own, it
runs in a user and mount namespace, which a Linux user may have without being root; where that is forbidden it is
skipped, and the report says so.
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
_END_S = 300.0
_FLAGS = ("--rows-per-unit", "4", "--max-num-seqs", "4", "--heartbeat-s", "0.5")


class Scene:
    """A run that faults happen to, and what went otherwise than it has to."""

    def __init__(self, folder: Path, *flags: str, num_rows: int = 100) -> None:
        self.job = Job(folder=folder, num_rows=num_rows, is_fake=True, flags=(*_FLAGS, *flags))
        self.job.write_corpus()
        self.run = RunDirectory(self.job.output)
        self.problems: list[str] = []
        self.facts: list[str] = []
        self._drivers: list[Driver] = []

    def start(self, environment: dict[str, str] | None = None) -> Driver:
        """The same command, once more."""
        driver = Driver(self.job, len(self._drivers), environment)
        self._drivers.append(driver)
        return driver

    def wait_for_units(self, driver: Driver, count: int) -> None:
        """Until so many units are committed."""
        deadline = time.monotonic() + _END_S
        while len(self.run.committed()) < count and driver.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self.expect(len(self.run.committed()) >= count, f"no {count} units were committed: {driver.last_words()}")

    def expect_end(self, driver: Driver, code: int, words: str) -> None:
        """It ends with that exit code, and says so."""
        found = driver.wait(_END_S)
        self.facts.append(f"exit code {found}: {driver.last_words()}")
        self.expect(found == code, f"a driver ended with {found} instead of {code}: {driver.last_words()}")
        self.expect(words in driver.said(), f"a driver did not say {words!r}: {driver.last_words()}")
        self.expect("Traceback" not in driver.said(), "a driver printed a traceback")

    def expect(self, condition: bool, problem: str) -> None:
        """Note a problem unless it is as it has to be."""
        if not condition:
            self.problems.append(problem)

    def finish(self, environment: dict[str, str] | None = None) -> None:
        """The same command finishes the run, and the audit finds nothing."""
        self.expect_end(self.start(environment), 0, "report:")
        self.audit()

    def audit(self) -> None:
        """Look at the finished run."""
        if not self.problems:
            found = audit(self.job)
            self.problems += found.problems
            self.facts.append(f"{found.num_rows} rows, lost {found.num_lost}, doubled {found.num_doubled}")

    def end(self) -> None:
        """Leave no driver behind."""
        for driver in self._drivers:
            driver.end()


def full_disk(folder: Path) -> Scene:
    """The disk is full while units are committed; room is made; run the same command to continue."""
    scene = Scene(folder)
    with _mounted(scene.job.output, "-t", "tmpfs", "-o", "size=8m", "tmpfs"):
        driver = scene.start()
        scene.wait_for_units(driver, 3)
        ballast = scene.job.output / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        scene.expect_end(driver, 1, "No space left on device")
        before = scene.run.committed()
        scene.expect_end(scene.start(), 2, "No space left on device")
        scene.expect(scene.run.committed() == before, "units came or went while the disk was full")
        ballast.unlink()
        scene.finish()
    return scene


def read_only_output(folder: Path) -> Scene:
    """The output cannot be written when the run starts, then when it is under way."""
    scene = Scene(folder)
    output = scene.job.output
    with _mounted(output, "-t", "tmpfs", "-o", "ro", "tmpfs"):
        scene.expect_end(scene.start(), 2, "cannot be written")
    scene.run.data.mkdir(parents=True)
    with _mounted(scene.run.data, "-t", "tmpfs", "tmpfs"):
        driver = scene.start()
        scene.wait_for_units(driver, 3)
        _remount(scene.run.data, "ro")
        scene.expect_end(driver, 1, "Read-only file system")
        _remount(scene.run.data, "rw")
        scene.finish()
    return scene


def two_drivers(folder: Path) -> Scene:
    """Two drivers are started at once on one new run directory: one drives, the other is refused."""
    scene = Scene(folder)
    drivers = [scene.start(), scene.start()]
    codes = [driver.wait(_END_S) for driver in drivers]
    scene.facts.append(f"exit codes {codes}")
    scene.expect(sorted(codes) == [0, 1], f"two drivers ended with {codes}")
    refused = drivers[codes.index(1)] if 1 in codes else drivers[0]
    scene.expect("is in use by" in refused.said(), f"the second was not refused: {refused.last_words()}")
    scene.audit()
    return scene


def hanging_driver(folder: Path) -> Scene:
    """A driver hangs for longer than its lease and is replaced; it comes back while the other drives."""
    scene = Scene(folder, "--lease-s", "2", num_rows=200)
    first = scene.start()
    scene.wait_for_units(first, 3)
    os.kill(first.pid, signal.SIGSTOP)
    second = scene.start()
    sessions = len(scene.run.sessions())
    deadline = time.monotonic() + _END_S
    while len(scene.run.sessions()) == sessions and second.exit_code() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGCONT)
    scene.expect_end(first, 1, "was taken over by another driver")
    scene.expect_end(second, 0, "report:")
    scene.audit()
    return scene


def jumping_clock(folder: Path) -> Scene:
    """The wall clock jumps by up to two hours, every two seconds; the driver is killed and goes on."""
    scene = Scene(folder)
    path = f"{ROOT / 'tests' / 'chaos' / 'jumping_clock'}{os.pathsep}{ROOT}"
    environment = {**os.environ, "PYTHONPATH": path}
    began = time.time()
    driver = scene.start(environment)
    scene.wait_for_units(driver, 3)
    driver.end()
    scene.finish(environment)
    starts = [session.started_at for session in scene.run.sessions()]
    scene.expect(any(start < began or start > time.time() for start in starts), "no clock jumped")
    off_s = ", ".join(f"{start - began:.0f}" for start in starts)
    scene.facts.append(f"by their clocks, engines started so many seconds after the scene: {off_s}")
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
    """Play a scene; what it was, what was seen, and its problems, or why it was skipped."""
    folder.mkdir(parents=True)
    what = " ".join((FAULTS[name].__doc__ or "").split())
    if name in _NEED_MOUNTS and (reason := _why_no_namespace()):
        return {"fault": name, "what": what, "skipped": reason, "facts": [], "problems": []}
    prefix = _NAMESPACE if name in _NEED_MOUNTS else []
    result = folder / "outcome.json"
    command = [*prefix, sys.executable, "-m", "tests.chaos.faults", name, str(folder), str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not result.exists():
        return {"fault": name, "what": what, "facts": [], "problems": [f"the scene broke off: {done.stderr[-2000:]}"]}
    return {"fault": name, "what": what, **json.loads(result.read_text())}


def _why_no_namespace() -> str:
    try:
        command = [*_NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"no file system of its own can be had here: {error}"
    return f"no file system of its own can be had here: {done.stderr.strip()}" if done.returncode else ""


@contextlib.contextmanager
def _mounted(folder: Path, *arguments: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", *arguments, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _remount(folder: Path, mode: str) -> None:
    """A mount on which a file is open for writing at this moment is busy."""
    deadline = time.monotonic() + _END_S
    command = ["mount", "-o", f"remount,{mode}", str(folder)]
    while subprocess.run(command, capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, f"{folder} stays busy"
        time.sleep(0.01)


def _main(name: str, folder: Path, result: Path) -> None:
    scene = FAULTS[name](folder)
    scene.end()
    result.write_text(json.dumps({"facts": scene.facts, "problems": scene.problems}))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
