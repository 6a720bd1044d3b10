"""Prompt lookup next to a head, in vLLM's scheduler; its drafts do not change the target's text."""

import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from chi_square import p_value, power

from peagle.engine import vllm_plugin


class Scheduler:
    """The patched methods of vLLM's scheduler: drafts after a step, and counts of accepted tokens."""

    def __init__(self, vllm_config):
        self.requests = {}
        self.received = []

    def update_draft_token_ids(self, draft_token_ids):
        self.received.append([list(drafts) for drafts in draft_token_ids.draft_token_ids])

    def make_spec_decoding_stats(self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, request_id):
        return f"{request_id}: {num_accepted_tokens} of {num_draft_tokens}"

    def accept(self, request_id, num_accepted):
        """Call it like vLLM."""
        return self.make_spec_decoding_stats(
            None, num_draft_tokens=3, num_accepted_tokens=num_accepted, request_id=request_id
        )


def config_of(**other):
    settings = {
        "is_async": False, "use_v2_model_runner": False, "draft_sample_method": "greedy",
        "rejection_sample_method": "standard", **other,
    }  # fmt: skip
    speculation = SimpleNamespace(
        **{name: settings[name] for name in ("draft_sample_method", "rejection_sample_method")}
    )
    return SimpleNamespace(
        speculative_config=speculation,
        scheduler_config=SimpleNamespace(async_scheduling=settings["is_async"]),
        use_v2_model_runner=settings["use_v2_model_runner"],
    )


@pytest.fixture
def make_scheduler(monkeypatch):
    """Make a scheduler that looks up n-grams of two tokens."""
    patched = type("Patched", (Scheduler,), dict(vars(Scheduler)))
    monkeypatch.setattr("vllm.v1.core.sched.scheduler.Scheduler", patched)
    for _ in range(2):  # a process may load plug-ins more than once
        vllm_plugin.look_up_drafts()
    monkeypatch.setenv(vllm_plugin.LOOKUP, "2")
    return lambda **other: patched(config_of(**other))


def request_of(*tokens):
    from vllm import SamplingParams
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.request import Request

    request = Request("one", list(tokens), SamplingParams(), None)
    request.spec_decode_metrics = RequestSpecDecodeMetrics.new(3)
    return request


def draft_ids(*drafts, request_id="one"):
    from vllm.v1.outputs import DraftTokenIds

    return DraftTokenIds([request_id], [list(drafts)])


def test_scheduler_copies_and_counts_by_source(make_scheduler):
    scheduler, request = make_scheduler(), request_of(1, 2, 3, 4, 1)
    scheduler.requests["one"] = request
    scheduler.update_draft_token_ids(draft_ids(2, 9, 9))  # earlier, 1 2 was followed by 3 4
    assert scheduler.received == [[[2, 3, 4]]]
    assert scheduler.accept("one", 3) == "one: 3 of 3"
    request.append_output_token_ids([2, 3, 4, 8])
    scheduler.update_draft_token_ids(draft_ids(7, 9, 9))
    assert scheduler.received[-1] == [[7, 9, 9]]
    scheduler.accept("one", 2)  # both come from the head
    assert sum(request.spec_decode_metrics.per_step_drafted) == 2
    request.spec_decode_metrics.observe(3, 3)
    assert "per_step_drafted" not in request.spec_decode_metrics.to_dict()  # no client sees it


def test_prefill_and_finished_requests_are_unchanged(make_scheduler):
    from vllm.v1.request import RequestStatus

    scheduler, request = make_scheduler(), request_of(1, 2, 3, 4, 1)
    scheduler.update_draft_token_ids(draft_ids(2, 9, 9))
    scheduler.requests["one"] = request
    request.is_prefill_chunk = True
    scheduler.update_draft_token_ids(draft_ids(2, 9, 9))
    request.is_prefill_chunk, request.status = False, RequestStatus.FINISHED_STOPPED
    scheduler.update_draft_token_ids(draft_ids(2, 9, 9))
    assert scheduler.received == [[[2, 9, 9]]] * 3


def test_failed_lookup_is_turned_off(make_scheduler, monkeypatch, caplog):
    def fail(*_):
        raise MemoryError("no room")

    scheduler = make_scheduler()
    scheduler.requests["one"] = request_of(1, 2, 3, 4, 1)
    monkeypatch.setattr(vllm_plugin.PromptLookup, "extend", fail)
    for _ in range(3):
        scheduler.update_draft_token_ids(draft_ids(2, 9, 9))
        scheduler.accept("one", 3)
    assert scheduler.received == [[[2, 9, 9]]] * 3
    assert [record.message for record in caplog.records] == [
        "prompt lookup failed and was disabled; only the head drafts"
    ]
    assert sum(scheduler.requests["one"].spec_decode_metrics.per_step_drafted) == 0


