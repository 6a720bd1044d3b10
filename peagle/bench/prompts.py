"""The prompts of a measurement: HumanEval or rows of a file, with the target's chat template."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from peagle.bench.config import MeasurementOptions
from peagle.corpus.rows import Row
from peagle.corpus.scan import find_files, read_all
from peagle.corpus.text import is_batch
from peagle.errors import InputError
from peagle.humaneval import HUMANEVAL, PROMPT_TEMPLATE, read_humaneval
from peagle.plain_json import is_nan, to_json
from peagle.requests.openai import parse_body
from peagle.requests.prompts import PromptBuilder, PromptSpec, RowError, Tokenizer, resolve_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    token_ids: list[int]
    category: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The prompts of a measurement.

    Attributes:
        name: display name.
        rejected: number of rows without a prompt, by reason.
    """

    name: str
    fingerprint: str
    spec: PromptSpec
    prompts: list[BenchPrompt]
    rejected: dict[str, int]
    category_column: str | None = None

    def fingerprint_fields(self) -> dict[str, Any]:
        """Return the prompts' part of a measurement's fingerprint, as JSON-ready data."""
        fields: dict[str, Any] = {"content": self.fingerprint, "prompts": self.spec.to_dict()}
        if self.category_column is not None:
            fields["category_column"] = self.category_column
        return fields


def read_dataset(config: MeasurementOptions) -> list[Row]:
    rows = list(islice(_read_rows(config.dataset), config.limit))
    if not rows:
        raise InputError(f"dataset {config.dataset}: has no rows")
    return rows


def build_dataset(
    config: MeasurementOptions,
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    max_model_len: int,
    *,
    category_column: str | None = None,
) -> Dataset:
    has_prompt_options = config.prompt_column or config.prompt_template or config.messages_column
    prompt_options = config
    if config.dataset == HUMANEVAL and not has_prompt_options:
        prompt_options = config.model_copy(update={"prompt_template": PROMPT_TEMPLATE})
    columns = list(dict.fromkeys(name for row in rows for name in row))
    body_column = "body" if is_batch(rows[0]) else None
    spec = resolve_prompts(prompt_options, columns, bool(tokenizer.chat_template), body_column=body_column)
    builder = PromptBuilder(spec, tokenizer, max_model_len)
    prompts: list[BenchPrompt] = []
    rejected: dict[str, int] = {}
    first_error = None
    fingerprint = hashlib.sha256()
    for row in rows:
        fingerprint.update(to_json(row, sort_keys=True, ensure_ascii=True).encode() + b"\n")
        prompt = _build_prompt(row, builder)
        if isinstance(prompt, RowError):
            rejected[prompt.reason] = rejected.get(prompt.reason, 0) + 1
            first_error = first_error or prompt.message
            continue
        category = row.get(category_column) if category_column else None
        category = None if category is None or is_nan(category) else str(category)
        prompts.append(BenchPrompt(token_ids=prompt, category=category))
    if not prompts:
        raise InputError(f"dataset {config.dataset}: no row yields a prompt; first error: {first_error}")
    return Dataset(
        name=config.dataset if config.dataset == HUMANEVAL else Path(config.dataset).name,
        fingerprint=fingerprint.hexdigest()[:16],
        spec=spec,
        prompts=prompts,
        rejected=rejected,
        category_column=category_column,
    )


def _read_rows(dataset: str) -> Iterable[Row]:
    if dataset == HUMANEVAL:
        return read_humaneval()
    try:
        return read_all(find_files(dataset))
    except InputError as error:
        raise InputError(
            f"dataset {dataset}: {error.message.removeprefix(f'input {dataset!r}: ')}",
            hint=f"use {HUMANEVAL}, or a corpus of prompts in a format that `peagle generate` reads",
        ) from error


def _build_prompt(row: Row, builder: PromptBuilder) -> list[int] | RowError:
    """Return the tokens of a row's prompt. Sampling parameters of requests in an OpenAI batch are ignored."""
    if builder.spec.body_column is None:
        return builder.build(row)
    body = parse_body(row["url"], row[builder.spec.body_column])
    if isinstance(body, str):
        return RowError(reason="invalid", message=body)
    return builder.build_from_body(body)
