"""The figures of a report (name, location in the report, format), and savings as text."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from peagle.economics.usage import EngineSession

SHARES = ("load", "compile", "busy", "idle", "lost")
SHARE_MEANINGS = {
    "load": "loading weights into memory",
    "compile": "compiling and warming up",
    "busy": "committed output",
    "idle": "engine running without requests",
    "lost": "work that was not committed",
}
UNKNOWN = "-"


def format_usd(usd: float) -> str:
    """Return dollars and cents, or three significant digits for amounts below one dollar.

    >>> format_usd(1234.5), format_usd(0.0053161), format_usd(1.7e-8), format_usd(0)
    ('$1,234.50', '$0.00532', '<$0.000001', '$0')
    """
    if usd == 0:
        return "$0"
    if 0 < usd < 1e-6:
        return "<$0.000001"
    decimals = 2 if usd >= 1 else 2 - math.floor(math.log10(usd))
    return f"${usd:,.{decimals}f}"


def format_count(count: float) -> str:
    """Return a count, in millions if it is large.

    >>> format_count(5872), format_count(1_104_862.4)
    ('5,872', '1.10 M')
    """
    return f"{count / 1e6:,.2f} M" if count >= 1e6 else f"{count:,.0f}"


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units.

    >>> format_duration(7.31), format_duration(189), format_duration(7500)
    ('7.3 s', '3 min 9 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_share(share: float) -> str:
    """Return a fraction in percent; a small one is "<1%", never "0%".

    >>> format_share(0.482), format_share(0.0004), format_share(0)
    ('48%', '<1%', '0%')
    """
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def _format_decimals(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of a report. `path` is its location; `has_ratio` says whether the ratio of two runs is meaningful."""

    name: str
    label: str
    path: tuple[str, ...]
    format: Callable[[float], str]
    has_ratio: bool = True

    def value(self, report: Mapping[str, Any]) -> float | None:
        value: Any = report
        for key in self.path:
            value = value[key]
        return None if value is None else float(value)

    def text(self, report: Mapping[str, Any]) -> str:
        value = self.value(report)
        return UNKNOWN if value is None else self.format(value)


def _account_figure(name: str, label: str, format: Callable[[float], str], *, has_ratio: bool = True) -> Figure:
    return Figure(name=name, label=label, path=("account", name), format=format, has_ratio=has_ratio)


FIGURES = {
    figure.name: figure
    for figure in (
        _account_figure("tokens_per_usd", "output tokens per dollar", format_count),
        _account_figure("usd_per_million_tokens", "per million output tokens", format_usd),
        _account_figure("tokens_per_busy_usd", "tokens per dollar, busy time only", format_count),
        _account_figure("output_tokens_per_s", "output tokens/s of a busy engine", _format_decimals),
        _account_figure("output_tokens_per_wall_s", "output tokens/s of the whole run", _format_decimals),
        Figure(
            name="acceptance_length",
            label="acceptance length",
            path=("account", "speculation", "acceptance_length"),
            format="{:.2f}".format,
        ),
        Figure(name="total_usd", label="cost", path=("account", "usd", "total"), format=format_usd, has_ratio=False),
        _account_figure("wall_s", "engines up", format_duration, has_ratio=False),
        _account_figure("num_rows", "rows committed", format_count, has_ratio=False),
        _account_figure("num_failed_rows", "rows failed", format_count, has_ratio=False),
        _account_figure("num_output_tokens", "output tokens", format_count, has_ratio=False),
        _account_figure("num_prompt_tokens", "prompt tokens", format_count, has_ratio=False),
        *(
            Figure(
                name=f"share_{share}",
                label=f"spent on {share}",
                path=("shares", share),
                format=format_share,
                has_ratio=False,
            )
            for share in SHARES
        ),
    )
}


# Labels for costs that are not a real bill.
FAKE_ENGINE = "FAKE ENGINE: speed and dollars are not real"
ASSUMED = "price assumed"


def money_labels(report: Mapping[str, Any]) -> list[str]:
    """Return short labels that say why the cost in a report is not a real bill."""
    return _labels(report["run"].get("is_stand_in"), report["account"]["price"].get("basis") == "assumed")


