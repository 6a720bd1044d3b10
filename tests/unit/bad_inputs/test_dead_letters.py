"""Invalid rows: each becomes a dead letter, and the valid row next to it is unaffected."""

import io
import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jinja2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from resolved_runs import resolve_run

from peagle.engine.fake import ByteTokenizer
from peagle.runs.plan import make_plan
from peagle.runs.prepare import prepare_unit
from peagle.runs.rows import PreparedUnit
from pipelines.batch.config import GenerateConfig

CHAT = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Bad:
    """An invalid row, the expected dead letter, and options of the run.

    The row follows a valid one (`good`) in the file `name`.
    """

    description: str
    row: Any
    reason: str
    message: str
    keys: dict[str, Any] = field(default_factory=dict)
    name: str = "a.jsonl"
    good: Any = None


def parameters(description, sampling, message):
    return Bad(
        description, {"prompt": "x", "sampling": sampling}, "invalid", message, good={"prompt": "a", "sampling": {}}
    )


def messages(description, value, reason, message, **keys):
    return Bad(description, {"messages": value}, reason, message, keys, good={"messages": CHAT})


def template(description, template, row, message):
    return Bad(
        description, row, "template_error", message, {"prompt_template": template}, good={"prompt": "a", "x": {"y": 1}}
    )


def envelope(description, message, reason="invalid", **changes):
    request = {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": CHAT}}
    return Bad(description, {**request, **changes}, reason, message, good={**request, "custom_id": "a"})


def body(description, message, reason="invalid", url="/v1/chat/completions", **changes):
    source = {"messages": CHAT} if "prompt" not in changes else {}
    return envelope(f"an OpenAI request {description}", message, reason, url=url, body={**source, **changes})


def of_file(description, name, good, row, reason, message):
    return Bad(description, row, reason, message, {}, name, good)


CASES = [
    # unreadable rows
    Bad("a line that is not JSON", b'{"prompt": "x"', "invalid_row", "a.jsonl line 2: not valid JSON"),
    Bad("a JSON list", [1, 2], "invalid_row", "a JSON list, not an object"),
    Bad("a JSON string", "x", "invalid_row", "a JSON str, not an object"),
    Bad("Latin-1 in JSON lines", b'{"prompt": "\xe9"}', "invalid_row", "'utf-8' codec can't decode"),
    Bad("null bytes, like in UTF-16", '{"prompt": "x"}'.encode("utf-16-be"), "invalid_row", "not valid JSON"),
    Bad("half a surrogate pair", b'{"prompt": "\\ud83d"}', "invalid_row", "half a surrogate pair"),
    Bad("JSON nested too deeply", b"[" * 100_000, "invalid_row", "not valid JSON"),
    Bad("a number that is too large", b'{"prompt": "x", "n": [1e400]}', "invalid_row", "1e400 is too large"),
    Bad("a number that rounds to 0", b'{"prompt": "x", "n": 1E-400}', "invalid_row", "1E-400 is too small for a"),
    Bad("a duplicate key", b'{"prompt": "x", "n": {"a": 1, "a": 2}}', "invalid_row", "has the key 'a'"),
    of_file("CSV with a missing field", "a.csv", b"prompt,n\na,1", b"x", "invalid_row", "1 fields, but"),
    of_file("CSV with an extra field", "a.csv", b"prompt,n\na,1", b"x,1,2", "invalid_row", "3 fields, but"),
    of_file("Latin-1 in CSV", "a.csv", b"prompt,n\na,1", b"\xe9,2", "invalid_row", "not valid UTF-8"),
    of_file("Latin-1 in text", "a.txt", b"a", b"\xe9", "invalid_row", "a.txt line 2: not valid UTF-8"),
    # prompts
    Bad("no prompt", {"other": 1}, "invalid_prompt", "must be text, not null"),
    Bad("a prompt that is a number", {"prompt": 7}, "invalid_prompt", "must be text, not int"),
    Bad("a prompt that is a list", {"prompt": ["x"]}, "invalid_prompt", "must be text, not list"),
    of_file("a null in Parquet", "a.parquet", "a", None, "invalid_prompt", "must be text, not null"),
    of_file("bytes in Parquet", "a.parquet", None, b"x", "invalid_prompt", "not bytes"),
    Bad("an empty prompt", {"prompt": ""}, "empty_prompt", "has no tokens", {"chat": False}),
    Bad("a prompt longer than the context", {"prompt": "x" * 200}, "prompt_too_long", "the limit is 100",
        {"max_model_len": 100, "max_tokens": 8}),
    messages("no messages", [], "invalid_messages", "not an empty list"),
    messages("text for messages", "hi", "invalid_messages", "must be a list of messages, not str"),
    messages("a message without a role", [{"content": "hi"}], "invalid_messages", "it needs a role and a content"),
    messages("a content that is a number", [{"role": "user", "content": 7}], "invalid_messages", "both text"),
    messages("an image", [{"role": "user", "content": [{"type": "image_url"}]}], "invalid_messages", "both text"),
    messages("roles that the model's chat template refuses", CHAT * 2, "template_error", "roles must alternate"),
    template("a template with a key that a row lacks", "{{ prompt }}{{ x.y }}", {"prompt": "x"}, "prompt_template"),
    template("a template that prints a null", "{{ prompt }}{{ x }}", {"prompt": "x", "x": None}, "'x' is null"),
    template("a template that prints a record with a null", "{{ prompt }}{{ x }}", {"prompt": "x", "x": {"y": None}},
             "'x.y' is null"),
    template("a template that prints a NaN", "{{ prompt }}{{ x }}", {"prompt": "x", "x": float("nan")}, "'x' is NaN"),
    template("a template that divides by 0", "{{ prompt }}{{ 1 / x.y }}", {"prompt": "x", "x": {"y": 0}},
             "division by zero"),
    template("a template that leaves its sandbox", "{{ prompt }}{% if not x %}{{ prompt.__class__.mro() }}{% endif %}",
             {"prompt": "x", "x": None}, "unsafe"),
    template("a filter that fails on a row", "{{ prompt }}{{ x | dictsort }}", {"prompt": "x", "x": "t"},
             "no attribute 'items'"),
    # a row's own parameters
    parameters("parameters that are not JSON", "{", "not valid JSON"),
    parameters("parameters that are a list", [1], "not an object of parameters"),
    parameters("an unknown parameter", {"temprature": 1}, "did you mean temperature?"),
    parameters("a parameter of a wrong type", {"temperature": "1"}, "temperature: "),
    parameters("a parameter out of range", {"top_p": 1.5}, "top_p: "),
    parameters("several greedy responses", {"n": 3}, "require a temperature above 0"),
    parameters("more tokens than the context", {"max_tokens": 9000}, "exceeds the context"),
    parameters("an empty stop string", {"stop": [""]}, "an empty string cannot be a stop string"),
    parameters("an invalid JSON schema", {"json_schema": {"type": "objekt"}}, "not a valid JSON schema"),
    # OpenAI batches
    envelope("an OpenAI request to another url", "url must be", url="/v1/embeddings"),
    envelope("an OpenAI request with GET", "method must be POST", method="GET"),
    envelope("an OpenAI request without a body", "the request has no body", body=None),
    envelope("an OpenAI request with a body of text", "body must be a JSON object", body="{}"),
    envelope("an OpenAI request with a number for its custom_id", "custom_id must be non-empty text", custom_id=7),
    envelope("an OpenAI request with a NaN", "NaN is not JSON", "invalid_row", body={"x": float("nan")}),
    envelope("an OpenAI request with another key", "unknown key 'priority'", priority=1),
    body("without messages", "the request has no messages", messages=None),
    body("with an unknown parameter", "did you mean temperature?", temprature=1),
    body("for a stream", "body.stream: True is not supported", stream=True),
    body("that calls tools", "require a tool_call_parser", tools=[{"type": "function", "function": {"name": "f"}}]),
    body("with several prompts", "use a line for each", url="/v1/completions", prompt=["x", "y"]),
    body("with a call of another kind", "tool_calls must be", "invalid_messages",
         messages=[{"role": "assistant", "tool_calls": [{"type": "custom"}]}]),
    body("with an unknown response_format", "response_format: its type must be", response_format={"type": "xml"}),
    body("with only top_logprobs", "requires logprobs: true", top_logprobs=2),
    body("with an image", "both text", "invalid_messages", messages=[{"role": "user", "content": [{"type": "image"}]}]),
]  # fmt: skip


class StrictTokenizer(ByteTokenizer):
    """A tokenizer whose chat template refuses two consecutive messages of one role, like many models."""

    def apply_chat_template(self, conversation, **options):
        roles = [message["role"] for message in conversation]
        if any(a == b for a, b in pairwise(roles)):
            raise jinja2.TemplateError("Conversation roles must alternate user/assistant/user/assistant/...")
        return super().apply_chat_template(conversation, **options)


def write(case, folder):
    """Write the corpus: a valid row and the invalid one."""
    path = folder / case.name
    good = {"prompt": "a"} if case.good is None else case.good
    if path.suffix == ".parquet":
        sink = io.BytesIO()
        is_bytes = isinstance(case.row, bytes)
        pq.write_table(pa.table({"prompt": pa.array([b"a" if is_bytes else "a", case.row])}), sink)
        path.write_bytes(sink.getvalue())
    else:
        lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in (good, case.row)]
        path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def prepare(case, folder, machine):
    """Return the corpus as it reaches an engine."""
    config = GenerateConfig(
        input=str(write(case, folder)),
        output=folder / "run",
        engine="fake",
        usd_per_hour=1,
        rows_per_unit=8,
        **case.keys,
    )
    plan = make_plan(config)
    run = resolve_run(config, plan, machine)
    (unit,) = plan.units
    return PreparedUnit(prepare_unit(unit, plan.schema, run.request_builder()))


