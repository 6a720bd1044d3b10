import json
from dataclasses import asdict, replace

import pytest

from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.errors import ConfigError

HEAD = DrafterSpec(method="peagle", model="head", num_speculative_tokens=3)


@pytest.mark.parametrize(
    "spec", [EngineSpec(model="m"), EngineSpec(model="m", drafter=HEAD, extra={"block_size": 32}, max_model_len=1024)]
)
def test_spec_json_round_trip(spec):
    assert EngineSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_synthetic_rates_json_round_trip():
    head = DrafterSpec(method="peagle", model="head", num_speculative_tokens=2, synthetic_rates=(0.8, 0.5))
    assert DrafterSpec.from_dict(json.loads(json.dumps(asdict(head)))) == head
    assert DrafterSpec.from_dict({"method": "peagle", "model": "head", "num_speculative_tokens": 3}) == HEAD


def test_commits_are_listed_by_hub_id():
    head = DrafterSpec(method="peagle", model="org/head", num_speculative_tokens=3, revision="b")
    assert EngineSpec(model="org/model", revision="a", drafter=head).commits == {"org/model": "a", "org/head": "b"}
    assert EngineSpec(model="org/model", drafter=HEAD).commits == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "model"),
        ({"precision": "fp9"}, "fp9"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": -1}, "pipeline_parallel_size"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"kv_cache_gib": -0.5}, "kv_cache_gib"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
    ],
)
def test_invalid_value_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        EngineSpec(**{"model": "m", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "eagle2"}, "eagle2"),
        ({"model": ""}, "model"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"method": "ngram"}, "drafts without a head"),
        ({"method": "ngram", "model": "", "lookup": True}, "requires a head"),
        ({"synthetic_rates": (0.5, 0.4, 0.2), "lookup": True}, "synthetic acceptance"),
        ({"synthetic_rates": (0.5, 0.4)}, "3 non-increasing shares"),
        ({"synthetic_rates": (0.5, 0.4, 0.6)}, "non-increasing"),
        ({"synthetic_rates": (1.5, 0.4, 0.2)}, "from 0 to 1"),
    ],
)
def test_invalid_drafter_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        DrafterSpec(**{"method": "peagle", "model": "head", "num_speculative_tokens": 3, **changes})


def test_unknown_key_suggests_the_closest():
    with pytest.raises(ConfigError, match="max_num_seq'") as caught:
        EngineSpec.from_dict({"model": "m", "max_num_seq": 4})
    assert "max_num_seqs" in caught.value.hint


def test_missing_key_is_named():
    with pytest.raises(ConfigError, match="missing keys in EngineSpec: model"):
        EngineSpec.from_dict({"max_num_seqs": 4})
    with pytest.raises(ConfigError, match="missing keys in DrafterSpec: method, model"):
        DrafterSpec.from_dict({"num_speculative_tokens": 4})


def test_nodes_have_equal_parts():
    spec = EngineSpec(model="m", tensor_parallel_size=4, pipeline_parallel_size=2, num_nodes=2)
    assert (spec.num_accelerators, spec.accelerators_per_node) == (8, 4)
    with pytest.raises(ConfigError, match="3 nodes cannot hold equal parts of 8 accelerators"):
        replace(spec, num_nodes=3)
