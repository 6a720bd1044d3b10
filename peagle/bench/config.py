"""Options of the measuring commands. Descriptions are the help texts of the flags."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, field_validator, model_validator

from peagle.catalog.drafters import find_on_cards
from peagle.economics.price_options import PriceOptions
from peagle.engine.keys import TargetOptions
from peagle.engine.spec import DRAFT_METHODS, LOOKUP_METHODS
from peagle.errors import ConfigError
from peagle.humaneval import HUMANEVAL
from peagle.key_values import parse_pairs
from peagle.profiles.measurements import METHODS, NONE
from peagle.requests.prompts import PromptOptions
from peagle.storage import require_local_path

Scope = tuple[str | None, int | None]  # method and K; None stands for any
Numbers = float | tuple[float, ...]  # a length, or rates by position


def parse_synthetic_acceptance(entries: Sequence[str]) -> dict[Scope, Numbers]:
    """Parse synthetic acceptance by method and K; the most specific entry wins.

        3.2                a length, for every method and K
        0.8,0.6,0.4        rates by position; a smaller K uses the first of them
        4:4.3,10:6.66      lengths by K, as published; other K are interpolated linearly
        peagle=...         for one method
        peagle:7=...       for one method and K

    The length at K is 1 plus the sum of the first K rates, so two lengths determine the mean of the rates between them.
    Measured lengths grow more slowly the larger K is, so linear interpolation never overestimates them.
    """
    parsed: dict[Scope, Numbers] = {}
    for entry in entries:
        prefix, _, numbers = entry.rpartition("=")
        method, _, k = prefix.partition(":")
        if prefix and (method not in DRAFT_METHODS + LOOKUP_METHODS or (":" in prefix and not k.isdecimal())):
            raise ValueError(f"{entry!r} is not NUMBERS, METHOD=NUMBERS or METHOD:K=NUMBERS")
        scope = method or None, int(k) if k else None
        if scope in parsed:
            raise ValueError(f"synthetic_acceptance has two values for {prefix or 'all methods'}")
        parsed[scope] = _parse_numbers(numbers, entry)
    return parsed


def rates_for(method: str, k: int, entries: dict[Scope, Numbers]) -> tuple[float, ...] | None:
    """Return the rates by position of a method and K; None if there is no entry."""
    scopes: tuple[Scope, ...] = ((method, k), (method, None), (None, None))
    numbers = next((entries[scope] for scope in scopes if scope in entries), None)
    if numbers is None:
        return None
    if isinstance(numbers, float):
        if numbers > k + 1:
            raise ConfigError(
                f"acceptance length {numbers:g} exceeds the maximum of {method} at K={k}: {k + 1}",
                hint=f"add a length for this K: --synthetic-acceptance {method}:{k}=LENGTH",
            )
        return rates_from_length(numbers, k)
    if len(numbers) < k:
        raise ConfigError(
            f"synthetic_acceptance has {len(numbers)} rates, but K is {k}", hint="add a rate for each position"
        )
    return numbers[:k]


def rates_from_length(length: float, k: int) -> tuple[float, ...]:
    """Return rates by position that add up to a length minus 1. As in vLLM: ones first, then the remainder.

    >>> rates_from_length(3.25, 4)
    (1.0, 1.0, 0.25, 0.0)
    """
    return tuple(min(1.0, max(0.0, length - 1 - position)) for position in range(k))


def rates_from_lengths_by_k(lengths: dict[int, float]) -> tuple[float, ...]:
    """Return rates by position, up to the largest K, from lengths by K.

    >>> rates_from_lengths_by_k({2: 2.5, 4: 3.0})
    (0.75, 0.75, 0.25, 0.25)
    """
    rates: list[float] = []
    for (k, length), (next_k, next_length) in pairwise([(0, 1.0), *sorted(lengths.items())]):
        rate = round((next_length - length) / (next_k - k), 6)
        if not 0 <= rate <= (rates[-1] if rates else 1.0):
            raise ValueError(f"a length of {next_length:g} at K={next_k} after {length:g} at K={k} is impossible")
        rates += [rate] * (next_k - k)
    return tuple(rates)


def _parse_numbers(numbers_text: str, entry: str) -> Numbers:
    try:
        if ":" in numbers_text:
            pairs = [word.partition(":") for word in numbers_text.split(",")]
            lengths = {int(k): float(length) for k, _, length in pairs}
            if min(lengths) < 1 or len(lengths) < len(pairs):
                raise ValueError("impossible K: the values of K must be distinct and at least 1")
            return rates_from_lengths_by_k(lengths)
        numbers = tuple(float(word) for word in numbers_text.split(","))
    except ValueError as error:
        # Messages of `int` and `float` are replaced.
        reason = str(error) if "impossible" in str(error) else "contains a value that is not a number"
        raise ValueError(f"synthetic_acceptance {entry!r}: {reason}") from None
    if len(numbers) == 1 and 1 <= numbers[0] < float("inf"):
        return numbers[0]
    are_rates = all(0 <= rate <= 1 for rate in numbers) and list(numbers) == sorted(numbers, reverse=True)
    if not are_rates:
        raise ValueError(f"{entry!r} is neither a length of at least 1 nor non-increasing rates between 0 and 1")
    return numbers


MAX_K = 32
MAX_CONCURRENCY = 4096


def whole_numbers(value: Any, name: str, largest: int) -> list[int]:
    """Parse whole numbers from "3,5" and from repeated flags; ascending and without duplicates.

    >>> whole_numbers(["7,3", "3"], "K", 32)
    [3, 7]
    """
    parts = value if isinstance(value, list) else [value]
    words = [word for part in parts for word in str(part).split(",")]
    if not all(word.strip().isdecimal() and 1 <= int(word) <= largest for word in words):
        raise ValueError(f"{name} must be whole numbers from 1 to {largest}, separated by commas")
    return sorted({int(word) for word in words})


TextList = Annotated[list[str], BeforeValidator(lambda value: value if isinstance(value, list) else [str(value)])]
KList = Annotated[list[int], BeforeValidator(lambda value: whole_numbers(value, "K", MAX_K))]
ConcurrencyList = Annotated[
    list[int], BeforeValidator(lambda value: whole_numbers(value, "concurrencies", MAX_CONCURRENCY))
]


class MeasurementOptions(PromptOptions, TargetOptions):
    dataset: str = Field(HUMANEVAL, description="humaneval, or a corpus of prompts in any format that generate reads")
    limit: int | None = Field(None, ge=1, description="maximum number of rows; default: all")
    output: Path | None = Field(None, description="folder for results; an existing measurement is resumed")

    temperature: float = Field(0.0, ge=0, le=2, description="sampling temperature; 0 is greedy and reproducible")
    max_tokens: int = Field(256, ge=1, description="maximum tokens of a response")

    _on_disk = field_validator("output", mode="before")(require_local_path)

    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "max_tokens": self.max_tokens}


class DraftingOptions(BaseModel):
    """Methods of speculation, their heads and K."""

    methods: list[str]
    drafter: TextList = Field(
        default_factory=list,
        description="METHOD=HEAD with a folder or a Hugging Face id, or only HEAD for a head of the catalog; "
        "default: the catalog's head of each method",
    )
    num_speculative_tokens: KList | None = Field(
        None,
        description="draft tokens per step (K), such as 3,5,7; default: 3,5,7, or with --verify auto each head's own",
    )

    @field_validator("drafter")
    @classmethod
    def _add_methods(cls, entries: list[str]) -> list[str]:
        found_heads = [find_on_cards(entry) for entry in entries]  # a head of the catalog does not need METHOD=
        entries = [f"{head[0]}={entry}" if head else entry for entry, head in zip(entries, found_heads, strict=True)]
        form = f"METHOD=HEAD, with a method of {', '.join(DRAFT_METHODS)}"
        for method, head in parse_pairs(entries, form=form).items():
            if method not in DRAFT_METHODS or not head:
                raise ValueError(f"{method}={head} is not {form}")
        return entries

    @model_validator(mode="after")
    def _heads_match_methods(self) -> Self:
        if unused := [method for method in self.heads if method not in self.methods]:
            raise ValueError(f"drafter {unused[0]}={self.heads[unused[0]]}: {unused[0]} is not one of the methods")
        return self

    @property
    def heads(self) -> dict[str, str]:
        return parse_pairs(self.drafter)


class BenchConfig(PriceOptions, MeasurementOptions, DraftingOptions):
    methods: list[str] = Field(
        default_factory=lambda: [NONE, "peagle"],
        min_length=1,
        description=f"any of {', '.join(METHODS)}; lookup means ngram; default: none,peagle",
    )
    concurrency: ConcurrencyList = Field(
        default_factory=lambda: [1, 4, 8], description="concurrent requests, such as 1,4,8; default: 1,4,8"
    )
    max_num_seqs: int | None = Field(
        None, ge=1, description="maximum concurrent requests of each engine; default: the largest concurrency"
    )
    repeats: int = Field(3, ge=1, description="passes per method, K and concurrency")
    rounds: int = Field(
        2, ge=1, description="starts of each engine, among which the repeats are divided; at most --repeats"
    )
    requests_per_slot: int | None = Field(
        None,
        ge=1,
        description="prompts per pass: N x concurrency, repeated if necessary; default: every prompt once",
    )
    time_budget_s: float | None = Field(
        None, gt=0, description="do not start passes that would exceed this time; repeat the command to resume"
    )
    output: Path | None = Field(
        None, description="folder for results; an existing benchmark is resumed; default: runs/bench/FINGERPRINT"
    )
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="maximum tokens per step of every engine; default: derived from K and max_num_seqs"
    )
    max_cudagraph_capture_size: int | None = Field(
        None,
        ge=1,
        description="maximum tokens per step with CUDA graphs; default: for --max-num-seqs requests, at most 4096",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: random weights of the target, only for timing"
    )
    synthetic_acceptance: TextList = Field(
        default_factory=list,
        description="accept drafts at random: a length (3.2) or rates by position (0.8,0.6,0.4); "
        "peagle=3.2 for one method, peagle:7=3.2 for one method and K",
    )

    @field_validator("methods", mode="before")
    @classmethod
    def _split_methods(cls, value: Any) -> list[str]:
        parts = value if isinstance(value, list) else [value]
        names = [word.strip() for part in parts for word in str(part).split(",")]
        names = ["ngram" if name == "lookup" else name for name in names]
        for name in names:
            if name not in METHODS:
                raise ValueError(f"{name!r} is not one of {', '.join(METHODS)}")
        return list(dict.fromkeys(names))

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        parse_synthetic_acceptance(self.synthetic_acceptance)
        if self.synthetic_acceptance and self.methods == [NONE]:
            raise ValueError("synthetic_acceptance requires a method that drafts")
        if self.max_num_seqs is not None and self.max_num_seqs < max(self.concurrency):
            raise ValueError("max_num_seqs is smaller than the largest concurrency")
        return self

    @property
    def is_synthetic(self) -> bool:
        """Whether responses are meaningless, because drafts are accepted at random or weights are random."""
        return bool(self.synthetic_acceptance) or self.load_format == "dummy"

    def sampling(self) -> dict[str, Any]:
        # Meaningless text would end at random points, so all responses get the full length.
        return super().sampling() | ({"ignore_eos": True} if self.is_synthetic else {})


class EvaluateConfig(MeasurementOptions):
    drafter: TextList = Field(
        default_factory=lambda: ["auto"],
        min_length=1,
        description=f"auto (recommended by the catalog), {', '.join(DRAFT_METHODS)}, a head of the catalog, a folder"
        " or a Hugging Face id",
    )
    num_speculative_tokens: list[int] | None = Field(
        None, description="draft tokens per step (K), such as 3 or 3,5,7; default: each drafter's own"
    )
    category_column: str = Field("category", description="column to group acceptance by, if the data has it")
    output: Path | None = Field(
        None,
        description="folder for results; an existing evaluation is resumed; default: runs/evaluate/FINGERPRINT",
    )
    concurrency: int = Field(1, ge=1, le=MAX_CONCURRENCY, description="concurrent requests")

    @field_validator("drafter")
    @classmethod
    def _check_drafter(cls, names: list[str]) -> list[str]:
        if "none" in names:
            raise ValueError(
                "`none` does not draft, so it has no acceptance to measure (`peagle bench --methods none` times the"
                " target)"
            )
        return names

    @field_validator("num_speculative_tokens", mode="before")
    @classmethod
    def _split_ks(cls, value: Any) -> Any:
        return None if value is None else whole_numbers(value, "K", MAX_K)


def as_benchmark(config: MeasurementOptions, **options: Any) -> BenchConfig:
    """Return the benchmark that performs the measurement of another command.

    Only options that the user set are copied, because an unknown price is an error only if the user set a price option.
    """
    shared = {*PriceOptions.model_fields, *MeasurementOptions.model_fields} - {"output"}
    return BenchConfig(**{**config.model_dump(include=shared & config.model_fields_set), **options})