@pytest.fixture(scope="module")
def results(machine, tmp_path_factory):
    """Prompts and dead letters of each case."""
    by_case = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.batch.resolve.tokenizer_of", lambda model, revision: StrictTokenizer())
        for case in CASES:
            folder = tmp_path_factory.mktemp("case")
            unit = prepare(case, folder, machine)
            letters = [{**letter, "message": letter["message"].replace(f"{folder}/", "")} for letter in unit.letters()]
            by_case[case.description] = unit.prompts, letters
    return by_case


@pytest.mark.parametrize("case", CASES, ids=[case.description for case in CASES])
def test_bad_row_becomes_dead_letter_and_good_row_stays(results, case):
    prompts, letters = results[case.description]
    if case.name.endswith(".parquet") and isinstance(case.row, bytes):
        assert prompts == [None, None]  # the column has one type, so both rows are bytes
    else:
        assert len(prompts) == 2
        assert prompts[0]
        assert prompts[1] is None
    letter = letters[-1]
    assert (letter["id"], letter["reason"]) == ("000000001", case.reason)
    assert case.message in letter["message"]
    assert set(letter) == {"id", "unit", "attempt", "reason", "message", "row"}


def test_page_lists_every_case(results, check_section, format_message):
    rows = [("row", "reason", "message")]
    rows += [
        (case.description, f"`{case.reason}`", format_message(results[case.description][1][-1]["message"]))
        for case in CASES
    ]
    check_section("Rows that become dead letters", rows)
