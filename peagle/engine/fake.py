"""A deterministic fake engine without a model, for tests, chaos runs and load studies.

Its text depends only on the prompt and the sampling parameters, so two runs can be compared row by row. Its speed is
not a measurement.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from peagle.engine.interface import CompletionOutput, Generation, Judgement, RequestRefused, SelfCheck, TokenLogprob
from peagle.errors import EngineError
from peagle.speculation import SpeculationStats

CORE_NAME = "peagle-fake-engine-core"
_OptionalText = Annotated[str, Field(min_length=1)] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeTraits:
    """The speed and the simulated failures of a fake engine.

    Attributes:
        token_s: seconds per token.
        start_s: seconds to start.
        has_core: whether the engine needs a separate process, as vLLM does. The process is named `CORE_NAME`.
        is_wrong: whether responses differ from those of the target, as with a broken kernel.
        die_on: a prompt with this text kills the engine, like a crash of vLLM's engine process.
        kill_on: a prompt with this text kills the process that hosts the engine.
        hang_on: after a prompt with this text, the engine hangs.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    token_s: Annotated[float, Field(ge=0)] = 0.0
    start_s: Annotated[float, Field(ge=0)] = 0.0
    has_core: bool = False
    is_wrong: bool = False
    die_on: _OptionalText = None
    kill_on: _OptionalText = None
    hang_on: _OptionalText = None


