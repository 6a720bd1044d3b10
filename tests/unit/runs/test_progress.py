import io
import re

import pytest
from rich.console import Console
from usage_records import unit_usage

from peagle.runs import progress
from peagle.runs.progress import RunProgress, Tally, seconds_left

UNIT = unit_usage(num_rows=8, num_failed_rows=2, num_output_tokens=400, busy_s=4.0, finished_at=5.0)


def test_time_left_is_unknown_before_the_first_heartbeat():
    tally = Tally(num_rows_planned=100)
    tally.add(UNIT)
    tally.observe(0.0, num_engines=1, tokens_per_s=0.0)  # no heartbeat since the engine started
    assert "left" not in tally.line()
    tally.observe(0.0, num_engines=1, tokens_per_s=100.0)
    assert "36.0 s left" in tally.line()  # 90 rows of 40 tokens at 100/s


def test_line_has_no_time_left_after_the_last_row():
    tally = Tally(num_rows_planned=10)
    tally.add(UNIT)
    tally.observe(0.0, num_engines=1, tokens_per_s=100.0)
    assert "left" not in tally.line()


# rows left, rows done, output tokens, tokens/s
@pytest.mark.parametrize("arguments", [(5, 0, 0, 10.0), (5, 5, 0, 10.0), (5, 5, 100, 0.0), (0, 5, 100, 10.0)])
def test_unknown_time_left_is_none(arguments):
    assert seconds_left(*arguments) is None


def test_lines_show_the_phase_and_the_tally(monkeypatch):
    monkeypatch.setattr(progress, "_PLAIN_LINE_EVERY_S", 0.0)
    output = io.StringIO()
    run_progress = RunProgress(Console(file=output, width=200))
    run_progress.enter("planning")
    tally = Tally(num_rows_planned=20)
    run_progress.enter("loading")
    run_progress.show(tally)
    tally.observe(0.5, num_engines=1, tokens_per_s=100.0)
    run_progress.show(tally)
    loading, generating = (re.split(r"  +", line) for line in output.getvalue().splitlines())
    assert loading[1:] == ["loading", "0/20 rows", "$0"]
    assert generating[1:] == ["generating", "0/20 rows", "100.0 output tokens/s", "$0.500"]


def test_few_lines_are_printed_without_a_terminal():
    output = io.StringIO()
    run_progress = RunProgress(Console(file=output, width=200))
    for _ in range(100):
        run_progress.show(Tally(num_rows_planned=20))
    run_progress.show(Tally(num_rows_planned=20), final=True)
    assert len(output.getvalue().splitlines()) == 1


def test_phase_and_messages_are_shown_on_a_terminal():
    output = io.StringIO()
    run_progress = RunProgress(Console(file=output, width=100, force_terminal=True))
    run_progress.enter("planning")
    run_progress.say("drafter: none")
    run_progress.close()
    assert "planning" in output.getvalue()
    assert "drafter: none" in output.getvalue()
