"""The report of a campaign (the runs, faults and pauses of one seed) as Markdown and JSON."""

from collections import Counter
from pathlib import Path
from typing import Any

from peagle.tables import markdown
from tests.chaos.schedule import KINDS
from tests.origin import origin, origin_text, write_report

_SUMMED_FIELDS = (
    "num_rows",
    "num_lost",
    "num_doubled",
    "num_dead_letters",
    "num_output_tokens",
    "num_regenerated_tokens",
    "regenerated_usd",
    "total_usd",
    "num_sessions",
)

_RUNS = """\
In each run, processes are killed by a schedule, and the same command is repeated until the run is complete. Then the
run is audited: every id is in one committed row or one dead letter, every row has its own prompt and (with the fake
engine) the expected answer, usage is the sum of the rows, no temporary file is left, the lease is released, and no
engine is alive."""

_PAUSES = """\
A driver is stopped (SIGSTOP) before it changes the run directory. A second driver runs the same command to its end, the
first one resumes, and the command is run once more. In crossed plays, both drivers are stopped several times and resume
in turns. Afterwards, every id is in one committed row or one dead letter, audit, report and export agree, and no
temporary file is left. Exit codes "1, 0" mean that the first driver reported that another one had taken over, and the
second one finished the run."""


def write(folder: Path, results: list[dict[str, Any]], *, seed: int, command: str) -> Path:
    data = {
        **origin(command),
        "seed": seed,
        "engines": {engine: summary(results, engine) for engine in ("fake", "real")},
        "results": results,
    }
    return write_report(folder / f"{data['date']}-chaos-seed-{seed}.md", data, to_markdown(data))


def summary(results: list[dict[str, Any]], engine: str) -> dict[str, Any]:
    """Return the totals of all runs with an engine."""
    runs = [result for result in results if result["engine"] == engine]
    audits = [run["audit"] for run in runs if run["audit"] is not None]
    kills = Counter(kill["kind"] for run in runs for kill in run["kills"])
    return {
        "num_runs": len(runs),
        "num_failed_runs": sum(bool(run["problems"]) for run in runs),
        "num_attempts": sum(len(run["attempts"]) for run in runs),
        "kills": {kind: kills[kind] for kind in KINDS},
        "num_kills": kills.total(),
        "wall_s": round(sum(run["wall_s"] for run in runs), 1),
        **{name: sum(audit[name] for audit in audits) for name in _SUMMED_FIELDS},
    }


def to_markdown(data: dict[str, Any]) -> str:
    parts = [f"# Chaos: {data['date']}, seed {data['seed']}", origin_text(data)]
    if runs := [result for result in data["results"] if result["engine"] in ("fake", "real")]:
        parts += [_RUNS, _totals(data["engines"]), "## Runs", _runs(runs)]
    if faults := [result for result in data["results"] if result["engine"] == "fault"]:
        parts += ["## Faults without kills", _faults(faults)]
    if scenes := [result for result in data["results"] if result["engine"] == "pauses"]:
        parts += ["## Paused drivers", _PAUSES, _pauses(scenes)]
    if problems := [f"- {entry['name']}: {problem}" for entry in data["results"] for problem in entry["problems"]]:
        parts += ["## Problems", "\n".join(problems)]
    return "\n\n".join(parts) + "\n"


def _totals(engines: dict[str, dict[str, Any]]) -> str:
    rows = [
        ("runs", lambda run: run["num_runs"]),
        ("runs that failed", lambda run: run["num_failed_runs"]),
        ("drivers started", lambda run: run["num_attempts"]),
        ("kills", lambda run: run["num_kills"]),
        *((f"- {kind}", lambda run, kind=kind: run["kills"][kind]) for kind in KINDS),
        ("engine processes", lambda run: run["num_sessions"]),
        ("rows committed", lambda run: f"{run['num_rows']:,}"),
        ("rows lost", lambda run: run["num_lost"]),
        ("rows duplicated", lambda run: run["num_doubled"]),
        ("dead letters", lambda run: run["num_dead_letters"]),
        ("tokens committed", lambda run: f"{run['num_output_tokens']:,}"),
        ("tokens generated again (from heartbeats)", lambda run: f"{run['num_regenerated_tokens']:,}"),
        ("dollars of lost work", lambda run: f"{run['regenerated_usd']:.6f}"),
        ("dollars in total", lambda run: f"{run['total_usd']:.6f}"),
    ]
    cells = [(name, str(value(engines["fake"])), str(value(engines["real"]))) for name, value in rows]
    return "\n".join(markdown([("", "fake engine", "real engine"), *cells]))


def _runs(results: list[dict[str, Any]]) -> str:
    rows = [("run", "cluster", "kills", "driver exit codes", "s", "rows", "lost", "duplicated", "tokens regenerated")]
    for run in results:
        kills = ", ".join(f"{kill['kind']} {kill['at_s']:.0f} s" for kill in run["kills"])
        codes = ", ".join(str(attempt["exit_code"]) for attempt in run["attempts"])
        audit = run["audit"] or dict.fromkeys(_SUMMED_FIELDS, "-")
        counts = [str(audit[name]) for name in ("num_rows", "num_lost", "num_doubled", "num_regenerated_tokens")]
        cluster = "the driver's" if run["own_cluster"] else "several nodes"
        rows.append((run["name"], cluster, kills, codes, f"{run['wall_s']:.0f}", *counts))
    return "\n".join(markdown(rows))


def _pauses(results: list[dict[str, Any]]) -> str:
    rows = [("scene", "where", "plays", "different steps", "driver exit codes", "problems")]
    for result in results:
        for plays in result["plays"]:
            codes = ", ".join(f"{exit_codes}: {count}" for exit_codes, count in sorted(plays["codes"].items()))
            counts = plays["num_plays"], len(set(plays["steps"])), len(plays["problems"])
            rows.append((plays["scene"], result["where"], str(counts[0]), str(counts[1]), codes, str(counts[2])))
    return "\n".join(markdown(rows))


def _faults(results: list[dict[str, Any]]) -> str:
    rows = [("fault", "what happens", "observed")]
    for result in results:
        observed = f"skipped: {result['skipped']}" if result.get("skipped") else "; ".join(result["facts"])
        rows.append((result["fault"], result["what"], observed))
    return "\n".join(markdown(rows))
