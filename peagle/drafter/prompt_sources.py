"""The prompts and documents of a training run, without evaluation problems."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from peagle.corpus.extensions import to_values
from peagle.corpus.rows import Row
from peagle.corpus.scan import find_files, read_all
from peagle.corpus.text import is_batch
from peagle.drafter.config import TrainConfig
from peagle.drafter.data import Rejected, Sample, build_samples, id_of, row_text
from peagle.drafter.decontamination import (
    Decontaminated,
    Dropped,
    NgramIndex,
    build_index,
    decontaminate,
    report_dropped,
)
from peagle.drafter.prompts import (
    Material,
    TrainingPrompt,
    generate_prompts,
    is_built_in_source,
    num_available,
    source_materials,
)
from peagle.drafter.target import Target
from peagle.errors import ConfigError, InputError, did_you_mean
from peagle.requests.openai import parse_body
from peagle.runs.directory import read_rows, unit_files
from peagle.storage import storage_path

MESSAGES = "messages"
PROMPT = "prompt"  # replaces the source's column name, which may conflict with a column of the run, such as `response`


def read_prompts(config: TrainConfig, say: Callable[[str], None]) -> list[Row]:
    """Read rows with `id` and `prompt`, or all with `id` and `messages`; report dropped rows.

    A limit is divided evenly among the sources; if a source has too few rows, the others provide more.
    """
    index = build_index(config.exclude)
    rows_by_source: list[list[Row]] = []
    dropped: list[Dropped[Row]] = []
    for source in config.prompts:
        if is_built_in_source(source):
            kept, source_dropped = _read_shipped(source, config, index)
        else:
            prompts = list(_prompts_of(source, config.prompt_column))
            decontaminated = decontaminate(prompts, index, text=lambda row: row_text(row, PROMPT))
            kept, source_dropped = decontaminated.kept, decontaminated.dropped
        rows_by_source.append(kept)
        dropped += source_dropped
    shares = divide_evenly(config.limit, [len(kept) for kept in rows_by_source])
    rows = [row for kept, share in zip(rows_by_source, shares, strict=True) for row in kept[:share]]
    say(f"{len(rows):,} prompts, {len(dropped)} dropped for overlap")
    if len(shares) > 1:
        for source, share in zip(config.prompts, shares, strict=True):
            say(f"  {share:,} from {source}")
    if config.limit is not None and len(rows) < config.limit:
        say(f"  there are fewer prompts than --limit {config.limit:,}")
    report_dropped(dropped, say)
    if not rows:
        sources = ", ".join(config.prompts)
        raise InputError(f"{sources}: no prompts left; all {len(dropped)} overlap {', '.join(config.exclude)}")
    if not any(MESSAGES in row for row in rows):
        return rows
    # A bulk run reads either prompts or messages, so all rows get messages.
    return [
        row if MESSAGES in row else {"id": row["id"], MESSAGES: [{"role": "user", "content": row[PROMPT]}]}
        for row in rows
    ]


def read_responses(source: str | Path) -> Iterator[Row]:
    """Yield the rows of a run directory or a corpus, local or `s3://`."""
    for number, row in enumerate(read_source(source)):
        if number == 0 and "response" not in row:
            raise InputError(f"{source}: has no column 'response'", hint=did_you_mean("response", row))
        yield row


def read_source(source: str | Path) -> Iterator[Row]:
    """Yield the rows of a run directory, with peagle's internal column names, or those of a corpus."""
    units = {}
    with contextlib.suppress(ConfigError):  # not a run directory, for example a whole bucket
        units = unit_files(storage_path(str(source)))
    if units:
        for _, path in sorted(units.items()):
            for batch in read_rows(path, None):
                yield from to_values(batch)
        return
    try:
        files = find_files(str(source))
    except InputError as error:
        raise InputError(
            f"{source}: has no prompts or responses: {error.message.removeprefix(f'input {str(source)!r}: ')}",
            hint="use the directory of a bulk run, or a corpus in a format that `peagle generate` reads",
        ) from error
    yield from read_all(files)


