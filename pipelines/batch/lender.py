"""The seam at which a run has an engine lent in place of one of its own."""

from typing import Protocol

from peagle.engine.interface import RowEngine
from peagle.runs.meter import BilledMeter


class Lender(Protocol):
    """Whoever lends a run engines that are already at work; it is picklable."""

    @property
    def num_slots(self) -> int:
        """Requests that its engines run at once at most."""

    def lend(self, meter: BilledMeter) -> RowEngine:
        """An engine for rows, in the process that asks; it bills what they take."""
