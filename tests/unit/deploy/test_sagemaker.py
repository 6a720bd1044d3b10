import json
from pathlib import Path

import pytest

from peagle.catalog.cards import ModelCard, load_catalog
from peagle.deploy.sagemaker import Preset, preset
from peagle.engine.sagemaker import VARIABLE, from_sagemaker_env, serve_keys

PUBLISHED = {"num_speculative_tokens": 3, "method": "eagle3", "parallel_drafting": True}


def card_of(name: str) -> ModelCard:
    return load_catalog().get(name)


def drafting(found: Preset) -> dict[str, object]:
    config: dict[str, object] = json.loads(found.variables[VARIABLE])
    return config


def test_a_head_that_aws_deploys_drafts_as_its_walk_through_does() -> None:
    found = preset(card_of("qwen3-coder-30b-a3b-instruct"))
    assert drafting(found) == PUBLISHED | {"model": "amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE"}
    assert found.variables["SM_VLLM_MODEL"] == "Qwen/Qwen3-Coder-30B-A3B-Instruct"
    assert "K=3: SageMaker JumpStart (its walk-through), ml.g7e.2xlarge [AWS machine learning blog" in found.drafter
    assert found.uploads == []


def test_for_a_number_of_requests_it_drafts_as_the_card_advises() -> None:
    card = card_of("qwen3-coder-30b-a3b-instruct")
    assert drafting(preset(card, concurrency=128))["num_speculative_tokens"] == 7
    assert "up to 128 requests at once" in preset(card, concurrency=128).drafter
    assert VARIABLE not in preset(card, concurrency=129).variables


def test_the_setting_for_the_same_instance_type_goes_first() -> None:
    card = card_of("qwen3-coder-30b-a3b-instruct")
    (one,) = card.heads["peagle"].deployments
    other = one.model_copy(update={"instance_type": "ml.p6-b200.48xlarge", "num_speculative_tokens": 11})
    head = card.heads["peagle"].model_copy(update={"deployments": [one, other]})
    card = card.model_copy(update={"heads": {"peagle": head}})
    assert drafting(preset(card))["num_speculative_tokens"] == 3
    assert drafting(preset(card, instance_type="ml.p6-b200.48xlarge"))["num_speculative_tokens"] == 11


def test_a_model_without_a_head_is_served_alone_and_says_why() -> None:
    found = preset(card_of("gemma-4-31b-it"))
    assert list(found.variables) == ["SM_VLLM_MODEL"]
    assert found.drafter == "none, since nothing was measured or published"


def test_what_is_only_here_has_to_be_uploaded(tmp_path: Path) -> None:
    card = card_of("qwen3-coder-30b-a3b-instruct")
    source = card.source.model_copy(update={"kind": "folder", "id": str(tmp_path / "mine")})
    head = card.heads["peagle"].model_copy(update={"kind": "folder", "id": str(tmp_path / "head")})
    found = preset(card.model_copy(update={"source": source, "heads": {"peagle": head}}))
    assert found.variables["SM_VLLM_MODEL"] == "/opt/ml/model"
    assert drafting(found) == PUBLISHED | {"model": "/opt/ml/additional-model-data-sources/eagle"}
    assert found.uploads == [
        (tmp_path / "mine", Path("/opt/ml/model")),
        (tmp_path / "head", Path("/opt/ml/additional-model-data-sources/eagle")),
    ]


def test_the_embedded_model_comes_from_the_hub_and_its_head_from_here(shipped_head: Path) -> None:
    found = preset(card_of("smollm2-135m"))
    assert found.variables["SM_VLLM_MODEL"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    ((folder, _),) = found.uploads
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize("name", load_catalog().names())
def test_peagles_own_container_understands_every_preset(name: str) -> None:
    found = preset(card_of(name))
    drafter, keys = from_sagemaker_env(found.variables), serve_keys(found.variables)
    assert keys["model"] == found.variables["SM_VLLM_MODEL"]
    assert keys.get("num_speculative_tokens") == (drafter.num_speculative_tokens if drafter else None)
