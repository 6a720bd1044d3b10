"""The driver's cost per row: time to plan, time to resume a half-finished run, rows/s and peak memory, by corpus size.

    python benchmarks/bulk/scale.py --rows 10000,100000,1000000 --folder /tmp/scale --output scale.json

Each corpus is JSON lines of short prompts. The fake engine answers each with one token immediately, so only peagle and
Ray are measured. Each stage runs in its own process, whose peak memory is that of the driver:

    plan      split the corpus, write the plan and read it again; in CPU seconds, since other processes may be running
    first     a run that is stopped (SIGINT) as soon as half of its units are committed
    second    the same command again; "resume s" is from its start to its first commit, including Ray's start

The slopes are those of the line through the smallest and the largest corpus, extrapolated to 1e9 rows.
"""

import argparse
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_POLL_S = 0.5
_MIB = 1024  # of ru_maxrss's KiB


def main() -> None:
    """Measure each corpus size, write the results after each one, and print a Markdown table."""
    options = _options()
    if options.child is not None:
        _child(options)
        return
    results: list[dict[str, Any]] = []
    for num_rows in options.rows:
        results.append(_measure(options, num_rows))
        options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(_table(results))  # noqa: T201


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda words: [int(word) for word in words.split(",")], required=True)
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder for the corpora and runs; existing files are kept"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--engines", default="1")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--plan-only", action="store_true", help="do not run anything")
    parser.add_argument("--child", choices=["plan", "run"], help=argparse.SUPPRESS)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(options: argparse.Namespace, num_rows: int) -> dict[str, Any]:
    folder = options.folder / str(num_rows)
    folder.mkdir(parents=True)
    corpus = folder / "prompts.jsonl"
    _write(corpus, num_rows)
    plan = _start(options, "plan", corpus)
    result = {"rows": num_rows, "plan": json.loads(plan.communicate()[0])}
    if not options.plan_only:
        half_of_units = result["plan"]["num_units"] // 2
        result |= {"first": _run(options, corpus, stop_at=half_of_units), "second": _run(options, corpus, stop_at=None)}
    return result


def _write(path: Path, num_rows: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            file.write(f'{{"prompt": "say the number {number} in words", "tag": "t{number % 7}"}}\n')


def _start(options: argparse.Namespace, child: str, corpus: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "--child", child, "--corpus", str(corpus), "--rows", "0"]
    command += ["--folder", str(options.folder), "--output", str(options.output)]
    command += ["--engines", options.engines, "--max-num-seqs", str(options.max_num_seqs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _run(options: argparse.Namespace, corpus: Path, *, stop_at: int | None) -> dict[str, Any]:
    """Run one attempt, and count its committed units from this process. Stop it after `stop_at` units."""
    data = corpus.parent / "run" / "data"
    before, started = _count(data), time.monotonic()
    process = _start(options, "run", corpus)
    first_commit_s = None
    while process.poll() is None:
        time.sleep(_POLL_S)
        count = _count(data)
        if first_commit_s is None and count > before:
            first_commit_s = time.monotonic() - started
        if stop_at is not None and count >= stop_at:
            process.send_signal(signal.SIGINT)
            stop_at = None
    wall_s = time.monotonic() - started
    result: dict[str, Any] = json.loads((process.stdout or sys.stdin).read().splitlines()[-1])
    return result | {"first_commit_s": first_commit_s, "wall_s": wall_s, "units": _count(data) - before}


def _count(folder: Path) -> int:
    if not folder.exists():
        return 0
    with os.scandir(folder) as entries:
        return sum(entry.name.endswith(".parquet") and not entry.name.startswith(".") for entry in entries)


def _child(options: argparse.Namespace) -> None:
    from pipelines.batch.config import GenerateConfig

    config = GenerateConfig(
        input=str(options.corpus),
        output=options.corpus.parent / "run",
        engine="fake",
        engines=options.engines,
        max_num_seqs=options.max_num_seqs,
        max_tokens=1,
        usd_per_hour=1,
        grace_s=5,
    )
    result = _plan(config) if options.child == "plan" else _generate(config)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _MIB
    print(json.dumps(result | {"peak_mib": round(peak_mib)}), flush=True)  # noqa: T201
    os._exit(0)  # without waiting for Ray's threads


def _plan(config: Any) -> dict[str, Any]:
    from peagle.runs.plan import make_plan, plan_from_bytes, plan_to_bytes

    times = [time.process_time()]
    plan = make_plan(config)
    times.append(time.process_time())
    data = plan_to_bytes(plan)
    times.append(time.process_time())
    plan_from_bytes(data)
    times.append(time.process_time())
    cut_s, write_s, read_s = (b - a for a, b in itertools.pairwise(times))
    return {
        "num_units": len(plan.units),
        "cut_s": cut_s,
        "write_s": write_s,
        "read_s": read_s,
        "plan_mib": len(data) / 2**20,
    }


def _generate(config: Any) -> dict[str, Any]:
    import io

    from rich.console import Console

    from peagle.errors import StoppedEarly
    from peagle.runs.progress import RunProgress
    from pipelines.batch.request import RunRequest
    from pipelines.batch.run import generate

    try:
        report = generate(RunRequest(config=config, command=["scale"]), RunProgress(Console(file=io.StringIO()))).report
    except StoppedEarly:
        return {"complete": False}
    return {"complete": True, "num_rows": report["account"]["num_rows"]}


def _table(results: list[dict[str, Any]]) -> str:
    def cells(result: dict[str, Any]) -> list[str]:
        plan, first, second = result["plan"], result.get("first"), result.get("second")
        cells = [f"{result['rows']:,}", f"{plan['num_units']:,}", f"{plan['cut_s']:.1f}", f"{plan['peak_mib']:,}"]
        if first is None or second is None:
            return cells + ["-"] * 4
        share = second["units"] / plan["num_units"]
        rows_per_s = result["rows"] * share / (second["wall_s"] - second["first_commit_s"])
        peaks = f"{first['peak_mib']:,} / {second['peak_mib']:,}"
        return [*cells, f"{second['first_commit_s']:.1f}", f"{second['wall_s']:.1f}", f"{rows_per_s:,.0f}", peaks]

    headers = [
        "rows",
        "units",
        "planning CPU s",
        "planning peak MiB",
        "resume s",
        "second half s",
        "rows/s",
        "driver peak MiB",
    ]
    lines = [headers, ["--:"] * len(headers), *map(cells, results)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n{_slopes(results)}" if len(results) > 1 else table


def _slopes(results: list[dict[str, Any]]) -> str:
    def line(name: str, unit: str, values: list[float]) -> str:
        slope = (values[-1] - values[0]) / (results[-1]["rows"] - results[0]["rows"])
        at_a_billion = values[0] + slope * (1e9 - results[0]["rows"])
        return f"{name}: {slope * 1e6:.2f} {unit} a million rows; 1e9 rows: {at_a_billion:,.0f} {unit}"

    lines = [
        line("planning", "CPU s", [result["plan"]["cut_s"] for result in results]),
        line("planning's peak", "MiB", [result["plan"]["peak_mib"] for result in results]),
    ]
    if all("second" in result for result in results):
        lines += [
            line("resuming", "s", [result["second"]["first_commit_s"] for result in results]),
            line(
                "driver's peak",
                "MiB",
                [max(result["first"]["peak_mib"], result["second"]["peak_mib"]) for result in results],
            ),
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
