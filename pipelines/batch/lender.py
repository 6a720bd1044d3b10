"""Engines that a run borrows instead of starting its own."""

from typing import Protocol

from peagle.engine.interface import RowEngine
from peagle.runs.meter import BilledMeter


class Lender(Protocol):
    """Picklable provider of engines that are already running."""

    @property
    def num_slots(self) -> int:
        """The maximum number of concurrent requests of the lender's engines."""

    def lend(self, meter: BilledMeter) -> RowEngine:
        """Return an engine for this process. Its rows are charged to `meter`."""
