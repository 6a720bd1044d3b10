import dataclasses
import json

import pytest

from peagle.economics.prices import PriceTable
from peagle.economics.report.data import check_report
from peagle.errors import PeagleError


def test_a_report_survives_its_file(with_drafter):
    assert check_report(json.loads(json.dumps(with_drafter))) == with_drafter
    assert with_drafter["schema"] == 1


def test_the_shares_are_those_of_the_cost(make_report):
    report = make_report(busy_s=50.0, lost_s=10.0, idle_s=10.0)
    assert report["shares"] == pytest.approx({"load": 0.2, "compile": 0.1, "busy": 0.5, "idle": 0.1, "lost": 0.1})
    assert report["account"]["usd"]["total"] == pytest.approx(100 * 0.20 / 3600)


def test_a_clean_run_has_no_notes(with_drafter):
    assert with_drafter["notes"] == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lost_s": 20.0}, "13% of the cost was lost work: 800 tokens"),
        ({"idle_s": 20.0}, "13% of the cost was idle time"),
        ({"busy_s": 20.0}, "60% of the cost went into loading and compiling"),
        ({"num_failed_rows": 3}, "3 rows could not be done"),
        ({"complete": False, "num_input_rows": 400}, "not finished: 40 of 400 rows"),
        ({"complete": False}, "not finished: 40 rows"),
        (
            {"num_drafts": 100, "accepted": (48, 10, 2), "break_even_acceptance_length": 4.2},
            "The drafter costs more than it saves: 1.60 tokens a step, and this hardware needs 4.20",
        ),
        ({"num_drafts": 100, "accepted": (1, 0, 0)}, "nearly every draft is rejected"),
    ],
)
def test_what_the_reader_should_not_miss_is_said_once(make_report, changes, expected):
    notes = make_report(**changes)["notes"]
    assert len(notes) == 1
    assert expected in notes[0]


def test_ten_percent_of_waste_is_not_yet_worth_a_note(make_report):
    assert make_report(busy_s=130.0, lost_s=19.9, idle_s=19.9)["notes"] == []


def test_a_doubtful_price_is_said(make_report):
    doubtful = dataclasses.replace(PriceTable.load().price("a4-highgpu-8g"), num_devices=8)
    (note,) = make_report(price=doubtful)["notes"]
    assert note.startswith("The price may be wrong: the catalogue's")


@pytest.mark.parametrize("report", [None, {}, {"schema": 2}, {"schema": 1, "run": {}, "account": {}}])
def test_what_is_no_report_is_refused(report):
    with pytest.raises(PeagleError, match=r"peagle report RUN|lacks notes, shares"):
        check_report(report)
