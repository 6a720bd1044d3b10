"""A plan as text for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from peagle.economics.report.figures import format_duration, format_share, format_usd
from peagle.tables import aligned

Rows = list[list[str]]
_OPTION_COLUMNS = (
    *("machine", "place", "market", "machines", "replicas", "method", "at once"),
    *("hours", "dollars", "$/M tokens", "lost"),
)


def text_plan(plan: Mapping[str, Any]) -> str:
    lines = [f"! {label}" for label in plan["labels"]]
    has_several = len(plan["wanted"]["measured"]) > 1
    lines += [_sentence(plan["chosen"], has_several=has_several), ""]
    lines += aligned(_option_rows(plan["options"], has_several=has_several))
    if plan["sensitivity"]:
        lines += ["", *aligned(_sensitivity_rows(plan))]
        if (length := plan["break_even_acceptance_length"]) is not None:
            lines.append(f"Below an acceptance length of {length:.2f} no speculation is cheaper.")
        if (length := plan["least_acceptance_length"]) is not None:
            lines.append(f"Below an acceptance length of {length:.2f} the choice is beyond a limit that was given.")
    lines += ["", _assumed(plan["wanted"])]
    return "\n".join([*lines, *plan["notes"]])


def _sentence(one: Mapping[str, Any], *, has_several: bool) -> str:
    fleet = f"{one['num_machines']} x {one['instance_type']} {one['market'].replace('_', '-')}"
    how = f"{one['num_engines']} engines, {one['label']}, {one['concurrency']} requests at once on each"
    how += f", as measured in {_measured(one)}" if has_several else ""
    price = f"{format_usd(one['usd_per_million_tokens'])} per million tokens"
    if one["usd"] is None:
        return f"{fleet}: {how}; {format_usd(one['usd_per_h'])} an hour, {price}."
    return f"{fleet}: {how}; {format_duration(one['hours'] * 3600)}, {format_usd(one['usd'])}, {price}."


def _option_rows(options: Sequence[Mapping[str, Any]], *, has_several: bool) -> Rows:
    rows = [[*_OPTION_COLUMNS, *(["measured in"] if has_several else [])]]
    return rows + [
        [
            one["instance_type"],
            one["place"] or "-",
            one["market"].replace("_", "-"),
            f"{one['num_machines']:,}",
            f"{one['num_engines']:,}",
            one["label"],
            str(one["concurrency"]),
            *_cost(one),
            format_share(one["lost_share"]),
            *([_measured(one)] if has_several else []),
        ]
        for one in options
    ]


def _measured(one: Mapping[str, Any]) -> str:
    return f"{one['measured']} ({one['precision']})" if one["precision"] else str(one["measured"])


def _sensitivity_rows(plan: Mapping[str, Any]) -> Rows:
    has_beyond = any(one["beyond"] for one in plan["sensitivity"])
    columns = ["acceptance length", "tokens/s of an engine", "machines", "hours", "dollars", "$/M tokens"]
    rows = [[*columns, *(["not possible"] if has_beyond else [])]]
    for one in plan["sensitivity"]:
        measured = " (measured)" if one["factor"] == 1 else f" ({one['factor'] - 1:+.0%})"
        rows.append(
            [
                f"{one['acceptance_length']:.2f}{measured}",
                f"{one['output_tokens_per_s']:,.1f}",
                f"{one['num_machines']:,}",
                *_cost(one),
                *([one["beyond"] or "-"] if has_beyond else []),
            ]
        )
    return rows


def _cost(one: Mapping[str, Any]) -> list[str]:
    if one["usd"] is None:
        return ["-", f"{format_usd(one['usd_per_h'])}/h", format_usd(one["usd_per_million_tokens"])]
    return [f"{one['hours']:,.2f}", format_usd(one["usd"]), format_usd(one["usd_per_million_tokens"])]


def _assumed(wanted: Mapping[str, Any]) -> str:
    of_service = [f"machines used to {wanted['target_utilisation']:.0%} of their capacity"]
    parts = [
        *(of_service if wanted["tokens_per_s"] is not None else []),
        f"{wanted['spot_interruptions_per_h']:g} interruptions an hour of a spot machine",
        f"{wanted['failures_per_h']:g} failures",
        f"{wanted['provision_s']:g} s until machines are available",
        f"{wanted['replace_s']:g} s to replace one",
    ]
    return f"Assumed, not measured: {', '.join(parts)}."
