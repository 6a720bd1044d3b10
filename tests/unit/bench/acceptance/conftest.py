"""A target and heads of which only `config.json` is read, and engines that are fakes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_only import write_head

from peagle.bench.acceptance_cells import CellResult
from peagle.engine.fake import FakeEngine
from peagle.engine.spec import EngineSpec
from peagle.hardware import Hardware
from peagle.speculation import SpeculationStats


class Bytes:
    """A token is a byte; the chat template is as plain as can be."""

    chat_template = "plain"

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, conversation: Any, **_: Any) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in conversation)


class Starter:
    """Starts fakes and remembers what it was asked for, and which of them are still up."""

    def __init__(self) -> None:
        self.specs: list[EngineSpec] = []
        self.engines: list[RecordingEngine] = []

    def __call__(self, spec: EngineSpec, hardware: Hardware) -> "RecordingEngine":
        assert all(engine.is_down for engine in self.engines), "one engine at a time"
        assert spec.drafter is not None
        self.specs.append(spec)
        self.engines.append(RecordingEngine(num_speculative_tokens=spec.drafter.num_speculative_tokens))
        return self.engines[-1]


class RecordingEngine(FakeEngine):
    """Counts how many requests are in it at once, and notes that it was shut down."""

    is_down = False
    num_running = most_running = 0

    async def generate(self, *args: Any) -> Any:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            return await super().generate(*args)
        finally:
            self.num_running -= 1

    def shutdown(self) -> None:
        self.is_down = True


@pytest.fixture
def head(tmp_path: Path) -> Callable[..., Path]:
    """Make a head: its path below the test's folder, its kind, and what sets it apart from others."""

    def make(path: str = "heads/mine/head", kind: str = "peagle", **changes: Any) -> Path:
        return write_head(tmp_path / path, kind, path=path, **changes)

    return make


def result(**changes: Any) -> CellResult:
    """Ten drafts at K=3 in two seconds: 7, 3 and 1 accepted."""
    values: dict[str, Any] = {
        "drafter": "mine", "method": "peagle", "fingerprint": "f", "k": 3, "start_s": 20.0, "wall_s": 2.0,
        "num_responses": 2, "num_refused": 0, "num_output_tokens": 21,
        "speculation": SpeculationStats(num_drafts=10, num_draft_tokens=30, accepted_per_position=(7, 3, 1)),
        "by_category": {}, "measured_at": "2026-11-21T10:00:00Z",
    }  # fmt: skip
    return CellResult(**(values | changes))
