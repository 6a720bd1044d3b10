"""The expected speed of an engine, from its profile or published speeds."""

from dataclasses import dataclass

from peagle.economics.prices import same_accelerator
from peagle.engine_options import ResolvedEngine
from peagle.hardware import Hardware
from peagle.profiles.measurements import NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    tokens_per_s: float
    concurrency: int
    source: str

    def describe(self) -> str:
        return (
            f"{self.tokens_per_s:,.0f} tokens/s per engine with {self.concurrency} concurrent requests ({self.source})"
        )


def known_speed(engine: ResolvedEngine, hardware: Hardware, concurrency: int) -> Speed | None:
    """Return the speed from the engine's profile, or else a published speed.

    A published speed is that of the highest concurrency that is not above `concurrency`.
    """
    profile = engine.profile
    if profile is not None and engine.follows_profile and profile.hardware == hardware.describe():
        cell = profile.chosen
        source = f"measured, {profile.made_at}, {profile.hardware}"
        return Speed(tokens_per_s=cell.output_tokens_per_s, concurrency=cell.concurrency, source=source)
    spec, card, accelerator = engine.spec, engine.model.card, hardware.accelerator
    if card is None or accelerator is None:
        return None
    method_and_k = (spec.drafter.method, spec.drafter.num_speculative_tokens) if spec.drafter else (NONE, 0)
    published = []
    for table in card.published:
        is_same_engine = (table.num_accelerators, table.precision) == (spec.num_accelerators, engine.precision.weights)
        if not is_same_engine or not same_accelerator(table.accelerator, accelerator):
            continue
        source = f"{table.label}, {table.dataset}; {table.source}"
        for row in table.speeds:
            if (row.method, row.num_speculative_tokens) == method_and_k:
                speeds = zip(table.concurrency, row.output_tokens_per_s, strict=True)
                published += [
                    Speed(tokens_per_s=s, concurrency=n, source=source) for n, s in speeds if n <= concurrency
                ]
    return max(published, key=lambda speed: speed.concurrency, default=None)