def cost_notes(sessions: Iterable[EngineSession]) -> list[str]:
    sessions = list(sessions)
    is_fake = any(session.is_stand_in for session in sessions)
    return _labels(is_fake, any(session.price_basis == "assumed" for session in sessions))


def _labels(is_fake: bool, is_price_assumed: bool) -> list[str]:
    return [FAKE_ENGINE] * bool(is_fake) + [ASSUMED] * is_price_assumed


def format_price(price: Mapping[str, Any]) -> str:
    """Return a price as one line.

    For example "$0.10264 per hour for 2 vCPUs (c7a.large, on-demand, aws us-east-1; assumed)".
    """
    num_devices = price["num_devices"]
    device = price["accelerator"] or "accelerator" if price["device"] == "accelerator" else "vCPU"
    plural = "s" if num_devices != 1 and device in ("vCPU", "accelerator") else ""
    place = f"{price['provider']} {price['region']}".strip()
    market = price["market"].replace("_", "-")
    origin = ", ".join(part for part in (price["instance_type"], market, place) if part)
    basis = f"; {price['basis']}" if price.get("basis") else ""  # missing in older reports
    if price["market"] == "fixed":
        origin, basis = "stated by the user", ""
    return f"${price['usd_per_hour']:g} per hour for {num_devices} {device}{plural} ({origin}{basis})"


def saved_lines(saved: Mapping[str, Any], counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the name and text of each kind of savings that applies, and of the cost of prompts and generation."""
    prompt, cached = counts["num_prompt_tokens"], counts["num_cached_tokens"]
    share = f" ({format_share(cached / prompt)})" if prompt else ""
    lines = (
        ("drafter", _speculation_text(saved["speculation"])),
        ("spot", _spot_text(saved["spot"])),
        ("cached", f"{format_count(cached)} of {format_count(prompt)} prompt tokens{share}"),
        ("prompts", _prompt_and_generation_text(saved)),
    )
    return [(name, text) for name, text in lines if text]


def savings_of_run(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the savings in a run's report, without cached tokens. Empty for older reports."""
    lines = saved_lines(report["saved"], report["account"]) if "saved" in report else []
    return [(name, text) for name, text in lines if name != "cached"]


def _speculation_text(savings: Mapping[str, Any]) -> str:
    known_text = ""
    if savings["usd"] is not None:
        error = "(error unknown)" if savings["error_usd"] is None else f"± {format_usd(savings['error_usd'])}"
        cost, cost_without = format_usd(savings["with_usd"]), format_usd(savings["without_usd"])
        known_text = (
            f"{format_usd(abs(savings['usd']))} {error} {_saved_or_lost(savings['usd'])}: "
            f"generation cost {cost}, without a drafter {cost_without}; "
            f"acceptance length {savings['acceptance_length']:.2f}, "
            f"break-even {savings['break_even_acceptance_length']:.2f}"
        )
    reason = "the drafter's step times were not measured, or its drafts were not counted"
    return _with_unknown(known_text, savings["unknown_usd"], reason)


def _spot_text(savings: Mapping[str, Any]) -> str:
    known_text = ""
    if savings["usd"] is not None:
        known_text = (
            f"{format_usd(abs(savings['usd']))} {_saved_or_lost(savings['usd'])}, net of lost work: "
            f"spot {format_usd(savings['spot_usd'])}, on demand {format_usd(savings['on_demand_usd'])}"
        )
    return _with_unknown(known_text, savings["unknown_usd"], "there is no on-demand price")


def _prompt_and_generation_text(saved: Mapping[str, Any]) -> str:
    known_text = ""
    if saved["prompt_usd"] is not None:
        known_text = f"{format_usd(saved['prompt_usd'])}, and generation {format_usd(saved['generation_usd'])}"
    return _with_unknown(known_text, saved["unsplit_usd"], "no step times were measured")


def _saved_or_lost(usd: float) -> str:
    return "saved" if usd >= 0 else "lost"


def _with_unknown(known_text: str, unknown_usd: float, reason: str) -> str:
    if not unknown_usd:
        return known_text
    return f"{known_text}; unknown for {format_usd(unknown_usd)}" if known_text else f"unknown: {reason}"
