"""The report of a campaign as Markdown and JSON."""

from pathlib import Path
from typing import Any

from peagle.tables import markdown
from tests.hostile.scenes import MAX_TIMES_QUIET
from tests.origin import origin, origin_text, write_report

_INTRODUCTION = """\
One key has two clients, each of which sends one request at a time. Another key attacks. A scene is one attack, or all
of them. In "quiet", the second key sends nothing. In "normal requests", it sends ordinary requests, which shows the
effect of sharing an engine.
Both load generators run on the endpoint's machine. The attacker's is a separate process at a low priority (nice 10).
A vLLM engine has cores of its own; with --shared-cores, other processes use them, too. Latencies are
those of the first key, "statuses" those of the attacker. Memory is the peak resident size of the ingress and of
Serve's proxy."""


def write(folder: Path, rows: list[dict[str, Any]], *, engine: str, command: str) -> Path:
    data = {**origin(command), "engine": engine, "scenes": rows}
    return write_report(folder / f"{data['date']}-hostile-{engine}-engine.md", data, to_markdown(data))


def to_markdown(data: dict[str, Any]) -> str:
    limit = f'The limit is {MAX_TIMES_QUIET:g} times the p95 of the scene "quiet".'
    parts = [
        f"# A hostile key next to a working one: {data['date']}",
        origin_text(data),
        f"{_INTRODUCTION} The engine is {data['engine']}. {limit}",
        _table(data["scenes"]),
    ]
    if problems := [f"- {row['scene']}: {problem}" for row in data["scenes"] for problem in row["problems"]]:
        parts += ["## Problems", "\n".join(problems)]
    return "\n\n".join(parts) + "\n"


def _table(rows: list[dict[str, Any]]) -> str:
    cells = [["scene", "answered", "p50, s", "p95, s", "times quiet", "ingress, MiB", "proxy, MiB", "statuses"]]
    for row in rows:
        statuses = ", ".join(f"{status}: {number}" for status, number in row["statuses"].items())
        cells.append(
            [
                row["scene"],
                f"{row['num_answered']} of {row['num_requests']}",
                _two_decimals(row["latency_p50_s"]),
                _two_decimals(row["latency_p95_s"]),
                _two_decimals(row.get("times_quiet_p95")),
                f"{row['peak_mib'].get('the ingress', 0):.0f}",
                f"{row['peak_mib'].get('the proxy', 0):.0f}",
                statuses or "-",
            ]
        )
    return "\n".join(markdown(cells))


def _two_decimals(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
