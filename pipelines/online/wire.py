"""The wire: paths, headers, errors, events, and the usage in answers.

It knows vLLM's JSON; it sends nothing and knows no Ray. A stream is a sequence of texts that each hold whole events, as
Ray hands them on.

    usage                           tokens of the prompt, cached ones, output; of a stream at its end, and in each event
                                    when it was asked for: there it is of that event's one choice and its prompt alone
    metrics.speculative_decoding    drafts of the request; with the last usage
    peagle                          ours: what the request cost; with the last usage
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
REQUEST_ID_HEADER = "x-peagle-request-id"  # of each answer
OURS = "peagle"
ShownUsage = Literal["never", "last", "each"]
"""Events of a stream in which the client sees its usage."""
_CONTEXT_HEADER = "x-peagle-context"
_DATA = "data: "
_END = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The gate's word on a request, for the engine that answers it.

    It travels in one header, since Ray hands a replica the headers of a request and nothing else. A client cannot say
    it: the gate drops every header of a client that begins with x-.

    Attributes:
        request_id: by which the ledger names it. Ray and vLLM read it in their own header.
        key: the name of its key.
        account: of the key.
        tags: the endpoint's, the key's and the request's own, as JSON.
        num_choices: of all its prompts.
        cap_tokens: the most output tokens of a chat that names no number; None without a cap.
        shown_usage: in the events of its stream.
        first_asked_at: Unix time at which another engine was asked, which died; None where there was none.
    """

    request_id: str
    key: str
    account: str = ""
    tags: str = NO_TAGS
    num_choices: int = 1
    cap_tokens: int | None = None
    shown_usage: ShownUsage = "never"
    first_asked_at: float | None = None

    def headers(self) -> dict[str, str]:
        """The headers that carry it: ours, and the one that Ray and vLLM read."""
        return {_CONTEXT_HEADER: json.dumps(asdict(self)), "x-request-id": self.request_id}

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Self | None:
        """The inverse of `headers`; None where the request has not come through the gate."""
        text = headers.get(_CONTEXT_HEADER)
        return None if text is None else cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeAnswer:
    """A whole answer, as a replica hands it on.

    Nobody behind it parses the body.

    Attributes:
        body: JSON, as the client gets it.
        said: what it says of its own usage: `usage`, `metrics` and our summary.
    """

    body: bytes
    said: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """The end of a stream, as a replica hands it on.

    Nobody behind it parses the events.

    Attributes:
        text: the events, as the client gets them; they may be none.
        said: as `WholeAnswer` has it.
    """

    text: str
    said: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowedRequest:
    """A request of a batch, for an engine of the endpoint that has an idle slot.

    Attributes:
        request_id: by which the engine and the ledger name this attempt.
        key, account, tags: whom it is billed to, as `Context` has them.
        cache_salt: of its key; None where keys share the prefix cache.
        sampling: as `Engine.generate` takes it.
    """

    request_id: str
    key: str
    account: str
    tags: str
    cache_salt: str | None
    prompt_token_ids: list[int]
    sampling: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowedReply:
    """An engine's word on a `BorrowedRequest`.

    The first says whether the engine takes it, the last what came of it; others say that it still runs.

    Attributes:
        state: full: no slot is idle; taken; returned: a person's request needs the slot; done; refused.
        generation: of a row that is done.
        reason, message: of the dead letter of one that is refused.
        engine_s: its share of the engine's busy seconds, which the ledger has.
    """

    state: Literal["full", "taken", "returned", "done", "refused"]
    generation: Generation | None = None
    reason: str = ""
    message: str = ""
    engine_s: float = 0.0


@dataclass(slots=True)
class AnswerTally:
    """The facts of an answer so far; a later statement replaces an earlier one.

    Attributes:
        choices_per_prompt: of a completion, whose choices are numbered through all its prompts; None where there is
            one prompt.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats.empty)
    choices_per_prompt: int | None = None
    _of_choice: dict[int, int] = field(default_factory=dict, compare=False)  # output tokens
    _of_prompt: dict[int, int] = field(default_factory=dict, compare=False)  # prompt tokens

    def read(self, answer: Mapping[str, Any]) -> None:
        """Take what a whole answer says of itself, or the last event of a stream."""
        if usage := answer.get("usage"):
            self.num_prompt_tokens = usage.get("prompt_tokens") or 0
            self.num_output_tokens = usage.get("completion_tokens") or 0
            details = usage.get("prompt_tokens_details") or {}
            self.num_cached_tokens = min(details.get("cached_tokens") or 0, self.num_prompt_tokens)
        drafts = (answer.get("metrics") or {}).get("speculative_decoding")
        if drafts:
            self.speculation = SpeculationStats.from_histogram(
                drafts["acceptance_histogram"], drafts["num_draft_tokens"]
            )

    def read_event(self, event: Mapping[str, Any]) -> None:
        """Take an event of a stream; a prompt counts from its answer's first event."""
        self.read(event)
        if event.get("usage") and (choices := event.get("choices")):
            choice = choices[0].get("index") or 0
            prompt = choice // self.choices_per_prompt if self.choices_per_prompt else 0
            self._of_choice[choice] = self.num_output_tokens
            self._of_prompt[prompt] = self.num_prompt_tokens
            self.num_output_tokens = sum(self._of_choice.values())
            self.num_prompt_tokens = sum(self._of_prompt.values())


def events(text: str) -> Iterator[dict[str, Any] | str]:
    """The events of a text: JSON objects as such, the rest as it stands.

    The rest is, for example, the end of a stream.
    """
    for event in text.split(_END):
        if not event:
            continue
        try:
            value = json.loads(event.removeprefix(_DATA))
        except ValueError:
            value = None
        yield value if isinstance(value, dict) else event + _END


def to_text(event: Mapping[str, Any] | str) -> str:
    """The inverse of `events`."""
    if isinstance(event, str):
        return event
    return f"{_DATA}{json.dumps(event, ensure_ascii=False, separators=(',', ':'))}{_END}"


def is_usage_alone(event: Mapping[str, Any]) -> bool:
    """The last event of a stream with usage: it has no choices."""
    return bool(event.get("usage")) and not event.get("choices")


Headers = Iterable[tuple[bytes, bytes]]


def header(scope: Scope, name: str) -> str | None:
    """The first of a request's headers of this name."""
    wanted = name.encode()
    return next((value.decode("latin-1") for key, value in scope.get("headers", []) if key.lower() == wanted), None)


def encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """The headers as ASGI has them."""
    return [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]


def with_headers(headers: Headers, said: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """A request's headers with these in place of its own."""
    names = {name.encode() for name in said}
    return [*((name, value) for name, value in headers if name.lower() not in names), *encoded(said)]


def error_response(error: ApiError) -> tuple[dict[str, str], bytes]:
    """Headers and body of the response that is an error."""
    body = json.dumps(error.body()).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
    return headers, body


def error_event(error: ApiError) -> str:
    """The last event of a stream that broke off."""
    return f"{_DATA}{json.dumps(error.body())}{_END}"  # in ASCII: it may repeat what a client sent


def path_refusal(scope: Scope) -> ApiError | None:
    """The refusal of a path with control characters or line breaks.

    In any alphabet; None for any other.

    Regular expressions, logs and other people's proxies read such a path differently: `$` of Python's matches before a
    line break at its end.
    """
    if scope["path"].isprintable():
        return None
    return ApiError(400, "the path has characters that cannot be printed", code="invalid_path")
