from dataclasses import replace

import pytest
from devices import cpu, gpu
from pydantic import ValidationError

from peagle.engine.keys import (
    TargetOptions,
    apply_drafter_options,
    check_argument_names,
    drafter_note,
    extra_arguments,
    non_default_options,
    parse_arguments,
    spec_fields,
)
from peagle.engine.precision import Precision
from peagle.engine.spec import DrafterSpec
from peagle.errors import ConfigError

BF16 = Precision(dtype="bfloat16")
FP8 = Precision(dtype="bfloat16", kv_cache_dtype="fp8")
SLIDING = {"text_config": {"layer_types": ["sliding_attention", "full_attention"]}}
HEAD = DrafterSpec(method="peagle", model="head", num_speculative_tokens=3)
NGRAM = DrafterSpec(method="ngram", model="", num_speculative_tokens=3)
CPU, GPU = cpu(), gpu()


@pytest.mark.parametrize(
    ("engine_args", "expected"),
    [
        (["block_size=32"], {"block_size": 32}),
        ("block-size=32", {"block_size": 32}),  # from an environment variable
        (["moe_backend=triton", "async_scheduling=false"], {"moe_backend": "triton", "async_scheduling": False}),
        (['attention_config={"backend": "TRITON_ATTN"}'], {"attention_config": {"backend": "TRITON_ATTN"}}),
        (["hf_overrides="], {"hf_overrides": ""}),
        ({"block_size": 32}, {"block_size": 32}),  # from YAML
        ([], {}),
    ],
)
def test_engine_arguments_are_parsed_from_pairs_or_a_map(engine_args, expected):
    assert TargetOptions(engine_args=engine_args).engine_args == expected


@pytest.mark.parametrize(
    ("engine_args", "reason"),
    [
        (["block_size"], "'block_size' is not KEY=VALUE"),
        (["=32"], "'=32' is not KEY=VALUE"),
        (["block_size=32", "block-size=16"], "block_size is given twice"),
        (["max_num_seqs=4"], "'max_num_seqs' is managed by peagle; set peagle's 'max_num_seqs' instead"),
        (["kv_cache_dtype=fp8"], "set peagle's 'kv_cache_precision' instead"),
        (["trust_remote_code=true"], "code in a model's folder never runs"),
        (["data_parallel_size=2"], "Ray divides requests among engines"),
        (["distributed_executor_backend=ray"], "set peagle's 'num_nodes' instead"),
        (['speculative_config={"num_speculative_tokens_per_batch_size": []}'], "computes wrong drafts"),
    ],
)
def test_managed_arguments_are_refused(engine_args, reason):
    with pytest.raises(ValidationError, match=reason):
        TargetOptions(engine_args=engine_args)


def test_unknown_argument_suggests_the_closest():
    check_argument_names({"block_size": 32, "enable_log_requests": False})
    with pytest.raises(ConfigError, match="no engine argument 'blok_size'") as caught:
        check_argument_names({"blok_size": 32})
    assert "block_size" in caught.value.hint


def test_fp8_cache_skips_sliding_windows():
    skipped = {"kv_cache_dtype_skip_layers": ["sliding_window"]}
    assert extra_arguments(TargetOptions(), FP8, SLIDING, on_gpu=True) == skipped
    assert extra_arguments(TargetOptions(), FP8, SLIDING, on_gpu=False) == {}
    assert extra_arguments(TargetOptions(), BF16, SLIDING, on_gpu=True) == {}
    assert extra_arguments(TargetOptions(), FP8, {"num_hidden_layers": 2}, on_gpu=True) == {}
    options = TargetOptions(engine_args=["kv_cache_dtype_skip_layers=[]"])
    assert extra_arguments(options, FP8, SLIDING, on_gpu=True) == {"kv_cache_dtype_skip_layers": []}


def test_arguments_become_spec_fields():
    options = TargetOptions(engine_args={"load_format": "dummy", "block_size": 32})
    assert spec_fields(options) == {"load_format": "dummy"}
    assert extra_arguments(options, BF16, {}, on_gpu=True) == {"block_size": 32}


def test_head_has_its_own_cache_and_attention():
    options = TargetOptions(draft_kv_cache_precision="bf16", draft_attention_backend="flash_attn")
    drafter = apply_drafter_options(HEAD, options, GPU)
    assert (drafter.kv_cache_precision, drafter.attention_backend) == ("bf16", "FLASH_ATTN")
    assert apply_drafter_options(HEAD, TargetOptions(), CPU) == HEAD
    assert apply_drafter_options(NGRAM, options, CPU) == NGRAM


def test_lookup_requires_a_head_and_the_option():
    with_lookup = TargetOptions(draft_lookup="on")
    assert apply_drafter_options(HEAD, with_lookup, CPU) == replace(HEAD, lookup=True)
    assert apply_drafter_options(NGRAM, with_lookup, CPU) == NGRAM
    for other in ("auto", "off"):
        options = TargetOptions(draft_lookup=other)
        assert [apply_drafter_options(HEAD, options, hardware) for hardware in (CPU, GPU)] == [HEAD, HEAD]
    assert drafter_note(apply_drafter_options(HEAD, with_lookup, CPU)) == "; with prompt lookup"
    assert drafter_note(HEAD) == drafter_note(None) == ""


def test_lookup_on_gpus_needs_synchronous_scheduling():
    with pytest.raises(ConfigError, match="asynchronous scheduling") as caught:
        apply_drafter_options(HEAD, TargetOptions(draft_lookup="on"), GPU)
    assert "--engine-arg async_scheduling=false" in caught.value.hint
    synchronous = TargetOptions(draft_lookup="on", engine_args={"async_scheduling": False})
    assert apply_drafter_options(HEAD, synchronous, GPU).lookup


def test_fingerprint_has_only_changed_options():
    assert non_default_options(TargetOptions(kv_cache_precision="fp8")) == {}  # part of the precision
    options = TargetOptions(draft_kv_cache_precision="bf16", draft_lookup="on", engine_args={"block_size": 32})
    assert non_default_options(options) == {
        "draft_kv_cache_precision": "bf16",
        "draft_lookup": "on",
        "engine_args": {"block_size": 32},
    }


def test_values_that_are_not_json_are_text():
    assert parse_arguments(["a=1.5", "b=one=two", "c=[1"]) == {"a": 1.5, "b": "one=two", "c": "[1"}


def test_verify_auto_applies_to_p_eagle_only_on_cpus():
    options = TargetOptions(verify="auto")
    assert [apply_drafter_options(HEAD, options, hardware).verify for hardware in (CPU, GPU)] == ["auto", "all"]


def test_block_head_on_gpu_has_a_bf16_cache_by_default():
    head = replace(HEAD, method="dflash")
    assert apply_drafter_options(head, TargetOptions(), GPU).kv_cache_precision == "bf16"
    assert apply_drafter_options(head, TargetOptions(), CPU).kv_cache_precision == "auto"
    assert apply_drafter_options(head, TargetOptions(draft_kv_cache_precision="fp8"), GPU).kv_cache_precision == "fp8"
    assert drafter_note(head) == "; without prefix caching, which would spoil its drafts"
    assert apply_drafter_options(replace(HEAD, method="dspark"), TargetOptions(verify="auto"), GPU).verify == "auto"
