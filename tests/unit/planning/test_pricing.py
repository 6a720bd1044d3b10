"""Machines for published speeds: all with that accelerator, and what the others get instead of a guess."""

from pathlib import Path
from typing import Any

import pytest

from peagle.economics.prices import PriceTable
from peagle.errors import ConfigError, PriceError
from peagle.planning.config import PlanConfig
from peagle.planning.plan import make_plan, text_plan

QWEN = "qwen3-coder-30b-a3b-instruct"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def plan(**keys: Any) -> dict[str, Any]:
    return make_plan(PlanConfig(**({"measured": QWEN, "tokens": "2B", "start_s": 300} | keys)))


def test_every_machine_with_the_accelerator_is_compared() -> None:
    found = plan()
    carrying = {offer.instance_type for offer in PriceTable.load().offers if offer.accelerator == "B200"}
    assert {one["instance_type"] for one in found["options"]} == carrying
    assert (found["chosen"]["method"], found["chosen"]["k"], found["chosen"]["concurrency"]) == ("peagle", 7, 128)
    hours = {one["num_engines"]: one["hours"] for one in found["options"] if one["k"] == 7 and one["lost_share"] == 0}
    assert hours[8] == pytest.approx((2e9 / (8 * 23_329) + 300 + 180) / 3600)


def test_the_plan_is_labelled_and_names_the_source() -> None:
    lines = text_plan(plan()).splitlines()
    label = f"! {QWEN} (published, one B200): SPEED-Bench, Code, FP8; AWS machine learning blog"
    assert lines[0].startswith(label)
    assert any("no acceptance lengths are published" in line for line in lines)
    assert not any("no spot price" in line for line in lines), "nobody named those machines"


def test_the_user_says_where() -> None:
    found = plan(provider="lambda", market="on_demand")
    assert {one["place"] for one in found["options"]} == {"lambda us-east-1"}
    with pytest.raises(PriceError, match="no price for a machine with B200") as refused:
        plan(provider="azure")
    assert "--instance-types" in refused.value.hint


def test_another_accelerator_is_refused_with_what_to_measure() -> None:
    with pytest.raises(ConfigError, match=r"was measured on B200, but p5\.48xlarge has H100: its speed") as refused:
        plan(instance_types="p5.48xlarge")
    assert f"measure on it: peagle bench --model {QWEN} --precision fp8 --methods none,peagle" in refused.value.hint


def test_what_is_not_published_is_asked_for_or_refused() -> None:
    with pytest.raises(ConfigError, match="has no start time of an engine") as refused:
        plan(start_s=None)
    assert refused.value.hint == "set --start-s"
    with pytest.raises(ConfigError, match="its latencies are unknown"):
        plan(max_tpot_ms=20)


def test_our_own_report_beside_it_is_compared(sweep: Any) -> None:
    cells = [{"method": "peagle", "k": 7, "concurrency": 128, "output_tokens_per_s": 20_000.0}]
    ours = sweep(model=QWEN, instance_type="p5.48xlarge", cells=cells)
    found = plan(measured=[ours, QWEN], market="on_demand")
    assert {one["measured"] for one in found["options"]} == {"sweep.json", f"{QWEN} (published, one B200)"}
    assert "measured in" in text_plan(found)
