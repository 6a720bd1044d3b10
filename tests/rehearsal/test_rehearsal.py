"""A small part of the rehearsal's grid, and the commands of the GPU queue."""

from pathlib import Path

import pytest

from tests.rehearsal.__main__ import grid, rehearse_card
from tests.rehearsal.cards import CARDS
from tests.rehearsal.queued import queued_commands

QWEN, EMBEDDED, OSS_20B, OSS_120B, GEMMA = (
    "qwen3-coder-30b-a3b-instruct",
    "smollm2-135m",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "gemma-4-31b-it",
)
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)


def cell(model, drafter, concurrency, **options):
    return {"model": model, "drafter": drafter, "concurrency": concurrency, "options": options}


@pytest.fixture(scope="module")
def h100_cells():
    """The rehearsed cells of an H100."""
    cells = [cell(model, drafter, 256) for model in (QWEN, OSS_20B) for drafter in ("peagle", "eagle3", "none")]
    cells += [cell(QWEN, "peagle", concurrency, num_speculative_tokens=10) for concurrency in (1, 256)]
    cells += [cell(EMBEDDED, "peagle", 256), cell(GEMMA, "peagle", 8)]
    cells += [cell(model, "dflash", 128) for model in (QWEN, OSS_20B, OSS_120B)] + [cell(QWEN, "dspark", 8)]
    cells += [cell(QWEN, "peagle", 64, max_model_len=4096), cell(OSS_20B, "peagle", 64, kv_cache_precision="fp8")]
    return rehearse_card("H100", [*cells, {"queue": True}])


def find_cell(cells, model, drafter, concurrency, **options):
    result = next(c for c in cells if c.get("model") == model and _configuration(c) == (drafter, concurrency, options))
    assert result["outcome"] == "accepted", result
    return result


def _configuration(result):
    return result["drafter"], result["concurrency"], result["options"]


def test_every_configuration_is_accepted_by_vllm_or_refused_by_peagle(h100_cells):
    assert [c for c in h100_cells if c["outcome"] == "failed"] == []


@pytest.mark.parametrize(("drafter", "runner"), [("peagle", "V1"), ("eagle3", "V2"), ("none", "V2")])
def test_p_eagle_runs_on_model_runner_v1_and_others_on_v2(h100_cells, drafter, runner):
    assert find_cell(h100_cells, QWEN, drafter, 256)["runner"] == runner


@pytest.mark.parametrize(("model", "drafter"), [(QWEN, "dflash"), (OSS_20B, "dflash"), (QWEN, "dspark")])
def test_block_heads_have_a_bf16_cache_and_graphs_on_model_runner_v2(h100_cells, model, drafter):
    result = find_cell(h100_cells, model, drafter, 8 if drafter == "dspark" else 128)
    assert (result["runner"], result["draft_kv_cache_dtype"]) == ("V2", "bfloat16")
    assert (result["verify"], result["draft"]) == ("FULL", "FULL")
    assert result["draft_back_ends"] == ["FLASH_ATTN"]
    assert result["kv_cache_dtype"] == ("fp8" if model == QWEN else "bfloat16")


def test_block_heads_avoid_flash_attention_on_newer_consumer_gpus():
    (result,) = rehearse_card("RTX-PRO-6000", [cell(QWEN, "dflash", 8)])
    assert result["draft_back_ends"] == ["TRITON_ATTN"]


