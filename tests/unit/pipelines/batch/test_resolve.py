import numpy as np
import pytest
from config_only import write_head
from devices import gpu
from resolved_runs import corpus_plan, resolve_run
from safetensors.numpy import save_file
from storing import upload

from peagle import hardware
from peagle.catalog.local import local_model_path, tokenizer_of
from peagle.errors import ConfigError, InputError
from pipelines.batch.config import GenerateConfig
from pipelines.cluster.placement import Neighbours, Placement

DETECTED_HARDWARE = hardware.detect()
CPU = hardware.Hardware(platform="cpu", memory_gib=16, free_memory_gib=12, num_cpus=4, core_ids=(0, 1, 2, 3))


def resolve_fake_run(columns=("prompt",), *, is_batch=False, **options):
    config = GenerateConfig(input="in.csv", output="o", engine="fake", usd_per_hour=1, **options)
    return resolve_run(config, corpus_plan(columns, file_format="openai-batch" if is_batch else "csv"))


def test_sampling_column_is_used_if_it_exists():
    assert resolve_fake_run(["prompt", "sampling"]).sampling.column == "sampling"
    assert resolve_fake_run(["prompt", "sampling"], sampling_column="none").sampling.column is None
    assert resolve_fake_run(["prompt", "mine"], sampling_column="mine").sampling.column == "mine"
    assert resolve_fake_run().sampling.column is None


def test_lookup_is_in_the_fingerprint():
    def drafter(**options):
        return resolve_fake_run(num_speculative_tokens=3, **options).fingerprint("corpus")["drafter"]

    assert drafter(draft_lookup="on") == {**drafter(), "lookup": True}
    assert drafter(draft_lookup="off") == drafter()


def test_drafter_is_watched_only_if_there_is_one():
    assert resolve_fake_run().drafter_watch() is None
    assert resolve_fake_run(num_speculative_tokens=3).drafter_watch() is not None


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (["promt"], {}, "input in.csv has no column 'prompt' or 'messages'; it has: promt"),
        (["prompt"], {"prompt_column": "question"}, "input in.csv has no column 'question'"),
        (["prompt"], {"sampling_column": "mine"}, "input in.csv has no column 'mine'"),
    ],
)
def test_missing_column_is_named_with_the_file(columns, options, message):
    with pytest.raises(InputError, match=message):
        resolve_fake_run(columns, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 9000}, "max_tokens: 9000 exceeds the context of 8192"),
        ({"n": 2}, "n: 2 responses require a temperature above 0"),
    ],
)
def test_invalid_sampling_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        resolve_fake_run(**options)


def test_min_p_with_drafter_is_refused_on_gpus(embedded_target):
    def run(machine, **options):
        config = GenerateConfig(input="i", output="o", usd_per_hour=1, max_model_len=512, min_p=0.1, **options)
        return resolve_run(config, machine=machine)

    h100 = hardware.Hardware(
        platform="cuda", memory_gib=80, free_memory_gib=80, num_cpus=16, accelerator="NVIDIA H100 80GB HBM3",
        num_accelerators=1, compute_capability=(9, 0),
    )  # fmt: skip
    assert run(CPU, drafter="peagle").sampling.limits.has_drafter is False
    with pytest.raises(ConfigError, match="min_p: not supported by vLLM on a GPU with a drafter"):
        run(h100, drafter="peagle")
    assert run(h100, drafter="none").sampling.base["min_p"] == 0.1


@pytest.mark.skipif(DETECTED_HARDWARE.platform != "cpu", reason="seeded sampling works on an accelerator")
def test_seed_is_refused_on_cpus(embedded_target):
    config = GenerateConfig(input="i", output="o", seed=1, temperature=0.5, drafter="none", usd_per_hour=1)
    with pytest.raises(ConfigError, match="vLLM on CPU crashes with seeded sampling"):
        resolve_run(config)
    assert resolve_fake_run(seed=1, temperature=0.5).sampling.base["seed"] == 1


