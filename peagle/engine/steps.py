"""Choose `max_num_batched_tokens` and the sizes of CUDA graphs."""

from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.errors import ConfigError
from peagle.hardware import Hardware

# vLLM's prefill budget of a step: `SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS` on CPU, and its default for
# data-centre GPUs (`EngineArgs.get_batch_defaults`).
_PREFILL_TOKENS = {"cpu": 2048, "cuda": 8192}
# vLLM's own sizes: 1, 2, 4, then every 8 tokens to 256, then every 16.
_VLLM_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
# The largest useful size in tokens: a larger step computes for longer than Python takes to launch it. The commands in
# the model cards of amazon/gpt-oss-20b-p-eagle and its long-context variant have the same maximum.
_MAX_SIZE = 4096
# Each size is captured twice, with attention and in pieces around it. A size takes 24 to 28 MiB and 0.06 s in the log
# of vllm-project/vllm pull 22897, and 10 to 15 MiB and 0.4 to 0.6 s on an H200 (2026-11-27, benchmarks/gpu/). So these
# limits add at most about 40 s to the start, and the graphs take at most 4 % of the memory.
_SIZE_GIB = 28 / 1024
_MAX_NUM_SIZES = 96
_MEMORY_SHARE = 0.04
# vLLM's arguments that set the sizes.
_SIZE_ARGUMENTS = {"cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config"}


def max_num_batched_tokens(spec: EngineSpec, hardware: Hardware) -> int:
    """Return the maximum tokens of one step: for all decoding requests, plus room for prefill.

    vLLM's scheduler (`v1/core/sched/scheduler.py`, `config/speculative.py: max_num_new_slots_for_drafting`) charges
    each request of a step with

    - its scheduled tokens: 1 + K while decoding (the last token and K draft tokens), or a chunk of the prompt;
    - the drafter's additional input slots, also in prefill: K - 1 with P-EAGLE and DSpark (mask tokens; the first draft
      token reuses a slot), K with DFlash, 0 with EAGLE-3.

    With S = `max_num_seqs` requests decoding, P-EAGLE takes S x ((1 + K) + (K - 1)) = S x 2K slots, EAGLE-3 S x (1 + K)
    and no speculation S. The prefill budget (2048 on CPU, 8192 on a GPU) is added.

    Example: S = 256, K = 7, P-EAGLE on a CPU: 256 x 14 + 2048 = 5632. With vLLM's default of 2048, only 146 of 256
    requests could take part in a step, and prefill, which is served last, would starve.
    """
    return _PREFILL_TOKENS[hardware.platform] + spec.max_num_seqs * slots_per_request(spec.drafter)


def check_slots(spec: EngineSpec) -> None:
    """Raise a ConfigError if no room is left for prefill, because decoding requests are scheduled first."""
    num_needed = spec.max_num_seqs * slots_per_request(spec.drafter)
    if spec.max_num_batched_tokens is not None and spec.max_num_batched_tokens <= num_needed:
        drafts = f" with {spec.drafter.num_speculative_tokens} draft tokens each" if spec.drafter else ""
        raise ConfigError(
            f"max_num_batched_tokens {spec.max_num_batched_tokens} leaves no room for prompts: {spec.max_num_seqs} "
            f"concurrent requests{drafts} need {num_needed} tokens per step",
            hint=f"use more than {num_needed}, remove the option, or decrease --max-num-seqs",
        )


def slots_per_request(drafter: DrafterSpec | None) -> int:
    """Return the token slots of a step for one decoding request (see `max_num_batched_tokens`)."""
    if drafter is None:
        return 1
    k = drafter.num_speculative_tokens
    return 1 + k + {"peagle": k - 1, "dspark": k - 1, "dflash": k}.get(drafter.method, 0)


def capture_sizes(spec: EngineSpec, hardware: Hardware) -> list[int] | None:
    """Return vLLM's `cudagraph_capture_sizes`, ascending; None if nothing is captured or the user sets them.

    A step runs as a CUDA graph if a captured size is at least its number of tokens. A larger step runs eagerly: Python
    launches each kernel. By default, vLLM 0.29 captures up to 512 tokens (`VllmConfig._set_cudagraph_sizes`), which is
    too small for speculation:

    - Verifying takes 1 + K tokens per request, and a pass of a P-EAGLE drafter 2K (`slots_per_request`). With K = 7,
      verification is eager for more than 64 concurrent requests, and drafting for more than 36.
    - Model runner V1, which P-EAGLE needs, rounds each size up to a multiple of 1 + K and drops sizes above the
      largest. With K = 10 and one request, the only size is 11 tokens, and the drafter, which needs 20, runs eagerly
      (see also vllm-project/vllm issue 54933).

    Example: with 128 requests and P-EAGLE at K = 7, verifying takes 128 x 8 = 1,024 tokens and drafting 128 x 14 =
    1,792. So the sizes end at 1,792 = 224 x 8 and include 1,024.
    """
    if hardware.platform != "cuda" or spec.enforce_eager or _SIZE_ARGUMENTS & spec.extra.keys():
        return None
    if spec.drafter is None and spec.max_num_seqs in _VLLM_SIZES:
        return None  # vLLM's own list is long enough
    verify_tokens = 1 + (spec.drafter.num_speculative_tokens if spec.drafter else 0)
    max_decode_tokens = _rounded_up(
        spec.max_num_seqs * max(verify_tokens, slots_per_request(spec.drafter)), verify_tokens
    )
    # Also for steps with a chunk of a prompt: twice the tokens of decoding, at most twice vLLM's default of 512.
    max_prefill_tokens = min(2 * spec.max_num_seqs * verify_tokens, 1024)
    max_size = min(max(max_decode_tokens, max_prefill_tokens), _MAX_SIZE) // verify_tokens * verify_tokens
    sizes = list(_VLLM_SIZES)
    while sizes[-1] < max_size:
        sizes.append(round(sizes[-1] * 1.125))  # padding is then at most a ninth of a step
    if spec.drafter is not None and spec.drafter.method == "peagle":  # as model runner V1 rounds them
        sizes = [_rounded_up(size, verify_tokens) for size in sizes]
    required = {spec.max_num_seqs * verify_tokens, max_decode_tokens, max_size}
    sizes = sorted(size for size in {*sizes, *required} if size <= max_size)
    max_num_sizes = min(_MAX_NUM_SIZES, int(_MEMORY_SHARE * hardware.memory_gib / _SIZE_GIB))
    while len(sizes) > max_num_sizes:  # remove the sizes with the closest neighbours
        gaps = {size: above / below for below, size, above in zip(sizes, sizes[1:], sizes[2:], strict=False)}
        closest = min(gaps.keys() - required, key=lambda size: (gaps[size], size), default=None)
        if closest is None:
            break
        sizes.remove(closest)
    return sizes


def graphs_gib(spec: EngineSpec, hardware: Hardware) -> float:
    """Estimate the memory of the graphs on one accelerator in GiB; vLLM measures the memory when it starts."""
    if hardware.platform != "cuda" or spec.enforce_eager:
        return 0.0
    sizes = capture_sizes(spec, hardware) or [
        size for size in _VLLM_SIZES if size <= 2 * spec.max_num_seqs
    ]  # vLLM's default
    return _SIZE_GIB * len(sizes)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