def divide_evenly(limit: int | None, sizes: Sequence[int]) -> list[int]:
    """Return how many rows to take from each source, as evenly as possible. Without a limit, all rows are taken.

    >>> divide_evenly(300, [594, 50, 200])
    [125, 50, 125]
    """
    if limit is None:
        return list(sizes)
    num_left, shares = limit, [0] * len(sizes)
    for num_sources_done, index in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        shares[index] = min(sizes[index], num_left // (len(sizes) - num_sources_done))
        num_left -= shares[index]
    return shares


def shipped_prompts(
    source: str, index: NgramIndex, *, limit: int | None = None, seed: int = 0
) -> tuple[list[TrainingPrompt], Decontaminated[Material]]:
    """Return `limit` prompts of a shipped source (default: one per material), and the decontaminated materials."""
    decontaminated = _materials(source, index)
    limit = len(decontaminated.kept) if limit is None else limit
    return list(generate_prompts(decontaminated.kept, source=source, seed=seed, limit=limit)), decontaminated


def _materials(source: str, index: NgramIndex) -> Decontaminated[Material]:
    return decontaminate(source_materials(source), index, text=lambda material: material.text)


def _read_shipped(source: str, config: TrainConfig, index: NgramIndex) -> tuple[list[Row], list[Dropped[Row]]]:
    decontaminated = _materials(source, index)
    limit = len(decontaminated.kept) if config.limit is None else min(config.limit, num_available(decontaminated.kept))
    prompts = generate_prompts(decontaminated.kept, source=source, limit=limit)
    dropped = [
        Dropped(
            item={"id": f"{drop.item.module}.{drop.item.name}"},
            overlap=drop.overlap,
            evaluation_set=drop.evaluation_set,
        )
        for drop in decontaminated.dropped
    ]
    return [{"id": prompt.id, PROMPT: prompt.prompt} for prompt in prompts], dropped


def _prompts_of(source: str, prompt_column: str) -> Iterator[Row]:
    number = -1
    for number, row in enumerate(map(_from_batch_request, read_source(source))):
        if number == 0 and prompt_column not in row and MESSAGES not in row:
            raise InputError(
                f"{source}: has neither a column {prompt_column!r} nor {MESSAGES!r}",
                hint=f"set --prompt-column; {did_you_mean(prompt_column, row)}",
            )
        prompt = {MESSAGES: row[MESSAGES]} if row.get(MESSAGES) else {PROMPT: row.get(prompt_column)}
        yield {"id": id_of(row, number), **prompt}
    if number < 0:
        raise InputError(f"{source}: has no rows")


def _from_batch_request(row: Row) -> Row:
    """Convert an OpenAI batch request to a row with `id` and its prompt or messages; return other rows unchanged."""
    if not is_batch(row):
        return row
    body = parse_body(row["url"], row["body"])
    if isinstance(body, str):
        raise InputError(f"request {row['custom_id']!r}: {body}")
    if body.template:
        names = ", ".join(sorted(body.template))
        raise InputError(
            f"request {row['custom_id']!r} has {names}, but training prompts can only have messages",
            hint="remove these requests; their answers depend on these fields",
        )
    return {"id": row["custom_id"], MESSAGES if body.is_chat else PROMPT: body.content}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDocuments:
    """The documents of a training run. `dropped` rows overlap an evaluation set; `held_out` has indices of samples."""

    samples: list[Sample]
    rejected: list[Rejected]
    dropped: list[Dropped[Row]]
    held_out: frozenset[int]

    @property
    def training_indices(self) -> list[int]:
        """The indices of the samples that are not held out."""
        return [index for index in range(len(self.samples)) if index not in self.held_out]


def read_corpus(config: TrainConfig, target: Target, say: Callable[[str], None]) -> TrainingDocuments:
    prompt_column = config.prompt_column if config.responses == "given" else PROMPT
    rows = [row for source in config.response_sources for row in read_responses(source)]
    decontaminated = decontaminate(rows, build_index(config.exclude), text=lambda row: row_text(row, prompt_column))
    samples, rejected = build_samples(
        decontaminated.kept, target.tokenizer, prompt_column=prompt_column, max_tokens=config.max_document_tokens
    )
    if not samples:
        reason = rejected[0].reason if rejected else f"every row overlaps {', '.join(config.exclude)}"
        sources = ", ".join(map(str, config.response_sources))
        raise InputError(f"{sources}: no row yields a document; first error: {reason}")
    target.require_known_tokens(samples)
    say(f"{len(samples):,} documents, {len(rejected)} rejected, {len(decontaminated.dropped)} dropped for overlap")
    report_dropped(decontaminated.dropped, say)
    num_held_out = round(len(samples) * config.held_out)
    # The choice of held-out documents does not depend on their order.
    by_hash = sorted(range(len(samples)), key=lambda i: hashlib.sha256(samples[i].id.encode()).digest())
    return TrainingDocuments(
        samples=samples,
        rejected=rejected,
        dropped=decontaminated.dropped,
        held_out=frozenset(by_hash[:num_held_out]),
    )
