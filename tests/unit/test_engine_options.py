import contextlib
from dataclasses import replace

import pytest

from peagle.catalog.cards import load_catalog
from peagle.catalog.drafters import ResolvedDrafter
from peagle.catalog.targets import ResolvedModel
from peagle.engine.arguments import engine_args
from peagle.engine.memory import check_capacity
from peagle.engine.spec import DrafterSpec, spec_precision
from peagle.engine_options import EngineOptions, compose_engine, footprint_of
from peagle.errors import CapacityError, ConfigError, PrecisionError
from peagle.hardware import Hardware

CPU = Hardware(platform="cpu", memory_gib=24, free_memory_gib=20, num_cpus=4)
GPU = Hardware(
    platform="cuda", accelerator="GPU", num_accelerators=8, compute_capability=(9, 0), memory_gib=80,
    free_memory_gib=80, num_cpus=8,
)  # fmt: skip
MODEL = ResolvedModel(name="m", path="m", card=None, fingerprint="m", config={"max_position_embeddings": 64})
DRAFTER = ResolvedDrafter(
    spec=DrafterSpec(method="peagle", model="head", num_speculative_tokens=3), name="head", note="", fingerprint="h"
)
NO_DRAFTER = ResolvedDrafter(spec=None, name=None, note="", fingerprint=None)


def test_int8_target_has_int8_weights(tmp_path):
    options = EngineOptions(precision="int8")
    engine = compose_engine(options, GPU, MODEL, NO_DRAFTER)
    assert (engine.spec.model, engine.spec.precision) == ("m", "int8")
    assert engine.precision.describe() == "int8 weights, bf16 KV cache"
    with pytest.raises(PrecisionError, match=r"no \*\.safetensors to convert"):
        compose_engine(options, GPU, replace(MODEL, path=str(tmp_path)), NO_DRAFTER)


def test_checkpoint_can_set_an_fp8_kv_cache():
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    published = replace(MODEL, config={**MODEL.config, "quantization_config": scheme})
    ada = replace(GPU, compute_capability=(8, 9))
    engine = compose_engine(EngineOptions(), ada, published, DRAFTER)
    assert engine.precision.describe() == "compressed-tensors weights, fp8 KV cache"
    assert engine_args(engine.spec, ada)["attention_backend"] == "TRITON_ATTN"
    plain = compose_engine(EngineOptions(kv_cache_precision="bf16"), ada, published, DRAFTER)
    assert engine_args(plain.spec, ada)["kv_cache_dtype"] == "bfloat16"


def test_unsupported_checkpoint_is_refused():
    groups = {"g": {"input_activations": {"num_bits": 8, "type": "int"}}}
    w8a8 = {"quant_method": "compressed-tensors", "config_groups": groups}
    published = replace(MODEL, config={**MODEL.config, "quantization_config": w8a8})
    with pytest.raises(PrecisionError, match="needs a CPU with VNNI"):
        compose_engine(EngineOptions(), CPU, published, NO_DRAFTER)


