"""Parse synthetic acceptance into rates by position.

    3.2                a length, for every method and K
    0.8,0.6,0.4        rates by position; a smaller K uses the first of them
    4:4.3,10:6.66      lengths by K, as published; other K are interpolated linearly
    peagle=...         for one method
    peagle:7=...       for one method and K

The most specific entry wins.

The length at K is 1 plus the first K rates, so two lengths determine the mean of the rates between them. Real lengths
grow ever more slowly with K, so linear interpolation never overestimates them.
"""

from collections.abc import Sequence
from itertools import pairwise

from peagle.engine.spec import DRAFT_METHODS, LOOKUP_METHODS
from peagle.errors import ConfigError

Key = tuple[str | None, int | None]  # method, K; None is any
Numbers = float | tuple[float, ...]  # a length, or rates by position


def parse_synthetic(entries: Sequence[str]) -> dict[Key, Numbers]:
    parsed: dict[Key, Numbers] = {}
    for entry in entries:
        where, _, numbers = entry.rpartition("=")
        key = _key(where, entry)
        if key in parsed:
            raise ValueError(f"synthetic_acceptance has two values for {where or 'all methods'}")
        parsed[key] = _numbers(numbers, entry)
    return parsed


def rates_for(method: str, k: int, entries: dict[Key, Numbers]) -> tuple[float, ...] | None:
    """Return the rates by position of a method and K; None if there is no entry."""
    keys: tuple[Key, ...] = ((method, k), (method, None), (None, None))
    numbers = next((entries[key] for key in keys if key in entries), None)
    if numbers is None:
        return None
    if isinstance(numbers, float):
        if numbers > k + 1:
            raise ConfigError(
                f"acceptance length {numbers:g} exceeds the maximum of {method} at K={k}: {k + 1}",
                hint=f"add a length for that K: --synthetic-acceptance {method}:{k}=LENGTH",
            )
        return rates_of_length(numbers, k)
    if len(numbers) < k:
        raise ConfigError(
            f"synthetic_acceptance has {len(numbers)} rates, but K is {k}", hint="add a rate for each position"
        )
    return numbers[:k]


def rates_of_length(length: float, k: int) -> tuple[float, ...]:
    """Return rates by position that add up to a length, like vLLM: ones first, then the remainder.

    >>> rates_of_length(3.25, 4)
    (1.0, 1.0, 0.25, 0.0)
    """
    return tuple(min(1.0, max(0.0, length - 1 - position)) for position in range(k))


def rates_of_lengths(lengths: dict[int, float]) -> tuple[float, ...]:
    """Return rates by position, up to the largest K, from lengths by K.

    >>> rates_of_lengths({2: 2.5, 4: 3.0})
    (0.75, 0.75, 0.25, 0.25)
    """
    rates: list[float] = []
    for (k, length), (next_k, next_length) in pairwise([(0, 1.0), *sorted(lengths.items())]):
        rate = round((next_length - length) / (next_k - k), 6)
        if not 0 <= rate <= (rates[-1] if rates else 1.0):
            raise ValueError(f"a length of {next_length:g} at K={next_k} after {length:g} at K={k} is impossible")
        rates += [rate] * (next_k - k)
    return tuple(rates)


def _key(where: str, entry: str) -> Key:
    if not where:
        return None, None
    method, _, k = where.partition(":")
    if method not in DRAFT_METHODS + LOOKUP_METHODS or (":" in where and not k.isdecimal()):
        raise ValueError(f"{entry!r} is not NUMBERS, METHOD=NUMBERS or METHOD:K=NUMBERS")
    return method, int(k) if k else None


def _numbers(words: str, entry: str) -> Numbers:
    try:
        if ":" in words:
            pairs = [word.partition(":") for word in words.split(",")]
            lengths = {int(k): float(length) for k, _, length in pairs}
            if min(lengths) < 1 or len(lengths) < len(pairs):
                raise ValueError("K must be distinct and at least 1; other values are impossible")
            return rates_of_lengths(lengths)
        numbers = tuple(float(word) for word in words.split(","))
    except ValueError as error:
        reason = str(error) if "impossible" in str(error) else "contains a value that is not a number"
        raise ValueError(f"synthetic_acceptance {entry!r}: {reason}") from None
    if len(numbers) == 1 and 1 <= numbers[0] < float("inf"):
        return numbers[0]
    are_rates = all(0 <= rate <= 1 for rate in numbers) and list(numbers) == sorted(numbers, reverse=True)
    if not are_rates:
        raise ValueError(f"{entry!r} is neither a length of at least 1 nor non-increasing rates between 0 and 1")
    return numbers
