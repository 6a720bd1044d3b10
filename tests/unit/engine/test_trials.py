"""Trial compilation of grammars, in a real or a fake process."""

import asyncio
import faulthandler
import json
import os
import signal
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import xgrammar

from peagle.engine import trial_process
from peagle.engine import trials as module
from peagle.engine.trials import (
    REQUESTER,
    TrialRefused,
    Trials,
    TrialsBusy,
    _FairLock,
    _specs,
    check_schema,
    guard_engine,
)
from peagle.errors import ConfigError

BYTES = [bytes([value]) for value in range(256)]  # a vocabulary with a token for each byte
KINDS = ("json", "regex", "grammar", "choice", "structural_tag")


def constraint(**fields):
    return SimpleNamespace(**{**dict.fromkeys(KINDS), **fields})


def object_schema(num_optional):
    return {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(num_optional)}}


def vocabulary():
    return {"tokenizer": xgrammar.TokenizerInfo(BYTES, vocab_size=256, stop_token_ids=[0]).serialize_json()}


@pytest.fixture(scope="module")
def try_constraint(embedded_target):
    """A function that returns the refusal of a constraint, or None. All calls share one trial process."""
    settings = {"model": str(embedded_target), "revision": None, "vocab_size": 49152}
    trials = Trials(lambda: settings, cpu_s=1.0)

    def refusal_of(**fields):
        try:
            asyncio.run(trials.require(constraint(**fields)))
        except TrialRefused as refusal:
            return str(refusal)
        return None

    yield refusal_of
    trials.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"json": object_schema(5)},
        {"json": json.dumps(object_schema(5))},
        {"regex": "[a-z]{1,10}"},
        {"choice": ["yes", 'no "not"']},
        {"grammar": 'root ::= "a" | "b"'},
        {"grammar": 'start: "a" | "b"'},
        {
            "structural_tag": json.dumps(
                {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
            )
        },
        {"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": "a+"}})},
    ],
    ids=str,
)
def test_valid_constraint_passes(try_constraint, fields):
    assert try_constraint(**fields) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"json": object_schema(3000)},
        {"regex": r"(\w+\s?)*$"},
        {"json": {"type": "string", "pattern": "(.{0,1000}){0,1000}"}},
    ],
)
def test_slow_constraint_is_refused(try_constraint, fields):
    started_at = time.monotonic()
    assert "refused" in try_constraint(**fields)
    assert time.monotonic() - started_at < 60  # the limit is one second of CPU time, but the machine may be slow
    assert try_constraint(json=object_schema(7)) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"$ref": "#"}},
        {"json": {"anyOf": [{"$ref": "#"}]}},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        {"grammar": 'root ::= root "a"'},
        {"grammar": "root ::= a\na ::= b\nb ::= a"},
        {"regex": "[^\\s\\S]"},
    ],
    ids=str,
)
def test_unsatisfiable_constraint_is_refused(try_constraint, fields):
    assert "no token can start a response" in try_constraint(**fields)


