"""`python -m tests.chaos`: play the runs, faults and pauses that have no result yet, and write the report.

Results are stored under --folder, so the same command continues an interrupted campaign.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from peagle import hardware
from tests.chaos import faults, pauses, report
from tests.chaos.driver import Job
from tests.chaos.play import Player
from tests.chaos.ray_nodes import ROOT, RayNodes
from tests.chaos.schedule import schedule
from tests.origin import say

_NUM_NODES = _NUM_ENGINES = 3
_OWN_CLUSTER_EVERY = 5  # in every fifth run, the driver starts its own local cluster
_NUM_KILLS = 4
_FAKE_LIMIT_S, _REAL_LIMIT_S = 600.0, 1800.0


def main() -> int:
    """Run the command; the exit code is 1 if there were problems."""
    args = _parser().parse_args()
    campaign = Campaign(args)
    campaign.play_all()
    campaign.inject_all()
    campaign.pause_all()
    path = report.write(args.report, campaign.results(), seed=args.seed, command=_command(args))
    say(f"report: {path}")
    return int(any(result["problems"] for result in campaign.results()))


class Campaign:
    """The runs, faults and pauses of one seed, with their results in one folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.folder: Path = args.folder / f"seed-{args.seed}"

    def play_all(self) -> None:
        """Play the missing runs, on one cluster of several nodes."""
        num_fake, num_all = self._args.runs, self._args.runs + self._args.real_runs
        numbers = [n for n in range(num_all) if self._is_missing(_name(n, n < num_fake))]
        if not numbers:
            return
        with RayNodes(_NUM_NODES, max(2, hardware.detect().num_cpus), self.folder / "ray") as nodes:
            for number in numbers:
                self._play(number, number < num_fake, nodes)

    def inject_all(self) -> None:
        """Inject the missing faults."""
        for fault in faults.FAULTS:
            if self._is_missing(name := f"fault-{fault}"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
                say(name)
                self._save(name, {"engine": "fault", **faults.inject(fault, self.folder / name)})

    def pause_all(self) -> None:
        """Play the missing scenes with paused drivers, on disk and on S3."""
        for where in ("disk", "s3"):
            for scene in pauses.SCENES:
                if self._is_missing(name := f"pauses-{where}-{scene}"):
                    say(name)
                    folder, every = self.folder / name, self._args.every * (4 if where == "s3" else 1)
                    values = {"--every": every, "--crossed": self._args.crossed, "--seed": self._args.seed}
                    flags = [str(part) for pair in values.items() for part in pair]
                    result = pauses.run(scene, folder, flags + ["--s3"] * (where == "s3"))
                    self._save(name, {"engine": "pauses", "where": where, **result})

    def _play(self, number: int, is_fake: bool, nodes: RayNodes) -> None:
        name = _name(number, is_fake)
        own_cluster = is_fake and number % _OWN_CLUSTER_EVERY == _OWN_CLUSTER_EVERY - 1
        job = self._job(name, is_fake, own_cluster)
        kills = schedule(self._args.seed, number, num_kills=_NUM_KILLS, max_wait_s=3.0 if is_fake else 20.0)
        shutil.rmtree(job.folder, ignore_errors=True)
        say(f"{name}: {job.num_rows} rows, {len(kills)} kills{', separate cluster' if own_cluster else ''}")
        limit_s = _FAKE_LIMIT_S if is_fake else _REAL_LIMIT_S
        result = Player(job, kills, None if own_cluster else nodes, limit_s=limit_s, say=say).play()
        self._save(name, {"engine": "fake" if is_fake else "real", "own_cluster": own_cluster, **result.to_dict()})

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("*.json"))]

    def _job(self, name: str, is_fake: bool, own_cluster: bool) -> Job:
        engines = 1 if own_cluster else _NUM_ENGINES if is_fake else 2
        common = ("--engines", str(engines), "--heartbeat-s", "0.5", "--max-num-seqs", "4", "--lease-s", "10")
        if is_fake:
            flags = ("--rows-per-unit", "8")
        else:
            flags = ("--rows-per-unit", "2", "--max-tokens", "24", "--max-model-len", "256", "--drafter", "peagle")
        num_rows = self._args.rows if is_fake else self._args.real_rows
        return Job(
            folder=self.folder / name,
            num_rows=num_rows // 2 if own_cluster else num_rows,
            is_fake=is_fake,
            flags=common + flags,
        )

    def _is_missing(self, name: str) -> bool:
        return not (self.folder / f"{name}.json").exists() and name in (self._args.only or [name])

    def _save(self, name: str, result: dict[str, Any]) -> None:
        """Save a result, and delete the files of a run without problems."""
        text = json.dumps({"name": name, **result}, indent=2)
        (self.folder / f"{name}.json").write_text(text.replace(f"{self.folder}/", ""))  # no local paths in reports
        for problem in result["problems"]:
            say(f"  PROBLEM {problem}")
        say(f"{name}: {'no problems' if not result['problems'] else 'problems; its files are kept'}")
        if not result["problems"]:
            shutil.rmtree(self.folder / name, ignore_errors=True)


def _name(number: int, is_fake: bool) -> str:
    return f"{'fake' if is_fake else 'real'}-{number:03d}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    env = os.environ.get
    parser.add_argument("--seed", type=int, default=int(env("CHAOS_SEED", "1")), help="CHAOS_SEED; default 1")
    parser.add_argument("--runs", type=int, default=int(env("CHAOS_RUNS", "20")), help="CHAOS_RUNS; default 20")
    parser.add_argument(
        "--real-runs", type=int, default=int(env("CHAOS_REAL_RUNS", "2")), help="CHAOS_REAL_RUNS; default 2"
    )
    parser.add_argument("--rows", type=int, default=600, help="rows of a run with the fake engine; default 600")
    parser.add_argument("--real-rows", type=int, default=48, help="rows of a run with the real engine; default 48")
    parser.add_argument(
        "--every",
        type=int,
        default=int(env("CHAOS_EVERY", "1")),
        help="pause drivers at every Nth durable step, on S3 at every fourth of these; CHAOS_EVERY; default 1",
    )
    parser.add_argument(
        "--crossed", type=int, default=20, help="plays of each scene in which both drivers are paused; default 20"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these, such as fake-004 or fault-full-disk")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "chaos", help="folder for results and run directories"
    )
    parser.add_argument(
        "--report", type=Path, default=ROOT / "benchmarks" / "reliability", help="folder for the report"
    )
    return parser


def _command(args: argparse.Namespace) -> str:
    size = f"--runs {args.runs} --rows {args.rows} --real-runs {args.real_runs} --real-rows {args.real_rows}"
    size += f" --every {args.every} --crossed {args.crossed}" + (f" --only {' '.join(args.only)}" if args.only else "")
    return f"python -m tests.chaos --seed {args.seed} {size}"


if __name__ == "__main__":
    sys.exit(main())
