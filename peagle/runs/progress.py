"""Progress of a run: a live line on a terminal, plain lines elsewhere."""

import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from peagle.economics.report.figures import format_duration, format_usd
from peagle.economics.usage import UnitUsage
from peagle.speculation import SpeculationStats

_PLAIN_LINE_EVERY_S = 30.0


@dataclass
class Tally:
    """Totals of a run: all committed units of all attempts."""

    num_rows_planned: int  # rows of the corpus
    num_rows: int = 0
    num_failed_rows: int = 0
    num_output_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats.empty)
    usd: float = 0.0  # cost of the run
    tokens_per_s: float = 0.0
    num_engines: int = 0
    seconds_left: float | None = None
    _num_earlier_rows: int = 0

    def add(self, usage: UnitUsage, *, is_earlier: bool = False) -> None:
        """Count a committed unit; `is_earlier` means that an earlier attempt committed it."""
        self.num_rows += usage.num_rows
        self.num_failed_rows += usage.num_failed_rows
        self.num_output_tokens += usage.num_output_tokens
        self.speculation += usage.speculation
        if is_earlier:
            self._num_earlier_rows += usage.num_rows + usage.num_failed_rows

    def observe(self, usd: float, *, num_engines: int, tokens_per_s: float) -> None:
        """Update the cost, and the speed of the running engines."""
        self.usd, self.num_engines, self.tokens_per_s = usd, num_engines, tokens_per_s
        num_done = self.num_rows + self.num_failed_rows
        num_left = self.num_rows_planned - num_done
        self.seconds_left = seconds_left(num_left, num_done, self.num_output_tokens, self.tokens_per_s)

    @property
    def is_generating(self) -> bool:
        """Whether an engine of this attempt has generated something."""
        return self.tokens_per_s > 0 or self.num_rows + self.num_failed_rows > self._num_earlier_rows

    def line(self) -> str:
        num_done = self.num_rows + self.num_failed_rows
        parts = [f"{num_done}/{self.num_rows_planned} rows"]
        if self.num_failed_rows:
            parts.append(f"{self.num_failed_rows} failed")
        if self.tokens_per_s:
            engines = f" of {self.num_engines} engines" if self.num_engines > 1 else ""
            parts.append(f"{self.tokens_per_s:.1f} output tokens/s{engines}")
        if self.speculation.acceptance_length is not None:
            parts.append(f"acceptance length {self.speculation.acceptance_length:.2f}")
        parts.append(format_usd(self.usd))
        if self.seconds_left is not None:
            parts.append(f"{format_duration(self.seconds_left)} left")
        return "  ".join(parts)


class RunProgress:
    """The phase of a run, its time and its `Tally`: a live line on a terminal, otherwise a line every 30 s."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._started_at = self._last_line_at = time.monotonic()
        self._phase = ""
        self._tally: Tally | None = None

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def enter(self, phase: str) -> None:
        """Start a phase, such as "planning"."""
        self._phase = phase
        if self._console.is_terminal and self._live is None:
            self._live = Live(console=self._console, get_renderable=lambda: Text(self._line()), refresh_per_second=4)
            self._live.start()

    def show(self, tally: Tally, *, final: bool = False) -> None:
        self._tally = tally
        if tally.is_generating:
            self._phase = "generating"
        if self._live is None and (final or time.monotonic() - self._last_line_at >= _PLAIN_LINE_EVERY_S):
            self._last_line_at = time.monotonic()
            self.say(self._line())

    def close(self) -> None:
        """Leave the last state of the live line on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self) -> str:
        parts = [format_duration(time.monotonic() - self._started_at), self._phase]
        return "  ".join(parts if self._tally is None else [*parts, self._tally.line()])


def seconds_left(num_rows_left: int, num_rows_done: int, num_output_tokens: int, tokens_per_s: float) -> float | None:
    """Estimate the seconds until all rows are done; None if unknown, or if no rows are left.

    The remaining rows are assumed to have as many output tokens as the finished rows.
    """
    if not (num_rows_left and num_rows_done and num_output_tokens and tokens_per_s):
        return None
    return num_rows_left * num_output_tokens / num_rows_done / tokens_per_s
