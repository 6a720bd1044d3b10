"""Stable random splits by a hash."""

import hashlib
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def part_by_hash(items: Iterable[T], share: float, *, text: Callable[[T], str]) -> tuple[list[T], list[T]]:
    """Split items into those outside and inside a share, by a hash of their text.

    Adding items does not change the split of the others.
    """
    parts: tuple[list[T], list[T]] = ([], [])
    for item in items:
        drawn = int.from_bytes(hashlib.sha256(text(item).encode()).digest()[:4]) / 2**32
        parts[drawn < share].append(item)
    return parts
