"""The two plots of a report, as SVG text.

Drawn by hand rather than by a plotting library: colours are CSS classes, so that one drawing serves light and
dark, text stays text, and the drawing scales with the screen. The page's style sheet defines the classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from peagle.economics.report.figures import SHARES, in_words_share

WIDTH = 440
# More series than colours that can be told apart.
MAX_SERIES = 6
_LEFT, _RIGHT = 38, 6


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
    top, bottom, height = 18, 34, 250
    num_positions = max(len(run.rates) for run in runs)
    ceiling = _nice_ceiling(max(max(run.rates) for run in runs))
    plot_height = height - top - bottom
    group = (WIDTH - _LEFT - _RIGHT) / num_positions
    bar = min(group * 0.76 / len(runs), 46)

    def y(share: float) -> float:
        return top + plot_height * (1 - share / ceiling)

    parts = [_grid_line(y(ceiling * step / 4), ceiling * step / 4) for step in range(5)]
    for position in range(num_positions):
        centre = _LEFT + group * (position + 0.5)
        parts.append(_text(centre, height - bottom + 16, str(position + 1), "tick", "middle"))
        for index, run in enumerate(runs):
            if position < len(run.rates):
                x = centre + bar * (index - len(runs) / 2)
                title = f"{run.label}, position {position + 1}: {run.rates[position]:.1%}"
                parts.append(_column(x, bar, y(run.rates[position]), y(0), run.series, title))
                if bar >= 15:
                    parts.append(_value_label(x + bar / 2, y(run.rates[position]), run.rates[position], bar))
    parts.append(_text(_LEFT + (WIDTH - _LEFT - _RIGHT) / 2, height - 2, "position in the draft", "axis", "middle"))
    return _svg(height, "Acceptance by position", parts)


def money_svg(runs: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """One bar a run, cut into the shares of its cost. With several runs each bar has its label above it.

    Args:
        runs: label and share by name, each summing to 1 (or all 0 where nothing was spent).
    """
    bar_height, label_height, gap = 34, 18 if len(runs) > 1 else 0, 12
    parts, y = [], 4.0
    for label, shares in runs:
        if label_height:
            parts.append(_text(0, y + 12, _shortened(label), "label", "start"))
        parts += _stacked_bar(y + label_height, bar_height, label, shares)
        y += label_height + bar_height + gap
    return _svg(round(y - gap + 4), "Where the money went", parts)


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
        title = _title(f"{label}: {name} {shares[name]:.1%}")
        parts.append(
            f'<rect class="share-{name}" x="{start:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" '
            f'rx="3">{title}</rect>'
        )
        if width >= 34:
            text = in_words_share(shares[name])
            parts.append(_text(start + width / 2, y + height / 2 + 4, text, f"inside on-{name}", "middle"))
    return parts


def _column(x: float, width: float, top: float, base: float, series: int, title: str) -> str:
    """A bar that is square at its base and rounded at its end."""
    width = max(width - 2, 1)
    radius = min(4, width / 2, base - top)
    path = (
        f"M{x + 1:.1f},{base:.1f} V{top + radius:.1f} q0,{-radius:.1f} {radius:.1f},{-radius:.1f} "
        f"h{width - 2 * radius:.1f} q{radius:.1f},0 {radius:.1f},{radius:.1f} V{base:.1f} Z"
    )
    return f'<path class="series-{series}" d="{path}">{_title(title)}</path>'


def _value_label(x: float, y: float, rate: float, width: float) -> str:
    text = in_words_share(rate)
    return _text(x, y - 5, text if width >= 26 else text.rstrip("%"), "value", "middle")


def _grid_line(y: float, share: float) -> str:
    line = f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(_LEFT - 6, y + 4, f"{share:.3g}" if share == 0 else f"{100 * share:.3g}%", "tick", "end")


def _nice_ceiling(share: float) -> float:
    return next(ceiling for ceiling in (0.2, 0.4, 0.6, 0.8, 1.0) if share <= ceiling)


def _shortened(label: str, num_letters: int = 64) -> str:
    return label if len(label) <= num_letters else label[: num_letters - 1] + "…"


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _svg(height: int, name: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(name)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
