import pytest

from peagle.requests.sampling import SamplingLimits, SamplingOptions, conflict, parse_overrides

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_overrides_are_parsed_from_objects_and_json_text():
    assert parse_overrides({"temperature": 1, "stop": "x", "n": None}) == {"temperature": 1.0, "stop": ["x"]}
    assert parse_overrides('{"max_tokens": 3}') == {"max_tokens": 3}
    assert parse_overrides(None) == parse_overrides("") == {}
    assert parse_overrides({"json_schema": SCHEMA}) == parse_overrides(
        {"json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}'}
    )


def nested_schema(levels):
    schema = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temprature": 1}, "unknown parameter 'temprature': did you mean temperature?"),
        ({"temperature": -0.1}, "temperature: Input should be greater than or equal to 0"),
        ({"temperature": 2.5}, "temperature: Input should be less than or equal to 2"),
        ({"temperature": float("nan")}, "temperature: "),
        ({"temperature": "hot"}, "temperature: Input should be a valid number, not 'hot'"),
        ({"temperature": "0.5"}, "temperature: Input should be a valid number"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"n": True}, "n: Input should be a valid integer"),
        ({"max_tokens": 1.5}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"top_p": 0}, "top_p: "),
        ({"logprobs": 21}, "logprobs: Input should be less than or equal to 20"),
        ({"stop": ["a", ""]}, "stop: an empty string cannot be a stop string"),
        ({"stop": [1]}, "stop.0: Input should be a valid string"),
        ({"json_schema": {"type": "strange"}}, "json_schema: not a valid JSON schema: at $.type"),
        ({"json_schema": "{bad"}, "json_schema: not valid JSON"),
        ({"json_schema": "[]"}, "json_schema: a JSON list, not a schema"),
        ({"json_schema": {"$schema": []}}, "json_schema: not a valid JSON schema: "),
        ({"json_schema": {"$schema": {}}}, "json_schema: not a valid JSON schema: "),
        ({"json_schema": '{"$schema": 7}'}, "json_schema: not a valid JSON schema: "),
        ({"json_schema": {"$schema": "http://[bad"}}, "json_schema: not a valid JSON schema: "),
        ({"json_schema": nested_schema(300)}, "json_schema: it is nested deeper than 64 levels"),
        ({"json_schema": '{"not":' * 3000 + "{}" + "}" * 3000}, "json_schema: it is nested deeper than 64 levels"),
        ({"json_schema": nested_schema(5000)}, "nested too deeply"),
        ('{"json_schema":' * 3000 + "{}" + "}" * 3000, "nested too deeply"),
        ({"json_schema": "/etc/passwd"}, "json_schema: not valid JSON"),
        ("{bad", "not valid JSON"),
        ([1], "a list, not an object of parameters"),
    ],
)
def test_invalid_overrides_are_refused(values, message):
    assert parse_overrides(values).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 101}, "max_tokens: 101 exceeds the context of 100"),
        ({"n": 2}, "n: 2 responses require a temperature above 0"),
        ({"min_p": 0.1}, "min_p: not supported by vLLM on a GPU with a drafter"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias: not supported by vLLM on a GPU with a drafter"),
        ({"min_tokens": 11}, "min_tokens: 11 exceeds max_tokens, 10"),
        (
            {"json_schema": "{}", "structured_outputs": {"regex": "x"}},
            "structured_outputs: cannot be combined with json_schema",
        ),
        ({"seed": 1, "temperature": 0.5}, "seed: vLLM on CPU crashes with seeded sampling"),
    ],
)
def test_conflicting_parameters_are_refused(changes, message):
    limits = SamplingLimits(max_model_len=100, has_drafter=True, can_seed=False)
    assert conflict({**SamplingOptions().model_dump(), "max_tokens": 10, **changes}, limits).startswith(message)


def test_supported_parameters_do_not_conflict():
    sampling = {**SamplingOptions().model_dump(), "n": 2, "min_p": 0.1, "seed": 1, "temperature": 0.5}
    assert conflict(sampling, SamplingLimits(max_model_len=256)) is None
    greedy = {**sampling, "n": 1, "temperature": 0.0}
    assert conflict(greedy, SamplingLimits(max_model_len=256, can_seed=False)) is None


def test_both_values_that_disable_top_k_are_equal():
    """So a run can continue with either value: its fingerprint is the same."""
    assert SamplingOptions(top_k=-1) == SamplingOptions(top_k=0)
    assert parse_overrides({"top_k": -2}).startswith("top_k: Input should be greater than or equal to -1")


def test_too_large_answer_is_refused():
    sampling = {"temperature": 1.0, "n": 128, "max_tokens": 4096, "logprobs": 20}
    limits = SamplingLimits(max_model_len=8192)
    assert "MiB" in conflict(sampling, limits)
    assert conflict({**sampling, "n": 1}, limits) is None
    assert conflict({**sampling, "logprobs": None}, limits) is None


def test_long_invalid_value_is_truncated():
    assert len(parse_overrides({"temperature": "x" * 100_000})) < 500
