import json

import pytest

from peagle.economics.report.comparison import compare
from peagle.errors import PeagleError


def figure(compared, name):
    return next(row for row in compared["figures"] if row["name"] == name)


def test_ratios_are_to_the_run_without_a_drafter_wherever_it_stands(with_drafter, without_drafter):
    compared = compare([with_drafter, without_drafter])
    assert compared["baseline"] == 1
    assert compared["labels"] == ["peagle K=3", "no drafter"]
    assert figure(compared, "output_tokens_per_s")["values"] == pytest.approx([60, 40])
    assert figure(compared, "output_tokens_per_s")["ratios"] == pytest.approx([1.5, 1])
    assert figure(compared, "tokens_per_usd")["ratios"] == pytest.approx([1.5, 1])
    assert figure(compared, "usd_per_million_tokens")["ratios"] == pytest.approx([1 / 1.5, 1])
    assert figure(compared, "acceptance_length")["ratios"] == [None, None]
    assert figure(compared, "num_rows")["ratios"] == [None, None]
    assert compared["notes"] == []
    assert json.loads(json.dumps(compared)) == compared


def test_without_such_a_run_the_first_is_the_baseline(with_drafter):
    compared = compare([with_drafter, with_drafter])
    assert compared["baseline"] == 0
    assert compared["labels"] == ["peagle K=3 (1)", "peagle K=3 (2)"]


def test_labels_keep_the_models_where_they_differ(make_report):
    compared = compare([make_report(), make_report(model="other")])
    assert compared["labels"] == ["smollm2-135m, no drafter", "other, no drafter"]
    assert compared["notes"] == ["other, no drafter differs from the baseline also in model."]


def test_a_drafter_that_costs_is_told(make_report):
    plain = make_report(concurrency=4)
    slow = make_report(concurrency=4, tokens=3000, drafter="peagle", num_drafts=1000, accepted=(480, 100))
    (note,) = compare([plain, slow])["notes"]
    assert note == "peagle: the drafter costs more than it saves, 0.75 x the tokens per busy dollar."


def test_no_verdict_on_the_drafter_where_conditions_differ(make_report):
    plain = make_report(concurrency=8)
    slow = make_report(concurrency=4, tokens=3000, drafter="peagle", num_drafts=1000, accepted=(480, 100))
    assert compare([plain, slow])["notes"] == ["peagle differs from the baseline also in concurrency."]


def test_other_numbers_of_rows_are_compared_by_busy_time(make_report):
    (note,) = compare([make_report(num_input_rows=40), make_report(num_input_rows=400, drafter="x")])["notes"]
    assert "input rows; loading weighs more on the shorter run" in note


def test_there_has_to_be_a_report():
    with pytest.raises(PeagleError, match="no report to compare"):
        compare([])
    with pytest.raises(PeagleError, match="schema 1"):
        compare([{"schema": 0}])
