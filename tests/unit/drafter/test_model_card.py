import re
from pathlib import Path

import pytest
import torch

from peagle.drafter.config import TrainConfig
from peagle.drafter.model_card import render_card
from peagle.drafter.vocabulary import DraftVocabulary
from peagle.speculation import SpeculationStats


def card(torch_device="cpu", **settings):
    return render_card(
        TrainConfig.model_validate({"prompts": ["stdlib"], "output": Path("out"), **settings}),
        device=torch.device(torch_device),
        target_id="org/target",
        target_fingerprint="0123456789abcdef0123",
        licence="MIT",
        aux_layers=(2, 15, 29),
        num_parameters=12_200_000,
        num_documents=7_374,
        num_response_tokens=1_044_960,
        num_tokens_seen=3_025_383,
        num_passes=1.5,
        vocabulary=DraftVocabulary(token_ids=(1, 2), target_size=8_192, coverage=0.9932),
        train_s=3_600.0,
        held_out=SpeculationStats.empty(),
    )


@pytest.mark.parametrize(
    ("settings", "torch_device", "hardware"),
    [
        ({"device": "cpu"}, "cpu", r"\d+ CPU threads \(\w+\)"),
        ({}, "cuda", "a fast GPU"),
        ({"workers": 2, "device": "cpu"}, "cuda", "2 workers with a CPU each"),
        ({"workers": 3, "device": "cuda"}, "cpu", "3 workers with a GPU each"),
    ],
)
def test_card_names_the_training_hardware(monkeypatch, settings, torch_device, hardware):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _device: "a fast GPU")
    assert re.search(rf"\| Hardware \| {hardware}, 1\.00 h", card(torch_device, **settings))


def test_card_of_a_continued_head_has_no_folder_names(tmp_path):
    text = card(init=str(tmp_path))
    assert "start from an earlier head" in text
    assert "| Seen | 3,025,383 tokens in 1.5 passes, in addition to those of the head that it continues |" in text
    assert str(tmp_path) not in text
