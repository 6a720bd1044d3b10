"""A process among those that train a head, and its requests to the others.

Whoever starts the processes (Ray Train, torchrun) sets up torch.distributed; this file only uses it.
"""

from collections.abc import Sequence
from typing import Protocol

import torch


class Workers(Protocol):
    """The workers of a training, seen from one of them."""

    rank: int
    size: int

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all workers."""

    def tell(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by the first worker's."""

    def agree(self, stop: bool) -> bool:
        """The first worker's value, so that all of them stop at the same step."""

    def barrier(self) -> None:
        """Wait until all are here."""


class Alone:
    """The only worker."""

    rank = 0
    size = 1

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing to add."""

    def tell(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nobody to tell."""

    def agree(self, stop: bool) -> bool:
        """Its own word."""
        return stop

    def barrier(self) -> None:
        """Nobody to wait for."""


class Distributed:
    """A worker of torch.distributed's process group (gloo on CPU, nccl on CUDA)."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.rank = torch.distributed.get_rank()
        self.size = torch.distributed.get_world_size()
        self._device = torch.device(device)

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """All-reduce, one message for each dtype.

        Many small messages would cost more than their bytes.
        """
        # In the tensors' order: that of a set differs from process to process, and their messages would not match.
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.flatten() for tensor in same])
            torch.distributed.all_reduce(flat)
            with torch.no_grad():
                for tensor, summed in zip(same, torch.split(flat, [tensor.numel() for tensor in same]), strict=True):
                    tensor.copy_(summed.view_as(tensor))

    def tell(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast from the first worker."""
        for tensor in tensors:
            torch.distributed.broadcast(tensor.detach(), src=0)

    def agree(self, stop: bool) -> bool:
        """Broadcast from the first worker."""
        word = torch.tensor([float(stop)], device=self._device)
        torch.distributed.broadcast(word, src=0)
        return bool(word.item())

    def barrier(self) -> None:
        """Wait until all are here."""
        torch.distributed.barrier()
