"""A run or an endpoint that follows a profile: whether it is still within what was tuned.

Bulk runs and the endpoint share it. It knows profiles and live figures; it says each thing once.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from peagle.catalog.engines import ResolvedEngine
from peagle.hardware import Hardware
from peagle.manifest import versions
from peagle.speculation import SpeculationStats
from peagle.tuning.profile import Profile
from peagle.tuning.watch import acceptance_advice, concurrency_advice, reliable_length


class TunedWatch:
    """The watch over one engine's profile.

    Args:
        follows: it drafts as its profile says; else acceptance says nothing of the profile.
        differs: what is not as it was when the profile was made.
    """

    def __init__(self, profile: Profile, *, follows: bool, differs: list[str]) -> None:
        self._profile, self._follows, self._differs = profile, follows, differs
        self._said: set[str] = set()

    @classmethod
    def of(cls, engine: ResolvedEngine, hardware: Hardware) -> "TunedWatch | None":
        """The watch; None for an engine without a profile."""
        profile = engine.profile
        if profile is None:
            return None
        head = profile.chosen.head_fingerprint if engine.follows_profile else None
        before = {
            "hardware": (profile.hardware, hardware.describe()),
            "weights": (profile.target.revision, engine.model.fingerprint),
            **({"head": (head, engine.drafter.fingerprint)} if head else {}),
        } | {name: (profile.versions.get(name), v) for name, v in versions().items() if name.startswith("vllm")}
        differs = [f"{name} {then}, now {now}" for name, (then, now) in before.items() if then != now]
        return cls(profile, follows=engine.follows_profile, differs=differs)

    def at_start(self, concurrency: float | None = None) -> list[str]:
        """What is to be said before anything runs; the endpoint's concurrency is its clients'."""
        notes = [f"profile: {self._profile.decision}"]
        if not self._follows:
            notes.append("the drafter is not the profile's, so the profile says nothing of its acceptance")
        if self._differs:
            notes.append(f"the profile was tuned elsewhere ({'; '.join(self._differs)}): its speeds may not hold here")
        return [*notes, *_given([concurrency_advice(self._profile, concurrency)])]

    def new(self, *, num_drafts: int, acceptance_length: float | None, concurrency: float | None = None) -> list[str]:
        """What the live figures call for; each kind of advice is given once."""
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
