"""Checks that each invalid row becomes a dead letter, and that a valid row next to it is unaffected."""

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
class BadRow:
    """An invalid row and its expected dead letter.

    Attributes:
        reason: the reason in the dead letter.
        message: a part of the message in the dead letter.
        options: options of the run.
        file_name: the input file, which has `valid_row` first and `row` second.
    """

    description: str
    row: Any
    reason: str
    message: str
    options: dict[str, Any] = field(default_factory=dict)
    file_name: str = "a.jsonl"
    valid_row: Any = None


def bad_sampling(description, sampling, message):
    return BadRow(
        description,
        {"prompt": "x", "sampling": sampling},
        "invalid",
        message,
        valid_row={"prompt": "a", "sampling": {}},
    )


def bad_messages(description, messages, reason, message):
    return BadRow(description, {"messages": messages}, reason, message, valid_row={"messages": CHAT})


def bad_template(description, template, row, message):
    return BadRow(
        description,
        row,
        "template_error",
        message,
        {"prompt_template": template},
        valid_row={"prompt": "a", "x": {"y": 1}},
    )


def bad_batch_line(description, message, reason="invalid", **changes):
    request = {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": CHAT}}
    return BadRow(description, {**request, **changes}, reason, message, valid_row={**request, "custom_id": "a"})


def bad_body(description, message, reason="invalid", url="/v1/chat/completions", **changes):
    body = changes if "prompt" in changes else {"messages": CHAT, **changes}
    return bad_batch_line(f"an OpenAI request {description}", message, reason, url=url, body=body)


def bad_row_in_file(description, file_name, valid_row, row, reason, message):
    return BadRow(description, row, reason, message, {}, file_name, valid_row)


CASES = [
    # unreadable rows
    BadRow("a line that is not JSON", b'{"prompt": "x"', "invalid_row", "a.jsonl line 2: not valid JSON"),
    BadRow("a JSON list", [1, 2], "invalid_row", "a JSON list, not an object"),
    BadRow("a JSON string", "x", "invalid_row", "a JSON str, not an object"),
    BadRow("Latin-1 in JSON lines", b'{"prompt": "\xe9"}', "invalid_row", "'utf-8' codec can't decode"),
    BadRow("null bytes, like in UTF-16", '{"prompt": "x"}'.encode("utf-16-be"), "invalid_row", "not valid JSON"),
    BadRow("half a surrogate pair", b'{"prompt": "\\ud83d"}', "invalid_row", "half a surrogate pair"),
    BadRow("JSON nested too deeply", b"[" * 100_000, "invalid_row", "not valid JSON"),
    BadRow("a number that is too large", b'{"prompt": "x", "n": [1e400]}', "invalid_row", "1e400 is too large"),
    BadRow("a number that rounds to 0", b'{"prompt": "x", "n": 1E-400}', "invalid_row", "1E-400 is too small for a"),
    BadRow("a duplicate key", b'{"prompt": "x", "n": {"a": 1, "a": 2}}', "invalid_row", "has the key 'a'"),
    bad_row_in_file("CSV with a missing field", "a.csv", b"prompt,n\na,1", b"x", "invalid_row", "1 fields, but"),
    bad_row_in_file("CSV with an extra field", "a.csv", b"prompt,n\na,1", b"x,1,2", "invalid_row", "3 fields, but"),
    bad_row_in_file("Latin-1 in CSV", "a.csv", b"prompt,n\na,1", b"\xe9,2", "invalid_row", "not valid UTF-8"),
    bad_row_in_file("Latin-1 in text", "a.txt", b"a", b"\xe9", "invalid_row", "a.txt line 2: not valid UTF-8"),
    # prompts
    BadRow("no prompt", {"other": 1}, "invalid_prompt", "must be text, not null"),
    BadRow("a prompt that is a number", {"prompt": 7}, "invalid_prompt", "must be text, not int"),
    BadRow("a prompt that is a list", {"prompt": ["x"]}, "invalid_prompt", "must be text, not list"),
    bad_row_in_file("a null in Parquet", "a.parquet", "a", None, "invalid_prompt", "must be text, not null"),
    bad_row_in_file("bytes in Parquet", "a.parquet", None, b"x", "invalid_prompt", "not bytes"),
    BadRow("an empty prompt", {"prompt": ""}, "empty_prompt", "has no tokens", {"chat": False}),
    BadRow("a prompt longer than the context", {"prompt": "x" * 200}, "prompt_too_long", "the limit is 100",
        {"max_model_len": 100, "max_tokens": 8}),
    bad_messages("no messages", [], "invalid_messages", "not an empty list"),
    bad_messages("text for messages", "hi", "invalid_messages", "must be a list of messages, not str"),
    bad_messages("a message without a role", [{"content": "hi"}], "invalid_messages", "a role and text content"),
    bad_messages("a content that is a number", [{"role": "user", "content": 7}], "invalid_messages", "text content"),
    bad_messages("an image", [{"role": "user", "content": [{"type": "image_url"}]}], "invalid_messages", "content"),
    bad_messages("roles that the model's chat template refuses", CHAT * 2, "template_error", "roles must alternate"),
    bad_template("a template with a key that a row lacks", "{{ prompt }}{{ x.y }}", {"prompt": "x"}, "prompt_template"),
    bad_template("a template that prints a null", "{{ prompt }}{{ x }}", {"prompt": "x", "x": None}, "'x' is null"),
    bad_template("a template that prints a record with a null", "{{ prompt }}{{ x }}", {"prompt": "x",
        "x": {"y": None}},
             "'x.y' is null"),
    bad_template("a template that prints a NaN", "{{ prompt }}{{ x }}", {"prompt": "x", "x": float("nan")},
        "'x' is NaN"),
    bad_template("a template that divides by 0", "{{ prompt }}{{ 1 / x.y }}", {"prompt": "x", "x": {"y": 0}},
             "division by zero"),
    bad_template("a template that leaves its sandbox",
        "{{ prompt }}{% if not x %}{{ prompt.__class__.mro() }}{% endif %}",
             {"prompt": "x", "x": None}, "unsafe"),
    bad_template("a filter that fails on a row", "{{ prompt }}{{ x | dictsort }}", {"prompt": "x", "x": "t"},
             "no attribute 'items'"),
    # sampling parameters of a row
    bad_sampling("parameters that are not JSON", "{", "not valid JSON"),
    bad_sampling("parameters that are a list", [1], "not an object of parameters"),
    bad_sampling("an unknown parameter", {"temprature": 1}, "did you mean temperature?"),
    bad_sampling("a parameter of a wrong type", {"temperature": "1"}, "temperature: "),
    bad_sampling("a parameter out of range", {"top_p": 1.5}, "top_p: "),
    bad_sampling("several greedy responses", {"n": 3}, "require a temperature above 0"),
    bad_sampling("more tokens than the context", {"max_tokens": 9000}, "exceeds the context"),
    bad_sampling("an empty stop string", {"stop": [""]}, "an empty string cannot be a stop string"),
    bad_sampling("an invalid JSON schema", {"json_schema": {"type": "objekt"}}, "not a valid JSON schema"),
    # OpenAI batches
    bad_batch_line("an OpenAI request to another url", "url must be", url="/v1/embeddings"),
    bad_batch_line("an OpenAI request with GET", "method must be POST", method="GET"),
    bad_batch_line("an OpenAI request without a body", "the request has no body", body=None),
    bad_batch_line("an OpenAI request with a body of text", "body must be a JSON object", body="{}"),
    bad_batch_line("an OpenAI request with a number for its custom_id", "custom_id must be non-empty text",
        custom_id=7),
    bad_batch_line("an OpenAI request with a NaN", "NaN is not JSON", "invalid_row", body={"x": float("nan")}),
    bad_batch_line("an OpenAI request with another key", "unknown key 'priority'", priority=1),
    bad_body("without messages", "the request has no messages", messages=None),
    bad_body("with an unknown parameter", "did you mean temperature?", temprature=1),
    bad_body("for a stream", "body.stream: True is not supported", stream=True),
    bad_body("that calls tools", "tool_call_parser", tools=[{"type": "function", "function": {"name": "f"}}]),
    bad_body("with several prompts", "use a line for each", url="/v1/completions", prompt=["x", "y"]),
    bad_body("with a call of another kind", "tool_calls must be", "invalid_messages",
         messages=[{"role": "assistant", "tool_calls": [{"type": "custom"}]}]),
    bad_body("with an unknown response_format", "response_format: its type must be", response_format={"type": "xml"}),
    bad_body("with only top_logprobs", "requires logprobs: true", top_logprobs=2),
    bad_body("with an image", "text content", "invalid_messages", messages=[{"role": "user",
        "content": [{"type": "image"}]}]),
]  # fmt: skip


class StrictTokenizer(ByteTokenizer):
    """A tokenizer whose chat template refuses two consecutive messages of one role, as many models' templates do."""

    def apply_chat_template(self, conversation, **options):
        roles = [message["role"] for message in conversation]
        if any(a == b for a, b in pairwise(roles)):
            raise jinja2.TemplateError("Conversation roles must alternate user/assistant/user/assistant/...")
        return super().apply_chat_template(conversation, **options)


def write_corpus(case, folder):
    """Write the corpus of a case: the valid row, then the invalid one."""
    path = folder / case.file_name
    valid_row = {"prompt": "a"} if case.valid_row is None else case.valid_row
    if path.suffix == ".parquet":
        sink = io.BytesIO()
        is_bytes = isinstance(case.row, bytes)
        pq.write_table(pa.table({"prompt": pa.array([b"a" if is_bytes else "a", case.row])}), sink)
        path.write_bytes(sink.getvalue())
    else:
        lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in (valid_row, case.row)]
        path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def prepare(case, folder, machine):
    """Return the corpus as one prepared unit, which is what an engine gets."""
    config = GenerateConfig(
        input=str(write_corpus(case, folder)),
        output=folder / "run",
        engine="fake",
        usd_per_hour=1,
        rows_per_unit=8,
        **case.options,
    )
    plan = make_plan(config)
    run = resolve_run(config, plan, machine)
    (unit,) = plan.units
    return PreparedUnit(prepare_unit(unit, plan.schema, run.request_builder()))


