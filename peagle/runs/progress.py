"""Progress of a run: a live line on a terminal, plain lines elsewhere.

It adds up what it is told and draws it; it reads no files.
"""

import math
import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from peagle.economics.usage import UnitUsage
from peagle.speculation import SpeculationStats

_PLAIN_LINE_EVERY_S = 10.0


@dataclass
class Tally:
    """Committed work so far, of the whole run and of this attempt.

    Args:
        num_rows_planned: rows of the corpus.
        usd: what the run directory has cost.
    """

    num_rows_planned: int
    num_rows: int = 0
    num_failed_rows: int = 0
    num_output_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats.empty)
    usd: float = 0.0
    tokens_per_s: float = 0.0
    num_engines: int = 0
    seconds_left: float | None = None
    _rows_before: int = 0

    def add(self, usage: UnitUsage, *, before: bool = False) -> None:
        """Count a committed unit; `before` if an earlier attempt committed it."""
        self.num_rows += usage.num_rows
        self.num_failed_rows += usage.num_failed_rows
        self.num_output_tokens += usage.num_output_tokens
        self.speculation += usage.speculation
        if before:
            self._rows_before += usage.num_rows + usage.num_failed_rows

    def observe(self, usd: float, *, num_engines: int, tokens_per_s: float) -> None:
        """Take the present dollars, and the speed of the engines at work."""
        self.usd, self.num_engines, self.tokens_per_s = usd, num_engines, tokens_per_s
        done = self.num_rows + self.num_failed_rows
        left = self.num_rows_planned - done
        self.seconds_left = seconds_left(left, done, self.num_output_tokens, self.tokens_per_s)

    def line(self) -> str:
        """The state in one line."""
        done = self.num_rows + self.num_failed_rows
        parts = [f"{done}/{self.num_rows_planned} rows"]
        if self.num_failed_rows:
            parts.append(f"{self.num_failed_rows} failed")
        if self.tokens_per_s:
            engines = f" of {self.num_engines} engines" if self.num_engines > 1 else ""
            parts.append(f"{self.tokens_per_s:.1f} output tokens/s{engines}")
        elif done == self._rows_before:
            parts.append("engines starting")
        if self.speculation.acceptance_length is not None:
            parts.append(f"acceptance length {self.speculation.acceptance_length:.2f}")
        parts.append(f"${self.usd:.4f}")
        if self.seconds_left is not None:
            parts.append(f"{duration(self.seconds_left)} left")
        return "  ".join(parts)


class RunProgress:
    """Draws a `Tally`: in place on a terminal, as a line now and then when not."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._last_line_at = 0.0

    def say(self, text: str) -> None:
        """Print one line of its own."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, tally: Tally, *, final: bool = False) -> None:
        """Draw the present state."""
        if self._console.is_terminal:
            self._live = self._live or _started(Live(console=self._console, refresh_per_second=4))
            self._live.update(Text(tally.line()))
        elif final or time.monotonic() - self._last_line_at >= _PLAIN_LINE_EVERY_S:
            self._last_line_at = time.monotonic()
            self.say(tally.line())

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _started(live: Live) -> Live:
    live.start()
    return live


def seconds_left(num_rows_left: int, num_rows_done: int, num_output_tokens: int, tokens_per_s: float) -> float | None:
    """Seconds that the rest takes at this speed.

    None where nothing is left, or nobody knows yet.

    Args:
        num_output_tokens: of the rows that are done; those of the rest are taken to be as many by the row.
        tokens_per_s: as heartbeats tell it. They come later than what is committed, so rows are not divided by their
            seconds: before the second heartbeat, no time would seem to be left.
    """
    if not (num_rows_left and num_rows_done and num_output_tokens and tokens_per_s):
        return None
    return num_rows_left * num_output_tokens / num_rows_done / tokens_per_s


def duration(seconds: float) -> str:
    """A length of time, for people; what is not over takes a second at least."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
