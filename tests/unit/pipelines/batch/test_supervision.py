from dataclasses import replace

import pyarrow as pa
import pytest
from resolved_runs import corpus_plan, resolve_run
from usage_records import engine_session, unit_usage

from peagle import hardware
from peagle.errors import EngineError, StoppedEarly, StorageError, TooManyFailedRows
from pipelines.batch import supervision
from pipelines.batch.config import GenerateConfig
from pipelines.batch.request import Allowance, RunRequest
from pipelines.batch.supervision import Supervisor, require_few_failures

DETECTED_HARDWARE = hardware.detect()
COMMAND = ["peagle", "generate", "--output", "runs/a"]


def make_session(name, *, lifetime_s=1.0, **values):
    device = "accelerator" if DETECTED_HARDWARE.platform == "cuda" else "vcpu"
    return engine_session(name, device=device, started_at=1.0, busy_s=lifetime_s, **values)


def make_usage(num_rows, num_failed_rows):
    return unit_usage("earlier", num_rows=num_rows, num_failed_rows=num_failed_rows, num_output_tokens=1, busy_s=0.5)


@pytest.fixture
def make_supervised_run(tmp_path):
    """Return a function that creates a run of four units with three rows each, and its supervisor.

    The first unit is committed, with two dead letters. It cost one cent.
    """

    def make(*command, output="run", allowance=None, draw=None, **options):
        config = GenerateConfig(input="in.csv", output=tmp_path / output, engine="fake", usd_per_hour=36, **options)
        resolved = resolve_run(config, corpus_plan(num_units=4))
        run = resolved.directory
        run.create({"price": resolved.price.to_dict()}, resolved.plan)
        run.write_session(make_session("earlier"))
        dead_letters = [
            {"id": "000000001", "reason": "refused", "message": "too odd"},
            {"id": "000000002", "reason": "refused", "message": "odder"},
        ]
        run.commit(0, pa.table({"id": ["000000000"]}), make_usage(1, 2), dead_letters)
        request = RunRequest(config=config, command=[*COMMAND, *command], allowance=allowance)
        return run, Supervisor(request, resolved, draw)

    return make


def test_start_warnings_are_reported_once(make_supervised_run):
    run, supervisor = make_supervised_run()
    run.write_session(replace(make_session("a"), start_warnings="no libtcmalloc\nno cards"))
    supervisor.observe()
    assert supervisor.new_warnings() == ["no libtcmalloc", "no cards"]
    run.write_session(replace(make_session("b", engine_index=1), start_warnings="no libtcmalloc\ncompiled again"))
    supervisor.observe()
    assert supervisor.new_warnings() == ["compiled again"]
    supervisor.observe()
    assert supervisor.new_warnings() == []


def test_run_within_limits_continues(make_supervised_run):
    run, supervisor = make_supervised_run(budget_usd=100, deadline="2h", max_failed_rows="2")
    supervisor.require_within_limits()
    supervisor.observe()
    assert supervisor.ending is None
    assert run.stop.grace_s() is None


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), StorageError("503")])
def test_failed_stop_request_is_retried(make_supervised_run, monkeypatch, error):
    run, supervisor = make_supervised_run(grace_s=0)
    supervisor._request.stop.set()
    monkeypatch.setattr(supervision, "GIVE_UP_S", 0.0)

    def fail(_):
        raise error

    with monkeypatch.context() as failing_storage:
        failing_storage.setattr(run.stop, "request", fail)
        supervisor.observe()
    assert supervisor.ending is not None
    assert run.stop.grace_s() is None
    assert supervisor.should_give_up
    supervisor.observe()
    assert run.stop.grace_s() == 0


def test_signal_stops_the_run_with_a_summary(make_supervised_run):
    run, supervisor = make_supervised_run(grace_s=7)
    supervisor._request.stop.set()
    supervisor.observe()
    assert run.stop.grace_s() == 7
    assert not supervisor.should_give_up
    error = supervisor.error()
    assert isinstance(error, StoppedEarly)
    assert "stopped with 1 of 4 units committed: stopped by a signal" in error.message
    assert "9 of 12 rows are left, $0.0" in error.message
    assert error.hint == "the same command continues the run: peagle generate --output runs/a"


def test_rows_left_are_counted_from_commits(make_supervised_run):
    run, supervisor = make_supervised_run()
    supervisor._request.stop.set()
    supervisor.observe()
    assert run.commit(1, pa.table({"id": ["3", "4", "5"]}), make_usage(3, 0), [])  # the supervisor gets no receipt
    assert "stopped with 2 of 4 units committed" in supervisor.error().message
    assert "6 of 12 rows are left" in supervisor.error().message


def test_budget_counts_earlier_attempts(make_supervised_run):
    _, supervisor = make_supervised_run("--budget-usd", "0.001", budget_usd=0.001)
    with pytest.raises(StoppedEarly) as error:
        supervisor.require_within_limits()
    assert "the budget of $0.00100 is reached" in error.value.message
    arguments = error.value.hint.split()
    assert arguments[-2] == "--budget-usd"
    assert arguments.count("--budget-usd") == 1
    assert float(arguments[-1]) >= 0.001 + 2 * supervisor._limits.reserve_usd


def test_deadline_in_the_past_is_not_in_the_resume_command(make_supervised_run):
    _, supervisor = make_supervised_run("--deadline", "2020-01-01T00:00:00Z", deadline="2020-01-01T00:00:00Z")
    with pytest.raises(StoppedEarly, match="the deadline 20") as error:
        supervisor.require_within_limits()
    assert error.value.hint.endswith("--output runs/a --deadline none")


