"""Savings of a run or a group of charges, as text."""

from collections.abc import Mapping
from typing import Any

from peagle.economics.report.figures import format_count, format_share, format_usd


def saved_lines(saved: Mapping[str, Any], counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a name and a sentence for each kind of savings that applies.

    Args:
        saved: from `Savings.to_dict`.
        counts: with `num_prompt_tokens` and `num_cached_tokens`.
    """
    prompt, cached = counts["num_prompt_tokens"], counts["num_cached_tokens"]
    share = f" ({format_share(cached / prompt)})" if prompt else ""
    lines = (
        ("drafter", _speculation(saved["speculation"])),
        ("spot", _spot(saved["spot"])),
        ("cached", f"{format_count(cached)} of {format_count(prompt)} prompt tokens{share}"),
        ("prompts", _split(saved)),
    )
    return [(name, text) for name, text in lines if text]


def savings_of_run(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the savings in a run's report, without cached tokens. Older reports have none."""
    lines = saved_lines(report["saved"], report["account"]) if "saved" in report else []
    return [(name, text) for name, text in lines if name != "cached"]


def format_drafter_savings(one: Mapping[str, Any]) -> str | None:
    """Return a drafter's savings with the error, as "$0.0250 ± $0.0013 saved", or None if unknown.

    Args:
        one: `speculation` of `Savings.to_dict`.
    """
    if one["usd"] is None:
        return None
    verb = "saved" if one["usd"] >= 0 else "lost"
    error = "of unknown error" if one["error_usd"] is None else f"± {format_usd(one['error_usd'])}"
    return f"{format_usd(abs(one['usd']))} {error} {verb}"


def _speculation(one: Mapping[str, Any]) -> str:
    rest = one["unknown_usd"]
    known = format_drafter_savings(one)
    if known is None:
        return "unknown: its step times were not measured, or its drafts were not counted" if rest else ""
    lengths = (
        f"{known}: generation cost {format_usd(one['with_usd'])}, without a drafter "
        f"{format_usd(one['without_usd'])}; "
        f"acceptance length {one['acceptance_length']:.2f}, break-even {one['break_even_acceptance_length']:.2f}"
    )
    return f"{lengths}; unknown for {format_usd(rest)}" if rest else lengths


def _spot(one: Mapping[str, Any]) -> str:
    rest = one["unknown_usd"]
    if one["usd"] is None:
        return "unknown: there is no on-demand price" if rest else ""
    verb = "saved" if one["usd"] >= 0 else "lost"
    known = (
        f"{format_usd(abs(one['usd']))} {verb}, net of lost work: spot {format_usd(one['spot_usd'])}, "
        f"on demand {format_usd(one['on_demand_usd'])}"
    )
    return f"{known}; unknown for {format_usd(rest)}" if rest else known


def _split(saved: Mapping[str, Any]) -> str:
    if saved["prompt_usd"] is None:
        return "unknown: no step times were measured" if saved["unsplit_usd"] else ""
    known = f"{format_usd(saved['prompt_usd'])}, and generation {format_usd(saved['generation_usd'])}"
    return f"{known}; unknown for {format_usd(rest)}" if (rest := saved["unsplit_usd"]) else known
