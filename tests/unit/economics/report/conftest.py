"""Reports of invented runs, in the proportions of real ones."""

from collections.abc import Callable
from typing import Any

import pytest

from peagle.economics.account import account
from peagle.economics.prices import Price
from peagle.economics.report.data import report_dict
from peagle.economics.usage import EngineSession, UnitUsage
from peagle.speculation import SpeculationStats

PRICE = Price.fixed(usd_per_hour=0.20, device="vcpu", num_devices=2)


@pytest.fixture
def make_report() -> Callable[..., dict[str, Any]]:
    """One engine on 2 vCPUs: 20 s load, 10 s compile; `busy_s` committed, `lost_s` and `idle_s` besides."""

    def make(
        *,
        tokens: int = 4000,
        busy_s: float = 100.0,
        lost_s: float = 0.0,
        idle_s: float = 0.0,
        num_failed_rows: int = 0,
        accepted: tuple[int, ...] = (),
        num_drafts: int = 0,
        price: Price = PRICE,
        **run: object,
    ) -> dict[str, Any]:
        started_at = 1_780_000_000.0
        drafts = SpeculationStats(
            num_drafts=num_drafts, num_draft_tokens=num_drafts * len(accepted), accepted_per_position=accepted
        )
        unit = UnitUsage(
            session_id="a",
            num_rows=40,
            num_failed_rows=num_failed_rows,
            num_prompt_tokens=8000,
            num_cached_tokens=1000,
            num_output_tokens=tokens,
            busy_s=busy_s,
            speculation=drafts,
            started_at=started_at + 30,
            finished_at=started_at + 30 + busy_s,
        )
        session = EngineSession(
            session_id="a",
            engine_index=0,
            hostname="node",
            num_devices=2,
            device=price.device,
            started_at=started_at,
            last_seen_at=started_at + 30 + busy_s + lost_s + idle_s,
            load_s=20.0,
            compile_s=10.0,
            busy_s=busy_s + lost_s,
            idle_s=idle_s,
            num_output_tokens=tokens + round(tokens * lost_s / busy_s),
            ended=True,
        )
        return report_dict(account([unit], [session], price), {"model": "smollm2-135m", **run})

    return make


@pytest.fixture
def with_drafter(make_report):
    return make_report(
        tokens=6000,
        drafter="peagle",
        num_speculative_tokens=3,
        num_drafts=1000,
        accepted=(480, 100, 20),
        precision="bf16",
        concurrency=1,
        num_input_rows=40,
        complete=True,
        sampling={"temperature": 0.0, "max_tokens": 128},
        versions={"vllm": "0.29.0"},
    )


@pytest.fixture
def without_drafter(make_report):
    return make_report(
        precision="bf16",
        concurrency=1,
        num_input_rows=40,
        complete=True,
        sampling={"temperature": 0.0, "max_tokens": 128},
        versions={"vllm": "0.29.0"},
    )
