import pytest

from peagle.economics.baseline import Baseline, StepTimes, recorded_baseline
from peagle.errors import PeagleError

BASELINE = Baseline(
    source="bench",
    steps=(
        StepTimes(concurrency=1, step_s=0.030, plain_step_s=0.020, error=0.02),
        StepTimes(concurrency=4, step_s=0.060, plain_step_s=0.020, error=0.05),
        StepTimes(concurrency=8, step_s=0.080, plain_step_s=0.040),
    ),
)


def test_step_times_are_interpolated():
    assert BASELINE.at(0.3) == BASELINE.at(1) == BASELINE.steps[0]
    between = BASELINE.at(2)
    assert (between.step_s, between.plain_step_s, between.error) == (pytest.approx(0.040), pytest.approx(0.020), 0.05)
    assert between.break_even == pytest.approx(2.0)
    assert BASELINE.at(4).step_s == 0.060
    assert BASELINE.at(6).error is None, "the error at concurrency 8 is unknown"
    assert BASELINE.at(64) == BASELINE.steps[2]


def test_baseline_as_text_round_trip():
    assert Baseline.from_text(BASELINE.to_text()) == BASELINE
    assert Baseline.from_text("") is None


@pytest.mark.parametrize(
    "data",
    [
        [], {"source": "a"}, {"source": "a", "steps": []}, {"source": "a", "steps": [{"concurrency": 1}]},
        {"source": "a", "steps": [{"concurrency": 1, "step_s": 0, "plain_step_s": 1}]},
        {"source": "a", "steps": [{"concurrency": 0.5, "step_s": 1, "plain_step_s": 1}]},
        {"source": "a", "steps": [{"concurrency": 1, "step_s": "1", "plain_step_s": 1}]},
        {"source": "a", "steps": [{"concurrency": 1, "step_s": float("nan"), "plain_step_s": 1}]},
        {"source": "a", "steps": [{"concurrency": 1, "step_s": 1, "plain_step_s": 1, "error": -1}]},
        {"source": "a", "steps": [{"concurrency": number, "step_s": 1, "plain_step_s": 1} for number in (2, 1)]},
    ],
)  # fmt: skip
def test_invalid_baselines_are_refused(data):
    with pytest.raises(ValueError, match=r"."):
        Baseline.from_dict(data)


def test_missing_baseline_is_none_and_a_damaged_one_is_refused():
    assert recorded_baseline({}) is recorded_baseline({"baseline": None}) is None
    with pytest.raises(PeagleError, match="damaged"):
        recorded_baseline({"baseline": {"steps": 5}})