def test_resume_command_repeats_a_deadline_that_is_a_duration(make_supervised_run):
    _, supervisor = make_supervised_run("--deadline", "5s", deadline="5s", grace_s=20)
    with pytest.raises(StoppedEarly, match="shutdown may take 37 s") as error:
        supervisor.require_within_limits()
    assert error.value.hint.endswith("--output runs/a --deadline 5s")


def test_run_ends_after_too_many_dead_letters(make_supervised_run):
    _, supervisor = make_supervised_run(max_failed_rows="1")
    with pytest.raises(TooManyFailedRows) as error:
        supervisor.require_within_limits()
    assert "2 of 3 rows are dead letters, more than --max-failed-rows 1" in error.value.message
    assert "2 refused; for example row 000000001: too odd" in error.value.message
    assert error.value.hint.endswith("--output runs/a --retry-failed")


def test_repeated_crashes_end_the_run(make_supervised_run):
    run, supervisor = make_supervised_run()
    for number in range(5):  # each further session of an engine means that it crashed
        run.write_session(make_session(f"s{number}"))
        supervisor.observe()
        assert supervisor.ending is None
    run.write_session(make_session("s5"))
    supervisor.observe()
    error = supervisor.error()
    assert isinstance(error, EngineError)
    assert "engines crashed 5 times without finishing a row" in error.message


def test_crashes_count_across_hosts(make_supervised_run):
    run, supervisor = make_supervised_run(engines="1:2")
    for number in range(7):
        assert supervisor.ending is None
        run.write_session(replace(make_session(f"s{number}"), hostname=f"node-{number}"))
        supervisor.observe()
    assert "engines crashed 5 times" in supervisor.error().message


def test_budget_from_an_allowance_can_grow(make_supervised_run):
    allowance = Allowance(usd=100)
    _, supervisor = make_supervised_run(budget_usd=0.001, allowance=allowance)
    supervisor.require_within_limits()
    supervisor.observe()
    assert supervisor.ending is None
    allowance.usd = 0.002
    supervisor.observe()
    assert "the budget of $0.00200 is reached" in supervisor.ending.message


def test_budget_reserves_the_cost_of_starting_engines(make_supervised_run):
    _, supervisor = make_supervised_run(engines="1:3")
    assert supervisor._limits.reserve_usd == pytest.approx(3 * reserve_usd_per_engine(supervisor))
    supervisor.observe()
    assert supervisor._limits.reserve_usd == pytest.approx(reserve_usd_per_engine(supervisor))
    assert make_supervised_run(engines="1:9", output="b")[1]._limits.reserve_usd == pytest.approx(
        4 * reserve_usd_per_engine(supervisor)  # at most one engine per unit
    )


def reserve_usd_per_engine(supervisor):
    placement = supervisor._run.placement
    return supervisor._limits.reserve_s * placement.num_devices * supervisor._price.usd_per_device_s


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        ("1", "all units are committed, but 2 of 3 rows are dead letters, more than --max-failed-rows 1"),
        ("2", None),
        (None, None),
    ],
)
def test_finished_run_with_more_failed_rows_than_allowed_is_an_error(make_supervised_run, allowed, message):
    run, supervisor = make_supervised_run(max_failed_rows=allowed)
    report = {"account": {"num_rows": 1, "num_failed_rows": 2}}
    if message is None:
        require_few_failures(report, run, supervisor._request)
        return
    with pytest.raises(TooManyFailedRows, match=message) as error:
        require_few_failures(report, run, supervisor._request)
    assert "2 refused; for example row 000000001" in error.value.message
    assert "--output runs/a --retry-failed; the report" in error.value.hint


def test_crashes_with_progress_do_not_end_the_run(make_supervised_run):
    run, supervisor = make_supervised_run(engines="1:5")
    for number in range(12):
        run.write_session(make_session(f"s{number}", num_output_tokens=number % 3))
        supervisor.observe()
    for number in range(4):
        run.write_session(make_session(f"other{number}", engine_index=1 + number))
        supervisor.observe()
    assert supervisor.ending is None


def test_stop_ends_the_wait_for_engines(make_supervised_run):
    _, supervisor = make_supervised_run()
    supervisor.require_within_limits()
    supervisor._request.stop.set()
    with pytest.raises(StoppedEarly, match="1 of 4 units committed: stopped by a signal"):
        supervisor.require_within_limits()


class FakeDraw:
    """A fake of a run's draw on a tag's budget. The budget is reached once a test sets `message`."""

    def __init__(self):
        self.message, self.calls = None, []

    def reached(self, spent_usd, reserve_usd):
        self.calls.append((spent_usd, reserve_usd))
        return self.message

    def end(self, spent_usd):
        self.calls.append(spent_usd)
        raise OSError(28, "No space left on device")


def test_run_stops_when_a_tag_budget_is_reached(make_supervised_run):
    draw = FakeDraw()
    run, supervisor = make_supervised_run(draw=draw)
    supervisor.observe()
    assert supervisor.ending is None
    draw.message = "the budget of $5 for team=search is reached"
    supervisor.observe()
    assert run.stop.grace_s() == 20
    error = supervisor.error()
    assert isinstance(error, StoppedEarly)
    assert "the budget of $5 for team=search is reached" in str(error)
    assert "when the budget has room, the same command continues the run" in error.hint
    supervisor.close()
    spent_usd, reserve_usd = draw.calls[0]
    assert draw.calls[-1] == spent_usd == supervisor.tally.usd > 0
    assert reserve_usd == pytest.approx(reserve_usd_per_engine(supervisor))
