import re
from pathlib import Path

import pytest
import torch

from peagle.drafter.config import TrainConfig
from peagle.drafter.publish import CardFacts, _hardware, render_card
from peagle.speculation import SpeculationStats


@pytest.mark.parametrize(
    ("settings", "device", "hardware"),
    [
        ({"device": "cpu"}, "cpu", r"\d+ CPU threads \(\w+\)"),
        ({}, "cuda", "a fast GPU"),
        ({"workers": 2, "device": "cpu"}, "cuda", "2 workers with a CPU each"),
        ({"workers": 3, "device": "cuda"}, "cpu", "3 workers with a GPU each"),
    ],
)
def test_card_names_the_training_hardware(monkeypatch, settings, device, hardware):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _device: "a fast GPU")
    config = TrainConfig(prompts="stdlib", output="out", **settings)
    assert re.fullmatch(hardware, _hardware(config, torch.device(device)))


def _card(**settings):
    return render_card(
        CardFacts(
            verifier="org/target",
            target_fingerprint="0123456789abcdef0123",
            licence="MIT",
            config=TrainConfig.model_validate({"prompts": ["stdlib"], "output": Path("out"), **settings}),
            aux_layers=(2, 15, 29),
            num_parameters=12_200_000,
            num_documents=7_374,
            num_response_tokens=1_044_960,
            num_tokens_seen=3_025_383,
            num_passes=1.5,
            vocabulary_size=8_192,
            vocabulary_coverage=0.9932,
            train_s=3_600.0,
            hardware="2 CPU threads (x86_64)",
            held_out=SpeculationStats.empty(),
        )
    )


def test_card_of_a_continued_head_has_no_folder_names(tmp_path):
    card = _card(init=str(tmp_path))
    assert "start from an earlier head" in card
    assert "| Seen | 3,025,383 tokens in 1.5 passes, in addition to those of the head that it continues |" in card
    assert str(tmp_path) not in card
