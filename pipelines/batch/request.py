"""The request for one attempt at a bulk run, with its limits."""

import datetime
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from peagle.errors import StoppedEarly
from peagle.runs.limits import Limits, MaxFailedRows, Situation, find_reached_limit, parse_deadline
from peagle.runs.stopping import resume_command
from pipelines.batch.config import GenerateConfig
from pipelines.batch.lender import Lender
from pipelines.cluster.placement import Neighbours

GIVE_UP_S = 15.0  # time after the grace period for workers to notice the signal and commit their last units
_NOTICE_S = 2.0  # until the driver next checks its limits, and the workers receive its stop signal
BY_SIGNAL = "stopped by a signal"


def max_shutdown_s(grace_s: float) -> float:
    """Return the maximum number of seconds that the shutdown of a run takes."""
    return grace_s + GIVE_UP_S + _NOTICE_S


@dataclass
class Allowance:
    """A budget in US dollars that may change while the run is running."""

    usd: float | None


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """One attempt at a bulk run.

    Attributes:
        command: the command line, for `run.json` and for the command that continues the run.
        stop: the run stops when this event is set, by the caller or by a signal.
        neighbours: other engines on the same nodes, or None.
        lender: provides running engines; None if the run starts its own.
        commits: model revisions that a new run must use, by hub id; an existing run keeps its own.
        served_name: the model's name in OpenAI answers of a new run; None means the model's own name.
        allowance: replaces the configuration's budget; None keeps it.
        limits: the configured limits, with a reserve for shutdown. A relative deadline counts from this request.
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
        """The current budget; None means no limit."""
        return self.allowance.usd if self.allowance else self.limits.budget_usd

    def require_time(self) -> None:
        """Check that there is time left to wait for a cluster.

        Raises:
            StoppedEarly: the deadline is near, or the run was asked to stop.
        """
        situation = Situation(now=time.time(), spent_usd=0.0, num_processed_rows=0, num_failed_rows=0)
        limit = find_reached_limit(replace(self.limits, budget_usd=self.budget_usd), situation)
        if self.stop.is_set() or limit:
            raise self.stopped_before_engines(limit.message if limit else BY_SIGNAL)

    def stopped_before_engines(self, message: str) -> StoppedEarly:
        """Return the error of a command that is stopped while none of its engines runs."""
        return StoppedEarly(
            f"stopped before an engine was running: {message}",
            hint=f"the same command continues the run: {resume_command(self.command, {})}",
        )

    @property
    def killed_message(self) -> str:
        """The message printed when a second signal ends the command."""
        command = resume_command(self.command, {})
        return f"stopped immediately: running units are lost\n  the same command continues the run: {command}"


def _limits_of(config: GenerateConfig) -> Limits:
    return Limits(
        budget_usd=config.budget_usd,
        deadline_at=parse_deadline(config.deadline or "none", datetime.datetime.now()),
        max_failed_rows=None if config.max_failed_rows is None else MaxFailedRows.parse(config.max_failed_rows),
        reserve_s=max_shutdown_s(config.grace_s),
    )
