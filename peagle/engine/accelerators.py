"""Refuse GPUs that an engine cannot use: different models, MIG slices, an old driver or card."""

import importlib.util
import os
import re
from pathlib import Path

from peagle.errors import CapacityError
from peagle.hardware import Hardware

# The oldest driver by major version of CUDA (https://docs.nvidia.com/deploy/cuda-compatibility, "Minor Version
# Compatibility").
_OLDEST_DRIVER = {12: 525, 13: 580}
# The oldest cards: CUDA 13 dropped Volta and older (release notes of CUDA 13.0).
_OLDEST_CAPABILITY = {13: (7, 5)}
_LIBRARIES = "LD_LIBRARY_PATH"


def require_usable(hardware: Hardware, *, cuda: str | None = None) -> None:
    """Refuse GPUs on which an engine would fail, or be sized and priced wrongly.

    Args:
        cuda: the release that torch was built for, such as "13.0"; None for the installed torch.

    Raises:
        CapacityError: with a hint about what works.
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
            hint=f"make only one model visible ({'; '.join(kinds)}), on a cluster before `ray start`",
        )
    cuda = cuda or _built_for()
    _require_driver(hardware, cuda)
    _require_capability(hardware, cuda)


def _require_capability(hardware: Hardware, cuda: str | None) -> None:
    oldest = _OLDEST_CAPABILITY.get(int(cuda.split(".")[0])) if cuda else None
    if oldest and (hardware.compute_capability or oldest) < oldest:
        raise CapacityError(
            f"CUDA {cuda}, which this torch was built for, does not support cards this old: {hardware.describe()}",
            hint="use a card of compute capability 7.5 (Turing) or later",
        )


def _require_driver(hardware: Hardware, cuda: str | None) -> None:
    if cuda is None or "VLLM_ENABLE_CUDA_COMPATIBILITY" in os.environ or "compat" in os.environ.get(_LIBRARIES, ""):
        return  # NVIDIA's forward compatibility package provides the newer part of the driver
    oldest, driver = _OLDEST_DRIVER.get(int(cuda.split(".")[0])), hardware.driver.split(".")[0]
    if oldest and driver.isdecimal() and int(driver) < oldest:
        raise CapacityError(
            f"NVIDIA's driver {hardware.driver} is too old for CUDA {cuda}, which this torch was built for",
            hint=f"install driver {oldest} or newer on the node, or for a data centre GPU NVIDIA's package cuda-compat "
            "and set VLLM_ENABLE_CUDA_COMPATIBILITY=1",
        )


def _built_for() -> str | None:
    """Return the CUDA release of the installed torch without importing it, or None."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b[^=]*= '(\d+\.\d+)'", text, re.MULTILINE)
    return match[1] if match else None
