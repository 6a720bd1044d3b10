"""The interface of an engine: token ids in, text and counts out. `vllm.py` and `fake.py` implement it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from peagle.speculation import SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token of a response and its log-probability. `top` has the requested number of most likely tokens."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of the responses to a prompt."""

    text: str
    finish_reason: str
    num_output_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A tool call. `arguments` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The result of one request.

    Attributes:
        text: text of the first response.
        finish_reason: of the first response: "stop", "length" or, with a parser, "tool_calls".
        num_cached_tokens: prompt tokens from the prefix cache; None if unknown.
        num_output_tokens: tokens of all responses.
        speculation: drafts of all responses; None without a drafter or if unknown.
        completions: every response, if several responses or log-probabilities were requested; otherwise empty.
        ttft_s: seconds from the first step in which the request was scheduled to its first token, without time in the
            queue.
        latency_s: seconds from the same moment to the last token.
        reasoning, tool_calls: parts that a parser has taken from the text (`response_parser.py`); `completions` then
            has the whole text.
    """

    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_output_tokens: int
    speculation: SpeculationStats | None
    ttft_s: float | None
    latency_s: float | None
    completions: tuple[CompletionOutput, ...] = ()
    reasoning: str | None = None
    tool_calls: tuple[FunctionCall, ...] = ()


FAILED = "engine_failed"  # reason of a dead letter: the engine failed on this row, but did not crash


class RequestRefused(Exception):  # noqa: N818 - the request's fault, not the engine's
    """The engine refuses this request and continues with the others.

    Attributes:
        reason: reason for the row's dead letter.
    """

    reason = "refused"


class RequestFailed(RequestRefused):
    """The engine failed on this request and continues with the others."""

    reason = FAILED


Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A token of a text and the target's most likely token, with their log-probabilities."""

    token: str
    logprob: float
    likeliest: str
    likeliest_logprob: float

    @property
    def margin(self) -> float:
        """The difference of the log-probabilities; 0 if the token is the most likely token."""
        return self.likeliest_logprob - self.logprob


class Checkable(Protocol):
    """The part of an engine that the self-check needs."""

    max_model_len: int

    def to_token_ids(self, text: str) -> list[int]:
        """The token ids of a text, without a chat template."""

    async def answer(self, prompt: Sequence[int], *, num_tokens: int, temperature: float) -> list[int]:
        """Generate exactly `num_tokens` tokens, ignoring the end-of-text token.

        Raises:
            RequestRefused, EngineError: see `RowEngine.generate`.
        """

    async def judge(self, token_ids: Sequence[int], begin: int) -> list[Judgement]:
        """Compare the tokens from `begin` on with the target's most likely tokens, without the prefix cache.

        Raises:
            RequestRefused: the engine does not report log-probabilities of a prompt.
            EngineError: see `RowEngine.generate`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """The result of a self-check.

    Attributes:
        num_tokens: length of the answer.
        num_ties: number of tokens that are not the most likely ones, but whose log-probability is within `max_tie`.
        largest_margin: largest difference in log-probability from the most likely token; None for NaN.
        max_tie: the largest difference that counts as a tie.
        seen: the first token that differs, or the reason why the check was skipped; empty if it passed.
        advice: what to do if the check failed.
    """

    outcome: Outcome
    num_tokens: int = 0
    num_ties: int = 0
    largest_margin: float | None = 0.0
    max_tie: float = 0.0
    seconds: float = 0.0
    seen: str = ""
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        """Return the JSON text that the ledger stores."""
        return json.dumps(asdict(self))

    def describe(self) -> str:
        """Return one line for a log."""
        if self.outcome == "passed":
            return f"self-check passed: {self.num_tokens} tokens, {self.num_ties} ties, {self.seconds:.2f} s"
        return f"self-check {self.outcome}: {self.seen}"


class RowEngine(Protocol):
    """The part of an engine that rows of a corpus need. A run's own engines and borrowed engines implement it."""

    async def generate(self, request_id: str, prompt_token_ids: list[int], sampling: Mapping[str, Any]) -> Generation:
        """Run one request to its end.

        Args:
            sampling: fields of `peagle.requests.sampling.SamplingOptions`; all but `temperature` and `max_tokens` have
                defaults.

        Raises:
            RequestRefused: this request cannot run.
            EngineError: the engine died; none of its requests will finish.
        """

    def signs_of_life(self) -> int:
        """Return a number that grows with every step of the engine.

        If it stays the same while requests run, the engine is in one long step, or hangs.
        """

    def shutdown(self) -> None:
        """Stop the engine and its processes."""

    def kill(self) -> None:
        """Kill the engine's processes immediately, even if they hang. The calling process must exit next."""


class Engine(RowEngine, Protocol):
    """An engine that runs many requests concurrently in one continuous batch."""

    max_model_len: int
    compile_s: float
    """Seconds of the start that were spent on compiling."""
    self_check: SelfCheck | None
    """The result of the engine's self-check; None until it has run."""

    @property
    def checkable(self) -> Checkable:
        """The part of the engine that the self-check uses."""

    @property
    def model_runner(self) -> str | None:
        """The version of vLLM's model runner: "V1", "V2", or None if unknown."""

    def speculation_totals(self) -> SpeculationStats | None:
        """Return the draft statistics since the engine started; None without a drafter or if unknown."""
