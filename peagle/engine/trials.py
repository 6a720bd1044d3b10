"""Compile grammars in a separate trial process with limits, one at a time, before the engine compiles them.

vLLM compiles in the engine's process without limits, and all requests wait. The cost of a schema, a regular expression
or a grammar cannot be predicted from its size.
"""

import asyncio
import functools
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from peagle.engine import vllm_internals
from peagle.errors import ConfigError
from peagle.requests.bounds import token_id_error

DEFAULT_CPU_S = 3.0
REQUESTER: ContextVar[str] = ContextVar("requester", default="")  # trials serve requesters in turn
_MAX_CACHED = 4_096  # results
_REFUSAL_CACHE_S = 600.0  # CPU time also grows on a busy machine, so refused constraints are retried
_MEMORY_BYTES = 512 * 2**20  # memory limit of a compilation
_MAX_PER_REQUESTER = 5  # concurrent trials, including waiting trials
_MAX_TOTAL = 64  # concurrent trials of all requesters
# A requester whose refused trials took 10 CPU seconds must wait; 0.1 of these seconds are forgotten every second.
_MAX_REFUSED_CPU_S, _FORGOTTEN_CPU_S_PER_S = 10.0, 0.1
_REASONS = {
    "slow": "compiling it takes more than {cpu_s:g} s of CPU time; reduce lengths and optional properties",
    "slow_steps": "checking it takes too long at each token",
    "large": "compiling it takes too much memory",
    "unsatisfiable": "no token can start a response that satisfies it; look for self-references",
}


class TrialRefused(Exception):  # noqa: N818 - an outcome, not an error
    """A constraint that is too expensive or cannot be satisfied."""


class TrialsBusy(Exception):  # noqa: N818 - an outcome, not an error
    """Too many constraints are waiting for their trial."""


class Trials:
    """Trial compilations of constraints in one engine's requests; results are cached, refusals only for ten minutes.

    Args:
        tokenizer: returns the vocabulary for `trial_process.py`; called once, in a thread.
        any_whitespace: the engine's setting for compiling JSON schemas.
        is_shared: whether to limit waiting trials, and to refuse requesters with many refused trials.
    """

    def __init__(
        self,
        tokenizer: Callable[[], Mapping[str, Any]],
        *,
        any_whitespace: bool = True,
        is_shared: bool = False,
        cpu_s: float = DEFAULT_CPU_S,
        memory_bytes: int = _MEMORY_BYTES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._any_whitespace = any_whitespace
        self._is_shared = is_shared
        self._cpu_s = cpu_s
        self._process = _Process(lambda: {**tokenizer(), "cpu_s": cpu_s, "memory_bytes": memory_bytes})
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-trials")
        self._monotonic = monotonic
        # By digest: the reason for a refusal (None if accepted), and the time of expiry.
        self._cached_reasons: OrderedDict[str, tuple[str | None, float]] = OrderedDict()
        self._running: dict[str, asyncio.Task[str | None]] = {}
        self._num_trials_by_requester: Counter[str] = Counter()
        self._refused_cpu_s: dict[str, tuple[float, float]] = {}  # requester -> CPU time, time of the last update
        self._lock = _FairLock()

    async def require(self, constraint: Any) -> None:
        """Check a constraint (vLLM's `StructuredOutputsParams`).

        Raises:
            TrialRefused: the constraint takes too much time or memory, or cannot be satisfied.
            TrialsBusy: too many constraints are waiting.
        """
        for kind, spec in _specs(constraint):
            digest = hashlib.sha256(f"{kind}\0{spec}".encode(errors="surrogatepass")).hexdigest()
            job = {"kind": kind, "spec": spec, "any_whitespace": self._any_whitespace}
            if reason := await self._refusal_reason(digest, job):
                raise TrialRefused(f"the {kind} constraint is refused: {reason}")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._process.close()

    async def _refusal_reason(self, digest: str, job: Mapping[str, Any]) -> str | None:
        """Return the reason for a refusal, or None if the constraint is accepted."""
        reason, expires_at = self._cached_reasons.get(digest, (None, -math.inf))
        if self._monotonic() < expires_at:
            self._cached_reasons.move_to_end(digest)
            return reason
        task = self._running.get(digest)
        if task is None:
            requester = REQUESTER.get()
            counts = self._num_trials_by_requester
            if self._is_shared and (counts[requester] >= _MAX_PER_REQUESTER or counts.total() >= _MAX_TOTAL):
                raise TrialsBusy("too many new schemas or grammars at once; try again, or use fewer different ones")
            if self._is_shared and self._recent_refused_cpu_s(requester) >= _MAX_REFUSED_CPU_S:
                raise TrialsBusy("too many of your schemas or grammars took too long; try again in a minute")
            self._num_trials_by_requester[requester] += 1
            # A trial continues when its client disconnects: otherwise the client could start another one immediately.
            task = self._running[digest] = asyncio.create_task(self._run_trial(digest, job, requester))
            task.add_done_callback(functools.partial(self._on_done, digest, requester))
        return await asyncio.shield(task)

    def _on_done(self, digest: str, requester: str, task: "asyncio.Task[str | None]") -> None:
        del self._running[digest]
        self._num_trials_by_requester[requester] -= 1
        if not task.cancelled():
            task.exception()  # otherwise Python logs an exception that no requester retrieves

    async def _run_trial(self, digest: str, job: Mapping[str, Any], requester: str) -> str | None:
        """Run a trial, and return the reason for a refusal, or None."""
        await self._lock.acquire(requester)
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._thread, self._process.run, job)
        finally:
            self._lock.release()
        if result["outcome"] in ("busy", "gone"):
            raise TrialsBusy("the machine is too busy to check a new schema or grammar; try again")
        reason, expires_at = None, math.inf
        if result["outcome"] in _REASONS:
            reason, expires_at = (
                _REASONS[result["outcome"]].format(cpu_s=self._cpu_s),
                self._monotonic() + _REFUSAL_CACHE_S,
            )
            refused_cpu_s = self._recent_refused_cpu_s(requester) + result.get("cpu_s", 0.0)
            self._refused_cpu_s[requester] = refused_cpu_s, self._monotonic()
        self._cached_reasons[digest] = reason, expires_at
        if len(self._cached_reasons) > _MAX_CACHED:
            self._cached_reasons.popitem(last=False)
        return reason

    def _recent_refused_cpu_s(self, requester: str) -> float:
        """Return the CPU time of this requester's recent refused trials."""
        seconds, updated_at = self._refused_cpu_s.get(requester, (0.0, 0.0))
        return max(0.0, seconds - (self._monotonic() - updated_at) * _FORGOTTEN_CPU_S_PER_S)


