"""The regret is of the engine that was chosen, and of no other with the same method, K and requests at once."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan import regret
from peagle.profiles.profile import MeasuredCell, Profile, Tuned


def write_profile(path: Path, *, num_slots: int, objective: str = "throughput") -> Path:
    cell = MeasuredCell(
        method="none", k=0, concurrency=4, output_tokens_per_s=90.0, drafter="none", max_num_batched_tokens=num_slots
    )
    profile = Profile(
        peagle_profile=1,
        decision="No speculation: 90.0 output tokens/s, 4 at once.",
        objective={"objective": objective, "max_tpot_ms": None, "max_ttft_ms": None},
        engine={
            "model": "m", "drafter": "none", "precision": "auto", "max_num_seqs": 4,
            "max_num_batched_tokens": num_slots,
        },
        tuned=Tuned(concurrency=4, acceptance_length=None),
        target={"name": "m", "revision": "abc"},
        hardware="a machine",
        versions={},
        dataset={"name": "humaneval", "num_prompts": 164},
        price=None,
        made_at="2026-11-21T22:00:00Z",
        engine_minutes=12.0,
        measurements=[cell],
    )  # fmt: skip
    path.write_text(json.dumps(profile.model_dump(mode="json")))
    return path


def write_report(path: Path, speed: float, **slots: int) -> Path:
    cells = [
        {"method": "none", "k": 0, "concurrency": concurrency, "output_tokens_per_s": speed * concurrency}
        for concurrency in (1, 4)
    ]
    setups = [{"method": "none", "k": 0} | slots]
    path.write_text(json.dumps({"configuration": {"precision": "auto"}, "cells": cells, "setups": setups}))
    return path


def test_the_choice_is_found_by_its_token_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*reports: Path) -> str:
        arguments: list[Any] = ["--profile", write_profile(tmp_path / "profile.yaml", num_slots=512)]
        arguments += [word for report in reports for word in ("--bench", report)]
        monkeypatch.setattr(sys, "argv", ["regret.py", *map(str, arguments)])
        regret.main()
        return capsys.readouterr().out

    auto = write_report(tmp_path / "auto.json", 25.0, max_num_batched_tokens=2052)
    slots = write_report(tmp_path / "512.json", 20.0, max_num_batched_tokens=512)
    assert "regret: 20.0%" in run(auto, slots)
    assert "regret: 0.0%" in run(slots)
    with pytest.raises(SystemExit, match=r"no benchmark has the choice, with .* --max-num-batched-tokens 512"):
        run(auto)
    with pytest.raises(SystemExit, match=r"old\.json does not state token slots: the same `peagle bench`"):
        run(slots, write_report(tmp_path / "old.json", 20.0))


def test_a_benchmark_without_a_price_is_named_where_dollars_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = write_profile(tmp_path / "profile.yaml", num_slots=512, objective="tokens-per-dollar")
    report = write_report(tmp_path / "unpriced.json", 20.0, max_num_batched_tokens=512)
    found = json.loads(report.read_text())
    report.write_text(json.dumps(found | {"cells": [cell | {"tokens_per_usd": None} for cell in found["cells"]]}))
    monkeypatch.setattr(sys, "argv", ["regret.py", "--profile", str(profile), "--bench", str(report)])
    with pytest.raises(SystemExit, match=r"unpriced\.json has no price, hence no tokens_per_usd: .* --usd-per-hour"):
        regret.main()
