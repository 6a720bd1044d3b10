from pathlib import Path

import pytest
from pydantic import ValidationError

from peagle.bench.acceptance_config import EvaluateConfig
from peagle.bench.config import BenchConfig
from peagle.bench.options import MeasurementKeys, whole_numbers
from peagle.tuning.config import TuneConfig


def test_numbers_from_one_flag_and_several() -> None:
    assert whole_numbers("8, 1", "N", 8) == [1, 8]
    assert whole_numbers(["4,2", 2], "N", 8) == [2, 4]


@pytest.mark.parametrize("value", ["0", "9", "", "1,", "-1", "1.5"])
def test_other_things_are_refused_by_name(value: str) -> None:
    with pytest.raises(ValueError, match="N must be whole numbers from 1 to 8"):
        whole_numbers(value, "N", 8)


@pytest.mark.parametrize("command", [BenchConfig, EvaluateConfig, TuneConfig])
def test_results_are_kept_on_a_disk(command: type[MeasurementKeys]) -> None:
    assert command(output="runs/mine").output == Path("runs/mine")
    with pytest.raises(ValidationError, match="has to be a folder on a disk"):
        command(output="s3://bucket/mine")
