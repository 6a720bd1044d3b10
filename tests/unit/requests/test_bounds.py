"""Limits for the size of schemas, patterns and other constraints, and for token ids."""

import json
import time

import pytest

from peagle.requests import bounds
from peagle.requests.bounds import choice_error, constraint_error, grammar_error, pattern_error, schema_error
from peagle.requests.sampling import SamplingOptions, parse_overrides


def object_schema(num_properties, num_required=0):
    names = [f"p{index}" for index in range(num_properties)]
    return {"type": "object", "properties": {name: {} for name in names}, "required": names[:num_required]}


def nested_schema(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


SCHEMAS_BEYOND_A_BOUND = {
    "optional properties": object_schema(201),
    "properties of all objects": {"allOf": [object_schema(600, 600), object_schema(600, 600)]},
    "depth": nested_schema(65),
    "an enum": {"enum": list(range(2001))},
    "unions together": {"anyOf": [{"enum": list(range(1000))}] * 3},
    "maxItems": {"type": "array", "maxItems": 100_001},
    "a length of many digits": {"type": "string", "minLength": 10**40},
    "a pattern that repeats": {"type": "string", "pattern": "a{1,999999}"},
    "a pattern that is long": {"type": "string", "pattern": "a" * 9000},
    "references": {"anyOf": [{"$ref": "#"}] * 501},
    "bytes": {"description": "x" * 70_000},
}


@pytest.mark.parametrize("schema", SCHEMAS_BEYOND_A_BOUND.values(), ids=SCHEMAS_BEYOND_A_BOUND)
def test_schema_beyond_a_bound_is_refused(schema):
    message = schema_error(schema)
    assert message == schema_error(json.dumps(schema))
    assert any(character.isdigit() for character in message)
    assert schema_error({"properties": {"inner": schema}}) is not None


def test_schema_with_thousands_of_properties_is_refused_quickly():
    started_at = time.process_time()
    assert "3,000" in schema_error(object_schema(3000)) or "bytes" in schema_error(object_schema(3000))
    assert time.process_time() - started_at < 5  # such a schema once blocked an engine for minutes


@pytest.mark.parametrize(
    "schema",
    [
        object_schema(200),
        object_schema(1000, 900),
        nested_schema(60),
        {"enum": ["a"] * 2000},
        {"maxItems": 100_000},
        {"$ref": "#"},
        True,
    ],
)
def test_schema_within_the_bounds_is_accepted(schema):
    assert schema_error(schema) is None


def test_schema_deeper_than_pythons_stack_is_refused():
    assert "nested" in schema_error(nested_schema(5000))
    message = schema_error("[" * 60_000)  # this is also invalid JSON, which other checks refuse
    assert message is None or "nested" in message


def test_patterns_grammars_and_choices_are_bounded():
    assert "500,000" in pattern_error("(ab){500000}")
    assert "500,000" in pattern_error("(ab){ 2 , 500000 }")
    assert pattern_error("a{" + "9" * 5000 + "}")
    assert pattern_error("[a-z]{2,3}") is None
    assert "bytes" in grammar_error('root ::= "' + "a" * 70_000 + '"')
    assert "2,001" in choice_error(["a"] * 2001)
    assert "bytes" in choice_error(["a" * 40_000] * 2)
    assert choice_error(["yes", "no"]) is None


@pytest.mark.parametrize("text", ["a{1, ", "a{1 ", "a{ ", "a{1", "{1, "])
def test_repetition_check_takes_linear_time(text):
    """60 KB of blanks once blocked all streams of an endpoint for 45 seconds."""
    started_at = time.process_time()
    assert grammar_error(text + text[-1] * 60_000) is None
    assert grammar_error(text * 12_000) is None
    assert time.process_time() - started_at < 5


TOO_LARGE = object_schema(201)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": TOO_LARGE}}]
STRICT_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": TOO_LARGE, "strict": True}}]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": TOO_LARGE}}},
            "response_format",
        ),
        ({"response_format": {"type": "structural_tag", "structures": [{"schema": TOO_LARGE}]}}, "response_format"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "a{999999}"}}},
            "response_format",
        ),
        ({"structured_outputs": {"json": TOO_LARGE}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(TOO_LARGE)}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a{999999}"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"] * 3000}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "a" * 70_000}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": json.dumps({"a": TOO_LARGE})}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": "a{999999}"}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools[0]"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tools[0]"),
        ({"tools": STRICT_TOOLS}, "tools[0]"),
    ],
)
def test_every_constraint_of_a_request_is_bounded(body, field):
    assert constraint_error(body)[0] == field


@pytest.mark.parametrize(
    "body",
    [{}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "auto"}, {"response_format": "x"},
     {"structured_outputs": [1]}, {"tools": "x", "tool_choice": "required"}, {"tools": [1], "tool_choice": "required"}],
)  # fmt: skip
def test_requests_without_constraints_are_accepted(body):
    assert constraint_error(body) is None


def test_bulk_runs_have_the_same_bounds():
    with pytest.raises(ValueError, match="optional properties"):
        SamplingOptions(json_schema=json.dumps(TOO_LARGE))
    assert "optional properties" in parse_overrides({"json_schema": TOO_LARGE})
    assert "optional properties" not in str(parse_overrides({"json_schema": object_schema(10)}))


@pytest.mark.parametrize(
    ("values", "field", "token_id"),
    [
        ({"prompt": [0, 99, 100]}, "prompt", 100),
        ({"prompt": [[1], [2, 100]]}, "prompt", 100),
        ({"prompt": [-1]}, "prompt", -1),
        ({"stop_token_ids": [100]}, "stop_token_ids", 100),
        ({"allowed_token_ids": [5, 2**40]}, "allowed_token_ids", 2**40),
        ({"logprob_token_ids": [100]}, "logprob_token_ids", 100),
        ({"logit_bias": {"5": 1, "100": 1}}, "logit_bias", 100),
    ],
)
def test_token_id_outside_the_vocabulary_is_refused(values, field, token_id):
    message = f"{field} has the token id {token_id}, but the model only has ids 0 to 99"
    assert bounds.token_id_error(values, 100) == (field, message)
    assert bounds.token_id_error(values, None) is None


def test_valid_token_ids_and_texts_are_accepted():
    for values in ({"prompt": [0, 99]}, {"prompt": "text"}, {"prompt": ["a", "b"]}, {"prompt": []}, {"logit_bias": {}}):
        assert bounds.token_id_error({**values, "stop_token_ids": None}, 100) is None
