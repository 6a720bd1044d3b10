import json
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from saved_heads import load_head

from peagle.catalog.folders import read_config
from peagle.catalog.head_files import check_fit, check_weights, read_head, read_shapes
from peagle.catalog.shipped_heads import HEADS_FOLDER
from peagle.drafter.config import TrainConfig
from peagle.drafter.decontamination import humaneval_references
from peagle.drafter.forward import batch_loss
from peagle.drafter.metrics import TrainingProgress
from peagle.drafter.pipeline import Listener, check_training, train_head
from peagle.economics.spending import Days, Spend, charges
from peagle.errors import ConfigError, DivergedError, DrafterError, InputError
from peagle.runs.ledgers import find_ledgers


@pytest.fixture
def responses_file(tmp_path):
    rows = [
        {"id": str(i), "prompt": f"count to {i}", "response": "1 2 3 " * (i + 2), "finish_reason": "stop"}
        for i in range(12)
    ]
    rows.append({"id": "leak", "prompt": humaneval_references()[0], "response": "x"})
    rows.append({"id": "mute", "prompt": "say nothing", "response": ""})
    file = tmp_path / "responses.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _config(target, responses_file, output, **changes):
    defaults = {
        "num_layers": 1,
        "num_depths": 3,
        "draft_vocab_size": 40,
        "epochs": 3,
        "batch_tokens": 64,
        "held_out": 0.2,
        "precision": "fp32",
        "num_speculative_tokens": 3,
    }
    return TrainConfig(
        model=str(target), prompts=[responses_file], responses="given", output=output, **{**defaults, **changes}
    )


@dataclass
class RecordingListener:
    messages: list[str] = field(default_factory=list)
    steps: list[TrainingProgress] = field(default_factory=list)

    @property
    def listener(self):
        return Listener(say=self.messages.append, on_step=self.steps.append)


def test_train_head_writes_a_head_and_its_model_card(chat_target, responses_file, tmp_path):
    recorder = RecordingListener()
    result = train_head(_config(chat_target, responses_file, tmp_path / "out"), recorder.listener)

    assert result["finished"]
    assert (result["documents"], result["held_out_documents"]) == (10, 2)
    assert [(drop["id"], drop["evaluation_set"]) for drop in result["dropped"]] == [("leak", "humaneval")]
    assert result["rejected"] == [{"id": "mute", "reason": "no response"}]
    assert any("overlaps humaneval: leak" in sentence for sentence in recorder.messages)
    assert any("name 'tiny' as its target; `vllm serve HEAD`" in sentence for sentence in recorder.messages)
    assert json.loads((tmp_path / "out" / "run.json").read_text()) == result

    head = tmp_path / "out" / "head"
    assert load_head(head, chat_target).config.draft_vocab_size == 40
    card = (head / "README.md").read_text()
    assert "# P-EAGLE head for tiny" in card
    assert f"{result['tokens_seen']:,} tokens in 3 passes" in card
    assert str(tmp_path) not in card + (head / "config.json").read_text()
    assert f"{result['steps']} of {result['steps']} steps" in (tmp_path / "out/training/metrics.svg").read_text()


def test_vllm_loads_a_head_and_its_target(chat_target, responses_file, tmp_path, monkeypatch):
    from vllm.transformers_utils.config import maybe_override_with_speculators

    monkeypatch.setattr("peagle.catalog.targets.ensure_embedded", lambda _name, announce: chat_target)
    recorder, hub_id = RecordingListener(), "HuggingFaceTB/SmolLM2-135M-Instruct"
    config = _config(Path("smollm2-135m"), responses_file, tmp_path / "out", time_budget_s=1e-9)  # stops after one step
    train_head(config, recorder.listener)
    head = str(tmp_path / "out" / "head")
    model, tokenizer, speculative_config = maybe_override_with_speculators(head, None, trust_remote_code=False)
    assert (model, tokenizer) == (hub_id, hub_id)
    assert speculative_config == {
        "method": "eagle3",
        "model": head,
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }
    assert not any("--verifier" in sentence for sentence in recorder.messages)


