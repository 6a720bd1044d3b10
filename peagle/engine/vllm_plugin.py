"""What vLLM does otherwise where peagle is installed: a plug-in that it loads (`vllm.general_plugins`).

- Sampling with drafts on CPUs. vLLM 0.29 without Triton repeats each request's temperature, top-k and top-p for its
  drafts into a copy that it throws away, and divides the target's logits by memory that nobody wrote. As soon as one
  request of a batch is sampled, all requests of that batch get answers that are not the target's, greedy ones too
  (https://github.com/vllm-project/vllm/issues/55005).
- The end of a core whose starter is gone. Ray ends what a lost worker leaves, but not where it was lost itself, and
  vLLM's core would keep its device and wait for requests for ever.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from peagle.errors import ConfigError

if TYPE_CHECKING:
    import torch

NAME = "peagle"
_GROUP = "vllm.general_plugins"


def register() -> None:
    """What vLLM calls, before the runner of a worker takes its kernels from `vllm.utils.cpu_triton_utils`."""
    end_with_starter()

    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.utils import cpu_triton_utils

        cpu_triton_utils.expand_kernel = _ExpandKernel()


def end_with_starter() -> None:
    """End this process when the one that spawned it is gone, by kill -9 too.

    Under Ray vLLM spawns its core. One that is forked (an engine without Ray on a CPU) does not come here: it inherits
    that the plug-ins have been loaded.
    """
    if (starter := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_after, args=(starter,), name="end-with-starter", daemon=True).start()


def require() -> None:
    """Refuse an installation whose vLLM would not find the plug-in.

    Raises:
        ConfigError: peagle is on the path, but not installed.
    """
    if not any(plugin.name == NAME for plugin in entry_points(group=_GROUP)):
        raise ConfigError(
            "vLLM would not load peagle's plug-in, without which it samples wrongly on CPUs where there are drafts: "
            f"the environment has no entry point {NAME!r} in {_GROUP!r}",
            hint="install peagle into it: pip install --no-deps -e . in its checkout",
        )


def expand(
    output: "torch.Tensor",
    values: "torch.Tensor",
    cu_num_tokens: "torch.Tensor",
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # of Triton's kernel, which works in blocks
) -> None:
    """Each request's value for each of its tokens, as `rejection_sampler.expand_kernel` of vLLM does it.

    Args:
        output: [num_tokens], of any type; it is written.
        values: [num_requests]; `replace_from` in them becomes `replace_to`.
        cu_num_tokens: [num_requests], tokens up to and including each request.
    """
    num_tokens = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(num_tokens))


def _end_after(starter: Any) -> None:
    starter.join()
    os._exit(1)


class _ExpandKernel:
    """Launched as kernels of Triton are: `kernel[grid](...)`."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return expand