class FakeEngine:
    """An engine that answers with a digest of the prompt.

    Args:
        traits: the constructor does not wait for `start_s`; its caller does.
        num_speculative_tokens: K of a simulated drafter; 0 for no drafter.
        max_num_seqs: maximum number of concurrent requests; None is unlimited. Latency includes the time in the queue.
    """

    compile_s = 0.0
    self_check: SelfCheck | None = None
    model_runner: str | None = None

    def __init__(
        self,
        traits: FakeTraits = FakeTraits(),
        *,
        num_speculative_tokens: int = 0,
        max_model_len: int = 8192,
        max_num_seqs: int | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.checkable = _Checkable(max_model_len, is_wrong=traits.is_wrong)
        self._traits = traits
        self._core: subprocess.Popen[bytes] | None = None
        if traits.has_core:  # the core exits when this process ends, because its standard input is closed
            command = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()", CORE_NAME]
            self._core = subprocess.Popen(command, stdin=subprocess.PIPE)
        self._is_dead = self._hangs = False
        self._signs_of_life = 0
        self._num_speculative_tokens = num_speculative_tokens
        self._slots = asyncio.Semaphore(max_num_seqs) if max_num_seqs else contextlib.nullcontext()
        self._totals = SpeculationStats.empty()

    async def generate(self, request_id: str, prompt_token_ids: list[int], sampling: Mapping[str, Any]) -> Generation:
        """See `Engine.generate`."""
        completions, started_at = self._start_request(prompt_token_ids, sampling), time.monotonic()
        async with self._slots:
            await asyncio.sleep(self._traits.token_s)
            first_token_at = time.monotonic()
            await asyncio.sleep(self._traits.token_s * (_longest(completions) - 1))
            await self._wait_if_hanging()
        ttft_s, latency_s = first_token_at - started_at, time.monotonic() - started_at
        return self._finish_request(prompt_token_ids, completions, ttft_s, latency_s)

    async def stream(
        self, request_id: str, prompt_token_ids: list[int], sampling: Mapping[str, Any]
    ) -> AsyncIterator[tuple[list[CompletionOutput], Generation | None]]:
        """Yield the partial responses of a request after each token, then the complete ones.

        Raises:
            RequestRefused, EngineError: see `Engine.generate`.
        """
        completions, started_at = self._start_request(prompt_token_ids, sampling), time.monotonic()
        first_token_at = started_at
        async with self._slots:
            for num_tokens in range(1, (longest := _longest(completions)) + 1):
                await asyncio.sleep(self._traits.token_s)
                await self._wait_if_hanging()
                self.check_alive()
                first_token_at = time.monotonic() if num_tokens == 1 else first_token_at
                if num_tokens < longest:
                    yield [_first_tokens(completion, num_tokens) for completion in completions], None
        ttft_s, latency_s = first_token_at - started_at, time.monotonic() - started_at
        yield completions, self._finish_request(prompt_token_ids, completions, ttft_s, latency_s)

    def speculation_totals(self) -> SpeculationStats | None:
        return self._totals if self._num_speculative_tokens else None

    def signs_of_life(self) -> int:
        """See `Engine.signs_of_life`. The number grows with every call unless the engine hangs."""
        self._signs_of_life += not self._hangs
        return self._signs_of_life

    def shutdown(self) -> None:
        if self._core is not None:
            self._core.communicate()

    def kill(self) -> None:
        if self._core is not None:
            self._core.kill()

    def _start_request(self, prompt_token_ids: list[int], sampling: Mapping[str, Any]) -> list[CompletionOutput]:
        """Check the request, and return its complete responses."""
        if len(prompt_token_ids) >= self.max_model_len:
            raise RequestRefused(f"{len(prompt_token_ids)} tokens exceed the context of {self.max_model_len}")
        if _contains(prompt_token_ids, self._traits.kill_on):
            os.kill(os.getpid(), signal.SIGKILL)
        self._hangs = self._hangs or _contains(prompt_token_ids, self._traits.hang_on)
        self._is_dead = self._is_dead or _contains(prompt_token_ids, self._traits.die_on)
        self.check_alive()
        return [_completion(prompt_token_ids, sampling, index) for index in range(sampling.get("n", 1))]

    def _finish_request(
        self, prompt_token_ids: list[int], completions: list[CompletionOutput], ttft_s: float, latency_s: float
    ) -> Generation:
        """Count the drafts, and return the result of a finished request."""
        self.check_alive()
        num_tokens = sum(c.num_output_tokens for c in completions)
        speculation = self._speculation(num_tokens)
        self._totals += speculation or SpeculationStats.empty()
        return Generation(
            text=completions[0].text,
            finish_reason=completions[0].finish_reason,
            num_prompt_tokens=len(prompt_token_ids),
            num_cached_tokens=0,
            num_output_tokens=num_tokens,
            speculation=speculation,
            ttft_s=ttft_s,
            latency_s=latency_s,
            completions=tuple(completions) if len(completions) > 1 or completions[0].logprobs is not None else (),
        )

    async def _wait_if_hanging(self) -> None:
        while self._hangs:
            await asyncio.sleep(60.0)

    def check_alive(self) -> None:
        """Raise an EngineError if the engine died."""
        self._is_dead = self._is_dead or (self._core is not None and self._core.poll() is not None)
        if self._is_dead:
            raise EngineError("the fake engine died")

    def _speculation(self, num_tokens: int) -> SpeculationStats | None:
        """Return statistics with one accepted token per draft, so two tokens per step."""
        k = self._num_speculative_tokens
        if not k:
            return None
        num_drafts = num_tokens // 2
        return SpeculationStats.from_histogram([0, num_drafts] + [0] * (k - 1), num_drafts * k)


class _Checkable:
    """A target that generates the tokens 0, 1, 2 and so on; with `is_wrong`, it only generates 0."""

    def __init__(self, max_model_len: int, *, is_wrong: bool) -> None:
        self.max_model_len = max_model_len
        self._is_wrong = is_wrong

    def to_token_ids(self, text: str) -> list[int]:
        return ByteTokenizer().encode(text)

    async def answer(self, prompt: Sequence[int], *, num_tokens: int, temperature: float) -> list[int]:
        return [0] * num_tokens if self._is_wrong else list(range(num_tokens))

    async def judge(self, token_ids: Sequence[int], begin: int) -> list[Judgement]:
        return [
            Judgement(
                token=str(token),
                logprob=-0.25 if token == position else -8.0,
                likeliest=str(position),
                likeliest_logprob=-0.25,
            )
            for position, token in enumerate(token_ids[begin:])
        ]


def _longest(completions: list[CompletionOutput]) -> int:
    return max(completion.num_output_tokens for completion in completions)


def _first_tokens(completion: CompletionOutput, num_tokens: int) -> CompletionOutput:
    """Return the first tokens (words) of a response."""
    return replace(
        completion,
        text=" ".join(completion.text.split(" ")[:num_tokens]),
        num_output_tokens=min(num_tokens, completion.num_output_tokens),
        logprobs=None if completion.logprobs is None else completion.logprobs[:num_tokens],
    )


def _contains(prompt_token_ids: list[int], text: str | None) -> bool:
    return text is not None and text.encode() in bytes(prompt_token_ids)


def _completion(prompt_token_ids: list[int], sampling: Mapping[str, Any], index: int) -> CompletionOutput:
    """Return a response that repeats a digest of the prompt, the temperature and `index`.

    The digest also determines the length; with `ignore_eos`, the length is `max_tokens`.
    """
    digested = [prompt_token_ids, sampling["temperature"], *([index] if index else [])]
    digest = hashlib.sha256(json.dumps(digested).encode()).hexdigest()
    natural_length = sampling["max_tokens"] if sampling.get("ignore_eos") else 1 + int(digest[:8], 16) % 32
    num_tokens = min(natural_length, sampling["max_tokens"])
    word, logprobs = digest[:16], None
    if (num_top := sampling.get("logprobs")) is not None:
        likeliest = [(f" {word}", -0.5), *((f" other{rank}", -1.0 - rank) for rank in range(1, num_top))]
        token = TokenLogprob(token=f" {word}", logprob=-0.5, top=tuple(likeliest[:num_top]))
        logprobs = (replace(token, token=word), *[token] * (num_tokens - 1))
    return CompletionOutput(
        text=" ".join([word] * num_tokens),
        finish_reason="stop" if num_tokens == natural_length else "length",
        num_output_tokens=num_tokens,
        logprobs=logprobs,
    )


class ByteTokenizer:
    """The fake engine's tokenizer: UTF-8 bytes. A chat is a list of messages with roles."""

    chat_template = "role: content"

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, conversation: Any, **_: Any) -> str:
        """Return a line for each message, then the start of the response's line."""
        return "".join(f"{m['role']}: {m['content']}\n" for m in conversation) + "assistant: "
