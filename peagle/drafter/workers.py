"""Communication between the worker processes of a training run."""

from collections.abc import Sequence

import torch


class SingleProcess:
    rank = 0
    size = 1

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor with its sum over all workers."""

    def broadcast_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor with the first worker's tensor."""

    def agree(self, stop: bool) -> bool:
        """Return the first worker's value, so that all workers stop at the same step."""
        return stop

    def barrier(self) -> None:
        """Wait until all workers have called this."""


class ProcessGroup(SingleProcess):
    """A worker of torch.distributed's default process group (gloo on CPU, nccl on CUDA)."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.rank = torch.distributed.get_rank()
        self.size = torch.distributed.get_world_size()
        self._device = torch.device(device)

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        # One message per dtype, since many small messages are slow. Dtypes are in the order of the tensors: the order
        # of a set may differ between processes, and the messages would not match.
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.flatten() for tensor in same])
            torch.distributed.all_reduce(flat)
            with torch.no_grad():
                for tensor, summed in zip(same, torch.split(flat, [tensor.numel() for tensor in same]), strict=True):
                    tensor.copy_(summed.view_as(tensor))

    def broadcast_(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            torch.distributed.broadcast(tensor.detach(), src=0)

    def agree(self, stop: bool) -> bool:
        value = torch.tensor([float(stop)], device=self._device)
        torch.distributed.broadcast(value, src=0)
        return bool(value.item())

    def barrier(self) -> None:
        torch.distributed.barrier()
