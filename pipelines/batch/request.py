"""A request for a bulk run: all that a caller asks, and when the run stops early.

It knows no cluster and no run directory.
"""

import datetime
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from peagle.errors import StoppedEarly
from peagle.runs.limits import Limits, MaxFailedRows, Situation, parse_deadline, reached
from peagle.runs.stopping import resume_command
from pipelines.batch.config import GenerateConfig
from pipelines.batch.lender import Lender
from pipelines.cluster.placement import Neighbours

GIVE_UP_S = 15.0  # after the grace period: for workers to notice, and for what they commit last
_NOTICE_S = 2.0  # until the driver has looked again, and its word has arrived
BY_SIGNAL = "asked to by a signal"


def ending_s(grace_s: float) -> float:
    """Seconds that ending a run takes at most."""
    return grace_s + GIVE_UP_S + _NOTICE_S


@dataclass
class Allowance:
    """US dollars that a run may cost; they may change while it is at work."""

    usd: float | None


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """One attempt at a bulk run, as its caller asks for it.

    Attributes:
        command: the command line, for `run.json` and for the command that continues the run.
        stop: asks the run to stop when it is set; signals do so too.
        neighbours: engines of others that share the nodes.
        lender: lends the run its engine; None where it has engines of its own.
        commits: by hub id, of the engine that a new run's is to equal; a run that is there keeps its own.
        served_name: what the model of a new run is called in its answers in OpenAI's form; None is its own name.
        allowance: in place of the configuration's budget.
        limits: of the configuration, counted from the moment of the request, with the time that ending takes.
    """

    config: GenerateConfig
    command: Sequence[str]
    stop: threading.Event = field(default_factory=threading.Event)
    neighbours: Neighbours | None = None
    lender: Lender | None = None
    commits: Mapping[str, str] = field(default_factory=dict)
    served_name: str | None = None
    allowance: Allowance | None = None
    limits: Limits = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits", _limits_of(self.config))

    @property
    def budget_usd(self) -> float | None:
        """The most that the run may cost at this moment; None is no limit."""
        return self.allowance.usd if self.allowance else self.limits.budget_usd

    def require_time(self) -> None:
        """Refuse to wait longer for a cluster before a run exists.

        Raises:
            StoppedEarly: the deadline is near, or a stop was asked for.
        """
        nothing_done = Situation(now=time.time(), spent_usd=0.0, num_done_rows=0, num_failed_rows=0)
        limit = reached(replace(self.limits, budget_usd=self.budget_usd), nothing_done)
        if self.stop.is_set() or limit:
            raise self.stopped_before_engines(limit.message if limit else BY_SIGNAL)

    def stopped_before_engines(self, message: str) -> StoppedEarly:
        """How a command ends that is stopped while no engine of its run is at work."""
        return StoppedEarly(
            f"stopped while no engine was at work: {message}",
            hint=f"the same command continues: {resume_command(self.command, {})}",
        )

    @property
    def last_words(self) -> str:
        """The last words of a command that a second signal ends."""
        again = resume_command(self.command, {})
        return f"stopped at once: units under way are lost\n  the same command continues the run: {again}"


def _limits_of(config: GenerateConfig) -> Limits:
    return Limits(
        budget_usd=config.budget_usd,
        deadline_at=parse_deadline(config.deadline or "none", datetime.datetime.now()),
        max_failed_rows=None if config.max_failed_rows is None else MaxFailedRows.parse(config.max_failed_rows),
        reserve_s=ending_s(config.grace_s),
    )
