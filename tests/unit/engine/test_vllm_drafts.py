"""Drafts in vLLM's scheduler: prompt lookup next to a head, and the choice of the drafts to verify."""

import inspect
import itertools
import json
import re
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from chi_square import p_value, power

from peagle.engine import vllm_drafts


class Scheduler:
    """A fake of vLLM's scheduler, with the methods that `change_drafts` patches."""

    def __init__(self, vllm_config):
        self.requests = {}
        self.received_drafts = []
        self.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(hash_block_size=4))
        self.new_names, self.finished_names = [], set()

    @property
    def running(self):
        return list(self.requests.values())

    def schedule(self):
        """Schedule a decoding step of all requests with the drafts that were received last."""
        drafts = dict(zip(self.requests, self.received_drafts[-1], strict=False)) if self.received_drafts else {}
        num_tokens = {name: 1 + len(drafts.get(name, ())) for name in self.requests}
        return SimpleNamespace(
            num_scheduled_tokens=num_tokens,
            scheduled_spec_decode_tokens={name: tokens for name, tokens in drafts.items() if tokens},
            total_num_scheduled_tokens=sum(num_tokens.values()),
            num_spec_tokens_to_schedule=3,
            scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=4) for name in self.new_names],
            finished_req_ids=self.finished_names,
        )

    def update_from_output(self, scheduled, output):
        return output

    def update_draft_token_ids(self, draft_token_ids):
        self.received_drafts.append([list(drafts) for drafts in draft_token_ids.draft_token_ids])

    def make_spec_decoding_stats(self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens, request_id):
        return f"{request_id}: {num_accepted_tokens} of {num_draft_tokens}"

    def accept(self, request_id, num_accepted):
        """Call `make_spec_decoding_stats` with vLLM's arguments."""
        return self.make_spec_decoding_stats(
            None, num_draft_tokens=3, num_accepted_tokens=num_accepted, request_id=request_id
        )


def make_config(**changes):
    settings = {
        "is_async": False, "use_v2_model_runner": False, "draft_sample_method": "greedy",
        "rejection_sample_method": "standard", **changes,
    }  # fmt: skip
    names = ("draft_sample_method", "rejection_sample_method")
    speculation = SimpleNamespace(method="eagle3", num_speculative_tokens=3, **{name: settings[name] for name in names})
    return SimpleNamespace(
        speculative_config=speculation,
        scheduler_config=SimpleNamespace(async_scheduling=settings["is_async"]),
        use_v2_model_runner=settings["use_v2_model_runner"],
    )


@pytest.fixture
def make_scheduler(monkeypatch):
    """Return a function that makes a scheduler with prompt lookup of n-grams of at least two tokens."""
    patched = type("Patched", (Scheduler,), dict(vars(Scheduler)))
    monkeypatch.setattr("vllm.v1.core.sched.scheduler.Scheduler", patched)
    for _ in range(2):  # a process may load plug-ins more than once
        vllm_drafts.change_drafts()
    monkeypatch.setenv(vllm_drafts.LOOKUP, "2")
    return lambda **changes: patched(make_config(**changes))


def make_request(*tokens):
    from vllm import SamplingParams
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.request import Request

    request = Request("one", list(tokens), SamplingParams(), None)
    request.spec_decode_metrics = RequestSpecDecodeMetrics.new(3)
    return request


def draft_ids(*drafts, request_id="one"):
    from vllm.v1.outputs import DraftTokenIds

    return DraftTokenIds([request_id], [list(drafts)])


def test_scheduler_counts_accepted_copies_and_verified_drafts(make_scheduler):
    scheduler, request = make_scheduler(), make_request(1, 2, 3, 4, 1)
    scheduler.requests["one"] = request
    scheduler.update_draft_token_ids(draft_ids(2, 9, 9))  # earlier, 1 2 was followed by 3 4
    assert scheduler.received_drafts == [[[2, 3, 4]]]
    assert scheduler.accept("one", 3) == "one: 3 of 3"
    request.append_output_token_ids([2, 3, 4, 8])
    scheduler.update_draft_token_ids(draft_ids(7, 9, 9))
    assert scheduler.received_drafts[-1] == [[7, 9, 9]]
    scheduler.accept("one", 2)  # both come from the head
    counts = [2, 0, 2, 2, 2]  # accepted copies, dropped drafts, and verified drafts at each position
    assert request.spec_decode_metrics.per_step_drafted == counts
    assert request.spec_decode_metrics.to_dict()["per_step_drafted"] == counts  # the replica omits them from responses


