"""Prompts and responses to token ids with a loss mask: what a head is trained on.

Reads a bulk run's directory or one JSONL or Parquet file, applies the target's chat template, and says by id
and reason which rows give no sample. Knows tokenizers; knows nothing of hidden states or heads.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from peagle.errors import InputError, did_you_mean
from peagle.messages import parse_messages
from peagle.storage import Place, open_to_read
from peagle.storage.s3_path import SCHEME, S3Path

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One document: the templated prompt and the target's own response to it.

    Attributes:
        id: the row's id.
        token_ids: prompt and response.
        num_prompt_tokens: how many of them are the prompt; the loss is on the others.
    """

    id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int

    def __post_init__(self) -> None:
        if not 0 < self.num_prompt_tokens < len(self.token_ids):
            raise ValueError(f"sample {self.id}: needs prompt and response tokens")

    @property
    def num_response_tokens(self) -> int:
        """Tokens under the loss."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def loss_mask(self) -> list[bool]:
        """True for each token of the response, its end-of-turn token included."""
        return [False] * self.num_prompt_tokens + [True] * self.num_response_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A row that gives no sample."""

    id: str
    reason: str


def read_responses(source: str | Path) -> Iterator[Row]:
    """Rows of a bulk run's directory (`data/unit-*.parquet`), or of a `.parquet` or `.jsonl` file; local or `s3://`.

    Raises:
        InputError: nothing there, an unknown suffix, invalid JSON, or no `response` column.
    """
    rows = (row for file in source_files(source) for row in read_rows(file))
    for number, row in enumerate(rows):
        if number == 0 and "response" not in row:
            raise InputError(f"{source}: no column 'response'", hint=did_you_mean("response", row))
        yield row


def row_text(row: Row, prompt_column: str) -> str:
    """All that a row says: messages (as `build_samples` takes them), prompt and response."""
    messages = parse_messages(row.get("messages"))
    said = "" if isinstance(messages, str) else "\n".join(message["content"] for message in messages)
    parts = (row.get(key) for key in (prompt_column, "response"))
    return "\n".join([said, *("" if part is None else str(part) for part in parts)])


def id_of(row: Row, number: int) -> str:
    """The row's own id, or its number where it has none or a null."""
    return str(number if row.get("id") is None else row["id"])


def build_samples(
    rows: Iterable[Row], tokenizer: Any, *, prompt_column: str = "prompt", max_tokens: int = 4096
) -> tuple[list[Sample], list[Rejected]]:
    """Apply the target's chat template to every row.

    Args:
        rows: with `response`, and `messages` (as lists or JSON text) or `prompt_column`; `id` and `finish_reason` where
            known.
        tokenizer: the target's, with its chat template.
        prompt_column: the column that holds the user's message when there is no `messages`.
        max_tokens: documents are cut there.

    Returns:
        The samples in the order of the rows, and the rows that gave none.
    """
    samples: list[Sample] = []
    rejected: list[Rejected] = []
    for number, row in enumerate(rows):
        own_id = id_of(row, number)
        outcome = _build_sample(row, own_id, tokenizer, prompt_column, max_tokens)
        if isinstance(outcome, Sample):
            samples.append(outcome)
        else:
            rejected.append(Rejected(id=own_id, reason=outcome))
    return samples, rejected


def _build_sample(row: Row, own_id: str, tokenizer: Any, prompt_column: str, max_tokens: int) -> Sample | str:
    """The sample of a row, or why there is none."""
    if not row.get("response"):
        return "no response"
    if not isinstance(row["response"], str):
        return f"its response is no text but {type(row['response']).__name__}"
    messages = _messages(row, prompt_column)
    if isinstance(messages, str):
        return messages
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # it refuses roles, and its filters raise whatever they meet
        return f"the chat template refuses the row: {error}"
    response_ids = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
    if row.get("finish_reason") == "stop":
        response_ids = [*response_ids, tokenizer.eos_token_id]
    token_ids = tuple([*prompt_ids, *response_ids][:max_tokens])
    if len(token_ids) <= len(prompt_ids):
        return f"the prompt alone has {len(prompt_ids)} tokens, the limit is {max_tokens}"
    return Sample(id=own_id, token_ids=token_ids, num_prompt_tokens=len(prompt_ids))


def _messages(row: Row, prompt_column: str) -> list[dict[str, Any]] | str:
    """The messages of a row, of its prompt where it has none; or what is wrong with them."""
    if row.get("messages"):
        messages = parse_messages(row["messages"])
        return f"column 'messages'{messages}" if isinstance(messages, str) else messages
    if not isinstance(row.get(prompt_column), str):
        return f"neither 'messages' nor a text in {prompt_column!r}"
    return [{"role": "user", "content": row[prompt_column]}]


def source_files(source: str | Path) -> list[Place]:
    """The files of a bulk run's directory, or the file itself.

    Raises:
        InputError: nothing there.
        StorageError: the store refuses, or does not answer.
    """
    found = source_place(source)
    if is_file(found):
        return [found]
    units = sorted((found / "data").glob("unit-*.parquet"), key=str)
    if not units:
        raise InputError(
            f"{source}: no prompts or responses there",
            hint="give the directory of a bulk run, or a .jsonl or .parquet file",
        )
    return units


def source_place(source: str | Path) -> Place:
    """What a user names, under the user's own name for it.

    Raises:
        ConfigError: an S3 URL that names nothing in a bucket.
    """
    return S3Path.parse(str(source)) if str(source).startswith(SCHEME) else Path(source).expanduser()


def is_file(found: Place) -> bool:
    """Whether there is such a file or object."""
    return found.is_file() if isinstance(found, Path) else found.exists()


def read_rows(file: Place) -> Iterator[Row]:
    """Rows of one `.parquet` or `.jsonl` file.

    Raises:
        InputError: an unknown suffix, no such file, damaged Parquet, invalid JSON, or another encoding than UTF-8.
        StorageError: the store refuses, or does not answer.
    """
    suffix = PurePath(file.name).suffix
    if suffix not in (".parquet", ".jsonl"):
        raise InputError(f"{file}: cannot read '{suffix}'", hint="give a .jsonl or .parquet file")
    try:
        yield from _read_parquet(file) if suffix == ".parquet" else _read_jsonl(file)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror or error}") from error


def _read_parquet(file: Place) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_to_read(file) as opened:
            for batch in pq.ParquetFile(opened).iter_batches():
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise InputError(f"{file}: not whole Parquet: {error}") from error


def _read_jsonl(file: Place) -> Iterator[Row]:
    with open_to_read(file) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse(line, file, number)


def _parse(line: bytes, file: Place, number: int) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{file}:{number}: not UTF-8: {error}", hint="convert the file to UTF-8") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{file}:{number}: invalid JSON: {error}") from error
    if not isinstance(row, dict):
        raise InputError(f"{file}:{number}: expected an object, got {type(row).__name__}")
    return row
