import json

import pytest

from tests.faults.arrivals import figures
from tests.faults.clients import OUTCOMES, Asked, Tally, judge
from tests.faults.endpoint import Size
from tests.faults.report import to_markdown
from tests.faults.scenes import VANISHING

ERROR = json.dumps({"error": {"message": "m", "type": "t", "param": None, "code": "c"}})
EVENT = 'data: {"choices": []}\n\n'


@pytest.mark.parametrize(
    ("status", "text", "is_stream", "outcome"),
    [
        (200, '{"choices": [], "usage": {}}', False, "answered"),
        (200, '{"choices": []}', False, "other"),
        (200, f"{EVENT}data: [DONE]\n\n", True, "answered"),
        (200, EVENT, True, "broken off"),
        (200, "", True, "other"),
        (200, f"{EVENT}data: {ERROR}\n\n", True, "error event"),
        (200, f"{EVENT}data: {ERROR}\n\ndata: [DONE]\n\n", True, "error event"),
        (503, ERROR, True, "refused"),
        (429, ERROR, False, "refused"),
        (503, "Service Unavailable", False, "other"),
        (503, '{"error": "busy"}', False, "other"),
        (500, ERROR, False, "other"),
    ],
)
def test_what_becomes_of_a_request(status, text, is_stream, outcome):
    assert judge(status, text.encode(), is_stream=is_stream)[0] == outcome


def asked(began, ended, outcome="answered"):
    return Asked(is_stream=False, began=began, ended=ended, outcome=outcome)


def test_a_gap_is_between_answers_and_the_ends_of_the_time():
    tally = Tally([asked(0, 3), asked(0, 4), asked(0, 5, "refused"), asked(0, 20)])
    assert tally.longest_gap_s(2, 10) == 6
    assert Tally([]).longest_gap_s(2, 10) == 8
    assert tally.outcomes() == {**dict.fromkeys(OUTCOMES, 0), "answered": 3, "refused": 1}


def test_an_overload_is_what_was_answered_and_what_was_refused():
    size = Size(max_replicas=2, slots=8, tokens=40, token_s=0.05)
    assert (size.admitted, size.capacity_per_s) == (18, 9)
    tally = Tally([asked(0, 2), asked(0, 4), asked(0, 0.1, "refused"), asked(0, 1, "other")])
    found = figures(tally, size, factor=2, seconds=4)
    assert (found["share_refused"], found["alone_s"], found["latency_max_s"]) == (0.25, 2, 4)
    assert (found["outcomes"]["other"], found["refusal_p95_s"]) == (1, pytest.approx(0.1))


def test_the_report_says_each_fault_and_its_problems():
    afterwards = {"num_billed_twice": 0, "num_answered_unbilled": 1, "slots": 18, "slots_answered": 17}
    killed = {
        "fault": "a replica", "num_requests": 30, "outcomes": dict.fromkeys(OUTCOMES, 5), "longest_gap_s": 1.25,
        "whole_after_s": None, "problems": ["of 18 slots 17 answer"], **afterwards,
    }  # fmt: skip
    vanished = {
        "fault": VANISHING, "num_requests": 9, "tokens_asked_for": 800, "cut": 9, "most_tokens_made": 3, "problems": [],
        **afterwards,
    }  # fmt: skip
    data = {
        "date": "d", "command": "c", "git_revision": "g", "machine": "m", "versions": {"ray": "1"},
        "faults": [killed, vanished], "overload": figures(Tally([]), Size(), factor=2, seconds=1),
    }  # fmt: skip
    text = to_markdown(data)
    assert "| a replica | 30 | 5 | 5 | 5 | 5 | 5 | 5 | 1.2 | - | 0 | 1 | 17 of 18 |" in text
    assert "9 of them are in the ledger as cut, with 3 tokens at most" in text
    assert "- a replica: of 18 slots 17 answer" in text
    assert "| share refused | 0.0% |" in text
