from typing import Any

import pydantic
import pytest

from peagle.bench.acceptance_config import EvaluateConfig
from peagle.drafter.config import TrainConfig


@pytest.mark.parametrize(
    ("given", "ks"), [("3", [3]), ("7,3, 5", [3, 5, 7]), (["3,5", "5,32"], [3, 5, 32]), ([1, 2], [1, 2]), (4, [4])]
)
def test_k_from_flags_environment_and_yaml(given: Any, ks: list[int]) -> None:
    assert EvaluateConfig(num_speculative_tokens=given).num_speculative_tokens == ks


@pytest.mark.parametrize("given", ["0", "33", "3,", "x", ["3", "-1"], 2.5, ""])
def test_k_out_of_range_is_refused(given: Any) -> None:
    with pytest.raises(pydantic.ValidationError, match="K must be whole numbers from 1 to 32"):
        EvaluateConfig(num_speculative_tokens=given)


def test_a_drafter_by_itself_and_several() -> None:
    assert EvaluateConfig(drafter="peagle").drafter == ["peagle"]
    assert EvaluateConfig().drafter == ["auto"]


def test_none_has_nothing_to_accept() -> None:
    with pytest.raises(pydantic.ValidationError, match="nothing to accept"):
        EvaluateConfig(drafter=["peagle", "none"])


def test_a_row_has_one_prompt() -> None:
    with pytest.raises(pydantic.ValidationError, match="exclude each other"):
        EvaluateConfig(prompt_column="a", prompt_template="{{ a }}")


def test_a_temperature_that_vllm_refuses_is_refused_before_an_engine_starts() -> None:
    with pytest.raises(pydantic.ValidationError, match="less than or equal to 2"):
        EvaluateConfig(temperature=2.5)
    with pytest.raises(pydantic.ValidationError, match="less than or equal to 2"):
        TrainConfig(prompts=["stdlib"], output="out", temperature=2.5)
