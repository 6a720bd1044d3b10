"""Plan the cheapest fleet, with alternatives and the effect of the acceptance length on the cost."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peagle.economics.prices import PriceTable
from peagle.economics.report.figures import format_duration, format_share, format_usd
from peagle.errors import ConfigError
from peagle.planning.config import PlanConfig
from peagle.planning.options import (
    ASSUMED_START_S,
    Fleet,
    exceeded_limit,
    find_fleets,
    with_acceptance_factor,
    with_cell,
)
from peagle.planning.sweeps import read_sweeps
from peagle.profiles.measurements import method_label
from peagle.speculation import break_even_acceptance_length
from peagle.tables import aligned

SCHEMA = 1


def make_plan(config: PlanConfig) -> dict[str, Any]:
    sweeps = read_sweeps(config.measured or [Path(config.model or "")])
    if len({sweep.model for sweep in sweeps}) > 1:
        raise ConfigError(
            f"the measurements are for several models: {', '.join(sorted({sweep.model for sweep in sweeps}))}",
            hint="plan for one model at a time",
        )
    fleets, reasons = find_fleets(config, sweeps, PriceTable.load(config.prices))
    if not fleets:
        raise ConfigError(
            "no fleet meets the goal:\n  " + "\n  ".join(reasons),
            hint="allow more time, latency or machines, or measure other hardware",
        )
    chosen = fleets[0]
    # The cheapest fleet for each machine and market, one with and one without a drafter.
    best: dict[tuple[str, str, bool], Fleet] = {}
    for fleet in fleets:
        best.setdefault((fleet.machine.price.instance_type, fleet.market, fleet.cell.has_drafter), fleet)
    return {
        "schema": SCHEMA,
        "model": chosen.sweep.model,
        "wanted": config.model_dump(mode="json"),
        "labels": [label for sweep in sweeps for label in sweep.labels],
        "chosen": option_dict(chosen, config),
        "command": _command(chosen, config),
        "options": [option_dict(fleet, config) for fleet in best.values()],
        "sensitivity": _sensitivity(chosen, config),
        "break_even_acceptance_length": _break_even(chosen, config),
        "least_acceptance_length": _least_length(chosen, config),
        "notes": [
            *([f"{sweep.name}: {caveat}" for sweep in sweeps for caveat in sweep.caveats]),
            *reasons,
            *_notes_on_chosen(chosen),
        ],
    }


def option_dict(fleet: Fleet, config: PlanConfig) -> dict[str, Any]:
    cell, price, estimate = fleet.cell, fleet.machine.price, fleet.estimate
    return {
        "instance_type": price.instance_type,
        "place": f"{price.provider} {price.region}".strip(),
        "market": price.market,
        "usd_per_machine_h": price.usd_per_hour,
        "measured": fleet.sweep.name,
        "precision": fleet.sweep.precision,
        "start_is_assumed": fleet.cell.start_s is None,
        "method": cell.method,
        "k": cell.k,
        "label": method_label(cell.method, cell.k),
        "concurrency": cell.concurrency,
        "output_tokens_per_s": cell.output_tokens_per_s,
        "acceptance_length": cell.acceptance_length,
        "num_machines": fleet.num_machines,
        "num_engines": fleet.num_engines,
        "hours": estimate.wall_s / 3600 if estimate else None,
        "usd": estimate.usd if estimate else None,
        "usd_per_h": fleet.usd_per_h,
        "usd_per_million_tokens": fleet.usd_per_million_tokens(config.tokens_per_s),
        "lost_share": estimate.lost_share if estimate else 1 - fleet.machine.useful_share,
        "device_s": asdict(estimate.device_s) if estimate else None,
    }


def _command(chosen: Fleet, config: PlanConfig) -> list[str]:
    """Return the command for the chosen fleet: a bulk run, or an endpoint if the goal is tokens per second."""
    cell, price = chosen.cell, chosen.machine.price
    command = ["peagle", "generate" if config.tokens_per_s is None else "serve", "--model", chosen.sweep.model]
    command += ["--drafter", cell.method]
    if cell.has_drafter:
        command += ["--num-speculative-tokens", str(cell.k)]
    command += ["--max-num-seqs", str(cell.concurrency)]
    command += ["--engines" if config.tokens_per_s is None else "--max-replicas", str(chosen.num_engines)]
    if price.market != "fixed":
        command += ["--instance-type", price.instance_type, "--market", price.market, "--provider", price.provider]
    if config.tokens_per_s is None:
        command += ["--input", "CORPUS", "--output", "DIR"]
    return command


def _sensitivity(chosen: Fleet, config: PlanConfig) -> list[dict[str, Any]]:
    """Return the chosen fleet at other acceptance lengths; empty if its speed does not depend on them."""
    length = chosen.cell.acceptance_length
    if length is None or not chosen.cell.drafts_each_step:
        return []
    rows = []
    for factor in (0.7, 0.8, 0.9, 1.0, 1.1, 1.2):
        if not 1 <= length * factor <= chosen.cell.k + 1:
            continue
        fleet = with_cell(chosen, with_acceptance_factor(chosen.cell, factor), config)
        if fleet is not None:
            rows.append(option_dict(fleet, config) | {"factor": factor, "beyond": exceeded_limit(fleet, config)})
    return rows


def _break_even(chosen: Fleet, config: PlanConfig) -> float | None:
    """Return the acceptance length below which the fastest possible cell without a drafter is cheaper."""
    length = chosen.cell.acceptance_length
    cells_without_drafter = [
        cell
        for cell in chosen.sweep.cells
        if not cell.has_drafter and _is_possible(with_cell(chosen, cell, config), config)
    ]
    if length is None or not cells_without_drafter or not chosen.cell.drafts_each_step:
        return None
    best = max(cell.output_tokens_per_s for cell in cells_without_drafter)
    # The arguments are step times: a step yields the acceptance length in tokens, or one token without drafts.
    return break_even_acceptance_length(length / chosen.cell.output_tokens_per_s, 1 / best)


def _least_length(chosen: Fleet, config: PlanConfig) -> float | None:
    """Find by bisection the acceptance length below which the chosen fleet exceeds a limit, if any."""
    length = chosen.cell.acceptance_length
    if length is None or not chosen.cell.drafts_each_step:
        return None

    def is_possible(other_length: float) -> bool:
        return _is_possible(
            with_cell(chosen, with_acceptance_factor(chosen.cell, other_length / length), config), config
        )

    too_short, sufficient = 1.0, length
    if is_possible(too_short):
        return None
    while sufficient - too_short > 1e-4:
        middle = (too_short + sufficient) / 2
        too_short, sufficient = (too_short, middle) if is_possible(middle) else (middle, sufficient)
    return sufficient


def _is_possible(fleet: Fleet | None, config: PlanConfig) -> bool:
    return fleet is not None and exceeded_limit(fleet, config) is None


def _notes_on_chosen(chosen: Fleet) -> list[str]:
    cell, price = chosen.cell, chosen.machine.price
    notes = [f"The price might be wrong: {price.doubt}."] if price.doubt else []
    if cell.spread:
        notes.append(f"The measured speed varied by {cell.spread:.0%} between repeats; hours and dollars vary equally.")
    unused = price.num_devices - chosen.machine.num_engines * chosen.machine.devices_per_engine
    if unused:
        notes.append(f"{unused} of {price.num_devices} devices per machine have no engine but are paid for.")
    return notes


_OPTION_COLUMNS = (
    *("machine", "place", "market", "machines", "engines", "method", "concurrency"),
    *("hours", "dollars", "$/M tokens", "lost"),
)


def text_plan(plan: Mapping[str, Any]) -> str:
    lines = [f"! {label}" for label in plan["labels"]]
    has_several_sources = len(plan["wanted"]["measured"]) > 1
    lines += [_sentence(plan["chosen"], has_several_sources=has_several_sources), ""]
    lines += aligned(_option_rows(plan["options"], has_several_sources=has_several_sources))
    if plan["sensitivity"]:
        lines += ["", *aligned(_sensitivity_rows(plan))]
        if (length := plan["break_even_acceptance_length"]) is not None:
            lines.append(f"Below an acceptance length of {length:.2f}, it is cheaper not to speculate.")
        if (length := plan["least_acceptance_length"]) is not None:
            lines.append(f"Below an acceptance length of {length:.2f}, the choice exceeds a given limit.")
    wanted = plan["wanted"]
    assumed = [
        f"{wanted['spot_interruptions_per_h']:g} interruptions per hour of a spot machine",
        f"{wanted['failures_per_h']:g} failures per hour",
        f"{wanted['provision_s']:g} s until machines are available",
        f"{wanted['replace_s']:g} s to replace a machine",
    ]
    if wanted["tokens_per_s"] is not None:
        assumed.insert(0, f"machines used to {wanted['target_utilisation']:.0%} of their capacity")
    if wanted["start_s"] is None and plan["chosen"]["start_is_assumed"]:
        assumed.append(f"{ASSUMED_START_S:g} s to start an engine")
    lines += ["", f"Assumed, not measured: {', '.join(assumed)}.", *plan["notes"]]
    return "\n".join([*lines, "", "Run it with:", f"  {shlex.join(plan['command'])}"])


def _sentence(option: Mapping[str, Any], *, has_several_sources: bool) -> str:
    fleet = f"{option['num_machines']} x {option['instance_type']} {option['market'].replace('_', '-')}"
    count = f"{option['num_engines']} engine{'s' if option['num_engines'] > 1 else ''}"
    engines = f"{count}, {option['label']}, {option['concurrency']} concurrent requests each"
    engines += f", as measured in {_measurement_name(option)}" if has_several_sources else ""
    price = f"{format_usd(option['usd_per_million_tokens'])} per million tokens"
    if option["usd"] is None:
        return f"{fleet}: {engines}; {format_usd(option['usd_per_h'])} an hour, {price}."
    return f"{fleet}: {engines}; {format_duration(option['hours'] * 3600)}, {format_usd(option['usd'])}, {price}."


def _option_rows(options: Sequence[Mapping[str, Any]], *, has_several_sources: bool) -> list[list[str]]:
    rows = [[*_OPTION_COLUMNS, *(["measured in"] if has_several_sources else [])]]
    return rows + [
        [
            option["instance_type"],
            option["place"] or "-",
            option["market"].replace("_", "-"),
            f"{option['num_machines']:,}",
            f"{option['num_engines']:,}",
            option["label"],
            str(option["concurrency"]),
            *_cost(option),
            format_share(option["lost_share"]),
            *([_measurement_name(option)] if has_several_sources else []),
        ]
        for option in options
    ]


def _measurement_name(option: Mapping[str, Any]) -> str:
    return f"{option['measured']} ({option['precision']})" if option["precision"] else str(option["measured"])


def _sensitivity_rows(plan: Mapping[str, Any]) -> list[list[str]]:
    exceeds_a_limit = any(option["beyond"] for option in plan["sensitivity"])
    columns = ["acceptance length", "tokens/s of an engine", "machines", "hours", "dollars", "$/M tokens"]
    rows = [[*columns, *(["not possible"] if exceeds_a_limit else [])]]
    for option in plan["sensitivity"]:
        change = " (measured)" if option["factor"] == 1 else f" ({option['factor'] - 1:+.0%})"
        rows.append(
            [
                f"{option['acceptance_length']:.2f}{change}",
                f"{option['output_tokens_per_s']:,.1f}",
                f"{option['num_machines']:,}",
                *_cost(option),
                *([option["beyond"] or "-"] if exceeds_a_limit else []),
            ]
        )
    return rows


def _cost(option: Mapping[str, Any]) -> list[str]:
    if option["usd"] is None:
        return ["-", f"{format_usd(option['usd_per_h'])}/h", format_usd(option["usd_per_million_tokens"])]
    return [f"{option['hours']:,.2f}", format_usd(option["usd"]), format_usd(option["usd_per_million_tokens"])]
