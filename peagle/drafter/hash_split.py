"""Splitting by a hash: a share to hold out, or to answer in another way."""

import hashlib
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def part_by_hash(items: Iterable[T], share: float, *, text: Callable[[T], str]) -> tuple[list[T], list[T]]:
    """Part items into those outside and inside of a share, by a hash of their text.

    The choice stays when items are added.
    """
    parts: tuple[list[T], list[T]] = ([], [])
    for item in items:
        drawn = int.from_bytes(hashlib.sha256(text(item).encode()).digest()[:4]) / 2**32
        parts[drawn < share].append(item)
    return parts
