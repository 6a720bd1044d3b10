"""Hardware for tests."""

from peagle.hardware import Hardware

# Error messages can describe the machine, so tests and generated pages that quote messages use this machine.
MACHINE = Hardware(
    platform="cpu", memory_gib=16, free_memory_gib=12, num_cpus=4, cpu_name="a CPU", cpu_flags=frozenset({"avx2"}),
    core_ids=(0, 1, 2, 3),
)  # fmt: skip


def cpu(*flags, **changes):
    values = {"memory_gib": 24, "free_memory_gib": 20, "num_cpus": 2, "core_ids": (0, 1)}
    return Hardware(platform="cpu", cpu_flags=frozenset(flags), **(values | changes))


def gpu(*capability, memory_gib=80, **changes):
    """Return a node with one GPU (default: an H100)."""
    values = {
        "accelerator": "H100", "num_accelerators": 1, "compute_capability": capability or (9, 0), "num_cpus": 16,
    }  # fmt: skip
    return Hardware(platform="cuda", memory_gib=memory_gib, free_memory_gib=memory_gib, **(values | changes))