@pytest.fixture(scope="module")
def results(machine, tmp_path_factory):
    """The prompts and dead letters of each case, by its description."""
    by_case = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.batch.resolve.tokenizer_of", lambda model, revision: StrictTokenizer())
        for case in CASES:
            folder = tmp_path_factory.mktemp("case")
            unit = prepare(case, folder, machine)
            dead_letters = [
                {**letter, "message": letter["message"].replace(f"{folder}/", "")}
                for letter in unit.dead_letter_records()
            ]
            by_case[case.description] = unit.prompts, dead_letters
    return by_case


@pytest.mark.parametrize("case", CASES, ids=[case.description for case in CASES])
def test_invalid_row_becomes_a_dead_letter_and_valid_row_a_prompt(results, case):
    prompts, dead_letters = results[case.description]
    if case.file_name.endswith(".parquet") and isinstance(case.row, bytes):
        assert prompts == [None, None]  # the column has one type, so both rows are bytes
    else:
        assert len(prompts) == 2
        assert prompts[0]
        assert prompts[1] is None
    letter = dead_letters[-1]
    assert (letter["id"], letter["reason"]) == ("000000001", case.reason)
    assert case.message in letter["message"]
    assert set(letter) == {"id", "unit", "attempt", "reason", "message", "row"}


def test_bad_inputs_page_lists_every_case(results, check_section, format_message):
    rows = [("row", "reason", "message")]
    rows += [
        (case.description, f"`{case.reason}`", format_message(results[case.description][1][-1]["message"]))
        for case in CASES
    ]
    check_section("Rows that become dead letters", rows)