def test_a_stopped_training_run_resumes_without_another_extraction(chat_target, responses_file, tmp_path):
    stopped = RecordingListener()
    config = _config(chat_target, responses_file, tmp_path / "out", time_budget_s=1e-9)  # stops after one step
    assert not train_head(config, stopped.listener)["finished"]
    shard = tmp_path / "out" / "features" / "shard-00000.safetensors"
    written_at = shard.stat().st_mtime_ns
    plot = tmp_path / "out" / "training" / "metrics.svg"
    assert "Training, 1 of" in plot.read_text()

    resumed = RecordingListener()
    result = train_head(config.model_copy(update={"time_budget_s": None}), resumed.listener)
    assert result["finished"]
    assert resumed.steps[0].step == len(stopped.steps) + 1 == 2
    assert shard.stat().st_mtime_ns == written_at
    assert f"Training, {result['steps']} of" in plot.read_text()


def test_every_attempt_is_in_the_ledger_once(chat_target, responses_file, tmp_path):
    output = tmp_path / "out"
    config = _config(chat_target, responses_file, output, time_budget_s=1e-9, usd_per_hour=3.6)
    started_at = time.time()
    train_head(config, Listener())
    train_head(config.model_copy(update={"time_budget_s": None}), Listener())
    elapsed_s = time.time() - started_at

    (ledger,) = find_ledgers([str(output)]).ledgers
    assert len(ledger.sessions) == 2
    assert all(session.ended for session in ledger.sessions)
    total = sum((charge.spend for charge in charges(ledger, Days())), Spend())
    assert total.attributed_usd > 0
    assert total.loading_usd > 0
    assert total.lost_usd == pytest.approx(0, abs=1e-12)
    lifetime_s = sum(session.last_seen_at - session.started_at for session in ledger.sessions)
    assert lifetime_s <= elapsed_s
    assert total.attributed_usd + total.loading_usd == pytest.approx(lifetime_s * 3.6 / 3600, rel=1e-3)


def _nan_loss(*arguments, **options):
    outcome = batch_loss(*arguments, **options)
    return replace(outcome, loss=outcome.loss * float("nan"))


def test_a_diverged_run_writes_the_head_of_its_last_checkpoint(chat_target, responses_file, tmp_path, monkeypatch):
    config, head = _config(chat_target, responses_file, tmp_path / "out", time_budget_s=1e-9), tmp_path / "out" / "head"
    with monkeypatch.context() as patch:
        patch.setattr("peagle.drafter.training.batch_loss", _nan_loss)
        with pytest.raises(DivergedError, match=r"step 0: the loss is not finite; .*\n  there is no checkpoint yet"):
            train_head(config, Listener())
        assert not head.exists()
    train_head(config, Listener())
    expected_weights = (head / "model.safetensors").read_bytes()
    shutil.rmtree(head)
    with monkeypatch.context() as patch:
        patch.setattr("peagle.drafter.training.batch_loss", _nan_loss)
        with pytest.raises(DivergedError, match=rf"step 1: the loss is not finite; .*\n  .* --init {head}, lower"):
            train_head(config, Listener())
    assert (head / "model.safetensors").read_bytes() == expected_weights
    changes = {"init": str(head), "learning_rate": 1e-4, "output": tmp_path / "other", "time_budget_s": None}
    assert train_head(config.model_copy(update=changes), Listener())["finished"]


def test_on_the_fly_training_stores_no_features_and_can_be_resumed_with_them(chat_target, responses_file, tmp_path):
    recorder = RecordingListener()
    config = _config(chat_target, responses_file, tmp_path / "out", time_budget_s=1e-9)
    train_head(config.model_copy(update={"on_the_fly": True}), recorder.listener)
    assert any("computed in each pass instead of stored" in sentence for sentence in recorder.messages)
    assert not (tmp_path / "out" / "features").exists()
    assert train_head(config, recorder.listener)["finished"] is False
    assert [step.step for step in recorder.steps] == [1, 2]


