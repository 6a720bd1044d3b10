"""A vLLM `AsyncLLM` as `self_check.py` asks it: bulk's and the endpoint's engines alike."""

import uuid
from collections.abc import Sequence
from typing import Any

from peagle.engine.generation import RequestRefused
from peagle.engine.self_check import Judgement
from peagle.errors import EngineError

_FIRST_IDS = 16  # where there is no tokenizer to ask


class CheckableLlm:
    """See `Checkable`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.max_model_len: int = llm.model_config.max_model_len

    def prompt(self, text: str) -> list[int]:
        """See `Checkable.prompt`; an engine that was started without a tokenizer gets the first ids instead."""
        if self._llm.model_config.skip_tokenizer_init:
            return list(range(min(_FIRST_IDS, self._llm.model_config.get_vocab_size())))
        return list(self._llm.get_tokenizer().encode(text))

    async def answer(self, prompt: Sequence[int], *, num_tokens: int, temperature: float) -> list[int]:
        """See `Checkable.answer`."""
        output = await self._output(
            prompt, temperature=temperature, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        return list(output.outputs[0].token_ids)

    async def judge(self, token_ids: Sequence[int], begin: int) -> list[Judgement]:
        """See `Checkable.judge`. A request for log-probabilities of its prompt does not read vLLM's prefix cache."""
        output = await self._output(token_ids, temperature=0.0, max_tokens=1, prompt_logprobs=1)
        pairs = zip(token_ids[begin:], output.prompt_logprobs[begin:], strict=True)
        return [_judgement(candidates[token_id], candidates.values()) for token_id, candidates in pairs]

    async def _output(self, prompt: Sequence[int], **sampling: Any) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        params = SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY)
        request_id = f"self-check-{uuid.uuid4().hex[:8]}"
        try:
            outputs = [o async for o in self._llm.generate({"prompt_token_ids": list(prompt)}, params, request_id)]
        except EngineDeadError as error:
            raise EngineError("the vLLM engine process died in its self-check") from error
        except refusals() as error:
            raise RequestRefused(str(error)) from error
        except EngineGenerateError as error:
            raise EngineError(f"vLLM failed on its self-check: {error.__cause__!r}") from error
        return outputs[-1]


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises of a request that it does not take: classes of its own in 0.29, a ValueError in 0.24."""
    import vllm.exceptions

    own = (getattr(vllm.exceptions, name, None) for name in ("VLLMClientError", "GracefulHTTPError"))
    return (ValueError, *filter(None, own))


def _judgement(taken: Any, candidates: Any) -> Judgement:
    likeliest = min(candidates, key=lambda candidate: candidate.rank)
    return Judgement(
        token=taken.decoded_token or "",
        logprob=taken.logprob,
        likeliest=likeliest.decoded_token or "",
        likeliest_logprob=likeliest.logprob,
    )
