from dataclasses import replace

from peagle.economics.price_options import PriceOptions, configured_machine
from peagle.engine.memory import footprint_from_config
from peagle.engine.spec import EngineSpec
from peagle.hardware import Hardware
from pipelines.batch.forecast import describe_memory

GPU = configured_machine(PriceOptions(), "H100", num_accelerators=1)
CPU = Hardware(platform="cpu", memory_gib=24, free_memory_gib=20, num_cpus=2)
FOOTPRINT = footprint_from_config(
    {
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "hidden_size": 4096,
        "max_position_embeddings": 8192,
    },
    16 * 1024**3,
)  # fmt: skip


def test_memory_of_a_gpu_engine():
    description = describe_memory(EngineSpec(model="org/model", precision="bf16"), GPU, FOOTPRINT)
    # 32 layers x 2 x 8 heads x 128 x 2 bytes x 8,192 tokens are 1 GiB.
    assert "of 71.7 GiB (weights 16.0, KV cache of one request 1.0, a step 2.0, CUDA graphs " in description


def test_memory_of_a_cpu_engine():
    spec = EngineSpec(model="org/model", precision="bf16", kv_cache_gib=1.5)
    assert describe_memory(spec, CPU, FOOTPRINT) == "fits by estimate, with a KV cache of 1.5 GiB; 20.0 GiB are free"
    shared = describe_memory(replace(spec, kv_cache_gib=None), CPU, FOOTPRINT, num_engines_on_node=2)
    assert "a KV cache of 2.5 GiB" in shared


def test_memory_of_an_unknown_model():
    assert describe_memory(EngineSpec(model="org/model"), GPU, None).startswith("unknown")