class _Process:
    """The process of `trial_process.py`, started on demand and restarted after a crash."""

    def __init__(self, settings: Callable[[], dict[str, Any]]) -> None:
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Run one trial."""
        try:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "peagle.engine.trial_process"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    # The process forks, so it must have only one thread. It needs no accelerator.
                    env=os.environ
                    | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""},
                )
                _exchange(self._process, self._settings())
            return _exchange(self._process, job)
        except (OSError, ValueError):  # the process died
            self.close()
            return {"outcome": "gone"}

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _exchange(process: "subprocess.Popen[str]", message: Mapping[str, Any]) -> dict[str, Any]:
    assert process.stdin, "it is a pipe"
    assert process.stdout, "it is a pipe"
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()
    reply: dict[str, Any] = json.loads(process.stdout.readline())
    return reply


class _FairLock:
    """A lock that serves waiting requesters in turn, no matter how many tasks each has waiting."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def acquire(self, requester: str) -> None:
        """Wait for a turn."""
        if not self._is_taken:
            self._is_taken = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(requester, deque()).append(turn)
        await turn

    def release(self) -> None:
        """End a turn; the next requester gets the lock."""
        while self._waiting:
            requester, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[requester] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False


def check_schema(schema: str, *, model: str, revision: str | None, vocab_size: int | None) -> None:
    """Raise a ConfigError if a run's engines would refuse its JSON schema."""
    trials = Trials(lambda: {"model": model, "revision": revision, "vocab_size": vocab_size})
    constraint = SimpleNamespace(json=schema, regex=None, structural_tag=None, grammar=None, choice=None)
    try:
        asyncio.run(trials.require(constraint))
    except TrialRefused as refusal:
        raise ConfigError(
            f"json_schema: {refusal}", hint="make the schema smaller; docs/http-api.md lists the limits"
        ) from None
    except TrialsBusy:
        pass  # each engine checks the schema again
    finally:
        trials.close()


def guard_engine(client: Any, trials: Trials) -> None:
    """Make an `AsyncLLM` refuse requests that would crash or stall its engine core.

    These are prompts with token ids outside the model's vocabulary, and constraints that fail their trial. Callers have
    already checked their requests; this check also covers ids that the tokenizer has but the model does not.
    """
    from vllm import exceptions

    vocab_size = client.model_config.get_vocab_size()

    async def check(prompt: Any, params: Any) -> None:
        # Ids of media placeholders may lie outside the vocabulary; vLLM replaces them.
        is_tokens = isinstance(prompt, Mapping) and prompt.get("type", "token") == "token"
        ids = prompt.get("prompt_token_ids") if is_tokens else None
        if error := token_id_error({"prompt": ids}, vocab_size):
            raise vllm_internals.refusal_of(*error)
        if (constraint := getattr(params, "structured_outputs", None)) is not None:
            try:
                await trials.require(constraint)
            except TrialRefused as refusal:
                raise vllm_internals.refusal_of(None, str(refusal)) from None
            except TrialsBusy as busy:
                raise exceptions.GracefulHTTPError(str(busy), HTTPStatus.TOO_MANY_REQUESTS) from None

    vllm_internals.before_each_request(client, check)


def trials_of(client: Any, *, is_shared: bool = False, cpu_s: float = DEFAULT_CPU_S) -> Trials:
    """Return the trials of an `AsyncLLM`'s requests."""
    config = client.vllm_config
    return Trials(
        lambda: {"tokenizer": vllm_internals.vocabulary(config, client.get_tokenizer())},
        any_whitespace=not config.structured_outputs_config.disable_any_whitespace,
        is_shared=is_shared,
        cpu_s=cpu_s,
    )


def _specs(constraint: Any) -> Iterator[tuple[str, str]]:
    """Yield kind and text of the constraint, as vLLM passes them to xgrammar."""
    if constraint.json is not None:
        yield "json", constraint.json if isinstance(constraint.json, str) else json.dumps(constraint.json)
    if constraint.regex is not None:
        yield "regex", constraint.regex
    if constraint.structural_tag is not None:
        yield "structural_tag", constraint.structural_tag
    if constraint.grammar is not None:
        yield "grammar", vllm_internals.as_ebnf(constraint.grammar)
    if constraint.choice is not None:
        yield "grammar", vllm_internals.choices_to_grammar(constraint.choice)
