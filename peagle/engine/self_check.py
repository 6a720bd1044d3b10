"""The self-check of an engine before it accepts work: its greedy answer must be that of the target without a drafter.

The engine continues a text greedily with its drafter. Then it reads the prompt and the answer in one prefill, and
reports the target's most likely token at each position. The answer must have these tokens, except for rounding ties
(`peagle.engine.lossless`).
"""

import asyncio
import json
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from peagle.engine.interface import Checkable, Judgement, RequestRefused, SelfCheck
from peagle.engine.lossless import tie_margin
from peagle.engine.precision import Precision
from peagle.engine.spec import EngineSpec, spec_precision
from peagle.engine.vllm_internals import engine_dead_error, refusal_errors, request_error
from peagle.errors import EngineError
from peagle.hardware import Hardware

NUM_TOKENS = 32
_NUM_TOKENS_WITHOUT_DRAFTER = 16  # fewer, because each token takes a step
LIMIT_S = 1800.0  # a kernel may be compiled on first use, which takes minutes
# In code with a docstring, drafts of all lengths are accepted, so a few steps verify a lot. In prose, drafts of the
# shipped heads are hardly ever accepted (0.8 s for 32 tokens, 0.5 s for 32 tokens of code, on two cores with AMX).
TEXT = '''def celsius(fahrenheit):
    """Convert degrees Fahrenheit to degrees Celsius."""
    return (fahrenheit - 32) * 5 / 9


def fahrenheit(celsius):
'''


async def self_check(engine: Checkable, spec: EngineSpec, hardware: Hardware, *, limit_s: float = LIMIT_S) -> SelfCheck:
    """Check an engine, and write the result to standard error, which is the engine's log.

    Raises:
        EngineError: the engine died, or did not answer in time.
    """
    if spec.drafter is not None and spec.drafter.synthetic_rates is not None:
        check = SelfCheck(outcome="skipped", seen="drafts are accepted at random, so text differs from the target's")
    else:
        precision = spec_precision(spec, hardware)
        try:
            check = await asyncio.wait_for(_check(engine, tie_margin(precision), spec), limit_s)
        except TimeoutError:
            raise EngineError(f"the engine did not answer its self-check within {limit_s:g} s") from None
        if check.outcome == "failed":
            check = replace(check, advice=_advice(spec, precision))
    sys.stderr.write(f"peagle: {check.describe()}\n")
    sys.stderr.flush()
    return check


def require_passed(check: SelfCheck) -> None:
    """Raise an EngineError if the self-check failed."""
    if check.outcome == "failed":
        raise EngineError(f"the engine failed its self-check: {check.seen}", hint=check.advice)


def require_none_failed(checks: Iterable[str]) -> None:
    """Raise an EngineError if an engine in a ledger failed its self-check; checks are JSON or empty."""
    for check in checks:
        if check:
            require_passed(SelfCheck(**json.loads(check)))


def _advice(spec: EngineSpec, precision: Precision) -> str:
    options = ["--drafter none"] * (spec.drafter is not None)
    options += ["--kv-cache-precision bf16"] * (precision.kv_cache == "fp8")
    options += ["--precision bf16"] * (precision.quantization is not None)
    options += ["--enforce-eager"] * (not spec.enforce_eager)
    fix = f"; try {' or '.join(options)} to find out which kernel it is" if options else ""
    return f"a vLLM kernel computes wrong results on this hardware or in this precision{fix}"


def count_outcomes(checks: Iterable[str]) -> dict[str, int]:
    """Count the outcomes of checks, given as JSON; empty for an engine that was not checked (yet)."""
    outcomes = Counter(json.loads(check)["outcome"] if check else "unchecked" for check in checks)
    return {outcome: outcomes[outcome] for outcome in ("passed", "failed", "skipped", "unchecked")}


