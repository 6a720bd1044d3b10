"""An engine that is up for a while: why it did not start is told by what it printed, and by nothing before."""

import dataclasses
import mmap
import os
import time
from pathlib import Path
from typing import Any

import pytest

from peagle import hardware
from peagle.bench import engine
from peagle.bench.engine import PeakMemory, memory_reader, tree_rss_gib, with_engine
from peagle.engine.fake import FakeEngine, FakeTraits
from peagle.engine.spec import EngineSpec
from peagle.errors import EngineError
from peagle.hardware import Hardware


def failing(*lines: str) -> Any:
    def start(*_: Any) -> Any:
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
def test_the_cause_is_that_of_this_start_and_not_of_an_earlier_one(
    lines: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # set by a start; put back afterwards
    log = tmp_path / "none-k0.log"
    for start, told in (
        (failing("ValueError: the KV cache is too small"), "vLLM did not start: ValueError: the KV cache is too small"),
        (failing(*lines), message),
    ):
        with pytest.raises(EngineError) as failed:
            with_engine(EngineSpec(model="m"), hardware.detect(), start, log, lambda *_: pytest.fail("it is not up"))
        assert failed.value.message == told
    assert "KV cache" in log.read_text(), "earlier prints are kept"


def test_an_engine_whose_answers_are_not_its_targets_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    ended = []

    class Fake(FakeEngine):
        def shutdown(self) -> None:
            ended.append(self.self_check)

    async def use(engine: Any, _: float) -> Any:
        return engine.self_check

    log = tmp_path / "none-k0.log"

    def start(*_: Any) -> Fake:
        os.write(2, b"WARNING 11-21 11:36:04 [cpu.py:1] no libtcmalloc: this is slow\n")
        return Fake(FakeTraits(is_wrong=is_wrong))

    def outcome() -> Any:
        return with_engine(EngineSpec(model="m"), hardware.detect(), start, log, use)

    is_wrong = False
    assert outcome().outcome == "passed"
    is_wrong = True
    with pytest.raises(EngineError, match="failed its self-check"):
        outcome()
    assert [check.outcome for check in ended] == ["passed", "failed"], "it is shut down all the same"
    said = capfd.readouterr().err
    assert "peagle: self-check failed: token 1 of its greedy answer is '0'" in log.read_text() + said
    assert said.count("warning of an engine's start: no libtcmalloc: this is slow") == 2


PAGE_GIB = os.sysconf("SC_PAGE_SIZE") / 1024**3
GPU = Hardware(platform="cuda", accelerator="H100", num_accelerators=1, memory_gib=80, free_memory_gib=80, num_cpus=8)


def write_process(proc: Path, pid: int, parent: int, pages: int) -> None:
    (proc / str(pid)).mkdir()
    fields = ["S", str(parent), *["0"] * 19, str(pages), "0"]
    (proc / str(pid) / "stat").write_text(f"{pid} (a (strange) name) {' '.join(fields)}")


def test_a_process_and_all_below_it_are_added_up(tmp_path: Path) -> None:
    for pid, parent, pages in ((10, 1, 100), (11, 10, 20), (12, 11, 3), (13, 1, 5000)):
        write_process(tmp_path, pid, parent, pages)
    assert tree_rss_gib(10, tmp_path) == pytest.approx(123 * PAGE_GIB)
    assert tree_rss_gib(99, tmp_path) is None


def test_this_process_holds_what_it_allocates() -> None:
    block = 200 * 1024**2
    before = tree_rss_gib()
    with mmap.mmap(-1, block) as pages:  # an allocator may hand out what it has kept of an earlier test
        pages.write(b"x" * block)
        after = tree_rss_gib()
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(block / 1024**3, abs=0.05)


def test_the_largest_reading_counts_also_one_in_between() -> None:
    readings = iter([1.0, 7.0, None])
    with PeakMemory(lambda: next(readings, 2.0), every_s=0.01) as peak:
        time.sleep(0.2)
    assert peak.gib == 7.0


def test_on_a_gpu_what_was_in_use_before_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([3.0, 60.0, None])
    monkeypatch.setattr(engine, "device_gib", lambda: next(readings))
    read = memory_reader(GPU)
    assert read() == 57.0
    assert read() is None


def test_a_target_in_int8_is_converted_before_its_engine_starts(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    started: list[EngineSpec] = []

    def start(spec: EngineSpec, _: Hardware) -> FakeEngine:
        started.append(spec)
        return FakeEngine(FakeTraits())

    async def use(_engine: Any, _start_s: float) -> None: ...

    log, vnni = tmp_path / "peagle-k3.log", dataclasses.replace(hardware.detect(), cpu_flags=frozenset({"avx512_vnni"}))
    with_engine(EngineSpec(model=str(target), precision="int8"), vnni, start, log, use)
    assert [Path(spec.model).parent for spec in started] == [tmp_path / "targets"]
    assert f"converting {target}" in log.read_text() + capfd.readouterr().err
