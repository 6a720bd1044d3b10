"""Pearson's chi-square test of whether samples follow a distribution; all rare outcomes count as one."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping

import torch

FEWEST = 8  # outcomes with fewer expected samples are pooled


def p_value(seen: Mapping[Hashable, int], chances: Mapping[Hashable, float]) -> float:
    """Return the probability that samples drawn from `chances` deviate from it at least as much as `seen` does.

    Args:
        seen: number of samples per outcome.
        chances: probability of each listed outcome; unlisted outcomes have the remaining probability.

    Example: 60 heads in 100 coin tosses have a statistic of 4 with one degree of freedom, so the p-value is 0.0455.
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
    """Return the fraction of a hundred tests that detect samples of a wrong distribution."""
    return sum(p_value(drawn(wrong, num, seed), chances) < level for seed in range(100)) / 100


def sharpened(chances: Mapping[Hashable, float], temperature: float) -> dict[Hashable, float]:
    """Return the distribution at another temperature, to simulate a sampler with a bug."""
    powers = {outcome: chance ** (1 / temperature) for outcome, chance in chances.items()}
    return {outcome: power * sum(chances.values()) / sum(powers.values()) for outcome, power in powers.items()}


def drawn(chances: Mapping[Hashable, float], num: int, seed: int) -> Counter[Hashable]:
    """Return samples; None stands for all unlisted outcomes."""
    outcomes = [*chances, None]
    weights = torch.tensor([*chances.values(), max(0.0, 1 - math.fsum(chances.values()))], dtype=torch.float64)
    indices = torch.multinomial(weights, num, replacement=True, generator=torch.Generator().manual_seed(seed))
    return Counter(outcomes[index] for index in indices.tolist())