def test_lookup_is_off_by_default(make_scheduler, monkeypatch):
    without_drafts = config_of()
    without_drafts.speculative_config = None
    schedulers = [type(make_scheduler())(without_drafts)]
    monkeypatch.setenv(vllm_plugin.LOOKUP, "")
    schedulers.append(make_scheduler(is_async=True))
    for scheduler in schedulers:
        scheduler.requests["one"] = request_of(1, 2, 3, 4, 1)
        scheduler.update_draft_token_ids(draft_ids(2, 9, 9))
        assert (scheduler.received, scheduler.accept("one", 3)) == ([[[2, 9, 9]]], "one: 3 of 3")
        assert scheduler.requests["one"].spec_decode_metrics.per_step_drafted == []


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"is_async": True}, "no asynchronous scheduling"),
        ({"use_v2_model_runner": True}, "model runner V1"),
        ({"draft_sample_method": "probabilistic"}, "greedy drafts"),
        ({"rejection_sample_method": "block"}, "standard rejection sampling"),
    ],
)
def test_unsupported_lookup_does_not_start(make_scheduler, other, reason):
    with pytest.raises(RuntimeError, match=reason):
        make_scheduler(**other)


def test_lookup_fits_vllms_scheduler():
    """Once this fails, vLLM passes drafts differently: check `look_up_drafts`."""
    from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

    assert list(inspect.signature(VllmScheduler.update_draft_token_ids).parameters) == ["self", "draft_token_ids"]
    counts = inspect.getsource(VllmScheduler.update_from_output).partition("self.make_spec_decoding_stats(")[2]
    assert re.search(r"num_accepted_tokens=num_accepted,.*request_id=req_id", counts.partition(")")[0], re.DOTALL)


# Runs in a subprocess, because it imports vLLM's kernels for this CPU. Each row is a request with two draft tokens.
_SAMPLES = """if True:
    import json, sys, torch
    from types import SimpleNamespace
    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    current_platform.import_kernels()
    for name in ("rejection_random_sample_kernel", "sample_recovered_tokens_kernel"):
        setattr(rejection_sampler, name, getattr(cpu_triton_utils, name))
    job = json.loads(sys.argv[1])
    num, chances = job["num"], torch.tensor(job["chances"])
    torch.manual_seed(0)
    logits = chances[torch.tensor([0, 1])].log().repeat(num, 1)  # for the first token, and after the first draft token
    samples = rejection_sampler.rejection_sample(
        torch.tensor(job["drafts"], dtype=torch.int32).repeat(num), [2] * num, 2,
        torch.arange(2, 2 * num + 1, 2, dtype=torch.int32), None, logits,
        torch.zeros((num, 1), dtype=torch.int32),
        SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(num), generators={}),
    )
    print(json.dumps(samples[:, :2].tolist()))
"""


def test_drafts_without_probabilities_keep_the_distribution():
    """Like a head's greedy drafts, tokens from lookup have no probabilities in vLLM.

    Sampled pairs of tokens must follow the target's distribution.
    """
    num, drafts = 6000, [1, 3]
    chances = [[0.1, 0.35, 0.3, 0.2, 0.05], [0.25, 0.05, 0.2, 0.1, 0.4]]
    job = json.dumps({"num": num, "drafts": drafts, "chances": chances})
    done = subprocess.run(
        [sys.executable, "-c", _SAMPLES, job], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts = Counter(map(tuple, json.loads(done.stdout.splitlines()[-1])))
    # If the first draft token is rejected, the step ends.
    expected = {(token, -1): chance for token, chance in enumerate(chances[0]) if token != 1}
    expected |= {(1, token): chances[0][1] * chance for token, chance in enumerate(chances[1])}
    assert counts.total() == num
    assert p_value(counts, expected) > 1e-4, counts
    # The test must detect a sampler that overweights drafts, as if the head had given probabilities.
    biased = expected | {(1, 3): expected[1, 3] * 1.5, (1, 4): expected[1, 4] - expected[1, 3] / 2}
    assert power(expected, biased, num, 1e-4) > 0.98
