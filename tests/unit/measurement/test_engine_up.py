"""An engine that is up for a while: why it did not start is told by what it printed, and by nothing before."""

import os
from pathlib import Path
from typing import Any

import pytest

from peagle import hardware
from peagle.engine.fake_engine import FakeEngine
from peagle.engine.spec import EngineSpec
from peagle.errors import EngineError
from peagle.measurement.engine_up import with_engine


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
        return Fake(is_wrong=is_wrong)

    def outcome() -> Any:
        return with_engine(EngineSpec(model="m"), hardware.detect(), start, log, use)

    is_wrong = False
    assert outcome().outcome == "passed"
    is_wrong = True
    with pytest.raises(EngineError, match="its answers are not its target's"):
        outcome()
    assert [check.outcome for check in ended] == ["passed", "failed"], "it is shut down all the same"
    said = capfd.readouterr().err
    assert "peagle: self-check failed: token 1 of its greedy answer is '0'" in log.read_text() + said
    assert said.count("warning of an engine's start: no libtcmalloc: this is slow") == 2
