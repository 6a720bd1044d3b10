"""The two plots of a report, as SVG text. What they are drawn with is in `peagle.svg`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from peagle.economics.report.figures import SHARES, in_words_share
from peagle.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    drawing,
    grid_line,
    text,
    title,
    x_axis_name,
    y_axis_name,
)

_LABELLED_BAR = 18  # narrower ones' values would run into each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Acceptance by position of one run; `series` picks its colour."""

    label: str
    rates: Sequence[float]
    series: int


def acceptance_svg(runs: Sequence[Rates]) -> str:
    """Grouped bars: for each draft position, the share of drafts in which it was accepted.

    Args:
        runs: one or more, at most `MAX_SERIES`, each with at least one rate.
    """
    num_positions = max(len(run.rates) for run in runs)
    ceiling = _nice_ceiling(max(max(run.rates) for run in runs))
    plot_height = HEIGHT - TOP - BOTTOM
    group = (WIDTH - LEFT - RIGHT) / num_positions
    bar = min(group * 0.76 / len(runs), 46)

    def y(share: float) -> float:
        return TOP + plot_height * (1 - share / ceiling)

    parts = [grid_line(y(ceiling * step / 4), _grid_label(ceiling * step / 4)) for step in range(5)]
    for position in range(num_positions):
        centre = LEFT + group * (position + 0.5)
        parts.append(text(centre, HEIGHT - BOTTOM + 16, str(position + 1), "tick", "middle"))
        for index, run in enumerate(runs):
            if position < len(run.rates):
                x = centre + bar * (index - len(runs) / 2)
                words = f"{run.label}, position {position + 1}: {run.rates[position]:.1%}"
                parts.append(_column(x, bar, y(run.rates[position]), y(0), run.series, words))
                if bar >= _LABELLED_BAR:
                    parts.append(_value_label(x + bar / 2, y(run.rates[position]), run.rates[position], bar))
    parts += [x_axis_name("position in the draft"), y_axis_name("share of drafts", at_right=True)]
    return drawing(HEIGHT, "Acceptance by position", parts)


def money_svg(runs: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """One bar a run, cut into the shares of its cost. With several runs each bar has its label above it.

    Args:
        runs: label and share by name, each summing to 1 (or all 0 where nothing was spent).
    """
    bar_height, label_height, gap = 34, 18 if len(runs) > 1 else 0, 12
    parts, y = [], 4.0
    for label, shares in runs:
        if label_height:
            parts.append(text(0, y + 12, _shortened(label), "label", "start"))
        parts += _stacked_bar(y + label_height, bar_height, label, shares)
        y += label_height + bar_height + gap
    return drawing(round(y - gap + 4), "Where the money went", parts)


def _stacked_bar(y: float, height: float, label: str, shares: Mapping[str, float]) -> list[str]:
    edges = [0.0]
    for name in SHARES:
        edges.append(edges[-1] + WIDTH * shares[name])
    parts = []
    for name, (start, end) in zip(SHARES, pairwise(edges), strict=True):
        if end <= start:
            continue
        # A gap of 2 between neighbours; a sliver stays visible.
        width = max(end - start - 2, 1)
        words = title(f"{label}: {name} {shares[name]:.1%}")
        parts.append(
            f'<rect class="share-{name}" x="{start:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" '
            f'rx="3">{words}</rect>'
        )
        if width >= 34:
            share = in_words_share(shares[name])
            parts.append(text(start + width / 2, y + height / 2 + 4, share, f"inside on-{name}", "middle"))
    return parts


def _column(x: float, width: float, top: float, base: float, series: int, words: str) -> str:
    """A bar that is square at its base and rounded at its end."""
    width = max(width - 2, 1)
    radius = min(4, width / 2, base - top)
    path = (
        f"M{x + 1:.1f},{base:.1f} V{top + radius:.1f} q0,{-radius:.1f} {radius:.1f},{-radius:.1f} "
        f"h{width - 2 * radius:.1f} q{radius:.1f},0 {radius:.1f},{radius:.1f} V{base:.1f} Z"
    )
    return f'<path class="series-{series}" d="{path}">{title(words)}</path>'


def _value_label(x: float, y: float, rate: float, width: float) -> str:
    share = in_words_share(rate)
    return text(x, y - 5, share if width >= 26 else share.rstrip("%"), "value", "middle")


def _grid_label(share: float) -> str:
    return f"{share:.3g}" if share == 0 else f"{100 * share:.3g}%"


def _nice_ceiling(share: float) -> float:
    return next(ceiling for ceiling in (0.2, 0.4, 0.6, 0.8, 1.0) if share <= ceiling)


def _shortened(label: str, num_letters: int = 64) -> str:
    return label if len(label) <= num_letters else label[: num_letters - 1] + "…"
