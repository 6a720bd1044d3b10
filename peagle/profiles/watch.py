"""Watch over a drafter or a profile: advice where it no longer fits.

Bulk runs and the endpoint share it. It knows break-evens, profiles and two live figures, and says each thing once.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from peagle.profiles.measurements import Cell, method_label
from peagle.profiles.profile import MeasuredCell, Profile
from peagle.profiles.ranges import best_at, best_with_acceptance, scale_of, tpot_s_at
from peagle.speculation import SpeculationStats, note

MIN_DRAFTS = 200
"""Before so many drafts an acceptance length says little."""


def label(cell: Cell) -> str:
    """A method and its K for people."""
    return method_label(cell.method, cell.k)


def reliable_length(num_drafts: int, acceptance_length: float | None) -> float | None:
    """The acceptance length, None before there are drafts enough to believe it."""
    return acceptance_length if num_drafts >= MIN_DRAFTS else None


class Watch(Protocol):
    """The watch over live figures."""

    def new(self, *, num_drafts: int, acceptance_length: float | None, concurrency: float | None = None) -> list[str]:
        """The advice that they call for, each kind once."""


def needed_at(break_even: Mapping[int, float], concurrency: float | None) -> float | None:
    """The acceptance length that pays at a concurrency.

    It is that of the nearest measured one, by ratio.

    Args:
        break_even: by requests at once.
        concurrency: None where it is not known; then no length is.
    """
    if not break_even or concurrency is None:
        return None
    # Below one request at once an engine idles between them, and runs each alone.
    nearest = min(break_even, key=lambda measured: abs(math.log(measured / max(concurrency, 1.0))))
    return break_even[nearest]


class DrafterWatch:
    """The watch over whether a drafter saves more than it costs, without a profile.

    Args:
        break_even: by requests at once, the acceptance length below which it does not. Where nothing is known, only a
            drafter whose drafts are nearly all rejected is told.
        concurrency: requests at once, where live figures do not say.
    """

    def __init__(self, break_even: Mapping[int, float], concurrency: float | None = None) -> None:
        self._break_even, self._concurrency = break_even, concurrency
        self._has_said = False

    @property
    def needed(self) -> float | None:
        """The acceptance length that pays at the concurrency that was given."""
        return needed_at(self._break_even, self._concurrency)

    def new(self, *, num_drafts: int, acceptance_length: float | None, concurrency: float | None = None) -> list[str]:
        """The advice that live figures call for, once."""
        length = reliable_length(num_drafts, acceptance_length)
        needed = self.needed if concurrency is None else needed_at(self._break_even, concurrency)
        if self._has_said or (said := note(length, break_even=needed)) is None:
            return []
        self._has_said = True
        return [said]


def acceptance_advice(profile: Profile, length: float | None) -> str | None:
    """A sentence where the acceptance length is outside of the tuned range.

    None inside, or where it is not known.
    """
    tuned = profile.tuned
    if length is None or tuned.acceptance_low is None or tuned.acceptance_high is None:
        return None
    if tuned.acceptance_low <= length <= tuned.acceptance_high:
        return None
    chosen, limit_ms = profile.chosen, profile.objective.get("max_tpot_ms")
    where = (
        f"The acceptance length is {length:.2f}, and the profile holds from {tuned.acceptance_low:.2f} to "
        f"{tuned.acceptance_high:.2f}."
    )
    tpot_s = tpot_s_at(chosen, scale_of(chosen, length))
    if limit_ms is not None and tpot_s is not None and tpot_s * 1000 > limit_ms:
        where += f" Its p95 time per output token would be {tpot_s * 1000:.1f} ms, and the limit is {limit_ms:g} ms."
    found = best_with_acceptance(chosen, profile.alternatives, length, max_tpot_ms=limit_ms)
    if found is None:
        return f"{where} No measured configuration would be within it: tune with prompts like these."
    better, ratio = found
    assert isinstance(better, MeasuredCell)
    return (
        f"{where} {_speeds(better, chosen)}; at this acceptance {label(better)} would be {ratio:.2f} times as fast: "
        f"{better.flags}. Or tune with prompts like these."
    )


def concurrency_advice(profile: Profile, concurrency: float | None) -> str | None:
    """A sentence where the concurrency is outside of the tuned range.

    None inside, or where it is not known.
    """
    tuned, chosen = profile.tuned, profile.chosen
    if concurrency is None or tuned.concurrency_low * 0.9 <= concurrency <= tuned.concurrency_high * 1.1:
        return None
    where = (
        f"{concurrency:.3g} requests are in an engine at once, and the profile holds from {tuned.concurrency_low} to "
        f"{tuned.concurrency_high}"
    )
    better = best_at(profile.alternatives, concurrency)
    if (better.method, better.k) == (chosen.method, chosen.k):
        return f"{where}. The nearest measurement is at {better.concurrency}: tune with --max-num-seqs nearer to it."
    assert isinstance(better, MeasuredCell)
    own = [c for c in profile.measurements if c.concurrency == better.concurrency and _is_like(c, chosen)]
    return f"{where}. {_speeds(better, own[0] if own else None)}: {better.flags} --max-num-seqs {better.concurrency}."


def _speeds(better: Cell, ours: Cell | None) -> str:
    against = f", {label(ours)} {ours.output_tokens_per_s:.1f}" if ours and ours != better else ""
    return (
        f"Measured at {better.concurrency} at once: {label(better)} {better.output_tokens_per_s:.1f} output "
        f"tokens/s{against}"
    )


def _is_like(cell: MeasuredCell, chosen: MeasuredCell) -> bool:
    return (cell.method, cell.k, cell.precision) == (chosen.method, chosen.k, chosen.precision)


class TunedWatch:
    """The watch over one engine's profile.

    Args:
        follows: it drafts as its profile says; else acceptance says nothing of the profile.
        differs: what is not as it was when the profile was made.
    """

    def __init__(self, profile: Profile, *, follows: bool, differs: list[str]) -> None:
        self._profile, self._follows, self._differs = profile, follows, differs
        self._said: set[str] = set()

    def at_start(self, concurrency: float | None = None) -> list[str]:
        """The notes before anything runs.

        The endpoint's concurrency is its clients'.
        """
        notes = [f"profile: {self._profile.decision}"]
        if not self._follows:
            notes.append("the drafter is not the profile's, so the profile says nothing of its acceptance")
        if self._differs:
            notes.append(f"the profile was tuned elsewhere ({'; '.join(self._differs)}): its speeds may not hold here")
        return [*notes, *_given([concurrency_advice(self._profile, concurrency)])]

    def new(self, *, num_drafts: int, acceptance_length: float | None, concurrency: float | None = None) -> list[str]:
        """The advice that live figures call for, each kind once."""
        length = reliable_length(num_drafts, acceptance_length) if self._follows else None
        found = {
            "acceptance": acceptance_advice(self._profile, length),
            "concurrency": concurrency_advice(self._profile, concurrency),
        }
        fresh = _given(note for kind, note in found.items() if kind not in self._said)
        self._said |= {kind for kind, note in found.items() if note}
        return fresh

    def to_dict(self, concurrency: float) -> dict[str, Any]:
        """For a run's manifest."""
        return {
            "profile": self._profile.model_dump(mode="json"),
            "follows": self._follows,
            "concurrency": concurrency,
        }


def tuned_notes(tuned: Mapping[str, Any] | None, speculation: SpeculationStats) -> list[str]:
    """For a report, from what `to_dict` wrote; nothing for a run without a profile."""
    if tuned is None:
        return []
    watch = TunedWatch(Profile(**tuned["profile"]), follows=tuned["follows"], differs=[])
    return watch.new(
        num_drafts=speculation.num_drafts,
        acceptance_length=speculation.acceptance_length,
        concurrency=tuned["concurrency"],
    )


def _given(notes: Iterable[str | None]) -> list[str]:
    return [note for note in notes if note]
