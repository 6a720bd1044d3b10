"""Refuse GPUs that an engine cannot use: different models, MIG slices, an old driver or card."""

import importlib.util
import os
import re
from pathlib import Path

from peagle.errors import CapacityError
from peagle.hardware import Hardware

# The oldest supported driver for each major version of CUDA (https://docs.nvidia.com/deploy/cuda-compatibility, "Minor
# Version Compatibility").
_OLDEST_DRIVER = {12: 525, 13: 580}
# The lowest supported compute capability: CUDA 13 dropped Volta and older (release notes of CUDA 13.0).
_OLDEST_CAPABILITY = {13: (7, 5)}


def require_usable(hardware: Hardware, *, cuda: str | None = None) -> None:
    """Raise a CapacityError for GPUs on which an engine would fail, or be sized and priced wrongly.

    Args:
        cuda: the release that torch was built for, such as "13.0"; None for the installed torch.
    """
    if hardware.platform != "cuda":
        return
    if hardware.has_mig:
        raise CapacityError(
            f"a GPU of this node ({hardware.accelerator}) has MIG slices, which vLLM mistakes for whole GPUs "
            "(vllm-project/vllm issue 41848 and pull request 41776)",
            hint="select whole GPUs with CUDA_VISIBLE_DEVICES, or disable MIG: sudo nvidia-smi -i INDEX -mig 0",
        )
    if len(hardware.accelerator_kinds) > 1:
        kinds = [
            f"{visible.count(',') + 1} x {name}: CUDA_VISIBLE_DEVICES={visible}"
            for name, visible in hardware.accelerator_kinds.items()
        ]
        raise CapacityError(
            "the GPUs of this node are different models, but engines are sized and priced for a single model",
            hint=f"make only one model visible ({'; '.join(kinds)}); on a cluster, do so before `ray start`",
        )
    cuda = cuda or _cuda_of_torch()
    if cuda is None:
        return
    cuda_major = int(cuda.split(".")[0])
    # NVIDIA's forward compatibility package provides the newer part of the driver.
    has_compat = "VLLM_ENABLE_CUDA_COMPATIBILITY" in os.environ or "compat" in os.environ.get("LD_LIBRARY_PATH", "")
    oldest_driver, driver = _OLDEST_DRIVER.get(cuda_major), hardware.driver.split(".")[0]
    if oldest_driver and driver.isdecimal() and int(driver) < oldest_driver and not has_compat:
        raise CapacityError(
            f"NVIDIA's driver {hardware.driver} is too old for CUDA {cuda}, which this torch was built for",
            hint=f"install driver {oldest_driver} or newer on the node; for a data centre GPU, you can instead install "
            "NVIDIA's package cuda-compat and set VLLM_ENABLE_CUDA_COMPATIBILITY=1",
        )
    oldest_card = _OLDEST_CAPABILITY.get(cuda_major)
    if oldest_card and (hardware.compute_capability or oldest_card) < oldest_card:
        raise CapacityError(
            f"CUDA {cuda}, which this torch was built for, does not support cards this old: {hardware.describe()}",
            hint="use a card of compute capability 7.5 (Turing) or later",
        )


def _cuda_of_torch() -> str | None:
    """Return the CUDA release of the installed torch without importing it, or None."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    text = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b[^=]*= '(\d+\.\d+)'", text, re.MULTILINE)
    return match[1] if match else None