def test_prefill_and_finished_requests_are_unchanged(make_scheduler):
    from vllm.v1.request import RequestStatus

    scheduler, request = make_scheduler(), make_request(1, 2, 3, 4, 1)
    scheduler.update_draft_token_ids(draft_ids(2, 9, 9))
    scheduler.requests["one"] = request
    request.is_prefill_chunk = True
    scheduler.update_draft_token_ids(draft_ids(2, 9, 9))
    request.is_prefill_chunk, request.status = False, RequestStatus.FINISHED_STOPPED
    scheduler.update_draft_token_ids(draft_ids(2, 9, 9))
    assert scheduler.received_drafts == [[[2, 9, 9]]] * 3


def test_lookup_is_disabled_after_an_error(make_scheduler, monkeypatch, caplog):
    def fail(*_):
        raise MemoryError("no room")

    scheduler = make_scheduler()
    scheduler.requests["one"] = make_request(1, 2, 3, 4, 1)
    monkeypatch.setattr(vllm_drafts.PromptLookup, "extend", fail)
    for _ in range(3):
        scheduler.update_draft_token_ids(draft_ids(2, 9, 9))
        scheduler.accept("one", 3)
    assert scheduler.received_drafts == [[[2, 9, 9]]] * 3
    assert [record.message for record in caplog.records] == [
        "prompt lookup failed and was disabled; all drafts come from the head"
    ]
    assert scheduler.requests["one"].spec_decode_metrics.per_step_drafted[0] == 0


def test_lookup_is_off_without_a_drafter_or_its_variable(make_scheduler, monkeypatch):
    without_drafts = make_config()
    without_drafts.speculative_config = None
    schedulers = [type(make_scheduler())(without_drafts)]
    monkeypatch.setenv(vllm_drafts.LOOKUP, "")
    schedulers.append(make_scheduler(is_async=True))
    for scheduler in schedulers:
        scheduler.requests["one"] = make_request(1, 2, 3, 4, 1)
        scheduler.update_draft_token_ids(draft_ids(2, 9, 9))
        assert (scheduler.received_drafts, scheduler.accept("one", 3)) == ([[[2, 9, 9]]], "one: 3 of 3")
        assert scheduler.requests["one"].spec_decode_metrics.per_step_drafted == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_async": True}, "no asynchronous scheduling"),
        ({"use_v2_model_runner": True}, "model runner V1"),
        ({"draft_sample_method": "probabilistic"}, "greedy drafts"),
        ({"rejection_sample_method": "block"}, "standard rejection sampling"),
    ],
)
def test_scheduler_with_unsupported_lookup_does_not_start(make_scheduler, changes, reason):
    with pytest.raises(RuntimeError, match=reason):
        make_scheduler(**changes)


def test_changes_fit_vllms_scheduler():
    """Once this fails, vLLM passes drafts differently: check `change_drafts`."""
    from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
    from vllm.v1.engine.core import EngineCore

    assert list(inspect.signature(VllmScheduler.update_draft_token_ids).parameters) == ["self", "draft_token_ids"]
    source = inspect.getsource(VllmScheduler.update_from_output)
    counts = source.partition("self.make_spec_decoding_stats(")[2]
    assert re.search(r"num_accepted_tokens=num_accepted,.*request_id=req_id", counts.partition(")")[0], re.DOTALL)
    assert "num_spec_tokens_to_schedule=num_spec_tokens_to_schedule" in inspect.getsource(VllmScheduler.schedule)
    assert "self.scheduler.update_draft_token_ids(draft_token_ids)" in inspect.getsource(EngineCore.post_step)