def test_a_tokenizer_of_another_model_is_refused_before_states_are_computed(chat_target, tmp_path):
    foreign = tmp_path / "foreign"
    shutil.copytree(chat_target, foreign)
    tokenizer = json.loads((foreign / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["~"] = 120
    (foreign / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "prompt": "p", "response": "~"}\n')
    with pytest.raises(ConfigError, match="the tokenizer produces token 120 for row a"):
        train_head(_config(foreign, tmp_path / "rows.jsonl", tmp_path / "out"), Listener())
    assert not (tmp_path / "out").exists()


def test_input_without_usable_responses_is_refused_with_the_first_reason(chat_target, tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"id": "a", "prompt": "p", "response": ""}\n')
    with pytest.raises(InputError, match="no row yields a document; first error: no response"):
        train_head(_config(chat_target, tmp_path / "empty.jsonl", tmp_path / "out"), Listener())


@pytest.mark.parametrize(
    ("model_type", "start"),
    [
        ("mistral", "warm start"),
        ("qwen3_moe", "random start"),
        ("gemma4_text", "random start"),
    ],
)
def test_heads_of_other_architectures_are_readable_by_vllm(foreign_target, responses_file, tmp_path, model_type, start):
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    target, recorder = foreign_target(model_type), RecordingListener()
    assert train_head(_config(target, responses_file, tmp_path / "out"), recorder.listener)["finished"]
    assert sum("starts with random weights" in sentence for sentence in recorder.messages) == (start == "random start")
    assert recorder.steps[-1].loss < recorder.steps[0].loss

    folder = tmp_path / "out" / "head"
    assert start in (folder / "README.md").read_text()
    assert check_fit(read_config(folder, ConfigError), read_config(target, ConfigError)).method == "peagle"
    check_weights(read_shapes(folder), read_head(read_config(folder, ConfigError)))
    trained, saved = load_head(folder, target), load_file(folder / "model.safetensors")
    torch.testing.assert_close(trained.fc.weight, saved["fc.weight"].float())
    assert not trained.lm_head.weight.isnan().any()
    served = SpeculatorsConfig.from_pretrained(folder)
    assert served.architectures == ["PeagleLlamaForCausalLM"]
    assert (served.hidden_act, served.head_dim, served.pard_token) == ("silu", 32, 0)


@pytest.mark.parametrize(("algorithm", "name"), [("dflash", "DFlash"), ("dspark", "DSpark")])
def test_block_heads_are_readable_by_vllm(chat_target, responses_file, tmp_path, algorithm, name):
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    result = train_head(_config(chat_target, responses_file, tmp_path / "out", algorithm=algorithm), Listener())
    assert result["finished"]
    assert result["held_out_acceptance"]["num_drafts"] > 0
    folder = tmp_path / "out" / "head"
    card = (folder / "README.md").read_text()
    assert f"# {name} head for tiny" in card
    assert f'"method": "{algorithm}", "model": "THIS FOLDER", "num_speculative_tokens": 3' in card
    assert "COD ratio 0.8, anchor share 0.5" in card
    facts = check_fit(read_config(folder, ConfigError), read_config(chat_target, ConfigError))
    assert (facts.method, facts.max_k) == (algorithm, 3)
    check_weights(read_shapes(folder), facts)
    served = SpeculatorsConfig.from_pretrained(folder)
    if algorithm == "dflash":  # attention within a block is in both directions, as in training
        assert served.dflash_config["causal"] is False


def test_a_block_head_starts_only_from_a_head_that_fits_the_target(chat_target, responses_file, tmp_path):
    config = _config(chat_target, responses_file, tmp_path / "out", algorithm="dflash", time_budget_s=1e-9)
    train_head(config, Listener())
    folder = tmp_path / "out" / "head"
    head_config = json.loads((folder / "config.json").read_text())
    head_config["transformer_layer_config"]["hidden_size"] = 64
    (folder / "config.json").write_text(json.dumps(head_config))
    changes = {"init": str(folder), "output": tmp_path / "other"}
    with pytest.raises(DrafterError, match="its hidden size is 64, but the target's is 32"):
        train_head(config.model_copy(update=changes), Listener())


@pytest.mark.usefixtures("embedded_target")
def test_training_can_start_from_a_shipped_fp8_head():
    init = HEADS_FOLDER / "smollm2-135m-peagle"
    config = TrainConfig(prompts="stdlib", output=Path("out"), init=str(init), num_layers=5, num_key_value_heads=9)
    checked, target, _ = check_training(config, pytest.fail)  # fails at any warning
    assert (checked, target.vocab_size) == (config, 49152)
