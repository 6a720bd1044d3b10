"""Pause a driver at each durable step (a change of the run directory) until another driver has finished the run.

    python -m tests.chaos.pauses FOLDER RESULT.json              every step of every scene
    python -m tests.chaos.pauses FOLDER RESULT.json --every 7    every seventh step

In a play, the first driver runs to a step and is stopped (SIGSTOP). Its lease expires, and a second driver runs the
same command to its end. Then the first driver resumes. In a crossed play, both drivers are stopped several times, in
turns. Finally, the same command is run once more. Every id must then be in exactly one row or dead letter, the report
and export must be correct, and no temporary file may be left. `stepping.py` defines the steps.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from peagle.runs.audit import audit_files
from peagle.runs.directory import RunDirectory
from peagle.runs.export import export
from peagle.runs.lease import read_lease
from peagle.storage import open_to_read, storage_path
from tests.chaos.ray_nodes import ROOT
from tests.chaos.stepping import Driver, Steps, run_in_fork

_NUM_ROWS = 10
_REFUSED_ROWS = frozenset({1, 6})  # rows that become dead letters
_FLAGS = (
    "--engine", "fake", "--rows-per-unit", "4", "--usd-per-hour", "1", "--max-num-seqs", "4",
    "--output-format", "jsonl",
)  # fmt: skip
_RETRY = "--retry-failed"
_STOPPED_AT = 35  # a step between the commits of the first and the last unit on disk; on S3, a third of this
_MAX_STEPS = 400  # more than a run has


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A situation in which a driver is stopped.

    Attributes:
        initial_state: state of the run before the play: `nothing`, `killed` midway, or `finished` with dead letters.
        flags: additional flags of the first and the second driver.
        at_renewals: whether the driver is stopped at the steps that renew its lease.
    """

    initial_state: str
    flags: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    at_renewals: bool = False


SCENES = {
    "start": Scene(initial_state="nothing", flags=((), ("--rows-per-unit", "3"))),  # each driver makes its own plan
    "continue": Scene(initial_state="killed"),
    "retry": Scene(initial_state="finished", flags=((_RETRY,), (_RETRY,))),
    "retry-alone": Scene(initial_state="finished", flags=((_RETRY,), ())),  # only the first driver retries
    "finish": Scene(initial_state="finished"),
    "renewals": Scene(initial_state="nothing", at_renewals=True),
}


@dataclass(kw_only=True)
class Plays:
    """The results of a scene's plays.

    Attributes:
        steps: the steps at which drivers were stopped.
        codes: how often each combination of the drivers' exit codes occurred.
    """

    scene: str
    num_plays: int = 0
    steps: list[str] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "codes": dict(self.codes)}


class Stage:
    """Plays scenes in a folder. Each play has its own run directory.

    Args:
        bucket: S3 prefix of the run directories; if None, they are on disk.
    """

    def __init__(self, folder: Path, bucket: str | None = None) -> None:
        self._folder = folder
        self._bucket = bucket
        self._numbers = itertools.count()
        folder.mkdir(parents=True, exist_ok=True)
        self._corpus = folder / "prompts.jsonl"
        self._corpus.write_text("".join(json.dumps({"prompt": f"Say {row}."}) + "\n" for row in range(_NUM_ROWS)))

    def play_each_step(self, name: str, steps: range) -> Plays:
        """Play the scene once per step, until the run has fewer steps."""
        plays = Plays(scene=name)
        for step in steps:
            if not self._play(plays, [frozenset({step}), frozenset()]):
                break
        return plays

    def play_crossed(self, name: str, rng: random.Random, num_plays: int, num_steps: int) -> Plays:
        """Play the scene with both drivers stopped at several steps and resumed in turns."""
        plays = Plays(scene=f"{name}, crossed")
        for _ in range(num_plays):
            steps_by_driver = [frozenset(rng.sample(range(1, num_steps), 4)) for _ in range(2)]
            self._play(plays, steps_by_driver)
        return plays

    def _play(self, plays: Plays, steps_by_driver: list[frozenset[int]]) -> bool:
        """Play once and stop each driver at its steps. Return whether a driver was stopped."""
        scene, number = SCENES[plays.scene.partition(",")[0]], next(self._numbers)
        folder = self._folder / f"play-{number:04d}"
        folder.mkdir()
        output = f"{self._bucket}/play-{number:04d}" if self._bucket else str(folder / "run")
        self._prepare(scene, output, folder)
        under = f"/play-{number:04d}" if self._bucket else output
        log, drivers = folder / "steps", []
        refused = _REFUSED_ROWS if scene.initial_state != "finished" else frozenset({1})  # row 6 can be retried
        for index, step_numbers in enumerate(steps_by_driver):
            stops = None
            if step_numbers:
                stops = Steps(at=step_numbers, under=under, log=log, at_renewals=scene.at_renewals)
            arguments = (*self._command(output), *scene.flags[index])
            drivers.append(Driver(arguments, folder / f"driver-{index}.log", steps=stops, refused=refused))
            drivers[-1].wait()
        _resume_in_turns(drivers)
        stopped_at = log.read_text().splitlines() if log.exists() else []
        final_driver = Driver(self._command(output), folder / "last.log", refused=refused)
        final_driver.wait()
        play_name = f"{plays.scene}, stopped at {', '.join(stopped_at)} ({folder.name})"
        problems = [
            *_exit_problems(drivers, final_driver),
            *run_in_fork(lambda: _run_problems(output), folder / "audit"),
        ]
        plays.num_plays += 1
        plays.steps += stopped_at
        plays.codes[", ".join(str(driver.exit_code) for driver in drivers)] += 1
        plays.problems += [f"{play_name}: {problem}" for problem in problems]
        if not problems:
            shutil.rmtree(folder)
        return bool(stopped_at)

    def _command(self, output: str) -> tuple[str, ...]:
        return ("generate", "--input", str(self._corpus), "--output", output, *_FLAGS)

    def _prepare(self, scene: Scene, output: str, folder: Path) -> None:
        """Bring the run into the state in which the scene begins."""
        if scene.initial_state == "nothing":
            return
        under = f"/{folder.name}" if self._bucket else output
        stopped_at = _STOPPED_AT // 3 if self._bucket else _STOPPED_AT
        at = frozenset({stopped_at}) if scene.initial_state == "killed" else frozenset()
        steps = Steps(at=at, under=under, log=folder / "before")
        driver = Driver(self._command(output), folder / "before.log", steps=steps, refused=_REFUSED_ROWS)
        is_stopped = driver.wait()
        driver.end()
        assert is_stopped == bool(at), driver.read_output()


