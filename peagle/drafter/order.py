"""Which documents a training step takes: a pure function of the seed and the step's number.

So a resumed training and every worker of several find the same documents without being told. It knows lengths only.
"""

import random
from collections.abc import Sequence


def plan_batches(num_tokens: Sequence[int], *, batch_tokens: int, seed: int) -> list[list[int]]:
    """One epoch: every document once, shuffled, cut into batches of at least `batch_tokens` but for the last.

    Args:
        num_tokens: length of each document.
        batch_tokens: when a batch is full.
        seed: of the order.
    """
    order = list(range(len(num_tokens)))
    random.Random(seed).shuffle(order)
    batches: list[list[int]] = [[]]
    filled = 0
    for index in order:
        if filled >= batch_tokens:
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += num_tokens[index]
    return batches


class Order:
    """The batches of all epochs, one after the other, each epoch in an order of its own.

    Args:
        num_tokens: length of each document.
        batch_tokens: when a batch is full.
        seed: of the training.
    """

    def __init__(self, num_tokens: Sequence[int], *, batch_tokens: int, seed: int) -> None:
        self._num_tokens, self._batch_tokens, self._seed = num_tokens, batch_tokens, seed
        self._epochs: list[list[list[int]]] = []

    def documents(self, step: int) -> list[int]:
        """The places of the documents of a step, counting through the epochs."""
        epoch = 0
        while step >= len(self._epoch(epoch)):
            step -= len(self._epoch(epoch))
            epoch += 1
        return self._epoch(epoch)[step]

    def _epoch(self, epoch: int) -> list[list[int]]:
        while len(self._epochs) <= epoch:
            seed = self._seed * 1_000_003 + len(self._epochs)
            self._epochs.append(plan_batches(self._num_tokens, batch_tokens=self._batch_tokens, seed=seed))
        return self._epochs[epoch]
