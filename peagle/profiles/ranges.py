"""The validity of a measured choice: acceptance lengths and concurrencies.

Pure.

The time of a step does not depend on what is accepted. So with `s` times as many accepted drafts a step as were
measured, a cell that made `v` tokens/s at an acceptance length `a` makes

    v / a * (1 + s * (a - 1))

which is a line in `s`, and level without speculation. Other prompts move all drafters together, so one `s` holds for
all of them, and the choice is right as long as its line is the highest. Worked by hand: none 40 tokens/s, P-EAGLE K=3
50 at 1.6, so 31.25 * (1 + 0.6 s). The lines cross at s = 0.467, an acceptance length of 1.28: below, none is faster.

The time per output token is that of a step over what it yields. A cell of 20 ms at 1.6 makes 25 ms at 1.28, so that
under a limit of 22 ms its choice ends at 1.6 * 20 / 22 = 1.45 already.

It knows cells; it knows nothing of runs, engines or files.
"""

import math
from collections.abc import Sequence

from peagle.profiles.measurements import Cell
from peagle.speculation import break_even_acceptance_length

_AS_GOOD = 0.02  # a choice this share behind the best is still the choice


def acceptance_range(
    chosen: Cell, cells: Sequence[Cell], *, max_tpot_ms: float | None = None
) -> tuple[float, float] | None:
    """The acceptance lengths at which `chosen` is the fastest of its concurrency.

    It is within a limit there, too.

    None where it does not draft. The measured length is always within: a choice is not doubted by what it was made
    from.
    """
    if chosen.acceptance_length is None:
        return None
    low, high = 0.0, math.inf
    level, slope = _line(chosen)
    for other in _alternatives(chosen, cells):
        other_level, other_slope = _line(other)
        if slope == other_slope:
            continue
        crossing = (other_level - level) / (slope - other_slope)
        if slope > other_slope:
            low = max(low, crossing)
        else:
            high = min(high, crossing)
    accepted = chosen.acceptance_length - 1
    length_low = 1 + min(low, 1.0) * accepted
    if max_tpot_ms is not None and (tpot_s := tpot_s_at(chosen, 1.0)) is not None:
        length_low = max(length_low, chosen.acceptance_length * min(tpot_s * 1000 / max_tpot_ms, 1.0))
    return length_low, min(1 + max(high, 1.0) * accepted, chosen.k + 1) if accepted else float(chosen.k + 1)


def concurrency_range(chosen: Cell, cells: Sequence[Cell]) -> tuple[int, int]:
    """The measured concurrencies around the chosen one at which it stays the best.

    The same method and K is the fastest there, or as good.
    """
    measured = sorted({cell.concurrency for cell in cells})
    position = low = high = measured.index(chosen.concurrency)
    while low > 0 and _is_best_at(chosen, cells, measured[low - 1]):
        low -= 1
    while high + 1 < len(measured) and _is_best_at(chosen, cells, measured[high + 1]):
        high += 1
    assert low <= position <= high
    return measured[low], measured[high]


def break_evens(chosen: Cell, cells: Sequence[Cell]) -> dict[int, float]:
    """The acceptance lengths below which no speculation is faster than the choice.

    By concurrency, where both were measured; empty where the method does not draft in every step.
    """
    plain = {cell.concurrency: cell.output_tokens_per_s for cell in cells if not cell.drafts}
    return {
        cell.concurrency: break_even_acceptance_length(
            cell.acceptance_length / cell.output_tokens_per_s, 1 / plain[cell.concurrency]
        )
        for cell in cells
        if (cell.method, cell.k) == (chosen.method, chosen.k)
        and cell.drafts_each_step
        and cell.acceptance_length is not None
        and cell.concurrency in plain
    }


def best_at(cells: Sequence[Cell], concurrency: float) -> Cell:
    """The fastest cell at the measured concurrency nearest to this one, by ratio."""
    nearest = min({cell.concurrency for cell in cells}, key=lambda measured: abs(math.log(measured / concurrency)))
    return max((c for c in cells if c.concurrency == nearest), key=lambda cell: cell.output_tokens_per_s)


def best_with_acceptance(
    chosen: Cell, cells: Sequence[Cell], length: float, *, max_tpot_ms: float | None = None
) -> tuple[Cell, float] | None:
    """The fastest cell, if the chosen one had another acceptance length.

    At the chosen concurrency.

    Returns:
        It, and its tokens/s over those of the chosen one there; `chosen` and 1.0 where nothing beats it. None where
        all would be beyond the limit.
    """
    scale = scale_of(chosen, length)
    within = [cell for cell in [chosen, *_alternatives(chosen, cells)] if _keeps(max_tpot_ms, tpot_s_at(cell, scale))]
    if not within:
        return None
    found = max(within, key=lambda cell: _speed(cell, scale))
    return found, _speed(found, scale) / _speed(chosen, scale)


def scale_of(chosen: Cell, length: float) -> float:
    """`s`, at which the chosen cell has this acceptance length."""
    assert chosen.acceptance_length is not None, "it drafts"
    accepted = chosen.acceptance_length - 1
    return (length - 1) / accepted if accepted else 1.0


def tpot_s_at(cell: Cell, scale: float) -> float | None:
    """The p95 time per output token with `scale` times as many accepted drafts.

    None where it was not measured.
    """
    measured_s = (cell.tpot_s or {}).get("p95")
    return None if measured_s is None else measured_s * cell.output_tokens_per_s / _speed(cell, scale)


def _keeps(max_tpot_ms: float | None, tpot_s: float | None) -> bool:
    return max_tpot_ms is None or (tpot_s is not None and tpot_s * 1000 <= max_tpot_ms)


def _alternatives(chosen: Cell, cells: Sequence[Cell]) -> list[Cell]:
    """Others at the same concurrency of which it is known how they would do."""
    here = [c for c in cells if c.concurrency == chosen.concurrency and c != chosen]
    return [cell for cell in here if not cell.drafts or cell.acceptance_length is not None]


def _line(cell: Cell) -> tuple[float, float]:
    """Tokens/s if nothing were accepted, and what is added for all that was."""
    length = cell.acceptance_length or 1.0
    level = cell.output_tokens_per_s / length
    return level, level * (length - 1)


def _speed(cell: Cell, scale: float) -> float:
    """Tokens/s with `scale` times as many accepted drafts; no more than all of them."""
    level, slope = _line(cell)
    return level + min(scale * slope, level * cell.k)


def _is_best_at(chosen: Cell, cells: Sequence[Cell], concurrency: int) -> bool:
    here = [cell for cell in cells if cell.concurrency == concurrency]
    own = [cell.output_tokens_per_s for cell in here if (cell.method, cell.k) == (chosen.method, chosen.k)]
    return bool(own) and max(own) >= (1 - _AS_GOOD) * max(cell.output_tokens_per_s for cell in here)