def test_confidence_fits_vllms_worker():
    """Once this fails, vLLM drafts differently: check `add_confidence`."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "self.model.get_top_tokens(hidden_states)" in inspect.getsource(SpecDecodeBaseProposer._greedy_sample)
    assert "self._apply_head(lm_head, hidden_states" in inspect.getsource(LogitsProcessor.get_top_tokens)
    proposed = inspect.getsource(SpecDecodeBaseProposer.propose)
    assert proposed.index("self.num_speculative_tokens == 0") < proposed.index("self._sample_draft_tokens(")
    assert "if not self.needs_extra_input_slots:" in inspect.getsource(SpecDecodeBaseProposer.set_inputs_first_pass)
    assert "scheduler_output.num_spec_tokens_to_schedule" in inspect.getsource(GPUModelRunner.propose_draft_token_ids)
    assert "isinstance(self._draft_token_ids, list)" in inspect.getsource(GPUModelRunner._get_draft_token_ids_cpu)


@pytest.fixture
def choosing_scheduler(make_scheduler, monkeypatch):
    """A scheduler that drops drafts that are not worth verifying. Time advances by 30 ms at each look at the clock."""
    monkeypatch.setenv(vllm_drafts.LOOKUP, "")
    monkeypatch.setenv(vllm_drafts.VERIFY, "auto")
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: 0.03 * next(clock))
    scheduler = make_scheduler()
    for name in ("sure", "unsure"):
        scheduler.requests[name] = make_request(1, 2, 3, 4)
        scheduler.requests[name].num_computed_tokens = 4
    return scheduler


def step(scheduler, log_probabilities):
    """Run a step in which the worker drafts with these log-probabilities."""
    from vllm.v1.outputs import DraftTokenIds

    scheduled = scheduler.schedule()
    scheduler.update_from_output(scheduled, None)
    drafted = DraftTokenIds(list(scheduler.requests), [[7, 8, 9] for _ in scheduler.requests])
    drafted.peagle_confidence = vllm_drafts.Confidence(log_probabilities, 0.01)  # drafting took 10 ms
    scheduler.update_draft_token_ids(drafted)
    return scheduled


def test_drafts_with_a_low_probability_are_dropped(choosing_scheduler):
    step(choosing_scheduler, [[-0.01, -0.01, -0.01], [-9.0, -9.0, -9.0]])
    assert choosing_scheduler.received_drafts == [[[7, 8, 9], []]]
    sure, unsure = (choosing_scheduler.requests[name].spec_decode_metrics for name in ("sure", "unsure"))
    choosing_scheduler.accept("sure", 3)
    assert (sure.per_step_drafted, unsure.per_step_drafted) == ([0, 0, 1, 1, 1], [0, 3])
    assert unsure.histogram == [1, 0, 0, 0]  # a step without an accepted draft


def test_time_without_requests_does_not_count_as_a_step(choosing_scheduler, monkeypatch):
    observed = []
    monkeypatch.setattr(vllm_drafts.DraftBudget, "observe_step", lambda self, step, **times: observed.append(times))
    for _ in range(18):  # the first 16 are not learned from
        step(choosing_scheduler, [[-0.05, -0.05, -0.05], [-0.05, -0.05, -0.05]])
    num_observed = len(observed)
    assert num_observed > 0
    assert observed[0] == {"step_s": pytest.approx(0.09), "drafter_s": pytest.approx(0.04)}  # choosing takes 30 ms
    for request in choosing_scheduler.requests.values():
        request.block_hashes = [b"prompt"]
    choosing_scheduler.new_names = ["sure", "unsure"]  # only new requests: the engine may have been idle before
    step(choosing_scheduler, [[-0.05, -0.05, -0.05], [-0.05, -0.05, -0.05]])
    assert len(observed) == num_observed


def test_some_steps_verify_nothing_or_all_drafts(choosing_scheduler, monkeypatch):
    monkeypatch.setattr(vllm_drafts.DraftBudget, "drafting_pays", lambda self, num_requests, now_s: True)
    depths = {}
    for number in range(1, 400):
        scheduled = step(choosing_scheduler, [[-0.01, -0.01, -0.01], [-9.0, -9.0, -9.0]])
        depths[number] = scheduled.num_spec_tokens_to_schedule
    num_drafts = {number: [*map(len, drafts)] for number, drafts in enumerate(choosing_scheduler.received_drafts, 1)}
    # Drafts are received at the end of a step, and verified in the next one.
    assert [number for number in range(100, 400) if num_drafts[number] == [3, 3]] == [359]
    assert [number for number in range(100, 400) if num_drafts[number] == [0, 0]] == [143, 287]
    assert (depths[359], depths[143]) == (3, 1)


def test_a_step_that_explores_verifies_the_drafts_of_few_requests(choosing_scheduler, monkeypatch):
    monkeypatch.setattr(vllm_drafts.DraftBudget, "drafting_pays", lambda self, num_requests, now_s: True)
    for name in "abcdefgh":
        choosing_scheduler.requests[name] = make_request(1, 2, 3, 4)
        choosing_scheduler.requests[name].num_computed_tokens = 4
    for _ in range(400):
        step(choosing_scheduler, [[-9.0, -9.0, -9.0]] * 10)
    num_drafts = [[*map(len, drafts)] for drafts in choosing_scheduler.received_drafts]
    assert [3] * 8 + [0] * 2 in num_drafts
    assert [3] * 10 not in num_drafts


def test_drafter_stops_when_all_drafts_are_rejected(choosing_scheduler):
    for _ in range(100):  # enough steps to learn from
        scheduled = step(choosing_scheduler, [[-0.05, -0.05, -0.05], [-0.05, -0.05, -0.05]])
        for name, drafts in zip(choosing_scheduler.requests, choosing_scheduler.received_drafts[-1], strict=True):
            if drafts:
                choosing_scheduler.accept(name, 0)
    assert choosing_scheduler.received_drafts[0] == [[7, 8, 9], [7, 8, 9]]
    assert choosing_scheduler.received_drafts[-1] == [[], []]
    assert scheduled.num_spec_tokens_to_schedule == 0


def test_drafter_is_skipped_when_it_does_not_pay(choosing_scheduler, monkeypatch):
    monkeypatch.setattr(vllm_drafts.DraftBudget, "drafting_pays", lambda self, *_: False)
    scheduled = step(choosing_scheduler, [])
    assert scheduled.num_spec_tokens_to_schedule == 0
    monkeypatch.setattr(vllm_drafts.DraftBudget, "drafting_pays", lambda self, *_: True)
    choosing_scheduler.requests["new"] = make_request(5, 6)
    scheduled = step(choosing_scheduler, [[-0.01] * 3] * 3)
    assert scheduled.num_spec_tokens_to_schedule == 3
    assert choosing_scheduler.received_drafts[-1] == [[], [], [7, 8, 9]]  # the drafter lacks tokens of two requests


def test_new_request_does_not_draft_after_cached_tokens_that_the_drafter_skipped(choosing_scheduler, monkeypatch):
    requests = choosing_scheduler.requests
    requests["sure"].block_hashes, requests["unsure"].block_hashes = [b"shared"], [b"other"]
    requests["sure"].num_computed_tokens = requests["unsure"].num_computed_tokens = 1  # in the first block
    monkeypatch.setattr(vllm_drafts.DraftBudget, "drafting_pays", lambda self, *_: False)
    step(choosing_scheduler, [])
    monkeypatch.setattr(vllm_drafts.DraftBudget, "drafting_pays", lambda self, *_: True)
    choosing_scheduler.new_names = ["same prefix", "another prefix"]
    for name, block_hash in zip(choosing_scheduler.new_names, (b"shared", b"new"), strict=True):
        requests[name] = make_request(1, 2, 3, 4, 5)
        requests[name].block_hashes, requests[name].num_computed_tokens = [block_hash], 5
    step(choosing_scheduler, [[-0.01] * 3] * 4)
    assert choosing_scheduler.received_drafts[-1] == [[], [], [], [7, 8, 9]]  # only for "another prefix"


def test_finished_requests_are_removed(choosing_scheduler):
    for request in choosing_scheduler.requests.values():
        request.block_hashes = [b"prompt"]
    choosing_scheduler.new_names = list(choosing_scheduler.requests)
    step(choosing_scheduler, [[-0.01] * 3] * 2)
    drafts = choosing_scheduler.peagle_drafts
    assert list(drafts._requests) == ["sure", "unsure"]
    choosing_scheduler.new_names, choosing_scheduler.finished_names = [], {"sure", "unsure"}
    choosing_scheduler.requests.clear()
    choosing_scheduler.schedule()  # vLLM schedules no tokens when the last request ends
    assert drafts._requests == {}


@pytest.mark.parametrize("failing_method", ["choose", "drafting_pays"])
def test_all_drafts_are_verified_after_a_failed_choice(choosing_scheduler, monkeypatch, caplog, failing_method):
    def fail(*_):
        raise FloatingPointError("overflow")

    monkeypatch.setattr(vllm_drafts.DraftBudget, failing_method, fail)
    for _ in range(2):
        step(choosing_scheduler, [[-9.0] * 3, [-9.0] * 3])
    assert choosing_scheduler.received_drafts == [[[7, 8, 9], [7, 8, 9]]] * 2
    assert [record.message for record in caplog.records] == [
        "the choice of drafts failed and was disabled; all drafts are verified"
    ]


def test_choice_of_drafts_is_off_if_unsupported(make_scheduler, monkeypatch):
    monkeypatch.setenv(vllm_drafts.LOOKUP, "")
    monkeypatch.setenv(vllm_drafts.VERIFY, "auto")
    for changes in ({"is_async": True}, {"use_v2_model_runner": True}, {"rejection_sample_method": "synthetic"}):
        assert make_scheduler(**changes).peagle_drafts is None


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
    num_requests, probabilities = job["num_requests"], torch.tensor(job["probabilities"])
    torch.manual_seed(0)
    logits = probabilities.log().repeat(num_requests, 1)  # for the first token, and after the first draft token
    samples = rejection_sampler.rejection_sample(
        torch.tensor(job["drafts"], dtype=torch.int32).repeat(num_requests), [2] * num_requests, 2,
        torch.arange(2, 2 * num_requests + 1, 2, dtype=torch.int32), None, logits,
        torch.zeros((num_requests, 1), dtype=torch.int32),
        SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(num_requests), generators={}),
    )
    print(json.dumps(samples[:, :2].tolist()))
"""


