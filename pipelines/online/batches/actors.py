"""Work on batches in Ray actors, on any node.

Each run has an actor of its own; one is kept that checks and collects for all batches.

An actor belongs to the process that made it. When the ingress dies, Ray ends the actor and the engines that it
started; the next ingress continues the run.
"""

import os
from typing import Any, Generic, Protocol, TypeVar

from peagle.errors import PeagleError
from peagle.private import keep_private
from pipelines.batch.request import Allowance
from pipelines.cluster.failures import explain
from pipelines.online.batches.validation import Checked, Rules, check_input
from pipelines.online.batches.work import Counts, Reason, Result, Stop, Task, collect, run_batch

Answer_co = TypeVar("Answer_co", covariant=True)
_METHODS_AT_ONCE = 3  # the work, a question, a stop
_LIGHT_NICENESS = 10


class Handle(Protocol[Answer_co]):
    """A piece of work that is being done somewhere."""

    def poll(self) -> Answer_co | None:
        """The answer, or None while the work goes on.

        Raises:
            PeagleError: it broke off.
        """

    def counts(self) -> tuple[int, int, float] | None:
        """Completed and failed requests and US dollars, as of a moment ago.

        None where no answer is there yet.
        """

    def allow(self, usd: float | None) -> None:
        """Let the run cost as much; None is no limit."""

    def stop(self, reason: Reason) -> None:
        """Ask for its end."""

    def kill(self) -> None:
        """End it without asking."""


class Runner(Protocol):
    """Where work on batches is done."""

    def check(self, path: str, rules: Rules) -> Handle[Checked]:
        """Hold the input against the rules."""

    def run(self, task: Task) -> Handle[Result]:
        """Run the batch, or continue it."""

    def collect(self, task: Task, reason: Reason) -> Handle[Result]:
        """Only collect what there is."""


class RayRunner:
    """Runs in actors of their own, checks and collecting in one that is kept.

    A process takes seconds of processor time to start, and an order of one line costs a key nothing.
    """

    def __init__(self) -> None:
        self._idle: list[Any] = []

    def check(self, path: str, rules: Rules) -> Handle[Checked]:
        """See `Runner`."""
        return _ActorHandle(self._light_actor(), "check", path, rules, idle=self._idle)

    def run(self, task: Task) -> Handle[Result]:
        """See `Runner`."""
        return _ActorHandle(_new_actor(), "run", task)

    def collect(self, task: Task, reason: Reason) -> Handle[Result]:
        """See `Runner`."""
        return _ActorHandle(self._light_actor(), "collect", task, reason, idle=self._idle)

    def _light_actor(self) -> Any:
        return self._idle.pop() if self._idle else _new_actor(_LIGHT_NICENESS)


def _new_actor(niceness: int = 0) -> Any:
    import ray

    options = {"num_cpus": 0, "max_concurrency": _METHODS_AT_ONCE, "max_restarts": 0}
    return ray.remote(BatchActor).options(**options).remote(niceness)


class BatchActor:
    """A process for work on batches.

    Args:
        niceness: how far it yields the processor to those who answer requests.
    """

    def __init__(self, niceness: int) -> None:
        os.nice(niceness)
        keep_private()
        self._stop, self._counts, self._allowance = Stop(), Counts(), Allowance(usd=None)

    def check(self, path: str, rules: Rules) -> Checked:
        """See `check_input`."""
        return check_input(path, rules)

    def run(self, task: Task) -> Result:
        """See `run_batch`."""
        return run_batch(task, self._stop, self._counts, self._allowance)

    def collect(self, task: Task, reason: Reason) -> Result:
        """See `collect`."""
        return collect(task, reason)

    def stop(self, reason: Reason) -> None:
        """End the run early."""
        self._stop.ask(reason)

    def allow(self, usd: float | None) -> None:
        """Let the run cost as much."""
        self._allowance.usd = usd

    def counts(self) -> tuple[int, int, float]:
        """Of the run at this moment."""
        return self._counts.num_completed, self._counts.num_failed, self._counts.usd


class _ActorHandle(Generic[Answer_co]):
    """A task of an actor.

    Args:
        idle: where the actor is left once it has answered, if nobody waits there; it is killed otherwise.
    """

    def __init__(self, actor: Any, method: str, *arguments: Any, idle: list[Any] | None = None) -> None:
        self._actor, self._idle = actor, idle
        self._answer = getattr(actor, method).remote(*arguments)
        self._asked: Any = None

    def poll(self) -> Answer_co | None:
        import ray

        if not ray.wait([self._answer], timeout=0)[0]:
            return None
        try:
            answer: Answer_co = ray.get(self._answer)
        except Exception as error:
            self.kill()
            raise explain(error, "the work broke off", hint="", otherwise=PeagleError) from error
        if self._idle == []:
            self._idle.append(self._actor)
        else:
            self.kill()
        return answer

    def counts(self) -> tuple[int, int, float] | None:
        import ray

        self._asked = self._asked or self._actor.counts.remote()
        if not ray.wait([self._asked], timeout=0)[0]:
            return None
        asked, self._asked = self._asked, None
        try:
            counts: tuple[int, int, float] = ray.get(asked)
        except ray.exceptions.RayError:  # it is gone, and poll() says why
            return None
        return counts

    def stop(self, reason: Reason) -> None:
        self._actor.stop.remote(reason)

    def allow(self, usd: float | None) -> None:
        self._actor.allow.remote(usd)

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)
