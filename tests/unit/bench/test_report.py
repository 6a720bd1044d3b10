import pytest

from peagle.bench.config import BenchConfig
from peagle.bench.report import few_prompts, model_runners, require_prompts
from peagle.errors import ConfigError

from .conftest import record


def config(**keys):
    return BenchConfig(**{"concurrency": "1,4", "methods": "none,eagle3,peagle"} | keys)


def test_a_concurrency_that_no_pass_would_reach_is_refused():
    with pytest.raises(ConfigError, match="concurrency 4 cannot be reached with 3 prompts") as refused:
        require_prompts(config(), 3)
    assert "--requests-per-slot" in refused.value.hint
    require_prompts(config(), 4)
    require_prompts(config(requests_per_slot=2), 3)


@pytest.mark.parametrize(
    ("keys", "num_prompts", "few"),
    [
        ({}, 12, ""),
        ({}, 11, "concurrency 4"),
        ({}, 2, "concurrency 1, 4"),
        ({"requests_per_slot": 3}, 1, ""),
        ({"requests_per_slot": 2}, 99, "concurrency 1, 4"),
    ],
)
def test_passes_that_are_short_for_their_concurrency_are_told(keys, num_prompts, few):
    found = few_prompts(config(**keys), num_prompts)
    assert bool(found) is bool(few)
    assert all(f"requests per slot at {few}: " in note for note in found)


def passes(**runners):
    return [record(method, model_runner=runner) for method, runner in runners.items()]


def test_methods_that_ran_on_different_runners_are_told_wherever_that_was():
    found = passes(none="V2", eagle3="V2", peagle="V1") + passes(none="V2", peagle="V1")
    for platform, chosen in (("cuda", None), ("cpu", "1")):
        (note,) = model_runners(config(), platform, chosen, found)
        assert "V1 ran P-EAGLE; V2 ran no speculation, EAGLE-3." in note
        assert "VLLM_USE_V2_MODEL_RUNNER=0" in note


@pytest.mark.parametrize(
    ("keys", "platform", "chosen", "found", "is_told"),
    [
        ({}, "cuda", None, [], True),
        ({}, "cuda", None, passes(none=None, peagle="V1"), True),
        ({}, "cuda", None, passes(none="V1", peagle="V1"), False),
        ({}, "cuda", "0", passes(none=None, peagle=None), False),
        ({}, "cpu", None, passes(none=None, peagle=None), False),
        ({"methods": "peagle"}, "cuda", None, [], False),
    ],
)
def test_what_is_not_known_of_runners_is_told_on_a_gpu_alone(keys, platform, chosen, found, is_told):
    notes = model_runners(config(**keys), platform, chosen, found)
    assert [note[:35] for note in notes] == (["VLLM_USE_V2_MODEL_RUNNER is not set"] if is_told else [])
