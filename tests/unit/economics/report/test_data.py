import dataclasses
import json

import pytest

from peagle.economics.prices import PriceTable
from peagle.economics.report.data import RunInfo, check_report, compare
from peagle.errors import PeagleError


def test_shares_are_fractions_of_the_cost(make_report):
    report = make_report(busy_s=50.0, lost_s=10.0, idle_s=10.0)
    assert report["shares"] == pytest.approx({"load": 0.2, "compile": 0.1, "busy": 0.5, "idle": 0.1, "lost": 0.1})
    assert report["account"]["usd"]["total"] == pytest.approx(100 * 0.20 / 3600)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lost_s": 20.0}, "13% of the cost was lost work: 800 tokens"),
        ({"idle_s": 20.0}, "13% of the cost was idle time"),
        ({"busy_s": 20.0}, "60% of the cost was loading and compiling"),
        ({"num_failed_rows": 3}, "3 rows failed"),
        ({"complete": False, "num_input_rows": 400}, "not finished: 40 of 400 rows"),
        ({"complete": False}, "not finished: 40 rows"),
        (
            {"num_drafts": 100, "accepted": (48, 10, 2), "break_even_acceptance_length": 4.2},
            "The drafter costs more than it saves: 1.60 tokens per step, but this hardware needs 4.20",
        ),
        ({"num_drafts": 100, "accepted": (1, 0, 0)}, "nearly all drafts are rejected"),
    ],
)
def test_report_has_a_note_on_each_problem(make_report, changes, expected):
    notes = make_report(**changes)["notes"]
    assert len(notes) == 1
    assert expected in notes[0]


def test_assumed_price_has_a_note(make_report):
    price = PriceTable.load().price("c7a.large")
    (note,) = make_report(price=dataclasses.replace(price, basis="assumed"))["notes"]
    assert note.startswith("Assuming a c7a.large")
    assert make_report(price=dataclasses.replace(price, basis="detected"))["notes"] == []


@pytest.mark.parametrize("report", [None, {}, {"schema": 2}, {"schema": 1, "run": {}, "account": {}}])
def test_data_that_is_not_a_report_is_refused(report):
    with pytest.raises(PeagleError, match=r"peagle report RUN|has no notes, shares"):
        check_report(report)


def test_default_label_names_model_and_drafter():
    run = {"model": "m", "drafter": "peagle", "num_speculative_tokens": 5}
    assert RunInfo(**run).label == "m with peagle K=5"
    assert RunInfo(**run, label="nightly").label == "nightly"


@pytest.mark.parametrize(
    "moment", [1_780_000_000, 1_780_000_000.4, "2026-05-28T20:26:40Z", "2026-05-28T22:26:40+02:00"]
)
def test_start_time_is_converted_to_utc(moment):
    assert RunInfo(model="m", started_at=moment).started_at == "2026-05-28T20:26:40+00:00"


def figure_of(comparison, name):
    return next(row for row in comparison["figures"] if row["name"] == name)


def test_ratios_are_relative_to_the_run_without_a_drafter(drafter_report, plain_report):
    comparison = compare([drafter_report, plain_report])
    assert comparison["baseline"] == 1
    assert comparison["labels"] == ["peagle K=3", "no drafter"]
    assert figure_of(comparison, "output_tokens_per_s")["values"] == pytest.approx([60, 40])
    assert figure_of(comparison, "output_tokens_per_s")["ratios"] == pytest.approx([1.5, 1])
    assert figure_of(comparison, "tokens_per_usd")["ratios"] == pytest.approx([1.5, 1])
    assert figure_of(comparison, "usd_per_million_tokens")["ratios"] == pytest.approx([1 / 1.5, 1])
    assert figure_of(comparison, "acceptance_length")["ratios"] == [None, None]
    assert figure_of(comparison, "num_rows")["ratios"] == [None, None]
    assert comparison["notes"] == []
    assert json.loads(json.dumps(comparison)) == comparison


def test_labels_include_models_that_differ(make_report):
    comparison = compare([make_report(), make_report(model="other")])
    assert comparison["labels"] == ["smollm2-135m, no drafter", "other, no drafter"]
    assert comparison["notes"] == ["other, no drafter also differs from the baseline in model."]


def test_drafter_that_costs_more_than_it_saves_has_a_note(make_report):
    plain = make_report(concurrency=4)
    slow = make_report(concurrency=4, tokens=3000, drafter="peagle", num_drafts=1000, accepted=(480, 100))
    (note,) = compare([plain, slow])["notes"]
    assert note == "peagle: the drafter costs more than it saves, with 0.75 times the tokens per busy dollar."
    other = make_report(concurrency=8)
    notes = compare([other, slow])["notes"]
    assert notes == ["peagle also differs from the baseline in concurrency."], "the loss has other possible causes"


def test_comparison_needs_a_report():
    with pytest.raises(PeagleError, match="no report to compare"):
        compare([])
    with pytest.raises(PeagleError, match="schema 1"):
        compare([{"schema": 0}])
