"""The report of the faults and the overload as Markdown and JSON."""

from pathlib import Path
from typing import Any

from peagle.tables import markdown
from tests.faults.clients import OUTCOMES
from tests.faults.scenes import CLIENTS_DISCONNECT
from tests.origin import origin, origin_text, write_report

_METHOD = """\
Clients send one request after another, half of them streamed. One process is killed with SIGKILL, and the clients
continue until all processes run again. "Gap" is the longest time between two answers, "recovery" the time until all
processes ran again. Then every slot gets a request, to check that it is free. The engine is fake, so the speeds are not
real."""


def write(folder: Path, results: list[dict[str, Any]], overload: dict[str, Any] | None, *, command: str) -> Path:
    data = {**origin(command), "faults": results, "overload": overload}
    return write_report(folder / f"{data['date']}-faults-fake-engine.md", data, to_markdown(data))


def to_markdown(data: dict[str, Any]) -> str:
    parts = [f"# Faults of the endpoint under load: {data['date']}", origin_text(data), _METHOD]
    if data["faults"]:
        parts.append(_faults([fault for fault in data["faults"] if fault["fault"] != CLIENTS_DISCONNECT]))
    parts += [_disconnected_clients(fault) for fault in data["faults"] if fault["fault"] == CLIENTS_DISCONNECT]
    if data["overload"]:
        parts += ["## Overload", _overload(data["overload"])]
    if problems := [f"- {fault['fault']}: {problem}" for fault in data["faults"] for problem in fault["problems"]]:
        parts += ["## Problems", "\n".join(problems)]
    return "\n\n".join(parts) + "\n"


def _faults(results: list[dict[str, Any]]) -> str:
    rows = [
        [
            "killed",
            "requests",
            *OUTCOMES,
            "gap, s",
            "recovery, s",
            "billed twice",
            "answered, not billed",
            "slots free",
        ],
    ]
    for result in results:
        cells = [
            result["fault"],
            result["num_requests"],
            *(result["outcomes"][outcome] for outcome in OUTCOMES),
            f"{result['longest_gap_s']:.1f}",
            "-" if result["whole_after_s"] is None else f"{result['whole_after_s']:.0f}",
            result["num_billed_twice"],
            result["num_answered_unbilled"],
            f"{result['slots_answered']} of {result['slots']}",
        ]
        rows.append([str(cell) for cell in cells])
    return "\n".join(markdown(rows))


def _disconnected_clients(fault: dict[str, Any]) -> str:
    return (
        f"{fault['num_requests']} clients started a stream of {fault['tokens_asked_for']} tokens and disconnected"
        f" immediately. The ledger records {fault['cut']} of them as cut off, with at most"
        f" {fault['most_tokens_made']} tokens. Afterwards, {fault['slots_answered']} of {fault['slots']} slots were"
        f" free, and {fault['num_billed_twice']} requests were billed twice."
    )


def _overload(result: dict[str, Any]) -> str:
    rows = [
        ("", ""),
        ("load, as a multiple of capacity", f"{result['factor']:g}"),
        ("capacity, requests/s", f"{result['capacity_per_s']:.1f}"),
        ("seconds", f"{result['seconds']:.0f}"),
        ("requests", result["num_requests"]),
        *result["outcomes"].items(),
        ("share refused", f"{result['share_refused']:.1%}"),
        ("answer without load, s", f"{result['alone_s']:.2f}"),
        ("latency of answered requests: p50, s", _seconds(result["latency_p50_s"])),
        ("p95, s", _seconds(result["latency_p95_s"])),
        ("longest, s", _seconds(result["latency_max_s"])),
        ("time to a refusal: p95, s", _seconds(result["refusal_p95_s"])),
    ]
    return "\n".join(markdown([(name, str(value)) for name, value in rows]))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
