"""Paths, headers, errors and stream events of the API, and the usage in answers.

usage                           prompt, cached and output tokens: at the end of a stream, of the whole answer; if
                                requested, also in each event, of its choice and prompt only
metrics.speculative_decoding    drafts of the request; in the object with the final usage
peagle                          peagle's summary with the request's cost; in the object with the final usage
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from starlette.types import Scope

from peagle.economics.tags import NO_TAGS
from peagle.engine.interface import Generation
from peagle.speculation import SpeculationStats
from pipelines.online.errors import ApiError

FILES_URL = "/v1/files"
BATCHES_URL = "/v1/batches"
INVOCATIONS_URL = "/invocations"
PING_URL = "/ping"
REQUEST_ID_HEADER = "x-peagle-request-id"  # in every answer
PEAGLE_KEY = "peagle"
ShownUsage = Literal["never", "last", "each"]
"""Which events of a stream show usage to the client."""
_CONTEXT_HEADER = "x-peagle-context"
_EVENT_PREFIX = "data: "
_EVENT_END = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The gate's information about a request, for the replica.

    The context is sent in one header, since Ray only passes headers to a replica. Clients cannot set it: the gate drops
    all client headers that begin with x-.
    """

    request_id: str  # id in the ledger; Ray and vLLM read it from another header
    # key, account: name and account of the API key
    key: str
    account: str = ""
    tags: str = NO_TAGS  # merged tags of the endpoint, the key and the request, as JSON
    num_choices: int = 1  # total number of choices over all prompts
    cap_tokens: int | None = None  # maximum output tokens of a chat without max_tokens; None is unlimited
    shown_usage: ShownUsage = "never"  # which events of the stream show usage
    # Unix time at which an earlier engine, which crashed, received the request; None on the first attempt
    first_asked_at: float | None = None

    def headers(self) -> dict[str, str]:
        """Return the headers that carry the context, including the request id for Ray and vLLM."""
        return {_CONTEXT_HEADER: json.dumps(asdict(self)), "x-request-id": self.request_id}

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Self | None:
        """Return the context from the headers, or None if the request did not pass the gate."""
        text = headers.get(_CONTEXT_HEADER)
        return None if text is None else cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeAnswer:
    """A non-streaming answer from a replica: the JSON for the client, which is not parsed again, and the usage.

    `reported` has `usage`, `metrics` and peagle's summary.
    """

    body: bytes
    reported: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """The end of a stream from a replica: the client's last events, if any, and the usage as in `WholeAnswer`."""

    text: str
    reported: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowedRequest:
    """A row of a batch, for an engine of the endpoint with an idle slot."""

    context: Context  # the row's context; its request id identifies this attempt
    cache_salt: str | None  # salt of the batch's key; None if keys share the prefix cache
    prompt_token_ids: list[int]
    sampling: dict[str, Any]  # as for `Engine.generate`


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowedReply:
    """An engine's reply to a row. The first says whether the engine accepts the row, the last has the result."""

    # full: no slot is idle; taken: the row is running (repeated each minute); returned: an interactive request needs
    # the slot; done; refused
    state: Literal["full", "taken", "returned", "done", "refused"]
    generation: Generation | None = None
    # reason, message: of the dead letter if refused
    reason: str = ""
    message: str = ""
    engine_s: float = 0.0  # the row's share of busy seconds, as in the ledger


@dataclass(slots=True)
class AnswerTally:
    """Current usage of an answer. Later values replace earlier ones."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats.empty)
    # number of choices per prompt if a completion has several prompts; their choices are numbered consecutively
    choices_per_prompt: int | None = None
    _tokens_of_choice: dict[int, int] = field(default_factory=dict, compare=False)  # output tokens
    _tokens_of_prompt: dict[int, int] = field(default_factory=dict, compare=False)  # prompt tokens

    def read(self, answer: Mapping[str, Any]) -> None:
        """Read the usage of a non-streaming answer, or of the last event of a stream."""
        if usage := answer.get("usage"):
            self.num_prompt_tokens = usage.get("prompt_tokens") or 0
            self.num_output_tokens = usage.get("completion_tokens") or 0
            details = usage.get("prompt_tokens_details") or {}
            self.num_cached_tokens = min(details.get("cached_tokens") or 0, self.num_prompt_tokens)
        drafts = (answer.get("metrics") or {}).get("speculative_decoding")
        if drafts:
            # `vllm_drafts` adds peagle's own counts to this field, which vLLM leaves empty. Clients do not get them.
            peagle_counts = drafts.pop("per_step_drafted", None) or ()
            self.speculation = SpeculationStats.from_histogram(
                drafts["acceptance_histogram"], drafts["num_draft_tokens"], peagle_counts
            )

    def read_event(self, event: Mapping[str, Any]) -> None:
        """Read the usage of any event of a stream: of one choice and its prompt, or of the whole answer at the end."""
        self.read(event)
        if event.get("usage") and (choices := event.get("choices")):
            choice = choices[0].get("index") or 0
            prompt = choice // self.choices_per_prompt if self.choices_per_prompt else 0
            self._tokens_of_choice[choice] = self.num_output_tokens
            self._tokens_of_prompt[prompt] = self.num_prompt_tokens
            self.num_output_tokens = sum(self._tokens_of_choice.values())
            self.num_prompt_tokens = sum(self._tokens_of_prompt.values())


def events(text: str) -> Iterator[dict[str, Any] | str]:
    """Yield the events of a stream's text: JSON objects are parsed, everything else (such as [DONE]) stays text."""
    for event in text.split(_EVENT_END):
        if not event:
            continue
        try:
            value = json.loads(event.removeprefix(_EVENT_PREFIX))
        except ValueError:
            value = None
        yield value if isinstance(value, dict) else event + _EVENT_END


def to_text(event: Mapping[str, Any] | str) -> str:
    """Format an event; the inverse of `events`."""
    if isinstance(event, str):
        return event
    return f"{_EVENT_PREFIX}{json.dumps(event, ensure_ascii=False, separators=(',', ':'))}{_EVENT_END}"


Headers = Iterable[tuple[bytes, bytes]]


def header(scope: Scope, name: str) -> str | None:
    encoded_name = name.encode()
    return next(
        (value.decode("latin-1") for raw_name, value in scope.get("headers", []) if raw_name.lower() == encoded_name),
        None,
    )


def encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]


def with_headers(headers: Headers, new: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    names = {name.encode() for name in new}
    return [*((name, value) for name, value in headers if name.lower() not in names), *encoded(new)]


def error_response(error: ApiError) -> tuple[dict[str, str], bytes]:
    body = json.dumps(error.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
    return headers, body


def error_event(error: ApiError) -> str:
    # In ASCII, since the message may quote text from the client.
    return f"{_EVENT_PREFIX}{json.dumps(error.body())}{_EVENT_END}"


def path_refusal(scope: Scope) -> ApiError | None:
    """Return an error if the path contains control characters or line breaks.

    Regular expressions, logs and proxies interpret these differently: Python's `$` matches before a final line break.
    """
    if scope["path"].isprintable():
        return None
    return ApiError(400, "the path contains unprintable characters", code="invalid_path")
