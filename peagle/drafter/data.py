"""Convert prompts and responses to token ids with a loss mask, using the target's chat template."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from peagle.corpus.rows import Row
from peagle.requests.messages import parse_messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A document: the templated prompt and the target's response."""

    id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int  # number of prompt tokens at the start, which have no loss

    def __post_init__(self) -> None:
        if not 0 < self.num_prompt_tokens < len(self.token_ids):
            raise ValueError(f"sample {self.id}: must have prompt and response tokens")

    @property
    def num_response_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def loss_mask(self) -> list[bool]:
        """True for each token of the response, including its end-of-turn token."""
        return [False] * self.num_prompt_tokens + [True] * self.num_response_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A row that cannot be trained on."""

    id: str
    reason: str


def row_text(row: Row, prompt_column: str) -> str:
    """Return the text of a row's messages, prompt and response, for finding overlaps."""
    messages = parse_messages(row.get("messages"))
    conversation = "" if isinstance(messages, str) else "\n".join(message["content"] for message in messages)
    parts = (row.get(key) for key in (prompt_column, "response"))
    return "\n".join([conversation, *("" if part is None else str(part) for part in parts)])


def id_of(row: Row, number: int) -> str:
    """Return the row's id, or its number if the id is missing or null."""
    return str(number if row.get("id") is None else row["id"])


def build_samples(
    rows: Iterable[Row], tokenizer: Any, *, prompt_column: str = "prompt", max_tokens: int = 4096
) -> tuple[list[Sample], list[Rejected]]:
    """Apply the target's chat template to every row, and return the samples in order and the rejected rows.

    Args:
        rows: with `response`, and `messages` (a list or JSON text) or `prompt_column`; optionally `id` and
            `finish_reason`.
    """
    samples: list[Sample] = []
    rejected: list[Rejected] = []
    for number, row in enumerate(rows):
        row_id = id_of(row, number)
        outcome = _build_sample(row, row_id, tokenizer, prompt_column, max_tokens)
        if isinstance(outcome, Sample):
            samples.append(outcome)
        else:
            rejected.append(Rejected(id=row_id, reason=outcome))
    return samples, rejected


def _build_sample(row: Row, row_id: str, tokenizer: Any, prompt_column: str, max_tokens: int) -> Sample | str:
    if not row.get("response"):
        return "no response"
    if not isinstance(row["response"], str):
        return f"the response must be text, not {type(row['response']).__name__}"
    messages = _messages(row, prompt_column)
    if isinstance(messages, str):
        return messages
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # templates reject roles, and their filters may raise anything
        return f"the chat template rejects the row: {error}"
    response_ids = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
    if row.get("finish_reason") == "stop":
        response_ids = [*response_ids, tokenizer.eos_token_id]
    token_ids = tuple([*prompt_ids, *response_ids][:max_tokens])
    if len(token_ids) <= len(prompt_ids):
        return f"the prompt has {len(prompt_ids)} tokens, which leaves no room for a response within {max_tokens}"
    return Sample(id=row_id, token_ids=token_ids, num_prompt_tokens=len(prompt_ids))


def _messages(row: Row, prompt_column: str) -> list[dict[str, Any]] | str:
    if row.get("messages"):
        messages = parse_messages(row["messages"])
        return f"column 'messages'{messages}" if isinstance(messages, str) else messages
    if not isinstance(row.get(prompt_column), str):
        return f"neither 'messages' nor text in {prompt_column!r}"
    return [{"role": "user", "content": row[prompt_column]}]