def test_recursion_that_can_end_passes(try_constraint):
    assert try_constraint(grammar='root ::= root "a" | "b"') is None
    assert try_constraint(json={"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]}) is None


def test_large_constraint_is_refused():
    trials = Trials(vocabulary, cpu_s=60.0, memory_bytes=2**21)  # 2 MiB

    async def run_requests():
        await trials.require(constraint(json=object_schema(400)))

    try:
        with pytest.raises(TrialRefused, match="memory"):
            asyncio.run(run_requests())
    finally:
        trials.close()


def test_invalid_grammar_is_left_to_vllm(try_constraint):
    assert try_constraint(regex="(") is None
    assert try_constraint(json="{") is None


def test_verdicts_are_cached_and_the_process_restarts(try_constraint):
    assert try_constraint(json=object_schema(9)) is None
    children = psutil.Process().children()
    child = next(process for process in children if "peagle.engine.trial_process" in process.cmdline())
    child.kill()
    child.wait()
    assert try_constraint(json=object_schema(9)) is None
    assert "peagle.engine.trial_process" not in str([child.cmdline() for child in psutil.Process().children()])
    with pytest.raises(TrialsBusy):
        try_constraint(json=object_schema(10))
    assert try_constraint(json=object_schema(10)) is None


def test_failed_process_makes_trials_busy(monkeypatch):
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    trials = Trials(vocabulary)

    async def run_requests():
        await trials.require(constraint(regex="a"))

    with pytest.raises(TrialsBusy):
        asyncio.run(run_requests())
    trials.close()


@pytest.mark.parametrize(
    ("signal_name", "outcome"),
    [("SIGKILL", "busy"), ("SIGTERM", "busy"), ("SIGALRM", "busy"), ("SIGPROF", "slow"), ("SIGSEGV", "large"),
     ("SIGABRT", "large")],
)  # fmt: skip
def test_only_crashes_and_timeouts_of_the_compiler_are_verdicts(monkeypatch, signal_name, outcome):
    """A kill, for example by the out-of-memory killer, must not become a cached refusal of the schema."""

    def die(*_):
        faulthandler.disable()  # in the child, which must die
        os.kill(os.getpid(), getattr(signal, signal_name))

    monkeypatch.setattr(trial_process, "_compile", die)
    trial = trial_process._compile_in_child(None, None, {}, {"cpu_s": 5.0, "memory_bytes": 2**30})
    assert trial["outcome"] == outcome


@pytest.fixture
def replace_process(monkeypatch):
    """Return a function that replaces the trial process by `run`, which returns the outcome of a constraint."""

    def replace(run):
        process = SimpleNamespace(run=lambda job: run(job["spec"]), close=lambda: None)
        monkeypatch.setattr(module, "_Process", lambda settings: process)

    return replace


def test_refusals_expire(replace_process):
    outcomes, specs, now = ["slow", "ok"], [], [0.0]

    def run(spec):
        specs.append(spec)
        return {"outcome": outcomes.pop(0)}

    replace_process(run)
    trials = Trials(vocabulary, monotonic=lambda: now[0])

    async def run_requests():
        for now_s in (0.0, 599.0):  # refusals are cached for 600 s
            now[0] = now_s
            with pytest.raises(TrialRefused):
                await trials.require(constraint(regex="a"))
        for now_s in (601.0, 1e9):
            now[0] = now_s
            await trials.require(constraint(regex="a"))

    asyncio.run(run_requests())
    assert specs == ["a", "a"]  # tried again when the refusal had expired
    trials.close()


def test_slow_grammars_delay_only_their_requester(replace_process):
    specs, now = [], [0.0]

    def run(spec):
        specs.append(spec)
        return {"outcome": "slow" if spec.startswith("slow") else "ok", "cpu_s": 3.0}

    replace_process(run)
    trials = Trials(vocabulary, is_shared=True, monotonic=lambda: now[0])

    async def outcome(requester, spec):
        REQUESTER.set(requester)
        try:
            await trials.require(constraint(regex=spec))
        except (TrialRefused, TrialsBusy) as error:
            return type(error)
        return None

    async def run_requests():
        # After ten seconds of CPU time for refused trials, a requester must wait.
        assert [await outcome("mallory", f"slow {n}") for n in range(6)] == [TrialRefused] * 4 + [TrialsBusy] * 2
        assert [await outcome("alice", f"good {n}") for n in range(20)] == [None] * 20
        assert await outcome("mallory", "good 0") is None  # a cached verdict needs no trial
        now[0] = 60.0
        assert await outcome("mallory", "slow 9") is TrialRefused

    asyncio.run(run_requests())
    assert len(specs) == 4 + 20 + 1
    trials.close()


@pytest.fixture
def blocked_trials(replace_process):
    """Shared trials, the list of constraints that were tried, and an event that lets the trials end."""
    specs, may_end = [], threading.Event()

    def run(spec):
        specs.append(spec)
        while not may_end.is_set():
            time.sleep(0.005)
        return {"outcome": "ok"}

    replace_process(run)
    trials = Trials(vocabulary, is_shared=True)
    yield trials, specs, may_end
    trials.close()


async def require_for(trials, requester, spec):
    REQUESTER.set(requester)
    await trials.require(constraint(regex=spec))


def test_requester_with_many_trials_delays_only_itself(blocked_trials):
    """Five of mallory's trials wait, and the others are refused. Alice's trial is one of the next."""
    trials, specs, may_end = blocked_trials

    async def run_requests():
        flood = [asyncio.create_task(require_for(trials, "mallory", f"m{index}")) for index in range(50)]
        await asyncio.sleep(0.05)
        alice = asyncio.create_task(require_for(trials, "alice", "a"))
        await asyncio.sleep(0.05)
        may_end.set()
        outcomes = await asyncio.gather(*flood, alice, return_exceptions=True)
        return sum(isinstance(outcome, TrialsBusy) for outcome in outcomes[:-1]), outcomes[-1]

    num_refused, alice_outcome = asyncio.run(run_requests())
    assert (num_refused, alice_outcome) == (50 - 5, None)
    assert specs.index("a") <= 2


def test_concurrent_requests_with_the_same_constraint_share_a_trial(blocked_trials):
    trials, specs, may_end = blocked_trials

    async def run_requests():
        requests = [asyncio.create_task(require_for(trials, f"k{index}", "same")) for index in range(20)]
        await asyncio.sleep(0.05)
        may_end.set()
        await asyncio.gather(*requests)

    asyncio.run(run_requests())
    assert specs == ["same"]


def test_trial_of_a_disconnected_client_continues_and_counts(blocked_trials):
    trials, specs, may_end = blocked_trials

    async def run_requests():
        num_busy = 0
        for index in range(30):
            request = asyncio.create_task(require_for(trials, "mallory", f"m{index}"))
            await asyncio.sleep(0.01)
            num_busy += request.done() and isinstance(request.exception(), TrialsBusy)
            request.cancel()
        may_end.set()
        await asyncio.sleep(0.2)
        return num_busy

    assert asyncio.run(run_requests()) == 30 - 5
    assert len(specs) == 5


def test_requesters_take_turns():
    async def run_requests():
        lock, served = _FairLock(), []

        async def work(requester):
            await lock.acquire(requester)
            served.append(requester)
            await asyncio.sleep(0)
            lock.release()

        await asyncio.gather(*(work(requester) for requester in "aaaabbc"))
        await work("d")
        return "".join(served)

    assert asyncio.run(run_requests()) == "aabcabad"


class FakeClient:
    """A fake `AsyncLLM` whose model has 100 token ids."""

    model_config = SimpleNamespace(get_vocab_size=lambda: 100)

    def __init__(self, engine_requests):
        self._engine_requests = engine_requests

    async def add_request(self, request_id, prompt, params, **options):
        self._engine_requests.append((request_id, options))


def test_invalid_token_ids_do_not_reach_the_engine():
    from vllm.exceptions import VLLMValidationError

    engine_requests, params = [], SimpleNamespace(structured_outputs=None)
    client = FakeClient(engine_requests)
    guard_engine(client, Trials(vocabulary))

    async def run_requests():
        await client.add_request("last id", {"type": "token", "prompt_token_ids": [0, 99]}, params)
        await client.add_request("bulk", {"prompt_token_ids": [99]}, params)
        await client.add_request("media placeholder", {"type": "multimodal", "prompt_token_ids": [200]}, params)
        for ids in ([100], [5, 101], [-1]):
            with pytest.raises(VLLMValidationError, match=f"token id {ids[-1]}, but the model only has ids 0 to 99"):
                await client.add_request("unknown", {"type": "token", "prompt_token_ids": ids}, params)

    asyncio.run(run_requests())
    assert [name for name, _ in engine_requests] == ["last id", "bulk", "media placeholder"]


@pytest.mark.parametrize(("outcome", "status"), [("slow", None), ("busy", 429), ("ok", None)])
def test_refused_constraints_do_not_reach_the_engine(replace_process, outcome, status):
    from vllm.exceptions import GracefulHTTPError, VLLMValidationError

    engine_requests = []
    replace_process(lambda spec: {"outcome": outcome})
    client = FakeClient(engine_requests)
    guard_engine(client, Trials(vocabulary))

    async def run_requests():
        await client.add_request("plain", "p", SimpleNamespace(structured_outputs=None), priority=1)
        await client.add_request("constrained", "p", SimpleNamespace(structured_outputs=constraint(regex="a")))

    if outcome == "ok":
        asyncio.run(run_requests())
    else:
        with pytest.raises(VLLMValidationError if outcome == "slow" else GracefulHTTPError) as raised:
            asyncio.run(run_requests())
        assert getattr(raised.value, "http_status", None) == status
    assert engine_requests[0] == ("plain", {"priority": 1})
    assert len(engine_requests) == (2 if outcome == "ok" else 1)


def test_all_kinds_of_constraints_are_tried():
    from vllm.sampling_params import StructuredOutputsParams

    kinds = {name for name in StructuredOutputsParams.__dataclass_fields__ if not name.startswith("_")}
    settings = {"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"}
    assert kinds - settings - {"json_object"} == set(KINDS)
    for kind, spec in {
        "json": "{}",
        "regex": "a",
        "choice": ["a"],
        "grammar": "root ::= a",
        "structural_tag": "{}",
    }.items():
        assert len(list(_specs(StructuredOutputsParams(**{kind: spec})))) == 1
    assert list(_specs(StructuredOutputsParams(json_object=True))) == []


def test_check_schema_refuses_a_slow_schema(embedded_target):
    settings = {"model": str(embedded_target), "revision": None, "vocab_size": 49152}
    check_schema(json.dumps(object_schema(5)), **settings)
    with pytest.raises(ConfigError, match=r"json_schema: .*CPU time"):
        check_schema(json.dumps(object_schema(3000)), **settings)
