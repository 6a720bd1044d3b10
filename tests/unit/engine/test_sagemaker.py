import json
from dataclasses import replace

import pytest

from peagle.engine.sagemaker import VARIABLE, from_sagemaker_env, to_sagemaker_env
from peagle.engine.spec import DrafterSpec, DraftMethod
from peagle.errors import ConfigError


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_a_drafter_survives_the_variable(method: DraftMethod) -> None:
    drafter = DrafterSpec(method=method, model="amazon/head", num_speculative_tokens=7)
    assert from_sagemaker_env(to_sagemaker_env(drafter)) == drafter
    pinned = replace(drafter, revision="abc")
    assert from_sagemaker_env(to_sagemaker_env(pinned)) == pinned


def test_what_jumpstart_writes_is_understood() -> None:
    text = '{"model": "amazon/h", "num_speculative_tokens": 5, "method": "eagle3", "parallel_drafting": true}'
    assert from_sagemaker_env({VARIABLE: text}) == DrafterSpec(
        method="peagle", model="amazon/h", num_speculative_tokens=5
    )


@pytest.mark.parametrize("env", [{}, {VARIABLE: ""}, {VARIABLE: "  "}])
def test_no_variable_means_no_drafter(env: dict[str, str]) -> None:
    assert from_sagemaker_env(env) is None
    assert to_sagemaker_env(None) == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        (json.dumps({"model": "h"}), "lacks num_speculative_tokens"),
        (json.dumps({"num_speculative_tokens": 3}), "lacks model"),
        (json.dumps({"model": "h", "num_speculative_tokens": 3, "method": "medusa"}), "medusa"),
        (
            json.dumps({"model": "h", "num_speculative_tokens": 3, "paralel_drafting": True}),
            "paralel_drafting",
        ),
        (json.dumps({"model": "h", "num_speculative_tokens": "3"}), "whole number"),
        (json.dumps({"model": "h", "num_speculative_tokens": 0}), "above zero"),
        (json.dumps({"model": 5, "num_speculative_tokens": 3}), "must be text"),
        (json.dumps({"model": "h", "num_speculative_tokens": 3, "revision": 5}), "revision must be text"),
        (
            json.dumps({"model": "h", "num_speculative_tokens": 3, "parallel_drafting": "yes"}),
            "true or false",
        ),
        (
            json.dumps(
                {
                    "model": "h",
                    "num_speculative_tokens": 3,
                    "num_speculative_tokens_per_batch_size": [[1, 2, 3]],
                }
            ),
            "num_speculative_tokens_per_batch_size",
        ),
    ],
)
def test_what_is_wrong_with_the_variable_is_said(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        from_sagemaker_env({VARIABLE: text})