async def _check(engine: Checkable, max_tie: float, spec: EngineSpec) -> SelfCheck:
    started = time.monotonic()

    def skipped(reason: str) -> SelfCheck:
        return SelfCheck(outcome="skipped", seen=reason, seconds=time.monotonic() - started)

    prompt = engine.to_token_ids(TEXT)[: max(1, engine.max_model_len // 2)]
    max_tokens = NUM_TOKENS if spec.drafter is not None else _NUM_TOKENS_WITHOUT_DRAFTER
    num_tokens = min(max_tokens, engine.max_model_len - len(prompt) - 1)
    if not prompt or num_tokens < 1:
        return skipped(f"a context of {engine.max_model_len} tokens is too short")
    # Sampler bugs appear if greedy and sampled requests share a batch; the sampled answer itself is not checked.
    # The sampled answer is short because it slows down the greedy request.
    requests = [engine.answer(prompt, num_tokens=num_tokens, temperature=0.0)]
    if spec.max_num_seqs > 1:
        requests.append(engine.answer(prompt, num_tokens=max(1, num_tokens // 4), temperature=1.0))
    try:
        answer, *_ = await asyncio.gather(*requests)
        judgements = await engine.judge([*prompt, *answer], len(prompt)) if answer else []
    except RequestRefused as error:
        return skipped(f"the engine refused the request: {error}")
    return _verdict(judgements, max_tie, time.monotonic() - started)


def _verdict(judgements: Sequence[Judgement], max_tie: float, seconds: float) -> SelfCheck:
    # NaN is not a tie.
    wrong = [position for position, judgement in enumerate(judgements) if not judgement.margin <= max_tie]
    finding = "" if judgements else "the answer is empty"
    if wrong:
        first = judgements[wrong[0]]
        finding = (
            f"token {wrong[0]} of the greedy answer is {first.token!r} (log-probability {first.logprob:.3f}), but "
            f"without a drafter the target prefers {first.likeliest!r} ({first.likeliest_logprob:.3f}); {len(wrong)} "
            f"of {len(judgements)} tokens differ by more than a rounding tie of {max_tie:g}"
        )
    largest_margin = max((judgement.margin for judgement in judgements), default=None)
    return SelfCheck(
        outcome="failed" if finding else "passed",
        num_tokens=len(judgements),
        num_ties=sum(0 < judgement.margin <= max_tie for judgement in judgements),
        largest_margin=largest_margin if largest_margin is not None and abs(largest_margin) < float("inf") else None,
        max_tie=max_tie,
        seconds=round(seconds, 3),
        seen=finding,
    )


class CheckableLlm:
    """A vLLM engine as a `Checkable`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.max_model_len: int = llm.model_config.max_model_len

    def to_token_ids(self, text: str) -> list[int]:
        """See `Checkable.to_token_ids`. Without a tokenizer, returns the first ids of the vocabulary."""
        if self._llm.model_config.skip_tokenizer_init:
            return list(range(min(16, self._llm.model_config.get_vocab_size())))
        return list(self._llm.get_tokenizer().encode(text))

    async def answer(self, prompt: Sequence[int], *, num_tokens: int, temperature: float) -> list[int]:
        output = await self._output(prompt, temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
        return list(output.outputs[0].token_ids)

    async def judge(self, token_ids: Sequence[int], begin: int) -> list[Judgement]:
        """See `Checkable.judge`. vLLM does not use its prefix cache for log-probabilities of a prompt."""
        output = await self._output(token_ids, temperature=0.0, max_tokens=1, prompt_logprobs=1)
        judgements = []
        for token_id, logprobs in zip(token_ids[begin:], output.prompt_logprobs[begin:], strict=True):
            likeliest = min(logprobs, key=lambda other_id: logprobs[other_id].rank)
            judgement = Judgement(
                token=self._text(token_id),
                logprob=logprobs[token_id].logprob,
                likeliest=self._text(likeliest),
                likeliest_logprob=logprobs[likeliest].logprob,
            )
            judgements.append(judgement)
        return judgements

    def _text(self, token_id: int) -> str:
        if self._llm.model_config.skip_tokenizer_init:
            return str(token_id)
        return str(self._llm.get_tokenizer().decode([token_id]))

    async def _output(self, prompt: Sequence[int], **sampling: Any) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # To detokenize log-probabilities, vLLM would read the tokenizer's file again: 0.3 s for 49,152 tokens.
        params = SamplingParams(**sampling, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        request_id = f"self-check-{uuid.uuid4().hex[:8]}"
        try:
            outputs = [o async for o in self._llm.generate({"prompt_token_ids": list(prompt)}, params, request_id)]
        except engine_dead_error() as error:
            raise EngineError("the vLLM engine process died in its self-check") from error
        except refusal_errors() as error:
            raise RequestRefused(str(error)) from error
        except request_error() as error:
            raise EngineError(f"vLLM failed on its self-check: {error.__cause__!r}") from error
        return outputs[-1]