def _resume_in_turns(drivers: list[Driver]) -> None:
    """Resume stopped drivers in turns until all have ended."""
    for driver in itertools.cycle(drivers):
        if all(process.exit_code is not None for process in drivers):
            return
        if driver.exit_code is None:
            driver.resume()
            driver.wait()


_REFUSAL_MESSAGES = ("is in use by", "was taken over by another driver", "has planned retry")


def _exit_problems(drivers: list[Driver], final_driver: Driver) -> Iterator[str]:
    """Yield a problem unless each driver finished, or was refused because of another driver."""
    for driver in [*drivers, final_driver]:
        output = driver.read_output()
        if "Traceback" in output:
            yield f"a traceback: {output[-600:]}"
        elif driver.exit_code not in (0, 1) or (
            driver.exit_code and not any(text in output for text in _REFUSAL_MESSAGES)
        ):
            yield f"a driver ended with {driver.exit_code}: {output[-600:]}"
    if all(driver.exit_code for driver in drivers):
        yield f"no driver finished the run: {[driver.read_output()[-200:] for driver in drivers]}"
    if final_driver.exit_code:
        yield f"the same command, once more, ended with {final_driver.exit_code}: {final_driver.read_output()[-600:]}"


def _run_problems(output: str) -> list[str]:
    """Return the problems of a finished run."""
    run = RunDirectory(output)
    audit = audit_files(run, run.manifest())
    problems = [f"{finding.where}: {finding.kind}, {finding.message}" for finding in audit.findings]
    rows = [row["id"] for unit in sorted(run.committed()) for row in _rows(run, unit)]
    failed = [dead_letter["id"] for dead_letter in run.dead_letters()]
    for number, count in Counter(map(int, [*rows, *failed])).items():
        problems += [f"row {number} occurs {count} times"] * (count > 1)
    if len(rows) + len(failed) != _NUM_ROWS:
        problems.append(f"{len(rows)} rows and {len(failed)} dead letters of {_NUM_ROWS} rows")
    report = json.loads((run.root / "report.json").read_bytes())
    if not (report["run"]["complete"] and report["account"]["num_units"] == audit.num_units):
        problems.append("the report describes another state of the run")
    if report["account"]["num_failed_rows"] != len(failed):
        problems.append(f"the report has {report['account']['num_failed_rows']} dead letters, not {len(failed)}")
    problems += _export_problems(run, rows, failed)
    problems += [f"the temporary file {path} is left" for path in _temporary_files(storage_path(output))]
    if (lease := read_lease(run.root)) is None or lease.outcome != "ended":
        problems.append(f"the lease's outcome is {lease and lease.outcome}, not ended")
    return problems


