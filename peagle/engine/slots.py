"""Token slots of a step: those of decoding, and those left for prompts.

Pure: a spec and a description of the hardware in, numbers out. The facts about vLLM's scheduler that they rest on are
cited.
"""

from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.errors import ConfigError
from peagle.hardware import Hardware

# What vLLM itself budgets for prefill in a step: `SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS` on CPU, and
# its default for data-centre GPUs (`EngineArgs.get_batch_defaults`).
_PREFILL_TOKENS = {"cpu": 2048, "cuda": 8192}


def max_num_batched_tokens(spec: EngineSpec, hardware: Hardware) -> int:
    """Token slots of one step: all decoding requests, and room for prefill.

    vLLM's scheduler (`v1/core/sched/scheduler.py`, `config/speculative.py: max_num_new_slots_for_drafting`)
    spends from `max_num_batched_tokens`, for each request that it puts into a step:

    - its scheduled tokens: while decoding 1 + K (the last token and the K drafts to verify), in prefill a
      piece of the prompt;
    - the drafter's extra input slots: K - 1 with parallel drafting (the first draft reuses an existing slot,
      the others are mask tokens), 0 with EAGLE-3. A request in prefill pays them too.

    With `max_num_seqs` = S decoding, P-EAGLE takes S x ((1 + K) + (K - 1)) = S x 2K, EAGLE-3 takes S x (1 +
    K) and no speculation takes S. The step keeps the prefill budget P (2048 on CPU, 8192 on a GPU) beyond
    that.

    Example: S = 256, K = 7, P-EAGLE: 256 x 14 = 3584 slots for decoding. Under vLLM's default of 2048 only
    146 of 256 requests could take part in a step, and prefill, served last, would never come; sized here on
    CPU it is 3584 + 2048 = 5632.
    """
    return _PREFILL_TOKENS[hardware.platform] + spec.max_num_seqs * slots_per_request(spec.drafter)


def check_slots(spec: EngineSpec) -> None:
    """Refuse token slots that leave prompts none.

    Decoding requests are served first, so no prompt would ever begin.

    Raises:
        ConfigError: with the number that is needed.
    """
    needed = spec.max_num_seqs * slots_per_request(spec.drafter)
    if spec.max_num_batched_tokens is not None and spec.max_num_batched_tokens <= needed:
        drafts = f", each with {spec.drafter.num_speculative_tokens} drafts" if spec.drafter else ""
        raise ConfigError(
            f"max_num_batched_tokens {spec.max_num_batched_tokens} leaves no room for prompts: {spec.max_num_seqs} "
            f"requests at once{drafts}, take {needed} token slots of a step",
            hint=f"give more than {needed}, or none, or fewer requests at once with --max-num-seqs",
        )


def slots_per_request(drafter: DrafterSpec | None) -> int:
    """Token slots of a step for one decoding request (`max_num_batched_tokens`)."""
    if drafter is None:
        return 1
    k = drafter.num_speculative_tokens
    return 2 * k if drafter.method == "peagle" else 1 + k
