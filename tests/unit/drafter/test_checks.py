"""What `check_training` lets through. What it refuses: unit/jobs/test_train.py."""

from pathlib import Path

import pytest

from peagle.catalog.shipped_heads import HEADS_FOLDER
from peagle.drafter.config import TrainConfig
from peagle.drafter.pipeline import check_training


@pytest.mark.usefixtures("embedded_target")
def test_a_training_may_go_on_from_a_head_of_the_package_that_is_kept_in_fp8() -> None:
    init = HEADS_FOLDER / "smollm2-135m-peagle"
    config = TrainConfig(prompts="stdlib", output=Path("out"), init=str(init), num_layers=5, num_key_value_heads=9)
    checked, target, _ = check_training(config, pytest.fail)
    assert (checked, target.vocab_size) == (config, 49152)
