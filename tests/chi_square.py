"""Pearson's chi-square test of whether samples follow a distribution. Rare outcomes are pooled."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping

import torch

MIN_EXPECTED = 8  # samples; outcomes with fewer are pooled


def p_value(counts: Mapping[Hashable, int], probabilities: Mapping[Hashable, float]) -> float:
    """Return the probability that samples drawn from `probabilities` deviate at least as much as `counts`.

    Args:
        counts: number of samples by outcome.
        probabilities: probability of each listed outcome. Unlisted outcomes have the remaining probability.

    Example: 60 heads in 100 coin tosses have a statistic of 4 with one degree of freedom, so the p-value is 0.0455.
    """
    total = sum(counts.values())
    cells = [(counts.get(outcome, 0), total * p) for outcome, p in probabilities.items() if total * p >= MIN_EXPECTED]
    pooled = total - sum(expected for _, expected in cells)
    if pooled >= MIN_EXPECTED:
        cells.append((total - sum(count for count, _ in cells), pooled))
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    half_freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)  # half of the degrees of freedom
    return float(torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def power(
    probabilities: Mapping[Hashable, float], wrong: Mapping[Hashable, float], num_samples: int, level: float
) -> float:
    """Return the fraction of a hundred tests that detect samples of a wrong distribution."""
    return sum(p_value(draw_samples(wrong, num_samples, seed), probabilities) < level for seed in range(100)) / 100


def sharpened(probabilities: Mapping[Hashable, float], temperature: float) -> dict[Hashable, float]:
    """Return the distribution at another temperature, to simulate a sampler with a bug."""
    powers = {outcome: chance ** (1 / temperature) for outcome, chance in probabilities.items()}
    return {outcome: value * sum(probabilities.values()) / sum(powers.values()) for outcome, value in powers.items()}


def draw_samples(probabilities: Mapping[Hashable, float], num_samples: int, seed: int) -> Counter[Hashable]:
    """Return the number of samples by outcome. None stands for all unlisted outcomes."""
    outcomes = [*probabilities, None]
    weights = torch.tensor(
        [*probabilities.values(), max(0.0, 1 - math.fsum(probabilities.values()))], dtype=torch.float64
    )
    indices = torch.multinomial(weights, num_samples, replacement=True, generator=torch.Generator().manual_seed(seed))
    return Counter(outcomes[index] for index in indices.tolist())
