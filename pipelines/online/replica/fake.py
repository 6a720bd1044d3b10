"""The fake engine behind Ray's `LLMServer`, for tests of faults and load. It parses requests as bulk runs do."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from peagle.engine.fake import ByteTokenizer, FakeEngine
from peagle.engine.interface import Checkable, CompletionOutput, Generation, RequestRefused
from peagle.engine.vllm_internals import engine_dead_error
from peagle.errors import EngineError
from peagle.requests import openai
from peagle.requests.fields import CHAT_URL, COMPLETIONS_URL
from peagle.requests.prompts import PromptBuilder, PromptSpec, RowError
from peagle.requests.sampling import SamplingLimits, conflict
from peagle.runs.rows import completion_row
from pipelines.online.config import ServedModelOptions
from pipelines.online.gateway.admission import COMPLETION_TOKENS
from pipelines.online.wire import BorrowedRequest, to_text

_IGNORED_FIELDS = {"stream", "stream_options", "request_id", "cache_salt"}  # only for streams, Ray or the cache


class FakeServeEngine:
    """The engine interface that Ray's `LLMServer` calls."""

    def __init__(self, options: ServedModelOptions, llm_config: Any) -> None:
        self._fake_options, self._num_speculative_tokens = options.fake, options.num_speculative_tokens or 0
        self._model: str = llm_config.model_id
        self._max_model_len: int = llm_config.engine_kwargs["max_model_len"]
        prompts = PromptSpec(body_column="body", chat=True)
        self._prompts = PromptBuilder(prompts, ByteTokenizer(), self._max_model_len)
        self._engine: FakeEngine | None = None

    async def start(self) -> None:
        await asyncio.sleep(self._fake_options.start_s)
        k, length = self._num_speculative_tokens, self._max_model_len
        self._engine = FakeEngine(self._fake_options, num_speculative_tokens=k, max_model_len=length)

    @property
    def checkable(self) -> Checkable:
        return self._running_engine().checkable

    async def check_health(self) -> None:
        """Raise vLLM's exception if the engine is dead, so that Serve starts another replica."""
        try:
            self._running_engine().check_alive()
        except EngineError as error:
            raise _dead_engine_error() from error

    def routing_stats(self) -> dict[str, Any]:
        return {}

    async def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()

    def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        from ray.serve.llm.openai_api_models import ChatCompletionResponse

        return self._answer(CHAT_URL, request, ChatCompletionResponse)

    def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        from ray.serve.llm.openai_api_models import CompletionResponse

        return self._answer(COMPLETIONS_URL, request, CompletionResponse)

    async def row(self, row: BorrowedRequest) -> Generation:
        return await self._running_engine().generate(row.context.request_id, row.prompt_token_ids, row.sampling)

    async def _answer(self, url: str, request: Any, response_type: type[Any]) -> AsyncGenerator[Any, None]:
        values = request.model_dump(mode="json", exclude_unset=True, warnings=False)
        parsed = self._parse(url, {key: value for key, value in values.items() if key not in _IGNORED_FIELDS})
        if isinstance(parsed, str):
            yield _refusal(parsed)
            return
        token_ids, sampling = parsed
        try:
            if values.get("stream"):
                self._running_engine().check_alive()  # like vLLM, check only before a stream starts
                try:
                    async for text in self._events(url, request.request_id, token_ids, sampling):
                        yield text
                except EngineError:  # vLLM reports a crash as an event, too
                    yield to_text(openai.error_body(str(_dead_engine_error()), kind="InternalServerError", code=500))
                yield "data: [DONE]\n\n"
            else:
                generation = await self._running_engine().generate(request.request_id, token_ids, sampling)
                yield response_type.model_validate(self._body(url, request.request_id, generation))
        except RequestRefused as error:
            yield _refusal(str(error))
        except EngineError as error:
            raise _dead_engine_error() from error

    def _running_engine(self) -> FakeEngine:
        assert self._engine is not None, "Ray calls `start` first"
        return self._engine

    def _parse(self, url: str, values: Mapping[str, Any]) -> tuple[list[int], dict[str, Any]] | str:
        """Return token ids and sampling parameters, or an error message."""
        body = openai.parse_body(url, values)
        if isinstance(body, str):
            return body
        token_ids = self._prompts.build_from_body(body)
        if isinstance(token_ids, RowError):
            return token_ids.message
        max_tokens = COMPLETION_TOKENS if url == COMPLETIONS_URL else max(1, self._max_model_len - len(token_ids))
        sampling: dict[str, Any] = {"temperature": 1.0, "max_tokens": max_tokens, **body.sampling}
        return conflict(sampling, SamplingLimits(max_model_len=self._max_model_len)) or (token_ids, sampling)

    def _body(self, url: str, request_id: str, generation: Generation) -> dict[str, Any]:
        row = {
            "model": self._model,
            "response": generation.text,
            "finish_reason": generation.finish_reason,
            "num_prompt_tokens": generation.num_prompt_tokens,
            "num_cached_tokens": generation.num_cached_tokens,
            "num_output_tokens": generation.num_output_tokens,
            "completions": list(map(completion_row, generation.completions)) or None,
        }
        body = openai.answer(row, request_id, is_chat=url == CHAT_URL, created=int(time.time()))
        return body | {"metrics": self._metrics(generation)}

    async def _events(
        self, url: str, request_id: str, token_ids: list[int], sampling: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        """Yield the event of each token with its choice's current usage, and finally the usage of the request."""
        sent_texts, num_sent_tokens = [""] * sampling.get("n", 1), [0] * sampling.get("n", 1)
        async for completions, generation in self._running_engine().stream(request_id, token_ids, sampling):
            for index, completion in enumerate(completions):
                offset, num_before = len(sent_texts[index]), num_sent_tokens[index]
                new_text = completion.text.removeprefix(sent_texts[index])
                sent_texts[index], num_sent_tokens[index] = completion.text, completion.num_output_tokens
                if new_text or generation:
                    logprobs = completion_row(completion)["logprobs"]
                    choice = openai.chunk_choice(
                        index,
                        new_text,
                        completion.finish_reason if generation else None,
                        is_chat=url == CHAT_URL,
                        logprobs=logprobs and logprobs[num_before:],
                        offset=offset,
                    )
                    yield self._event(url, request_id, [choice], _usage(token_ids, [completion]))
            if generation:
                yield self._event(
                    url, request_id, [], _usage(token_ids, completions), metrics=self._metrics(generation)
                )

    def _event(self, url: str, request_id: str, choices: list[Any], usage: dict[str, Any], **more: Any) -> str:
        created, is_chat = int(time.time()), url == CHAT_URL
        event = openai.chunk(choices, request_id, is_chat=is_chat, created=created, model=self._model)
        return to_text({**event, "usage": usage, **more})

    def _metrics(self, generation: Generation) -> dict[str, Any] | None:
        """Return a request's acceptance in vLLM's format. Each draft has one accepted token."""
        drafts = generation.speculation
        if drafts is None:
            return None
        k = self._num_speculative_tokens
        return {
            "speculative_decoding": {
                "mean_acceptance_length": drafts.acceptance_length or 1.0,
                "draft_acceptance_rate": drafts.num_accepted_tokens / max(1, drafts.num_draft_tokens),
                "acceptance_histogram": [0, drafts.num_drafts, *[0] * (k - 1)],
                "num_spec_steps": drafts.num_drafts,
                "num_accepted_draft_tokens": drafts.num_accepted_tokens,
                "num_draft_tokens": drafts.num_draft_tokens,
                "num_spec_tokens": k,
            }
        }


def _usage(token_ids: list[int], completions: list[CompletionOutput]) -> dict[str, Any]:
    return openai.usage(len(token_ids), sum(completion.num_output_tokens for completion in completions))


def _refusal(message: str) -> Any:
    """Return a refusal as Ray's ingress expects it."""
    from ray.serve.llm.openai_api_models import ErrorResponse

    return ErrorResponse.model_validate(openai.error_body(message, kind="BadRequestError", code=400))


def _dead_engine_error() -> Exception:
    """Return vLLM's exception for requests of a dead engine."""
    return engine_dead_error()()
