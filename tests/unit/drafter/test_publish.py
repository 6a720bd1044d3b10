import re
from typing import Any

import pytest
import torch

from peagle.drafter.config import TrainConfig
from peagle.drafter.publish import _hardware


@pytest.mark.parametrize(
    ("settings", "device", "hardware"),
    [
        ({"device": "cpu"}, "cpu", r"\d+ CPU threads \(\w+\)"),
        ({}, "cuda", "a fast GPU"),
        ({"workers": 2, "device": "cpu"}, "cuda", "2 workers with a CPU each"),
        ({"workers": 3, "device": "cuda"}, "cpu", "3 workers with a GPU each"),
    ],
)
def test_the_hardware_is_that_of_the_training_and_not_all_that_this_machine_has(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], device: str, hardware: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _device: "a fast GPU")
    config = TrainConfig(prompts="stdlib", output="out", **settings)
    assert re.fullmatch(hardware, _hardware(config, torch.device(device)))
