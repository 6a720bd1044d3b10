"""Sampling with drafts on CPUs: the kernel that vLLM has wrong there, in our words, and a probe of the one in use.

vLLM (0.29 to 0.32) without Triton repeats each request's temperature, top-k and top-p for its drafts into a copy that
it throws away, and divides the target's logits by memory that nobody wrote. As soon as one request of a batch is
sampled, all requests of that batch get answers that are not the target's, greedy ones too
(https://github.com/vllm-project/vllm/issues/55005).
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


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


def replace_kernel() -> None:
    """Have vLLM take `expand` for its own: 0.29 installs the first of these names, 0.32 registers the second."""
    from vllm.utils import cpu_triton_utils

    if hasattr(cpu_triton_utils, "expand_kernel"):
        cpu_triton_utils.expand_kernel = _Launched()
    cpu_triton_utils._expand_kernel_impl = expand


def probe() -> None:
    """Try the kernel that this process samples with, whichever it is.

    Values that no earlier computation can have left in memory stand for two requests' temperatures and top-k.

    Raises:
        RuntimeError: drafts would be verified with other values than the requests have.
    """
    import torch
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    ends = torch.tensor([3, 3, 4, 6], dtype=torch.int32)
    for values, expected in (
        ([0.8125, 7.5, 0.0, 0.40625], [0.8125] * 3 + [1.0] + [0.40625] * 2),
        ([2713, 31, 0, 4409], [2713] * 3 + [1] + [4409] * 2),
    ):
        found = expand_batch_to_tokens(torch.tensor(values), ends, 6, replace_from=0, replace_to=1).tolist()
        if found != expected:
            raise RuntimeError(
                "this vLLM does not give drafts their requests' sampling values: "
                f"{values} over 3, 0, 1 and 2 drafts became {found}, not {expected}. Run without a drafter, or with "
                "the version of vLLM that peagle is made for"
            )


def probe_before_loading() -> None:
    """Have each worker on a CPU that is to draft try its kernel before it loads the models.

    It cannot be done at once: the worker installs its kernels after its plug-ins.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    original = WorkerWrapperBase.init_device
    if getattr(original, "probes", False):
        return

    @functools.wraps(original)
    def init_device(self: Any) -> Any:
        answer = original(self)
        if self.vllm_config.speculative_config is not None:
            probe()
        return answer

    init_device.probes = True  # type: ignore[attr-defined]
    WorkerWrapperBase.init_device = init_device


class _Launched:
    """Launched as kernels of Triton are: `kernel[grid](...)`."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return expand
