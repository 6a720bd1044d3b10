"""Prompts and responses to token ids with a loss mask: what a head is trained on.

Reads a bulk run's directory or a corpus, applies the target's chat template, and says by id
and reason which rows give no sample. Knows tokenizers; knows nothing of hidden states or heads.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.corpus.files import SourceFile
from peagle.corpus.rows import Row
from peagle.corpus.scan import find, read_all
from peagle.errors import ConfigError, InputError, did_you_mean
from peagle.private import user_path
from peagle.requests.messages import parse_messages
from peagle.storage import Place
from peagle.storage.s3_path import SCHEME, S3Path


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
    """Rows of a run directory (`data/unit-*.parquet`) or a corpus; local or `s3://`.

    Raises:
        InputError: nothing there, an unknown format, a row that is none, or no `response` column.
    """
    for number, row in enumerate(read_all(source_files(source))):
        if number == 0 and "response" not in row:
            raise InputError(f"{source}: no column 'response'", hint=did_you_mean("response", row))
        yield row


def row_text(row: Row, prompt_column: str) -> str:
    """All text of a row: messages (as in `build_samples`), prompt and response."""
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
    """The messages of a row, or of its prompt; or their fault."""
    if row.get("messages"):
        messages = parse_messages(row["messages"])
        return f"column 'messages'{messages}" if isinstance(messages, str) else messages
    if not isinstance(row.get(prompt_column), str):
        return f"neither 'messages' nor a text in {prompt_column!r}"
    return [{"role": "user", "content": row[prompt_column]}]


def source_files(source: str | Path) -> list[SourceFile]:
    """The units of a run directory, or the files of a corpus.

    A corpus as `peagle generate` finds it.

    Raises:
        InputError: nothing there, or nothing of a known format.
        StorageError: the store refuses, or does not answer.
    """
    if units := _units(str(source)):
        return [SourceFile(path=str(unit), format="parquet", size=unit.stat().st_size) for unit in units]
    try:
        return find(str(source))
    except InputError as error:
        raise InputError(
            f"{source}: no prompts or responses there: {error.message.removeprefix(f'input {str(source)!r}: ')}",
            hint="give the directory of a bulk run, or a corpus that peagle generate reads",
        ) from error


def _units(source: str) -> Sequence[Place]:
    """The committed units, where the source is a run directory."""
    if not source.startswith(SCHEME):
        return sorted((user_path(source) / "data").glob("unit-*.parquet"))
    try:
        folder = S3Path.parse(source)
    except ConfigError:
        return []  # a whole bucket, say
    return sorted((folder / "data").glob("unit-*.parquet"), key=str)
