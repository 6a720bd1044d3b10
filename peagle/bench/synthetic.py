"""Synthetic acceptance, from what a user writes to rates by position.

    3.2                a length, for every method and K
    0.8,0.6,0.4        rates by position; a smaller K takes the first of them
    4:4.3,10:6.66      lengths by K, as they are published; any other K lies on the straight line between its neighbours
    peagle=...         for one method
    peagle:7=...       for one method at one K

The most particular entry wins.

Lengths by K become rates by position: acceptance of a position is that of all before it and its own, whatever K is, so
the length at K is 1 and the first K rates. Two published lengths give the mean of the rates between them. A length
rises ever more slowly with K, so a straight line is on the low side, never on the high one.
"""

from collections.abc import Sequence
from itertools import pairwise

from peagle.engine.spec import DRAFT_METHODS, LOOKUP_METHODS
from peagle.errors import ConfigError

Key = tuple[str | None, int | None]  # method, K; None is any
Numbers = float | tuple[float, ...]  # a length, or rates by position


def parse_synthetic(entries: Sequence[str]) -> dict[Key, Numbers]:
    """Parse synthetic acceptance: values by method and K.

    A single number is a length, from 1 up.

    Raises:
        ValueError: an entry is of none of the forms, or says the same as another.
    """
    found: dict[Key, Numbers] = {}
    for entry in entries:
        where, _, numbers = entry.rpartition("=")
        key = _key(where, entry)
        if key in found:
            raise ValueError(f"synthetic_acceptance says {where or 'any method'} twice")
        found[key] = _numbers(numbers, entry)
    return found


def rates_for(method: str, k: int, entries: dict[Key, Numbers]) -> tuple[float, ...] | None:
    """Rates by position for a method at a K; None where nothing was written for it.

    Raises:
        ConfigError: they do not reach K, or K cannot yield that length.
    """
    keys: tuple[Key, ...] = ((method, k), (method, None), (None, None))
    numbers = next((entries[key] for key in keys if key in entries), None)
    if numbers is None:
        return None
    if isinstance(numbers, float):
        if numbers > k + 1:
            raise ConfigError(
                f"an acceptance length of {numbers:g} is more than {method} can reach at K={k}: {k + 1}",
                hint=f"give one for that K: --synthetic-acceptance {method}:{k}=LENGTH",
            )
        return rates_of_length(numbers, k)
    if len(numbers) < k:
        raise ConfigError(f"acceptance is given for {len(numbers)} positions, and K is {k}", hint="give one for each")
    return numbers[:k]


def rates_of_length(length: float, k: int) -> tuple[float, ...]:
    """Rates by position that add up to a length.

    As vLLM lays them out: full ones first, then the remainder.

    >>> rates_of_length(3.25, 4)
    (1.0, 1.0, 0.25, 0.0)
    """
    return tuple(min(1.0, max(0.0, length - 1 - position)) for position in range(k))


def rates_of_lengths(lengths: dict[int, float]) -> tuple[float, ...]:
    """Rates by position, as far as the largest K, from lengths by K.

    Raises:
        ValueError: a K adds less than nothing or more than its tokens, or more a token than the one before it.

    >>> rates_of_lengths({2: 2.5, 4: 3.0})
    (0.75, 0.75, 0.25, 0.25)
    """
    rates: list[float] = []
    for (k, length), (next_k, next_length) in pairwise([(0, 1.0), *sorted(lengths.items())]):
        rate = round((next_length - length) / (next_k - k), 6)
        if not 0 <= rate <= (rates[-1] if rates else 1.0):
            raise ValueError(f"a length of {next_length:g} at K={next_k} after {length:g} at K={k} cannot be")
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
                raise ValueError("the same K twice, or one below 1, cannot be")
            return rates_of_lengths(lengths)
        numbers = tuple(float(word) for word in words.split(","))
    except ValueError as error:
        reason = str(error) if "cannot be" in str(error) else "it holds something that is no number"
        raise ValueError(f"synthetic_acceptance {entry!r}: {reason}") from None
    if len(numbers) == 1 and 1 <= numbers[0] < float("inf"):
        return numbers[0]
    are_rates = all(0 <= rate <= 1 for rate in numbers) and list(numbers) == sorted(numbers, reverse=True)
    if not are_rates:
        raise ValueError(f"{entry!r} is neither a length from 1 up nor rates from 1 to 0 that never rise")
    return numbers