def test_steps_of_all_requests_run_as_graphs(h100_cells):
    result = find_cell(h100_cells, OSS_20B, "peagle", 256)
    assert (result["verify"], result["draft"], result["graphs_to"]) == ("FULL", "PIECEWISE", 256)
    assert result["largest_size"] >= 256 * 2 * result["k"]
    # K = 10 means 5,120 draft tokens: the drafter's graphs end at 4,096.
    large_k = find_cell(h100_cells, QWEN, "peagle", 256, num_speculative_tokens=10)
    assert (large_k["verify"], large_k["draft"], large_k["graphs_to"]) == ("FULL", "NONE", 4092 // 20)
    assert find_cell(h100_cells, QWEN, "none", 256)["verify"] == "FULL"


def test_one_request_with_a_large_k_drafts_in_a_graph(h100_cells):
    """By default, vLLM's capture sizes end at 11 tokens, but the drafter needs 20."""
    result = find_cell(h100_cells, QWEN, "peagle", 1, num_speculative_tokens=10)
    assert (result["verify"], result["draft"], result["graphs_to"]) == ("FULL", "PIECEWISE", 1)


def test_token_budget_of_a_step_leaves_room_for_a_prefill(h100_cells):
    result = find_cell(h100_cells, OSS_20B, "peagle", 256)
    assert result["num_batched_tokens"] == 8192 + 256 * 2 * result["k"]
    assert find_cell(h100_cells, QWEN, "none", 256)["num_batched_tokens"] == 8192 + 256


def test_cache_is_fp8_only_for_long_contexts(h100_cells):
    long, short = (
        find_cell(h100_cells, QWEN, "peagle", 256),
        find_cell(h100_cells, QWEN, "peagle", 64, max_model_len=4096),
    )
    assert (long["kv_cache_dtype"], short["kv_cache_dtype"]) == ("fp8", "auto")
    assert long["draft_kv_cache_dtype"] == "fp8"
    assert find_cell(h100_cells, OSS_20B, "peagle", 256)["precision"] == "mxfp4 weights, bf16 KV cache"


def test_no_engine_has_flashinfer_with_an_fp8_cache(h100_cells):
    fp8_cells = [c for c in h100_cells if c.get("kv_cache_dtype") == "fp8"]
    assert len(fp8_cells) > 2
    assert not any("FLASHINFER" in c["back_ends"] + c["draft_back_ends"] for c in fp8_cells)


def test_estimated_cache_per_request_is_close_to_vllms(h100_cells):
    for result in h100_cells:
        if result["outcome"] == "accepted":
            assert result["estimated_gib"] == pytest.approx(result["kv_cache_gib"], rel=0.25, abs=0.05), result
            assert result["cache_requests"] >= 1, result


@pytest.mark.parametrize("card", ["L4", pytest.param("RTX-PRO-6000", marks=pytest.mark.soak)])
def test_too_small_card_is_refused_with_what_fits(card):
    cells = [cell(model, "peagle", 8) for model in (QWEN, OSS_120B, EMBEDDED)]
    cells += [cell(EMBEDDED, "peagle", 8, kv_cache_precision="fp8")]
    cells += [cell(model, "peagle", 8, precision="int8") for model in (EMBEDDED, QWEN, OSS_20B)]
    result = rehearse_card(card, cells)
    assert [c for c in result if c["outcome"] == "failed"] == []
    assert find_cell(result, EMBEDDED, "peagle", 8)["flags"] == []
    fp8 = find_cell(result, EMBEDDED, "peagle", 8, kv_cache_precision="fp8")
    assert (fp8["back_ends"], fp8["draft_back_ends"]) == (["TRITON_ATTN"], ["TRITON_ATTN"])
    int8 = {c["model"]: c for c in result if c["options"] == {"precision": "int8"}}
    assert "they cannot be run in int8" in int8[OSS_20B]["message"]
    if card == "L4":
        assert [int8[model]["precision"] for model in (EMBEDDED, QWEN)] == ["int8 weights, bf16 KV cache"] * 2
        assert any(flag.startswith("--tensor-parallel-size") for flag in find_cell(result, QWEN, "peagle", 8)["flags"])
    else:
        assert "int8 needs CUDA compute capability 7.5 to 9.0" in int8[EMBEDDED]["message"]


def test_grid_has_int8_where_card_and_model_support_it():
    in_int8 = {name: {c["model"] for c in grid(card, [8]) if c["options"]} for name, card in CARDS.items()}
    assert in_int8["L4"] == in_int8["H200"] == {EMBEDDED, QWEN, GEMMA}
    assert in_int8["B200"] == set()


def test_queue_commands_equal_what_bash_runs(tmp_path):
    commands = queued_commands(tmp_path)
    scripts = [Path(arguments[0]).name for arguments in commands]
    assert scripts[:3] == ["headline.py", "best_k.py", "embedded.py"]
    assert all((ROOT / arguments[0]).is_file() for arguments in commands)


def test_queue_engines_are_accepted_on_an_h100(h100_cells):
    queue = [c for c in h100_cells if "command" in c]
    assert [c for c in queue if c["outcome"] != "accepted"] == []
    assert len(queue) > 30
    assert [c["engine"] for c in queue[:3]] == ["P-EAGLE K=7", "EAGLE-3 K=7", "no speculation"]
    with_ray = [c for c in queue if "with_ray" in c["command"]]
    assert len(with_ray) == 4
    assert all(c["verify"] == "FULL" and c["draft"] == "PIECEWISE" for c in with_ray)
