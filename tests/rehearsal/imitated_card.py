"""Use vLLM's CUDA platform on a machine without a GPU, with vLLM's build for CPUs.

Call `imitate_card` before importing vLLM. It fakes the properties of the card, and the modules that the CPU build
lacks; these are imported but never called. Afterwards, the process cannot run engines. vLLM uses model runner V2 only
if Triton is installed, so `imitate_card` makes it appear installed, as in the CUDA build.
"""

import importlib.machinery
import os
import sys
import types
from typing import Any

from tests.rehearsal.cards import Card

_ABSENT_MODULES = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
_ABSENT_OPS = (
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
)
# FlashInfer is a dependency of the CUDA build. vLLM imports its FlashInfer back end to query its features.
_FLASHINFER = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")
_libraries: list[Any] = []


class _FakeModule(types.ModuleType):
    """A module in which every name is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def imitate_card(card: Card) -> None:
    """Make vLLM's platform report eight of these GPUs."""
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"  # flashinfer-cubin appears installed, so nothing is downloaded
    import torch

    for name in _ABSENT_MODULES:
        sys.modules.setdefault(name, types.ModuleType(name))
    for name in _FLASHINFER:
        module = sys.modules.setdefault(name, _FakeModule(name))
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name == "flashinfer")
        module.__path__ = []
    ops = torch.library.Library("_C", "FRAGMENT")
    for op in _ABSENT_OPS:
        ops.define(f"{op}(int capability) -> bool")
        ops.impl(op, lambda capability: capability >= 89, "CompositeExplicitAutograd")
    _libraries.append(ops)  # a library's operators disappear when it is garbage-collected

    import vllm.platforms as platforms
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    class FakeCudaPlatform(cuda.NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*card.capability)

        @classmethod
        def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
            return card.capability >= (capability if isinstance(capability, tuple) else divmod(capability, 10))

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return card.name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return card.memory_mib * 2**20

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return card.num_processors

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return False

        @classmethod
        def get_cuda_runtime_major(cls) -> int:
            return 13

        @classmethod
        def log_warnings(cls) -> None:
            pass

    platforms._current_platform = FakeCudaPlatform()
    import vllm.config.vllm
    from vllm.vllm_flash_attn import flash_attn_interface

    vllm.config.vllm.HAS_TRITON = True
    flash_attn_interface.FA4_AVAILABLE = True  # vLLM looks for a file that only the CUDA build has
