"""Progress for people: not more than a line every few seconds."""

import time
from typing import Any

_REPORT_EVERY_S = 15.0


class Throttle:
    """Let a report through every few seconds, and the first and last one always."""

    def __init__(self, report: Any) -> None:
        self._report, self._last = report, float("-inf")

    def __call__(self, *news: Any) -> None:
        """`news` is `done` and `total`, or one record that has `step` and `num_steps`."""
        done, total = (news[0].step, news[0].num_steps) if len(news) == 1 else news
        if done == total or time.monotonic() - self._last >= _REPORT_EVERY_S:
            self._last = time.monotonic()
            self._report(*news)
