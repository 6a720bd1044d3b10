"""The keys of a benchmark, the same in YAML and on the command line.

Acceptance by lot is read here too, from lengths to vLLM's rates by position.

Synthetic acceptance, as a user writes it:

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
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from peagle.bench.options import MeasurementKeys, whole_numbers
from peagle.economics.price_options import PriceKeys
from peagle.engine.spec import DRAFT_METHODS, LOOKUP_METHODS
from peagle.errors import ConfigError
from peagle.profiles import measurements

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


NONE = measurements.NONE
METHODS = measurements.METHODS
MAX_K = 32
MAX_CONCURRENCY = 4096


class DraftingKeys(BaseModel):
    """Methods of speculation, their heads and K: the keys of commands that compare."""

    methods: list[str]
    drafter: list[str] = Field(
        default_factory=list,
        description="METHOD=HEAD, a folder or a Hugging Face id; default: the catalog's head of each method",
    )
    num_speculative_tokens: list[int] = Field(
        default_factory=lambda: [3, 5, 7], description="draft tokens a step (K), as 3,5,7; default: 3,5,7"
    )

    @field_validator("drafter", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return value if isinstance(value, list) else [str(value)]

    @field_validator("drafter")
    @classmethod
    def _heads_of_methods(cls, value: list[str]) -> list[str]:
        return heads_of_methods(value)

    @field_validator("num_speculative_tokens", mode="before")
    @classmethod
    def _split_ks(cls, value: Any) -> list[int]:
        return whole_numbers(value, "K", MAX_K)

    @model_validator(mode="after")
    def _heads_are_of_methods(self) -> Self:
        if unused := [one for one in self.drafter if one.partition("=")[0] not in self.methods]:
            raise ValueError(f"drafter {unused[0]} is of none of the methods")
        return self

    @property
    def heads(self) -> dict[str, str]:
        """The heads that were named, by method."""
        return {method: head for method, _, head in (one.partition("=") for one in self.drafter)}


class BenchConfig(PriceKeys, MeasurementKeys, DraftingKeys):
    """One benchmark.

    A description is the help text of its flag; an unknown key is an error.
    """

    methods: list[str] = Field(
        default_factory=lambda: [NONE, "peagle"],
        min_length=1,
        description=f"of {', '.join(METHODS)}; default: none,peagle",
    )
    concurrency: list[int] = Field(
        default_factory=lambda: [1, 4, 8], description="requests in the engine at once, as 1,4,8; default: 1,4,8"
    )
    max_num_seqs: int | None = Field(
        None, ge=1, description="requests that each engine is sized for; default: the largest concurrency"
    )
    repeats: int = Field(3, ge=1, description="passes over all prompts for each cell")
    rounds: int = Field(
        2, ge=1, description="times that each engine is started, its repeats shared out among them; at most repeats"
    )
    requests_per_slot: int | None = Field(
        None,
        ge=1,
        description="requests of a pass for each at once: N x concurrency prompts, round and round; default: each once",
    )
    time_budget_s: float | None = Field(
        None, gt=0, description="begin no pass that would hardly end in that time; the same command goes on"
    )
    output: Path | None = Field(
        None, description="folder of results; a benchmark there goes on; default: runs/bench/FINGERPRINT"
    )
    kv_cache_precision: Literal["auto", "bf16", "fp8"] = Field(
        "auto", description="of the KV cache alone; default: as --precision has it"
    )
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="token slots of a step of every engine; default: from K and max_num_seqs"
    )
    max_cudagraph_capture_size: int | None = Field(
        None,
        ge=1,
        description="tokens of a step that CUDA graphs are captured for; default: vLLM's, at most 512",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: random weights of the target, for timing alone"
    )
    synthetic_acceptance: list[str] = Field(
        default_factory=list,
        description="accept drafts by lot: a length (3.2) or rates by position (0.8,0.6,0.4), for all or as "
        "peagle=3.2 or peagle:7=3.2 for one method, or one K of it",
    )

    @field_validator("methods", mode="before")
    @classmethod
    def _split_methods(cls, value: Any) -> list[str]:
        parts = value if isinstance(value, list) else [value]
        names = [word.strip() for part in parts for word in str(part).split(",")]
        for name in names:
            if name not in METHODS:
                raise ValueError(f"methods are {', '.join(METHODS)}")
        return list(dict.fromkeys(names))

    @field_validator("synthetic_acceptance", mode="before")
    @classmethod
    def _one_or_several_lots(cls, value: Any) -> Any:
        return value if isinstance(value, list) else [str(value)]

    @field_validator("concurrency", mode="before")
    @classmethod
    def _split_concurrencies(cls, value: Any) -> list[int]:
        return whole_numbers(value, "concurrencies", MAX_CONCURRENCY)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        parse_synthetic(self.synthetic_acceptance)
        if self.synthetic_acceptance and self.methods == [NONE]:
            raise ValueError("synthetic_acceptance needs a method that drafts")
        if self.max_num_seqs is not None and self.max_num_seqs < max(self.concurrency):
            raise ValueError("max_num_seqs is below the largest concurrency")
        return self

    @property
    def is_synthetic(self) -> bool:
        """Whether the text means nothing: drafts accepted by lot, or random weights."""
        return bool(self.synthetic_acceptance) or self.load_format == "dummy"

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters.

        Where the text means nothing, so does its end: every response has full length.
        """
        return super().sampling() | ({"ignore_eos": True} if self.is_synthetic else {})


def heads_of_methods(entries: list[str]) -> list[str]:
    """The same, if each is METHOD=HEAD and no method is there twice.

    Raises:
        ValueError: one of them is not.
    """
    for one in entries:
        method, _, head = one.partition("=")
        if method not in DRAFT_METHODS or not head:
            raise ValueError(f"a drafter is METHOD=HEAD, with a method of {', '.join(DRAFT_METHODS)}")
    if len({one.partition("=")[0] for one in entries}) < len(entries):
        raise ValueError("a method has one head")
    return entries
