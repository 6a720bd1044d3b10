"""What makes figures of a benchmark worth less than they look: refused, or said beforehand and in its report.

Pure: it knows counts of prompts, and what engines said of themselves.
"""

from collections.abc import Sequence

from peagle.bench.config import BenchConfig
from peagle.bench.record import PassRecord
from peagle.errors import ConfigError
from peagle.measurement.cells import METHOD_NAMES
from peagle.measurement.target import MODEL_RUNNER

_ENOUGH = 3  # requests of a pass for each at once: of fewer, the last ones run with fewer beside them for long


def require_prompts(config: BenchConfig, num_prompts: int) -> None:
    """Refuse a concurrency that no pass would reach.

    Raises:
        ConfigError: it names that concurrency.
    """
    largest = max(config.concurrency)
    if config.requests_per_slot is None and num_prompts < largest:
        raise ConfigError(
            f"concurrency {largest}: there are {num_prompts} prompts, so no more would ever be in the engine at once",
            hint=f"ask them round and round with --requests-per-slot {_ENOUGH + 1}, take more of them, or leave it out",
        )


def few_prompts(config: BenchConfig, num_prompts: int) -> list[str]:
    """That passes are too short for their concurrency; nothing where they are not."""
    few = [c for c in config.concurrency if (config.requests_per_slot or num_prompts / c) < _ENOUGH]
    if not few:
        return []
    return [
        f"Fewer than {_ENOUGH} requests for each at once at concurrency {', '.join(map(str, few))}: for much of a pass "
        "fewer are under way, and its tokens/s are too low. More prompts or --requests-per-slot help."
    ]


def model_runners(config: BenchConfig, platform: str, chosen: str | None, records: Sequence[PassRecord]) -> list[str]:
    """That methods ran, or may run, on different model runners of vLLM; nothing where they did not.

    Args:
        platform: of the hardware.
        chosen: what the user set `VLLM_USE_V2_MODEL_RUNNER` to.
        records: of the passes that are done.
    """
    methods: dict[str, list[str]] = {}
    for record in records:
        if record.model_runner is not None:
            methods.setdefault(record.model_runner, []).append(METHOD_NAMES[record.method])
    if len(methods) > 1:
        found = "; ".join(f"{runner} ran {', '.join(dict.fromkeys(methods[runner]))}" for runner in sorted(methods))
        return [
            f"vLLM took different model runners: {found}. What they differ by is in the ratios, too. "
            f"{MODEL_RUNNER}=0 has all methods run on V1, in a folder of its own."
        ]
    is_known = bool(records) and all(record.model_runner is not None for record in records)
    if platform == "cuda" and chosen is None and len(config.methods) > 1 and not is_known:
        return [
            f"{MODEL_RUNNER} is not set, and on a GPU vLLM may take another model runner for P-EAGLE than for other "
            f"methods. {MODEL_RUNNER}=0 has all of them run on V1."
        ]
    return []