@pytest.mark.skipif(DETECTED_HARDWARE.platform != "cpu", reason="the placement is that of CPU nodes")
def test_engine_on_several_nodes_has_their_devices(embedded_target):
    config = GenerateConfig(
        input="i", output="o", drafter="none", usd_per_hour=1, tensor_parallel_size=2, nodes_per_engine=2
    )
    run = resolve_run(config, num_nodes=2)
    assert (run.spec.num_nodes, run.placement.nodes_per_engine) == (2, 2)
    assert run.placement.num_devices == 2 * DETECTED_HARDWARE.num_cpus


def test_engines_already_on_the_nodes_determine_the_placement():
    placement = Placement(num_cpus=0.5, num_gpus=0, num_devices=1, device="vcpu", num_engines_on_node=2)
    config = GenerateConfig(input="in.csv", output="o", engine="fake", usd_per_hour=1)
    run = resolve_run(config, neighbours=Neighbours(slot_group="app", hardware=DETECTED_HARDWARE, placement=placement))
    assert (run.placement, run.slot_group) == (placement, "app")
    assert resolve_fake_run().slot_group is None


@pytest.mark.parametrize("key", ["prompt_column", "prompt_template", "messages_column", "sampling_column"])
def test_prompt_options_are_refused_for_openai_batches(key):
    assert resolve_fake_run(is_batch=True).prompts.body_column == "body"
    with pytest.raises(ConfigError, match=f"{key} cannot be used with an OpenAI batch"):
        resolve_fake_run(is_batch=True, **{key: "body"})


def test_models_on_s3_have_the_fingerprint_of_local_copies(s3, chat_target, tmp_path, monkeypatch):
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    head = write_head(tmp_path / "head", transformer_layer_config={"hidden_size": 32, "vocab_size": 96})
    save_file({"midlayer.weight": np.zeros(4, np.float32)}, head / "model.safetensors")
    upload(chat_target, "models/tiny")
    upload(head, "heads/head")

    def run(model, drafter):
        config = GenerateConfig(
            input="i", output="o", model=str(model), drafter=str(drafter), usd_per_hour=1, max_tokens=8, max_num_seqs=2
        )
        return resolve_run(config)

    try:
        local, remote = run(chat_target, head), run("s3://bucket/models/tiny", "s3://bucket/heads/head")
    finally:
        tokenizer_of.cache_clear()
        local_model_path.cache_clear()
    assert remote.fingerprint("corpus") == local.fingerprint("corpus")
    assert list(remote.spec.commits) == ["s3://bucket/models/tiny", "s3://bucket/heads/head"]
    assert local.spec.commits == {}
    assert not list((tmp_path / "home").rglob("*.safetensors"))  # nodes with engines fetch the weights


@pytest.mark.parametrize(
    ("machine", "num_rows", "options", "has_compiled", "is_eager"),
    [
        (CPU, 3, {}, False, True),
        (CPU, 3, {}, True, False),  # cached compiled code loads in seconds
        (CPU, 3, {"enforce_eager": False}, False, False),
        (CPU, 1000, {}, False, False),
        (CPU, 1000, {"max_tokens": 2}, False, True),
        (CPU, 1000, {"enforce_eager": True}, False, True),
        (gpu(9, 0), 1000, {}, False, True),  # 4 x 256 steps
        (gpu(9, 0), 1000, {"max_num_seqs": 32}, False, False),  # 32 x 256 steps
        (gpu(9, 0), 10_000, {}, False, False),
        (gpu(9, 0), 10, {}, True, False),
    ],
)
def test_short_runs_are_not_compiled(embedded_target, monkeypatch, machine, num_rows, options, has_compiled, is_eager):
    monkeypatch.setattr("pipelines.batch.resolve.has_compiled_code", lambda *_: has_compiled)
    config = GenerateConfig(input="i", output="o", drafter="none", usd_per_hour=1, **options)
    run = resolve_run(config, corpus_plan(rows_per_unit=num_rows), machine)
    assert run.spec.enforce_eager is is_eager
