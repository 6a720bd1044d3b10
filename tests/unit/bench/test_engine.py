import asyncio
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from usage_records import drafts

from peagle import hardware
from peagle.bench import engine as bench_engine
from peagle.bench.engine import drafts_between, memory_reader, run_pass, tree_rss_gib, with_engine
from peagle.bench.prompts import BenchPrompt
from peagle.engine.fake import FakeEngine, FakeTraits
from peagle.engine.interface import RequestRefused
from peagle.engine.spec import EngineSpec
from peagle.errors import EngineError
from peagle.hardware import Hardware
from peagle.speculation import SpeculationStats


def failing_start(*lines):
    def start(*_):
        for line in lines:
            os.write(2, f"(EngineCore pid=7) ERROR 11-21 11:36:04 [core.py:1374] {line}\n".encode())
        raise EngineError("vLLM did not start: see above")

    return start


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["OSError: the disk is full"], "vLLM did not start: OSError: the disk is full"),
        ([], "vLLM did not start: see above"),
    ],
)
def test_error_has_the_cause_from_the_log_of_the_last_start(lines, message, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # with_engine sets it; monkeypatch restores it
    log = tmp_path / "none-k0.log"
    for start, expected in (
        (
            failing_start("ValueError: the KV cache is too small"),
            "vLLM did not start: ValueError: the KV cache is too small",
        ),
        (failing_start(*lines), message),
    ):
        with pytest.raises(EngineError) as error:
            with_engine(
                EngineSpec(model="m"), hardware.detect(), start, log, lambda *_: pytest.fail("the engine did not start")
            )
        assert error.value.message == expected
    assert "KV cache" in log.read_text(), "the log of the earlier start is kept"


def test_failed_self_check_stops_the_measurement(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    checks = []

    class CheckedEngine(FakeEngine):
        def shutdown(self):
            checks.append(self.self_check)

    async def use(engine, _):
        return engine.self_check

    log = tmp_path / "none-k0.log"

    def start(*_):
        os.write(2, b"WARNING 11-21 11:36:04 [cpu.py:1] no libtcmalloc: this is slow\n")
        return CheckedEngine(FakeTraits(is_wrong=is_wrong))

    def start_and_check():
        return with_engine(EngineSpec(model="m"), hardware.detect(), start, log, use)

    is_wrong = False
    assert start_and_check().outcome == "passed"
    is_wrong = True
    with pytest.raises(EngineError, match="failed its self-check"):
        start_and_check()
    assert [check.outcome for check in checks] == ["passed", "failed"], "a failed engine is shut down, too"
    stderr = capfd.readouterr().err
    assert "peagle: self-check failed: token 1 of the greedy answer is '0'" in log.read_text() + stderr
    assert stderr.count("warning from an engine's start: no libtcmalloc: this is slow") == 2


GPU = Hardware(platform="cuda", accelerator="H100", num_accelerators=1, memory_gib=80, free_memory_gib=80, num_cpus=8)


def test_memory_of_a_process_includes_its_descendants():
    grandchild = "x = bytearray(2**27); print('up', flush=True); input()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", child], **pipes) as process:
        assert process.stdout.readline() == "up\n"
        assert 2**27 / 1024**3 < tree_rss_gib(process.pid) < 2**28 / 1024**3
        assert tree_rss_gib() > tree_rss_gib(process.pid)
        process.communicate("\n")
    assert tree_rss_gib(process.pid) is None


def test_gpu_memory_excludes_what_was_used_before(monkeypatch):
    readings = iter([3.0, 60.0, None])
    monkeypatch.setattr(bench_engine, "device_gib", lambda: next(readings))
    read = memory_reader(GPU)
    assert read() == 57.0
    assert read() is None


def test_target_in_int8_is_converted_before_its_engine_starts(target, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    specs: list[EngineSpec] = []

    def start(spec, _):
        specs.append(spec)
        return FakeEngine(FakeTraits())

    async def use(_engine, _start_s): ...

    log, vnni = tmp_path / "peagle-k3.log", dataclasses.replace(hardware.detect(), cpu_flags=frozenset({"avx512_vnni"}))
    with_engine(EngineSpec(model=str(target), precision="int8"), vnni, start, log, use)
    assert [Path(spec.model).parent for spec in specs] == [tmp_path / "targets"]
    assert f"converting {target}" in log.read_text() + capfd.readouterr().err


PROMPTS = [BenchPrompt(token_ids=[i], category=None) for i in range(6)]
SAMPLING = {"temperature": 0.0, "max_tokens": 20}


@pytest.fixture(autouse=True)
def no_waiting_for_counters(monkeypatch):
    monkeypatch.setattr(bench_engine, "_COUNTERS_SETTLE_S", 0.0)


class RecordingEngine(FakeEngine):
    """Records the requests and their concurrency, and refuses the request with the id `refused`."""

    def __init__(self, refused=""):
        super().__init__(num_speculative_tokens=2)
        self.requests: list[tuple[str, int]] = []
        self.max_running = self._running = 0
        self._refused = refused

    async def generate(self, request_id, prompt, sampling):
        if request_id == self._refused:
            raise RequestRefused("not this one")
        self.requests.append((request_id, sampling["max_tokens"]))
        self._running += 1
        self.max_running = max(self.max_running, self._running)
        try:
            return await super().generate(request_id, prompt, sampling)
        finally:
            self._running -= 1


def run(engine, concurrency=2, num_warm_up=1):
    progress: list[tuple[int, int]] = []
    result = asyncio.run(
        run_pass(
            engine,
            PROMPTS,
            sampling=SAMPLING,
            concurrency=concurrency,
            progress=lambda done, total: progress.append((done, total)),
            num_warm_up=num_warm_up,
        )
    )
    return result, progress


def test_pass_runs_the_given_number_of_concurrent_requests():
    engine = RecordingEngine()
    result, progress = run(engine, concurrency=3)
    assert engine.max_running == 3
    assert [request for request, _ in engine.requests[1:]] == [str(i) for i in range(6)]
    assert len(result.completed) == 6
    assert progress == [(i, 6) for i in range(1, 7)]


def test_warm_up_requests_are_not_measured():
    engine = RecordingEngine()
    result, _ = run(engine, concurrency=4, num_warm_up=4)
    assert engine.requests[:4] == [(f"warm-up-{i}", 8) for i in range(4)]
    assert result.drafted == sum(
        (generation.speculation for generation in result.completed if generation.speculation),
        start=SpeculationStats.empty(),
    )


def test_refused_request_has_no_answer():
    result, progress = run(RecordingEngine(refused="2"))
    assert [answer is None for answer in result.answers] == [False, False, True, False, False, False]
    assert result.generations[2] is None
    assert progress[-1] == (6, 6)


def test_drafts_between_two_readings_are_their_difference():
    assert drafts_between(drafts(10, 6, 3), drafts(4, 3, 1)) == drafts(6, 3, 2)
    assert drafts_between(drafts(10, 6, 3), SpeculationStats.empty()) == drafts(10, 6, 3)
    assert drafts_between(None, drafts(1, 1)) is None
