"""The interface of an engine: requests in, generations out.

Token ids in, text and counts out. It knows nothing of prompts' templates, of rows or of how an engine works; this is
the seam at which `vllm.py` and `fake.py` stand in for each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from peagle.speculation import SpeculationStats

if TYPE_CHECKING:
    from peagle.engine.self_check import Checkable, SelfCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token of a response and its log-probability.

    `top` are the likeliest at its position, as many as were asked for.
    """

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
class Generation:
    """The outcome of one request.

    Attributes:
        text: the response; the first, where several were asked for.
        finish_reason: "stop" or "length"; the first response's.
        num_prompt_tokens: tokens of the prompt.
        num_cached_tokens: those of them that came from the prefix cache; None where the engine cannot say.
        num_output_tokens: tokens of all responses.
        speculation: drafts of all responses; None without a drafter, or where the engine cannot say.
        completions: every response, where several or log-probabilities were asked for; else empty.
        ttft_s: from the first step that the engine scheduled it in to its first token (time in the queue is not in it).
        latency_s: from the same moment to its last token.
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


FAILED = "engine_failed"  # reason of a row on which the engine failed, and went on with the others


class RequestRefused(Exception):  # noqa: N818 - the request's fault, not the engine's
    """The engine will not take this one request; it goes on with the others.

    Attributes:
        reason: of a row's dead letter.
    """

    reason = "refused"


class RequestFailed(RequestRefused):
    """A fault of the engine on this one request, told in the message.

    The engine goes on.
    """

    reason = FAILED


class RowEngine(Protocol):
    """The part of an engine that rows of a corpus need.

    A run's own engines have it, and those that are lent to it.
    """

    async def generate(self, request_id: str, prompt_token_ids: list[int], sampling: Mapping[str, Any]) -> Generation:
        """Run one request to its end.

        Args:
            sampling: keys of `peagle.requests.sampling.SamplingKeys`; those that are not there have its defaults, but
                `temperature` and `max_tokens`, which must be there.

        Raises:
            RequestRefused: this request cannot run.
            EngineError: the engine has died; no request will ever finish.
        """

    def signs_of_life(self) -> int:
        """A number that grows with every step of the engine, and never falls.

        While requests run and it stays the same, the engine is in one long step, or hangs.
        """

    def shutdown(self) -> None:
        """Stop the engine and its processes."""

    def kill(self) -> None:
        """End the engine's processes at once, even hanging ones.

        This process is to end next.
        """


class Engine(RowEngine, Protocol):
    """An engine that runs many requests at once in one continuous batch."""

    max_model_len: int
    compile_s: float
    """Seconds of its start that went into compiling."""
    self_check: "SelfCheck | None"
    """What its self-check found; None before it."""

    @property
    def checkable(self) -> "Checkable":
        """The same engine as its self-check asks it."""

    @property
    def model_runner(self) -> str | None:
        """The generation of vLLM's model runner: "V1", "V2", or None if unknown."""

    def speculation_totals(self) -> SpeculationStats | None:
        """Drafts of all requests since the engine started.

        None where it does not draft or cannot say.
        """
