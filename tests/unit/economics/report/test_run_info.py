import pytest

from peagle.economics.report.run_info import RUN_KEYS, RunInfo
from peagle.errors import PeagleError


def test_only_the_model_is_required():
    info = RunInfo.from_dict({"model": "smollm2-135m"})
    assert info.label == "smollm2-135m, no drafter"
    assert info.complete is None
    assert set(info.to_dict()) == set(RUN_KEYS)


def test_the_label_names_the_drafter_unless_one_is_given():
    drafted = {"model": "m", "drafter": "peagle", "num_speculative_tokens": 5}
    assert RunInfo.from_dict(drafted).label == "m with peagle K=5"
    assert RunInfo.from_dict({**drafted, "label": "nightly"}).label == "nightly"


@pytest.mark.parametrize(
    "moment", [1_780_000_000, 1_780_000_000.4, "2026-05-28T20:26:40Z", "2026-05-28T22:26:40+02:00"]
)
def test_times_become_utc(moment):
    assert RunInfo(model="m", started_at=moment).started_at == "2026-05-28T20:26:40+00:00"


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ({}, "needs the run's model"),
        ({"model": None}, "model is None: that is not of type str"),
        ({"model": "m", "drater": "x"}, "(?s)no 'drater'.*drafter"),
        ({"model": "m", "concurrency": "8"}, "concurrency is '8': that is not of type int"),
        ({"model": "m", "concurrency": 1.5}, "not of type int"),
        ({"model": "m", "concurrency": True}, "not of type int"),
        ({"model": "m", "complete": 1}, "not of type bool"),
        ({"model": "m", "sampling": [0]}, "not of type dict"),
        ({"model": "m", "started_at": "yesterday"}, "that is no time"),
        ({"model": "m", "finished_at": 1e30}, "that is no time"),
    ],
)
def test_wrong_information_is_refused_by_name(run, reason):
    with pytest.raises(PeagleError, match=reason):
        RunInfo.from_dict(run)
