"""A vLLM `AsyncLLM` as an `Engine`.

vLLM is imported when an engine starts, after the environment variables that it reads have been set.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from peagle.engine.arguments import NodeRank, engine_args
from peagle.engine.environment import set_environment
from peagle.engine.interface import CompletionOutput, Generation, RequestFailed, RequestRefused, SelfCheck, TokenLogprob
from peagle.engine.self_check import CheckableLlm
from peagle.engine.spec import EngineSpec
from peagle.engine.startup import interruptible, start_limit
from peagle.engine.trials import guard_engine, trials_of
from peagle.engine.vllm_internals import (
    client_text,
    counters,
    drafts_of,
    engine_dead_error,
    follow,
    model_runner,
    refusal_errors,
    request_error,
)
from peagle.errors import ConfigError, EngineError, PeagleError
from peagle.hardware import Hardware
from peagle.plain_json import logprob_number
from peagle.speculation import SpeculationStats

_COUNTER_PREFIX = "vllm:spec_decode_"


class VllmEngine:
    """A running vLLM engine, from keyword arguments of `vllm.AsyncEngineArgs`.

    Raises:
        EngineError: vLLM did not start; the cause is chained.
    """

    compile_s = 0.0
    self_check: SelfCheck | None = None

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from vllm import AsyncEngineArgs, AsyncLLMEngine

        self._steps = _StepCounter()
        try:
            with start_limit(kill_children), interruptible():
                self._llm = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[self._steps])
        except PeagleError:
            raise
        except Exception as error:  # vLLM raises any type
            raise EngineError(f"vLLM did not start: {error}") from error
        self._trials = trials_of(self._llm)
        guard_engine(self._llm, self._trials)
        self.checkable = CheckableLlm(self._llm)
        self.max_model_len: int = self._llm.model_config.max_model_len

    @property
    def model_runner(self) -> str | None:
        """See `Engine.model_runner`."""
        return model_runner(self._llm)

    async def generate(self, request_id: str, prompt_token_ids: list[int], sampling: Mapping[str, Any]) -> Generation:
        """See `Engine.generate`."""
        return await generate(self._llm, request_id, {"prompt_token_ids": prompt_token_ids}, sampling)

    def speculation_totals(self) -> SpeculationStats | None:
        return _totals(counters())

    def signs_of_life(self) -> int:
        return self._steps.num_steps

    def shutdown(self) -> None:
        self._trials.close()
        self._llm.shutdown()

    def kill(self) -> None:
        """See `Engine.kill`. Otherwise a hanging engine core would outlive this process."""
        kill_children()


async def generate(
    llm: Any, request_id: str, prompt: Mapping[str, Any], sampling: Mapping[str, Any], *, priority: int = 0
) -> Generation:
    """Run one request of an `AsyncLLM` to its end, like `Engine.generate`.

    Args:
        prompt: vLLM's prompt: `prompt_token_ids`, and optionally `cache_salt`.
        priority: lower values run first, if the engine's scheduling policy is priority.

    Raises:
        RequestRefused, EngineError: for the reasons in `Engine.generate`.
    """
    try:
        params = _sampling_params(sampling)
        outputs = [output async for output in llm.generate(prompt, params, request_id, priority=priority)]
    except engine_dead_error() as error:
        raise EngineError("the vLLM engine process died") from error
    except refusal_errors() as error:
        raise RequestRefused(client_text(error)) from error
    except request_error() as error:  # only this request failed
        raise RequestFailed(f"vLLM failed on this request: {error.__cause__!r}") from error
    if not outputs:
        raise EngineError(f"vLLM ended request {request_id} without an output")
    output = outputs[-1]
    # vLLM ends a response early if its constraint does not compile or allows no further token.
    for completion in output.outputs:
        if (reason := str(completion.finish_reason)) in ("error", "abort"):
            num_tokens = len(completion.token_ids)
            if params.structured_outputs is not None and reason == "error":
                raise RequestRefused(f"the constraint allows no further token after {num_tokens} tokens")
            raise RequestRefused(f"vLLM ended the response early ({reason}) after {num_tokens} tokens")
    return _generation(output, sampling.get("logprobs") or 0)


class _StepCounter:
    """A vLLM statistics logger that counts the steps of all engine cores. vLLM calls it to get each core's logger."""

    def __init__(self) -> None:
        self.num_steps = 0

    def __call__(self, vllm_config: Any, engine_index: int) -> "_StepCounter":
        return self

    def record(self, *_: Any, **__: Any) -> None:
        self.num_steps += 1

    def log(self) -> None: ...
    def log_engine_initialized(self) -> None: ...
    def record_sleep_state(self, *_: Any, **__: Any) -> None: ...


def kill_children() -> None:
    """Kill all descendants of this process, including those that vLLM has just started.

    Python's resource tracker survives, because it frees shared memory when the other processes are gone.
    """
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in word for word in process.cmdline()):
                process.kill()


def has_request_metrics() -> bool:
    """Whether this vLLM can report acceptance per request: 0.29 can, 0.24 rejects the argument."""
    from vllm import AsyncEngineArgs

    return hasattr(AsyncEngineArgs, "per_request_spec_decode_metrics")


def has_synthetic_acceptance() -> bool:
    """Whether this vLLM can accept draft tokens at random, with a given rate per position."""
    from vllm.config import SpeculativeConfig

    return hasattr(SpeculativeConfig, "synthetic_acceptance_rates")