def _rows(run: RunDirectory, unit: int) -> list[dict[str, Any]]:
    with open_to_read(run.unit_path(unit)) as file:
        rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return rows


def _export_problems(run: RunDirectory, rows: list[str], failed: list[str]) -> Iterator[str]:
    folder = run.root / "export" / "jsonl"
    for name, ids in (("output.jsonl", sorted(rows)), ("errors.jsonl", failed)):
        result = [json.loads(line)["id"] for line in (folder / name).read_bytes().splitlines()]
        if result != ids:
            yield f"export/jsonl/{name} has the rows {result}, not {ids}"
    files_before = (folder / "output.jsonl").read_bytes(), (folder / "errors.jsonl").read_bytes()
    description = json.loads((folder / "export.json").read_bytes())
    if description["commits"] != export(run, "jsonl", force=True).commits:
        yield "export/jsonl/export.json describes other units"
    if files_before != ((folder / "output.jsonl").read_bytes(), (folder / "errors.jsonl").read_bytes()):
        yield "export/jsonl was written for an earlier state of the run"


def _temporary_files(root: Any) -> Iterator[str]:
    if isinstance(root, Path):
        yield from (str(path.relative_to(root)) for path in root.rglob("*.tmp"))


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Run an S3 server in a process, set the AWS variables, and yield the URL of a bucket."""
    address_file = folder / "s3"
    folder.mkdir(parents=True, exist_ok=True)
    server = os.fork()
    if server == 0:
        _run_s3_server(address_file)
    try:
        while not (url := address_file.read_text().strip() if address_file.exists() else ""):
            time.sleep(0.05)
        os.environ |= {
            "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }  # fmt: skip
        yield "s3://bucket"
    finally:
        os.kill(server, 9)
        os.waitpid(server, 0)


def _run_s3_server(address_file: Path) -> None:
    """Write the server's URL to a file, and serve until this process is killed."""
    from botocore.session import Session

    from tests.faulty_s3 import FaultyS3

    server = FaultyS3()
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    client = Session().create_client("s3", endpoint_url=server.url, region_name="us-east-1", **keys)
    client.create_bucket(Bucket="bucket")
    address_file.write_text(server.url + "\n")
    while True:
        signal.pause()


def play_all(folder: Path, args: argparse.Namespace) -> list[Plays]:
    """Play the scenes, on disk or S3."""
    all_plays, rng = [], random.Random(args.seed)
    with s3_server(folder / "s3") if args.s3 else contextlib.nullcontext() as bucket:
        stage = Stage(folder, bucket)
        for name in args.scenes:
            first = args.first if args.first is not None else rng.randint(1, args.every)
            all_plays.append(stage.play_each_step(name, range(first, args.last + 1, args.every)))
            if args.crossed and not SCENES[name].at_renewals:
                num_steps = max(8, all_plays[-1].num_plays * args.every)
                all_plays.append(stage.play_crossed(name, rng, args.crossed, num_steps))
    return all_plays


def run(scene: str, folder: Path, flags: list[str]) -> dict[str, Any]:
    """Play a scene in a separate process, because playing forks."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    result = folder.with_suffix(".result")
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.chaos.pauses", str(folder), str(result), "--scenes", scene, *flags]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not result.exists():
        return {"scene": scene, "plays": [], "problems": [f"the plays crashed: {process.stderr[-2000:]}"]}
    plays = json.loads(result.read_text())
    result.unlink()
    return {"scene": scene, "plays": plays, "problems": [problem for play in plays for problem in play["problems"]]}


def main() -> int:
    """Run the command; the exit code is 1 if there were problems."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.pauses", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--every", type=int, default=1, help="stop at every Nth durable step; default 1")
    parser.add_argument("--first", type=int, help="first step; by default, a random one of the first EVERY steps")
    parser.add_argument("--last", type=int, default=_MAX_STEPS, help="last step; by default, the last step of the run")
    parser.add_argument("--crossed", type=int, default=0, help="number of crossed plays of each scene; default 0")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random steps; default 1")
    parser.add_argument("--scenes", nargs="+", choices=list(SCENES), default=list(SCENES))
    parser.add_argument("--s3", action="store_true", help="with run directories on S3")
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    all_plays = play_all(args.folder, args)
    args.result.write_text(json.dumps([plays.to_dict() for plays in all_plays], indent=2))
    for plays in all_plays:
        sys.stdout.write(f"{plays.scene}: {plays.num_plays} plays, {dict(plays.codes)}\n")
        sys.stdout.writelines(f"  PROBLEM {problem}\n" for problem in plays.problems)
    return int(any(plays.problems for plays in all_plays))


if __name__ == "__main__":
    sys.exit(main())
