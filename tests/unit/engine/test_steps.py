from dataclasses import replace
from itertools import pairwise

import devices
import pytest
from devices import cpu

from peagle.engine.arguments import engine_args
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.engine.steps import capture_sizes, graphs_gib

CPU = cpu()
MAX_TOKENS = 4096  # the largest size that peagle captures


def gpu(memory_gib=80):
    return devices.gpu(memory_gib=memory_gib)


def make_spec(method, k, concurrency, **changes):
    drafter = DrafterSpec(method=method, model="head", num_speculative_tokens=k) if method else None
    return EngineSpec(model="org/m", drafter=drafter, max_num_seqs=concurrency, **changes)


def sizes_of(spec, hardware):
    sizes = capture_sizes(spec, hardware)
    assert sizes is not None
    return sizes


def adjusted_by_v1(sizes, width):
    """Adjust sizes like model runner V1 (`CompilationConfig.adjust_cudagraph_sizes_for_spec_decode`)."""
    rounded = {-(-size // width) * width for size in sizes}
    return sorted(size for size in rounded if size <= sizes[-1])


@pytest.mark.parametrize("k", [1, 3, 6, 7, 10, 11, 18])
@pytest.mark.parametrize("concurrency", [1, 2, 5, 37, 64, 100, 128])
def test_widest_steps_of_p_eagle_are_captured(k, concurrency):
    captured = adjusted_by_v1(sizes_of(make_spec("peagle", k, concurrency), gpu()), 1 + k)
    largest_size = MAX_TOKENS // (1 + k) * (1 + k)
    assert concurrency * (1 + k) in captured or concurrency * (1 + k) > largest_size
    assert captured[-1] >= min(concurrency * 2 * k, largest_size)  # P-EAGLE drafts with 2K tokens per request


@pytest.mark.parametrize("concurrency", [1, 7, 64, 100, 256])
def test_eagle3_verification_is_captured(concurrency):
    sizes = sizes_of(make_spec("eagle3", 3, concurrency), gpu())
    assert concurrency * 4 in sizes
    assert sizes[-1] % 4 == 0  # model runner V1 would drop a largest size that is not a multiple of 1 + K


def test_vllms_own_sizes_are_included():
    """Otherwise peagle would pad short steps more than vLLM does."""
    sizes = set(sizes_of(make_spec("eagle3", 7, 256), gpu()))
    assert {1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)} <= sizes


def test_padding_wastes_at_most_a_ninth():
    sizes = [size for size in sizes_of(make_spec("eagle3", 7, 512), gpu(180)) if size >= 512]
    assert sizes[-1] == MAX_TOKENS
    # A step of `below + 1` tokens is padded to `above`: with a ratio of 1.125, a ninth of the step is padding.
    assert all(above / below < 1.13 for below, above in pairwise(sizes))


@pytest.mark.parametrize(("memory_gib", "max_graphs"), [(22.5, 32), (45, 65), (80, 96), (180, 96)])
def test_number_of_graphs_is_limited(memory_gib, max_graphs):
    spec = make_spec("eagle3", 15, 256)
    sizes = sizes_of(spec, gpu(memory_gib))
    assert len(sizes) <= max_graphs
    assert sizes[0] == 1
    assert sizes[-1] == MAX_TOKENS
    assert graphs_gib(spec, gpu(memory_gib)) <= 0.04 * memory_gib


@pytest.mark.parametrize(("concurrency", "expected"), [(8, None), (256, None), (100, 100), (600, 600)])
def test_sizes_without_a_drafter_are_set_only_if_vllm_lacks_the_concurrency(concurrency, expected):
    sizes = capture_sizes(make_spec(None, 0, concurrency), gpu())
    assert sizes is None if expected is None else expected in (sizes or [])


@pytest.mark.parametrize(
    "changes",
    [{"enforce_eager": True}, {"extra": {"max_cudagraph_capture_size": 64}}, {"extra": {"compilation_config": {}}}],
)
def test_user_sizes_replace_peagles_sizes(changes):
    assert "cudagraph_capture_sizes" not in engine_args(make_spec("peagle", 7, 64, **changes), gpu())
    assert "cudagraph_capture_sizes" in engine_args(make_spec("peagle", 7, 64), gpu())


def test_cpus_have_no_graphs():
    assert capture_sizes(make_spec("peagle", 7, 64), CPU) is None
    assert graphs_gib(make_spec("peagle", 7, 64), CPU) == 0


def test_eager_engines_have_no_graphs():
    spec = make_spec("peagle", 7, 64)
    assert graphs_gib(spec, gpu()) > graphs_gib(replace(spec, enforce_eager=True), gpu()) == 0
    assert graphs_gib(make_spec(None, 0, 256), gpu()) > 1  # vLLM's default sizes
