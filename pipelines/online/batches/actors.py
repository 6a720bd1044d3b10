"""Ray actors that work on batches, on any node.

Each run has its own actor; validation and collection share one.

When the ingress dies, Ray ends its actors and the engines that they started. The next ingress resumes the runs.
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
_METHODS_AT_ONCE = 3  # the work, `counts`, `stop`
_LIGHT_NICENESS = 10


class Handle(Protocol[Answer_co]):
    """Work in another process."""

    def poll(self) -> Answer_co | None:
        """Return the result, or None while the work is running.

        Raises:
            PeagleError: the work failed.
        """

    def counts(self) -> tuple[int, int, float] | None:
        """Return completed requests, failed requests and cost in US dollars; None until known."""

    def allow(self, usd: float | None) -> None:
        """Change the run's cost limit; None is unlimited."""

    def stop(self, reason: Reason) -> None: ...

    def kill(self) -> None: ...


class Runner(Protocol):
    """Starts work on batches."""

    def check(self, path: str, rules: Rules) -> Handle[Checked]: ...

    def run(self, task: Task) -> Handle[Result]: ...

    def collect(self, task: Task, reason: Reason) -> Handle[Result]: ...


class RayRunner:
    """Starts an actor for each run; validation and collection reuse an idle actor.

    Starting a process takes seconds of CPU time, which tiny batches should not cost.
    """

    def __init__(self) -> None:
        self._idle: list[Any] = []

    def check(self, path: str, rules: Rules) -> Handle[Checked]:
        return _ActorHandle(self._light_actor(), "check", path, rules, idle=self._idle)

    def run(self, task: Task) -> Handle[Result]:
        return _ActorHandle(_new_actor(), "run", task)

    def collect(self, task: Task, reason: Reason) -> Handle[Result]:
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
        niceness: lowers the CPU priority.
    """

    def __init__(self, niceness: int) -> None:
        os.nice(niceness)
        keep_private()
        self._stop, self._counts, self._allowance = Stop(), Counts(), Allowance(usd=None)

    def check(self, path: str, rules: Rules) -> Checked:
        return check_input(path, rules)

    def run(self, task: Task) -> Result:
        return run_batch(task, self._stop, self._counts, self._allowance)

    def collect(self, task: Task, reason: Reason) -> Result:
        return collect(task, reason)

    def stop(self, reason: Reason) -> None:
        self._stop.ask(reason)

    def allow(self, usd: float | None) -> None:
        self._allowance.usd = usd

    def counts(self) -> tuple[int, int, float]:
        return self._counts.num_completed, self._counts.num_failed, self._counts.usd


class _ActorHandle(Generic[Answer_co]):
    """A task of an actor.

    Args:
        idle: the pool to which the actor returns, unless it already has one; without a pool the actor is killed.
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
            raise explain(error, "the work failed", hint="", otherwise=PeagleError) from error
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
        except ray.exceptions.RayError:  # the actor died; poll() raises the reason
            return None
        return counts

    def stop(self, reason: Reason) -> None:
        self._actor.stop.remote(reason)

    def allow(self, usd: float | None) -> None:
        self._actor.allow.remote(usd)

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)
