from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.economics.baseline import Baseline, StepTimes
from peagle.economics.prices import PriceTable
from peagle.economics.savings import Savings, spot_savings, work_savings
from peagle.economics.usage import Work

STEPS = Baseline(source="bench", steps=(StepTimes(concurrency=8, step_s=0.080, plain_step_s=0.040, error=0.1),))
WORK = Work(
    num_requests=1, num_output_tokens=2501, num_drafts=1000, num_accepted_tokens=1500, busy_s=12.0, request_s=96.0,
    usd=0.12,
)  # fmt: skip


def test_savings_of_a_drafter():
    savings = work_savings(WORK, has_drafter=True, baseline=STEPS)
    assert (savings.prompt_usd, savings.generation_usd) == (pytest.approx(0.02), pytest.approx(0.10))
    assert (savings.undrafted_usd, savings.saved_usd) == (pytest.approx(0.125), pytest.approx(0.025))
    assert savings.error_usd == pytest.approx(0.0125)
    assert (savings.acceptance_length, savings.break_even) == (2.5, pytest.approx(2.0))
    assert savings.loss_note("head for m") is None


def test_steps_without_verified_drafts_are_counted():
    assert work_savings(replace(WORK, num_drafts=600), has_drafter=True, baseline=STEPS) == work_savings(
        WORK, has_drafter=True, baseline=STEPS
    )


def test_loss_has_a_note_if_it_exceeds_the_error():
    large_loss = work_savings(
        replace(WORK, num_output_tokens=1501, num_accepted_tokens=500), has_drafter=True, baseline=STEPS
    )
    assert large_loss.saved_usd == pytest.approx(-0.025)
    expected = "head for m cost $0.025 more than without, at an acceptance length of 1.50 where 2.00 breaks even"
    assert expected in large_loss.loss_note("head for m")
    small_loss = work_savings(
        replace(WORK, num_output_tokens=1951, num_accepted_tokens=950), has_drafter=True, baseline=STEPS
    )
    assert small_loss.saved_usd < 0
    assert small_loss.loss_note("head for m") is None


def test_generation_costs_at_most_the_busy_time():
    slow = Baseline(source="a slower machine", steps=(StepTimes(concurrency=1, step_s=1.0, plain_step_s=0.5),))
    savings = work_savings(WORK, has_drafter=True, baseline=slow)
    assert (savings.prompt_usd, savings.generation_usd, savings.undrafted_usd) == (0.0, 0.12, pytest.approx(0.15))
    assert savings.to_dict()["speculation"]["error_usd"] is None


def test_work_without_a_drafter_has_no_savings():
    plain = Baseline(source="bench", steps=(StepTimes(concurrency=8, step_s=0.040, plain_step_s=0.040),))
    work = replace(WORK, num_drafts=0, num_accepted_tokens=0, busy_s=20.0, request_s=160.0)
    savings = work_savings(work, has_drafter=False, baseline=plain)
    assert savings.generation_usd == pytest.approx(0.12 * (2500 * 0.040 / 8) / 20.0)
    assert savings.to_dict()["speculation"] == Savings().to_dict()["speculation"]


@pytest.mark.parametrize(
    ("work", "baseline"),
    [
        (WORK, None),
        (replace(WORK, request_s=0.0), STEPS),
        (replace(WORK, busy_s=0.0), STEPS),
        (replace(WORK, num_drafts=0, num_accepted_tokens=0), STEPS),
    ],
    ids=["no baseline", "unknown concurrency", "no busy seconds", "no draft counts"],
)
def test_savings_without_data_are_unknown(work, baseline):
    savings = work_savings(work, has_drafter=True, baseline=baseline).to_dict()
    assert savings["speculation"]["usd"] is None
    assert savings["prompt_usd"] is savings["generation_usd"] is None
    assert savings["speculation"]["unknown_usd"] == savings["unsplit_usd"] == 0.12


def test_spot_savings_include_the_cost_of_lost_work():
    spot = PriceTable.load().price("p5.48xlarge", market="spot", region="us-east-1")
    ratio = spot.on_demand_usd_per_hour / spot.usd_per_hour
    savings = spot_savings(spot, kept_usd=9.0, lost_usd=1.0).to_dict()["spot"]
    assert savings["spot_usd"] == 10.0
    assert savings["on_demand_usd"] == pytest.approx(9.0 * ratio)
    assert savings["usd"] == pytest.approx(9.0 * ratio - 10.0)
    unknown = spot_savings(replace(spot, on_demand_usd_per_hour=None), kept_usd=9.0, lost_usd=1.0).to_dict()["spot"]
    assert (unknown["usd"], unknown["unknown_usd"]) == (None, 10.0)
    assert spot_savings(PriceTable.load().price("c7a.large"), kept_usd=9.0, lost_usd=1.0) == Savings()


@st.composite
def work_records(draw):
    num_drafts = draw(st.integers(0, 1000))
    return Work(
        num_requests=1,
        num_output_tokens=draw(st.integers(1, 5000)),
        num_drafts=num_drafts,
        num_accepted_tokens=draw(st.integers(0, 4 * num_drafts)),
        busy_s=draw(st.floats(0, 100)),
        request_s=draw(st.floats(0, 1000)),
        usd=draw(st.floats(0, 10)),
    )


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(items=st.lists(st.tuples(work_records(), st.booleans(), st.sampled_from([None, STEPS])), max_size=6))
def test_savings_add_up_in_any_order(items):
    parts = [work_savings(work, has_drafter=has_drafter, baseline=baseline) for work, has_drafter, baseline in items]
    total = sum(parts, Savings())
    total_usd = sum(work.usd for work, _, _ in items)
    assert total.prompt_usd + total.generation_usd + total.unsplit_usd == pytest.approx(total_usd)
    assert total.drafted_usd + total.uncompared_usd <= total_usd + 1e-9
    assert min(total.prompt_usd, total.generation_usd, total.undrafted_usd, total.error_usd) >= 0
    backwards = sum(reversed(parts), Savings())
    assert backwards.saved_usd == pytest.approx(total.saved_usd)
    assert backwards.num_steps == total.num_steps