def _totals(metrics: Sequence[Any]) -> SpeculationStats | None:
    """Return vLLM's draft counts, summed over the engine's ranks; None if vLLM does not count drafts."""
    counts: dict[str, int] = {}
    accepted_by_position: list[int] = []
    for metric in metrics:
        if not metric.name.startswith(_COUNTER_PREFIX):
            continue
        if metric.name == f"{_COUNTER_PREFIX}num_accepted_tokens_per_pos":
            accepted_by_position = [a + b for a, b in zip_longest(accepted_by_position, metric.values, fillvalue=0)]
        else:
            counts[metric.name] = counts.get(metric.name, 0) + metric.value
    if f"{_COUNTER_PREFIX}num_drafts" not in counts:
        return None
    return SpeculationStats(
        num_drafts=counts[f"{_COUNTER_PREFIX}num_drafts"],
        num_draft_tokens=counts[f"{_COUNTER_PREFIX}num_draft_tokens"],
        accepted_per_position=tuple(accepted_by_position),
    )


def _sampling_params(sampling: Mapping[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

    arguments = {key: value for key, value in sampling.items() if key not in ("json_schema", "stop")}
    if schema := sampling.get("json_schema"):
        arguments["structured_outputs"] = StructuredOutputsParams(json=schema)
    elif constraint := sampling.get("structured_outputs"):
        arguments["structured_outputs"] = StructuredOutputsParams(**constraint)
    if detection := sampling.get("repetition_detection"):
        arguments["repetition_detection"] = RepetitionDetectionParams(**detection)
    return SamplingParams.from_optional(
        **arguments, stop=sampling.get("stop") or None, output_kind=RequestOutputKind.FINAL_ONLY
    )


def _generation(output: Any, num_top: int = 0) -> Generation:
    first_completion = output.outputs[0]
    times = output.metrics
    has_times = times is not None and times.scheduled_ts > 0 and times.first_token_ts > 0
    needs_completions = len(output.outputs) > 1 or first_completion.logprobs is not None
    drafts = [stats for completion in output.outputs if (stats := drafts_of(completion)) is not None]
    return Generation(
        text=first_completion.text,
        finish_reason=str(first_completion.finish_reason),
        num_prompt_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
        num_output_tokens=sum(len(completion.token_ids) for completion in output.outputs),
        speculation=sum(drafts, start=SpeculationStats.empty()) if drafts else None,
        ttft_s=times.first_token_ts - times.scheduled_ts if has_times else None,
        latency_s=times.last_token_ts - times.scheduled_ts if has_times else None,
        completions=tuple(_completion(c, num_top) for c in output.outputs) if needs_completions else (),
    )


def _completion(completion: Any, num_top: int) -> CompletionOutput:
    logprobs = None
    if completion.logprobs is not None:
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        logprobs = tuple(_token_logprob(token_id, candidates, num_top) for token_id, candidates in pairs)
    return CompletionOutput(
        text=completion.text,
        finish_reason=str(completion.finish_reason),
        num_output_tokens=len(completion.token_ids),
        logprobs=logprobs,
    )


def _token_logprob(token_id: int, candidates: Mapping[int, Any], num_top: int) -> TokenLogprob:
    """Return a token's log-probability and the most likely tokens.

    vLLM's `candidates` are the sampled token and the most likely tokens; ranks begin at 1.
    """
    likeliest = sorted(candidates.values(), key=lambda c: c.rank)[:num_top]
    return TokenLogprob(
        token=candidates[token_id].decoded_token or "",
        logprob=logprob_number(candidates[token_id].logprob),
        top=tuple((c.decoded_token or "", logprob_number(c.logprob)) for c in likeliest),
    )


def start_engine(
    spec: EngineSpec,
    hardware: Hardware,
    *,
    engine_index: int = 0,
    num_engines_on_node: int = 1,
    node_rank: NodeRank | None = None,
) -> VllmEngine:
    """Set the environment variables and start vLLM.

    Args:
        node_rank: rank of this node, which leads an engine on several nodes. The start waits for the other nodes.

    Raises:
        EngineError: vLLM did not start.
        ConfigError: the hardware or this version of vLLM cannot run the spec.
    """
    return VllmEngine(_prepare(spec, hardware, engine_index, num_engines_on_node, node_rank))


def follow_engine(
    spec: EngineSpec, hardware: Hardware, *, engine_index: int, num_engines_on_node: int, node_rank: NodeRank
) -> None:
    """Run this node's ranks of an engine that another node leads, until one of them ends."""
    follow(_prepare(spec, hardware, engine_index, num_engines_on_node, node_rank))


def _prepare(
    spec: EngineSpec, hardware: Hardware, engine_index: int, num_engines_on_node: int, node_rank: NodeRank | None
) -> dict[str, Any]:
    """Set the environment, and return vLLM's arguments."""
    assert (node_rank is not None) == (spec.num_nodes > 1), "an engine on several nodes has a rank on each"
    set_environment(spec, hardware, engine_index=engine_index, num_engines_on_node=num_engines_on_node)
    if spec.drafter and spec.drafter.synthetic_rates and not has_synthetic_acceptance():
        raise ConfigError(
            "this version of vLLM does not support synthetic acceptance",
            hint="use vLLM 0.24 or later, or remove --synthetic-acceptance",
        )
    arguments = engine_args(
        spec, hardware, num_engines_on_node=num_engines_on_node, request_metrics=has_request_metrics()
    )
    if node_rank is None:
        return arguments
    os.environ |= node_rank.environment()
    return arguments | node_rank.arguments(spec.num_nodes)
