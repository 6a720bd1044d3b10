"""Prompts and responses to token ids with a loss mask: what a head is trained on.

It applies the target's chat template, and says by id and reason which rows give no sample. It knows rows and
tokenizers; it knows nothing of files, hidden states or heads.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from peagle.corpus.rows import Row
from peagle.requests.messages import parse_messages


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