def test_drafts_without_probabilities_keep_the_distribution():
    """Like a head's greedy drafts, tokens from lookup have no probabilities in vLLM.

    Sampled pairs of tokens must follow the target's distribution.
    """
    num_requests, drafts = 6000, [1, 3]
    probabilities = [[0.1, 0.35, 0.3, 0.2, 0.05], [0.25, 0.05, 0.2, 0.1, 0.4]]
    job = json.dumps({"num_requests": num_requests, "drafts": drafts, "probabilities": probabilities})
    completed = subprocess.run(
        [sys.executable, "-c", _SAMPLES, job], capture_output=True, text=True, timeout=120, check=False
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    counts = Counter(map(tuple, json.loads(completed.stdout.splitlines()[-1])))
    # If the first draft token is rejected, the step ends.
    expected = {(token, -1): probability for token, probability in enumerate(probabilities[0]) if token != 1}
    expected |= {(1, token): probabilities[0][1] * probability for token, probability in enumerate(probabilities[1])}
    assert counts.total() == num_requests
    assert p_value(counts, expected) > 1e-4, counts
    # The test must detect a sampler that overweights drafts, as if the head had given probabilities.
    biased = expected | {(1, 3): expected[1, 3] * 1.5, (1, 4): expected[1, 4] - expected[1, 3] / 2}
    assert power(expected, biased, num_requests, 1e-4) > 0.98


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_log_probability_is_that_of_the_most_likely_token(dtype, tolerance):
    logits = (3 * torch.randn(5, 16_384)).to(dtype)
    expected = logits.float().log_softmax(dim=-1).amax(dim=-1)
    assert torch.allclose(vllm_drafts._top_log_probability(logits, num_shards=1), expected, atol=tolerance)