def test_too_large_model_on_s3_is_refused():
    config = {
        "max_position_embeddings": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    stored = replace(MODEL, path="s3://bucket/m", config=config, weights_bytes=100 * 10**9)
    engine = compose_engine(EngineOptions(precision="bf16"), GPU, stored, NO_DRAFTER)
    with pytest.raises(CapacityError, match=r"weights 93\.1"):
        check_capacity(engine.spec, GPU, known=footprint_of(stored))


def test_number_of_accelerators_is_the_product_of_parallel_sizes():
    options = EngineOptions(tensor_parallel_size=2, pipeline_parallel_size=3)
    assert compose_engine(options, CPU, MODEL, NO_DRAFTER).spec.num_accelerators == 6
    drafter = compose_engine(EngineOptions(tensor_parallel_size=2), CPU, MODEL, DRAFTER).spec.drafter
    assert drafter == replace(DRAFTER.spec, verify="auto")


def test_break_even_applies_only_to_the_measured_engine():
    card = load_catalog().get("smollm2-135m")
    model, name = replace(MODEL, card=card), card.heads["eagle3"].id
    spec = DrafterSpec(method="eagle3", model=name, num_speculative_tokens=3)
    head = replace(DRAFTER, spec=spec, name=name)

    def engine(model=model, head=head, precision="bf16", verify="all", **options):
        return compose_engine(EngineOptions(precision=precision, verify=verify, **options), CPU, model, head)

    # With verify="auto", only drafts that pay are verified, so there is no break-even.
    assert engine(verify="auto").break_even(CPU) == {}
    assert engine().break_even(CPU) == card.steps[0].break_even("eagle3", 3)
    assert engine().drafter_watch(CPU, 8).break_even_length == card.steps[0].break_even("eagle3", 3)[8]
    assert engine().break_even(GPU) == {}
    assert engine(precision="float32").break_even(CPU) == {}
    assert engine(enforce_eager=True).break_even(CPU) == {}
    assert engine(head=replace(head, name="custom head")).break_even(CPU) == {}
    assert engine(model=MODEL).break_even(CPU) == {}
    assert engine(head=NO_DRAFTER).drafter_watch(CPU) is None


def test_baseline_applies_only_to_the_measured_hardware_and_head():
    card = load_catalog().get("smollm2-135m")
    model, name = replace(MODEL, card=card), card.heads["eagle3"].id
    head = replace(DRAFTER, spec=DrafterSpec(method="eagle3", model=name, num_speculative_tokens=3), name=name)
    measured_on = replace(CPU, cpu_name="AMD EPYC", num_cpus=2, memory_gib=23.5)

    def baseline(hardware, head=head):
        return compose_engine(EngineOptions(precision="bf16"), hardware, model, head).baseline(hardware)

    matching = baseline(measured_on)
    needed = card.steps[0].break_even("eagle3", 3)
    assert {step.concurrency: step.break_even for step in matching.steps} == pytest.approx(needed)
    assert [step.break_even for step in baseline(measured_on, NO_DRAFTER).steps] == [1.0] * 4
    assert baseline(CPU) is None
    assert baseline(measured_on, replace(head, name="custom head")) is None


def test_draft_lookup_requires_a_head():
    engine = compose_engine(EngineOptions(draft_lookup="on"), CPU, MODEL, DRAFTER)
    assert engine.spec.drafter.lookup
    assert engine.drafter.note == "; with prompt lookup"
    assert not compose_engine(EngineOptions(draft_lookup="on"), CPU, MODEL, NO_DRAFTER).spec.drafter
    with pytest.raises(ValueError, match="draft_lookup requires a head"):
        EngineOptions(draft_lookup="on", drafter="none")


def test_revision_of_the_model_reaches_vllm():
    spec = compose_engine(EngineOptions(), CPU, replace(MODEL, revision="v2"), NO_DRAFTER).spec
    arguments = engine_args(spec, CPU)
    assert (arguments["revision"], arguments["tokenizer_revision"]) == ("v2", "v2")
    assert "revision" not in engine_args(compose_engine(EngineOptions(), CPU, MODEL, NO_DRAFTER).spec, CPU)
    with pytest.raises(ConfigError, match="'revision' is managed by peagle"):
        engine_args(replace(spec, extra={"revision": "v3"}), CPU)


def test_precision_chosen_for_one_node_applies_to_all_nodes():
    old_gpu = replace(GPU, compute_capability=(8, 0))
    hopper = compose_engine(EngineOptions(), GPU, MODEL, NO_DRAFTER)
    ampere = compose_engine(EngineOptions(), old_gpu, MODEL, NO_DRAFTER)
    assert (hopper.spec.precision, hopper.spec.kv_cache_precision) == ("fp8", "bf16")
    assert (ampere.spec.precision, ampere.spec.kv_cache_precision) == ("bf16", "bf16")
    assert spec_precision(ampere.spec, GPU) == ampere.precision
    with pytest.raises(PrecisionError, match="fp8 needs CUDA compute capability"):
        spec_precision(hopper.spec, old_gpu)


def test_unsupported_pipeline_stages_are_refused():
    with pytest.raises(ConfigError, match=r"drafter head .* 2 pipeline stages(.|\n)*--tensor-parallel-size"):
        compose_engine(EngineOptions(pipeline_parallel_size=2), CPU, MODEL, DRAFTER)
    with pytest.raises(ConfigError, match=r"2 pipeline stages on a CPU without compiling(.|\n)*--enforce-eager"):
        compose_engine(EngineOptions(pipeline_parallel_size=2, enforce_eager=True), CPU, MODEL, NO_DRAFTER)
    assert compose_engine(EngineOptions(pipeline_parallel_size=2), CPU, MODEL, NO_DRAFTER).spec.num_accelerators == 2


def test_draft_options_and_engine_arguments_reach_vllm():
    options = EngineOptions(
        kv_cache_precision="bf16", draft_kv_cache_precision="bf16", draft_attention_backend="triton_attn",
        engine_args=["block_size=32", "load_format=dummy"],
    )  # fmt: skip
    arguments = engine_args(compose_engine(options, CPU, MODEL, DRAFTER).spec, CPU)
    assert arguments["speculative_config"]["kv_cache_dtype"] == "bfloat16"
    assert arguments["speculative_config"]["attention_backend"] == "TRITON_ATTN"
    assert (arguments["block_size"], arguments["load_format"], arguments["kv_cache_dtype"]) == (32, "dummy", "auto")


def test_unknown_engine_argument_is_refused():
    with pytest.raises(ConfigError, match="vLLM has no engine argument 'blok_size'"):
        compose_engine(EngineOptions(engine_args={"blok_size": 32}), CPU, MODEL, NO_DRAFTER)


@pytest.mark.parametrize("key", ["draft_kv_cache_precision", "draft_attention_backend"])
def test_drafter_options_without_drafter_are_refused(key):
    with pytest.raises(ValueError, match="cannot be used with drafter: none"):
        EngineOptions(drafter="none", **{key: "fp8"})


@pytest.mark.parametrize(("num_parameters", "fits"), [(30_000_000_000, True), (200_000_000_000, False)])
def test_footprint_comes_from_the_card(num_parameters, fits):
    card = load_catalog().get("qwen3-coder-30b-a3b-instruct")
    architecture = card.architecture.model_copy(update={"num_parameters": num_parameters})
    config = {"num_attention_heads": 32, "num_hidden_layers": 48, "hidden_size": 2048, "max_position_embeddings": 4096}
    model = replace(MODEL, card=card.model_copy(update={"architecture": architecture}), config=config)
    footprint = footprint_of(model)
    assert footprint.weights_bytes == 2 * num_parameters
    spec = compose_engine(EngineOptions(), GPU, model, NO_DRAFTER).spec
    with contextlib.nullcontext() if fits else pytest.raises(CapacityError, match="tensor-parallel-size"):
        check_capacity(spec, GPU, known=footprint)
