"""Whether samples are of a distribution: Pearson's chi-square over its frequent outcomes, all others together."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping

import torch

FEWEST = 8  # expected samples of an outcome that counts by itself


def p_value(seen: Mapping[Hashable, int], chances: Mapping[Hashable, float]) -> float:
    """How likely samples of this distribution are to be as far from it as these, or farther.

    Args:
        seen: samples by outcome.
        chances: of the outcomes that are known; the rest of 1 is of those that are not.

    Example: 100 throws of a coin that gave 60 heads have a statistic of 4 with one degree of freedom, and 0.0455.
    """
    total = sum(seen.values())
    cells = [(seen.get(outcome, 0), total * p) for outcome, p in chances.items() if total * p >= FEWEST]
    rest = total - sum(expected for _, expected in cells)
    if rest >= FEWEST:
        cells.append((total - sum(count for count, _ in cells), rest))
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    half = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))


def power(chances: Mapping[Hashable, float], wrong: Mapping[Hashable, float], num: int, level: float) -> float:
    """The share of so many samples of a wrong distribution that are found out, of a hundred tries."""
    return sum(p_value(drawn(wrong, num, seed), chances) < level for seed in range(100)) / 100


def sharpened(chances: Mapping[Hashable, float], temperature: float) -> dict[Hashable, float]:
    """The same outcomes as at another temperature, as a wrong sampler would draw them."""
    powers = {outcome: chance ** (1 / temperature) for outcome, chance in chances.items()}
    return {outcome: power * sum(chances.values()) / sum(powers.values()) for outcome, power in powers.items()}


def drawn(chances: Mapping[Hashable, float], num: int, seed: int) -> Counter[Hashable]:
    """So many samples; what is left of 1 is the outcome None."""
    outcomes = [*chances, None]
    weights = torch.tensor([*chances.values(), max(0.0, 1 - math.fsum(chances.values()))], dtype=torch.float64)
    places = torch.multinomial(weights, num, replacement=True, generator=torch.Generator().manual_seed(seed))
    return Counter(outcomes[place] for place in places.tolist())
