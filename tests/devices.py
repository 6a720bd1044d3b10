"""Hardware of tests."""

from typing import Any

from peagle.hardware import Hardware


def cpu(*flags: str, **changes: Any) -> Hardware:
    values: dict[str, Any] = {"memory_gib": 24, "free_memory_gib": 20, "num_cpus": 2, "core_ids": (0, 1)}
    return Hardware(platform="cpu", cpu_flags=frozenset(flags), **(values | changes))


def gpu(*capability: int, memory_gib: float = 80, **changes: Any) -> Hardware:
    """One GPU, by default a Hopper."""
    values: dict[str, Any] = {
        "accelerator": "H100", "num_accelerators": 1, "compute_capability": capability or (9, 0), "num_cpus": 16,
    }  # fmt: skip
    return Hardware(platform="cuda", memory_gib=memory_gib, free_memory_gib=memory_gib, **(values | changes))
