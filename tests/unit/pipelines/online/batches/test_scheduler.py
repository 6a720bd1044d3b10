from dataclasses import replace
from types import SimpleNamespace

import pytest

from peagle.economics.ledger import RequestReader, write_session
from peagle.economics.shared_budgets import SharedBudget, edit_budgets
from peagle.errors import ConfigError, EngineError, RunInUse, StorageError
from pipelines.online.batches.records import Batch, BatchProgress
from pipelines.online.batches.scheduler import Scheduler, scheduling_order
from pipelines.online.batches.store import BatchStore
from pipelines.online.batches.validation import CheckedInput
from pipelines.online.totals import TokenPrice, totals_of
from tests.unit.pipelines.online.ledgers import make_request_usage


@pytest.fixture
def spent_usd():
    return {"alice": 0.0}  # by account: the name of a key, a tag, or "*" for the endpoint


@pytest.fixture
def make_scheduler(store, runner, settings, spent_usd, clock):
    def make(**changes):
        return Scheduler(
            store, runner, replace(settings, **changes), spent_usd=spent_usd.__getitem__, now=clock, monotonic=clock
        )

    return make


@pytest.fixture
def scheduler(make_scheduler):
    return make_scheduler()


@pytest.fixture
def create_batch(store, make_batch_request):
    """Return a function that creates a batch and returns its id."""

    def create_batch(**changes):
        return store.add_batch(make_batch_request(**changes)).id

    return create_batch


@pytest.fixture
def running_batch(scheduler, runner, create_batch):
    """The id of a running batch, and the handle of its run."""
    batch_id = create_batch()
    scheduler.tick()
    accept_input(scheduler, runner.handles[-1])
    return batch_id, runner.handles[-1]


def finish(scheduler, handle, answer):
    """Set the result or error of a check, run or collection, and let the scheduler react."""
    handle.answer = answer
    scheduler.tick()


def accept_input(scheduler, handle, num_requests=3):
    finish(scheduler, handle, CheckedInput(num_requests=num_requests, model="m"))
    scheduler.tick()


@pytest.mark.parametrize("jump_s", [365 * 24 * 3600, -365 * 24 * 3600])
def test_clock_jump_does_not_affect_a_batch(tmp_path, runner, settings, make_batch_request, clock, jump_s):
    uptime = SimpleNamespace(now=50.0)
    store = BatchStore(tmp_path / "jumps", now=clock, monotonic=lambda: uptime.now)
    store.prepare()
    store.is_scheduling = True
    scheduler = Scheduler(store, runner, settings, spent_usd=lambda key: 0.0, now=clock, monotonic=lambda: uptime.now)
    batch_id = store.add_batch(make_batch_request()).id
    scheduler.tick()
    accept_input(scheduler, runner.handles[-1])
    clock.now += jump_s
    finish(scheduler, runner.handles[-1], EngineError("the engine died"))
    uptime.now += 20  # the run is retried after ten seconds of the monotonic clock
    scheduler.tick()
    assert [handle.kind for handle in runner.handles] == ["check", "run", "run"]
    assert runner.handles[-1].reason is None
    assert store.batch(batch_id, "alice").progress.status == "in_progress"


def accept_all_inputs(scheduler, runner):
    for _ in range(4):  # the number of concurrent checks is limited
        scheduler.tick()
        for handle in runner.handles:
            if handle.kind == "check" and handle.answer is None:
                handle.answer = CheckedInput(num_requests=3, model="m")
    scheduler.tick()


def fail_to_write(*_):
    raise OSError("no space left")


def api_object(store, batch_id):
    return store.batch(batch_id, "alice").to_api_object()


def test_batch_is_validated_run_and_completed(scheduler, runner, store, create_batch, make_result, clock, tmp_path):
    batch_id = create_batch()
    scheduler.tick()
    (check,) = runner.handles
    assert check.kind == "check"
    assert api_object(store, batch_id)["status"] == "validating"
    clock.now += 1
    accept_input(scheduler, check)
    run = runner.handles[1]
    assert (run.kind, run.arguments[0].model, run.arguments[0].budget_usd) == ("run", "m", None)
    assert api_object(store, batch_id)["in_progress_at"] == 101  # the clock started at 100
    run.current = (2, 0, 0.1)  # completed and failed requests, US dollars
    scheduler.tick()
    assert api_object(store, batch_id)["request_counts"] == {"total": 3, "completed": 2, "failed": 0}
    run.current = (2, 1, 0.1)
    scheduler.tick()
    assert api_object(store, batch_id)["status"] == "finalizing"
    finish(scheduler, run, make_result(batch_id, num_completed=2, num_failed=1))
    batch = api_object(store, batch_id)
    assert batch["status"] == "completed"
    assert batch["usage"]["total_tokens"] == 42
    files = [store.file(batch[name], "alice") for name in ("output_file_id", "error_file_id")]
    assert [(file.num_bytes, file.purpose) for file in files] == [(10, "batch_output"), (20, "batch_output")]
    assert [record.usd for record in RequestReader(tmp_path / "ledger").new()] == [0.5]
    scheduler.tick()
    assert len(runner.handles) == 2


def test_invalid_input_fails_the_batch(scheduler, runner, store, create_batch):
    batch_id = create_batch()
    scheduler.tick()
    error = {"code": "invalid_json_line", "message": "x", "param": None, "line": 2}
    finish(scheduler, runner.handles[0], CheckedInput(num_requests=2, errors=(error,)))
    scheduler.tick()
    assert api_object(store, batch_id)["status"] == "failed"
    assert api_object(store, batch_id)["errors"] == {"object": "list", "data": [error]}
    assert len(runner.handles) == 1


def test_number_of_concurrent_runs_and_validations_is_limited(make_scheduler, runner, create_batch):
    scheduler = make_scheduler(max_concurrent=2)
    for _ in range(5):
        create_batch()
    scheduler.tick()
    assert len(runner.handles) == 2
    accept_all_inputs(scheduler, runner)
    assert sorted(handle.kind for handle in runner.handles) == ["check"] * 5 + ["run"] * 2


def test_cancelled_run_keeps_its_results(scheduler, store, running_batch, make_result):
    batch_id, run = running_batch
    store.cancel(store.batch(batch_id, "alice"))
    assert api_object(store, batch_id)["status"] == "cancelling"
    scheduler.tick()
    scheduler.tick()
    assert run.reason == "batch_cancelled"
    finish(scheduler, run, make_result(batch_id, "batch_cancelled", num_completed=1, num_failed=2))
    batch = api_object(store, batch_id)
    assert (batch["status"], batch["request_counts"]["completed"]) == ("cancelled", 1)
    assert batch["cancelled_at"]
    assert batch["output_file_id"]


def test_batch_cancelled_before_validation_ends_immediately(scheduler, runner, store, create_batch):
    batch_id = create_batch()
    store.cancel(store.batch(batch_id, "alice"))
    scheduler.tick()
    assert api_object(store, batch_id)["status"] == "cancelled"
    assert not runner.handles


def test_waiting_batch_expires(scheduler, runner, store, running_batch, create_batch, make_result, clock):
    waiting = create_batch()
    scheduler.tick()
    accept_input(scheduler, runner.handles[-1])
    clock.now += 24 * 3600
    scheduler.tick()
    assert running_batch[1].reason == "batch_expired"
    collect = runner.handles[-1]
    assert (collect.kind, collect.arguments[1]) == ("collect", "batch_expired")  # the second argument is the reason
    finish(scheduler, collect, make_result(waiting, "batch_expired", num_completed=0, num_failed=3))
    assert api_object(store, waiting)["status"] == "expired"
    assert api_object(store, waiting)["output_file_id"] is None


def test_next_scheduler_continues_unfinished_batches(
    scheduler, make_scheduler, runner, store, running_batch, make_result, monkeypatch, tmp_path
):
    batch_id, run = running_batch
    run.answer = make_result(batch_id)
    with monkeypatch.context() as crash:  # after all files were stored, but before the final status
        crash.setattr(store, "save", fail_to_write)
        scheduler.tick()
    next_scheduler = make_scheduler()
    next_scheduler.tick()
    next_run = runner.handles[-1]
    assert next_run is not run
    assert next_run.kind == "run"
    finish(next_scheduler, next_run, make_result(batch_id))
    assert api_object(store, batch_id)["status"] == "completed"
    assert len(RequestReader(tmp_path / "ledger").new()) == 1
    assert len(store.files("alice")) == 1


def test_abandon_kills_work_without_changing_progress(scheduler, store, running_batch):
    batch_id, run = running_batch
    scheduler.abandon()
    assert run.is_killed
    assert api_object(store, batch_id)["status"] == "in_progress"


def test_batch_fails_with_results_after_three_failed_runs(scheduler, runner, store, running_batch, clock, make_result):
    batch_id, run = running_batch
    for wait_s in (10, 20):
        finish(scheduler, run, EngineError("the engine died in /secret/place"))
        scheduler.tick()
        assert runner.handles[-1] is run
        clock.now += wait_s
        scheduler.tick()
        run = runner.handles[-1]
        assert run.kind == "run"
    finish(scheduler, run, EngineError("the engine died in /secret/place"))
    collect = runner.handles[-1]
    assert (collect.kind, collect.arguments[1]) == ("collect", "batch_failed")
    finish(scheduler, collect, make_result(batch_id, "batch_failed", num_completed=1, num_failed=2))
    batch = api_object(store, batch_id)
    assert batch["status"] == "failed"
    assert batch["output_file_id"]
    assert "secret" not in str(batch["errors"])
    assert batch["errors"]["data"][0]["code"] == "internal_error"


def test_full_disk_delays_the_end_of_a_batch(scheduler, store, running_batch, make_result, monkeypatch):
    batch_id, run = running_batch
    run.answer = make_result(batch_id)
    with monkeypatch.context() as full_disk:
        full_disk.setattr(store, "save", fail_to_write)
        scheduler.tick()
    assert not run.is_killed
    assert api_object(store, batch_id)["status"] == "in_progress"
    scheduler.tick()
    assert api_object(store, batch_id)["status"] == "completed"


@pytest.mark.parametrize("name", ["unfinished", "sweep"])
@pytest.mark.parametrize("error", [OSError("no answer"), StorageError("no answer")])
def test_unavailable_store_does_not_stop_a_run(
    scheduler, store, running_batch, make_result, monkeypatch, clock, name, error
):
    def unavailable():
        raise error

    batch_id, run = running_batch
    clock.now += 3600  # after an hour, expired files are also checked
    with monkeypatch.context() as outage:
        outage.setattr(store, name, unavailable)
        scheduler.tick()
    finish(scheduler, run, make_result(batch_id))
    assert api_object(store, batch_id)["status"] == "completed"


def test_progress_resets_the_retry_count(scheduler, runner, running_batch, clock):
    run = running_batch[1]
    for number in range(5):
        run.current = (0, number + 1, 0.1)
        scheduler.tick()
        finish(scheduler, run, EngineError("the engine died"))
        clock.now += 10
        scheduler.tick()
        run = runner.handles[-1]
        assert run.kind == "run"


@pytest.fixture
def uncollected_id(scheduler, runner, create_batch, make_key, clock):
    """The id of a batch with a reservation. Its run failed, and then nine attempts to collect its results failed."""
    batch_id = create_batch(key=make_key(budget_usd=2))
    accept_all_inputs(scheduler, runner)
    finish(scheduler, runner.handles[-1], ConfigError("another model"))
    for number in range(1, 10):
        collect = runner.handles[-1]
        finish(scheduler, collect, StorageError("no answer"))
        clock.now += 10 * number - 1  # each wait is 10 s longer
        scheduler.tick()
        assert runner.handles[-1] is collect
        clock.now += 1
        scheduler.tick()
        assert runner.handles[-1] is not collect
    return batch_id


def test_collection_is_retried(scheduler, runner, store, settings, uncollected_id, make_result):
    budgets, collect = totals_of(settings.ledger).budgets, runner.handles[-1]
    assert (collect.kind, collect.arguments[1]) == ("collect", "batch_failed")
    assert (api_object(store, uncollected_id)["status"], budgets.reserved_by_batches("alice")) == ("in_progress", 2)
    finish(scheduler, collect, make_result(uncollected_id, "batch_failed", num_completed=1, num_failed=2))
    batch = api_object(store, uncollected_id)
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "internal_error")
    assert batch["output_file_id"]
    assert (budgets.reserved_by_batches("alice"), budgets.spent_usd("alice")) == (0, 0.5)


def test_batch_that_cannot_be_collected_releases_its_budget(
    scheduler, runner, store, settings, uncollected_id, make_result, monkeypatch
):
    budgets = totals_of(settings.ledger).budgets
    runner.handles[-1].answer = StorageError("no answer")
    with monkeypatch.context() as full_disk:
        full_disk.setattr(store, "save", fail_to_write)
        scheduler.tick()
    assert (api_object(store, uncollected_id)["status"], budgets.reserved_by_batches("alice")) == ("in_progress", 2)
    scheduler.tick()
    finish(scheduler, runner.handles[-1], StorageError("no answer"))
    assert (api_object(store, uncollected_id)["status"], budgets.reserved_by_batches("alice")) == ("failed", 0)
    assert api_object(store, uncollected_id)["output_file_id"] is None


def test_batch_waiting_for_collection_starts_no_engines(
    scheduler, runner, store, running_batch, create_batch, make_result
):
    batch_id, run = running_batch
    for _ in range(2):
        create_batch()
    scheduler.tick()
    run.answer = ConfigError("another model")
    for _ in range(3):
        scheduler.tick()
    assert [handle.kind for handle in runner.handles] == ["check", "run", "check", "check"]
    finish(scheduler, runner.handles[-1], CheckedInput(num_requests=3, model="m"))
    scheduler.tick()
    (collect,) = (handle for handle in runner.handles if handle.kind == "collect")
    assert (collect.arguments[0].batch_id, collect.arguments[1]) == (batch_id, "batch_failed")
    finish(scheduler, collect, make_result(batch_id, "batch_failed", num_completed=0, num_failed=3))
    assert api_object(store, batch_id)["errors"]["data"][0]["code"] == "internal_error"


def test_tick_after_abandon_continues_from_the_store(scheduler, runner, running_batch):
    finish(scheduler, running_batch[1], ConfigError("another model"))
    assert runner.handles[-1].kind == "collect"
    scheduler.abandon()
    scheduler.tick()
    assert runner.handles[-1].kind == "run"


def test_run_in_use_is_retried_later(scheduler, runner, running_batch, clock):
    for _ in range(5):
        finish(scheduler, runner.handles[-1], RunInUse("another process drives the run"))
        clock.now += 10
        scheduler.tick()
        assert runner.handles[-1].kind == "run"


def test_run_is_limited_by_the_budget(scheduler, runner, store, create_batch, make_key, spent_usd, make_result):
    poor = make_key(budget_usd=2)
    first, second = create_batch(key=poor), create_batch(key=poor)
    spent_usd["alice"] = 1.5
    accept_all_inputs(scheduler, runner)
    (run,) = (handle for handle in runner.handles if handle.kind == "run")
    assert run.arguments[0].batch_id == first
    assert run.arguments[0].budget_usd == 0.5
    run.answer = make_result(first, "insufficient_quota", num_completed=1, num_failed=2)
    spent_usd["alice"] = 2.0
    scheduler.tick()
    assert api_object(store, first)["status"] == "failed"
    assert api_object(store, first)["errors"]["data"][0]["code"] == "insufficient_quota"
    scheduler.tick()
    assert (runner.handles[-1].kind, runner.handles[-1].arguments[1]) == ("collect", "insufficient_quota")
    assert api_object(store, second)["status"] == "in_progress"


@pytest.fixture
def priced_model(settings, make_session):
    """Set a model's price, learned from a request: 2.2 cents for 100 prompt and 41 output tokens.

    The engine took 30 s to load and costs one cent per second.
    """
    totals = totals_of(settings.ledger)
    totals.prices["m"] = TokenPrice()
    totals.prices["m"].update(make_request_usage())
    settings.ledger.mkdir(parents=True)
    write_session(settings.ledger, make_session())
    batch_model = settings.models["m"]
    settings.models["m"] = replace(batch_model, config={**batch_model.config, "engines": "2"})


def start_with_large_budget(scheduler, runner, create_batch, make_key, output_tokens=2000):
    """Start a batch of a key with a budget of ten dollars."""
    batch_id = create_batch(key=make_key(budget_usd=10))
    scheduler.tick()
    finish(
        scheduler,
        runner.handles[-1],
        CheckedInput(num_requests=3, model="m", prompt_tokens=1000, output_tokens=output_tokens),
    )
    scheduler.tick()
    return batch_id, runner.handles[-1]


@pytest.mark.usefixtures("priced_model")
def test_batch_reserves_its_estimate(scheduler, runner, settings, create_batch, make_key):
    _, run = start_with_large_budget(scheduler, runner, create_batch, make_key)
    # 1,000 x 0.2 s / 100 and 2,000 x 2 s / 40 at a cent per second, plus loading and stopping two engines.
    estimated = 0.02 + 1.0 + 2 * (0.30 + 0.37)
    budgets = totals_of(settings.ledger).budgets
    assert run.arguments[0].budget_usd == pytest.approx(estimated)
    assert budgets.reserved_by_batches("alice") == pytest.approx(estimated)
    assert budgets.reserve_request("1", "alice", 10, 4.0) is None  # accepted; 10 - 2.36 - 4 = 3.64 dollars are left
    assert budgets.reserve_request("2", "alice", 10, 3.7) == "reserved by requests"
    assert budgets.reserve_request("2", "alice", 10, 3.6) is None


@pytest.mark.usefixtures("priced_model")
def test_reservation_grows_with_the_cost(scheduler, runner, settings, create_batch, make_key):
    batch_id, run = start_with_large_budget(scheduler, runner, create_batch, make_key)
    budgets = totals_of(settings.ledger).budgets
    run.current = (1, 0, 0.5)
    scheduler.tick()
    assert run.allowed == [], "the estimate covers twice the cost"
    run.current = (1, 0, 2.0)
    scheduler.tick()
    assert run.allowed == pytest.approx([2 * 2.0 + 2 * 0.67])  # twice the cost, plus loading and stopping two engines
    budgets.reserve_request("1", "alice", 10, 3.0)
    run.current = (2, 0, 6.0)
    scheduler.tick()
    assert run.allowed[-1] == budgets.reserved_by_batch(batch_id, "alice") == 10 - 3.0


@pytest.mark.usefixtures("priced_model")
def test_reservation_excludes_costs_already_in_the_ledger_on_lent_engines(
    make_scheduler, runner, settings, create_batch, make_key, spent_usd
):
    settings.models["m"] = replace(
        settings.models["m"], config={**settings.models["m"].config, "engines": "1"}, lent_slots=8
    )
    scheduler = make_scheduler(deployments={"m": "LLM:m"})
    batch_id, run = start_with_large_budget(scheduler, runner, create_batch, make_key)
    estimated = 0.02 + 1.0 + 0.37  # as in test_batch_reserves_its_estimate, but without loading
    assert run.arguments[0].budget_usd == pytest.approx(estimated)
    budgets = totals_of(settings.ledger).budgets
    for cost_usd, reserved_usd in ((0.5, estimated - 0.5), (0.8, 0.8 + 0.37), (6.0, 10 - 6.0)):
        run.current = (run.current[0] + 1, 0, cost_usd)
        spent_usd["alice"] = cost_usd
        scheduler.tick()
        assert budgets.reserved_by_batch(batch_id, "alice") == pytest.approx(reserved_usd)
        assert run.allowed[-1] == pytest.approx(cost_usd + reserved_usd)


@pytest.mark.usefixtures("priced_model")
def test_resumed_batch_reserves_the_whole_remaining_budget(
    scheduler, runner, settings, store, create_batch, make_key, clock
):
    batch_id, run = start_with_large_budget(scheduler, runner, create_batch, make_key, output_tokens=10**6)
    assert run.arguments[0].budget_usd == 10
    store.run_path(batch_id).mkdir()
    (store.run_path(batch_id) / "run.json").write_text("{}")
    totals_of(settings.ledger).budgets.reserve_request("1", "alice", None, 1.0)
    finish(scheduler, run, EngineError("the engine died"))
    clock.now += 10
    scheduler.tick()
    # The previous cost is unknown, so the estimate cannot be used.
    assert runner.handles[-1].arguments[0].budget_usd == 9


def test_batches_with_the_same_budget_run_one_at_a_time(make_scheduler, runner, create_batch, make_key, spent_usd):
    scheduler = make_scheduler(max_concurrent=3)
    spent_usd["bob"] = 0.0
    for name in ("alice", "alice", "bob"):
        create_batch(key=make_key(name, budget_usd=2))
    accept_all_inputs(scheduler, runner)
    assert sorted(handle.arguments[0].owner for handle in runner.handles if handle.kind == "run") == ["alice", "bob"]


def test_batch_waits_until_the_spend_is_known(scheduler, runner, create_batch, make_key, spent_usd):
    create_batch(key=make_key(budget_usd=2))
    spent_usd["alice"] = None
    accept_all_inputs(scheduler, runner)
    scheduler.tick()
    assert [handle.kind for handle in runner.handles] == ["check"]
    spent_usd["alice"] = 0.5
    scheduler.tick()
    assert runner.handles[-1].arguments[0].budget_usd == 1.5


def test_reservation_lasts_until_the_batch_ends(
    scheduler, runner, store, settings, create_batch, make_key, make_result, clock, spent_usd
):
    budgets, batch_id = totals_of(settings.ledger).budgets, create_batch(key=make_key(budget_usd=2))
    budgets.reserve_request("1", "alice", None, 0.25)
    accept_all_inputs(scheduler, runner)
    run = runner.handles[-1]
    assert (run.arguments[0].budget_usd, budgets.reserved_by_batches("alice")) == (1.75, 1.75)
    finish(scheduler, run, EngineError("the engine died"))
    assert budgets.reserved_by_batches("alice") == 1.75  # the run will be retried
    clock.now += 10
    scheduler.tick()
    finish(scheduler, runner.handles[-1], make_result(batch_id))
    assert (budgets.reserved_by_batches("alice"), budgets.spent_usd("alice")) == (0, 0.5)


def test_batch_waits_for_reservations_of_requests(scheduler, runner, settings, create_batch, make_key):
    budgets = totals_of(settings.ledger).budgets
    create_batch(key=make_key(budget_usd=2))
    for number in "12":
        budgets.reserve_request(number, "alice", None, 1)
    accept_all_inputs(scheduler, runner)
    assert [handle.kind for handle in runner.handles] == ["check"]
    budgets.release_request("2", "alice")
    scheduler.tick()
    assert runner.handles[-1].arguments[0].budget_usd == 1


def test_batch_waits_while_another_with_the_same_budget_is_retried(
    make_scheduler, runner, create_batch, make_key, clock
):
    scheduler, poor = make_scheduler(max_concurrent=3), make_key(budget_usd=2)
    first, _ = create_batch(key=poor), create_batch(key=poor)
    accept_all_inputs(scheduler, runner)
    runner.handles[-1].answer = EngineError("the engine died")
    for _ in range(3):
        scheduler.tick()
    clock.now += 10
    scheduler.tick()
    assert [handle.arguments[0].batch_id for handle in runner.handles if handle.kind == "run"] == [first, first]


def test_batch_with_an_existing_run_has_priority(make_scheduler, runner, store, create_batch, make_key, spent_usd):
    poor = make_key(budget_usd=2)
    create_batch(key=poor)
    running = create_batch(key=poor)
    store.run_path(running).mkdir()
    (store.run_path(running) / "run.json").write_text("{}")
    accept_all_inputs(make_scheduler(max_concurrent=3), runner)
    assert [handle.arguments[0].batch_id for handle in runner.handles if handle.kind == "run"] == [running]


@pytest.fixture
def shared_budgets(settings, spent_usd):
    """Unspent budgets: three dollars for a tag, two for the endpoint."""
    settings.ledger.mkdir(parents=True)
    with edit_budgets(settings.ledger / "budgets.json") as shared:
        for name, usd in (("team=search", 3), ("endpoint", 2)):
            shared[name] = SharedBudget(name=name, budget_usd=usd)
    spent_usd |= {"bob": 0.0, "team=search": 0.0, "*": 0.0}


@pytest.mark.usefixtures("shared_budgets")
def test_smallest_budget_limits_a_batch(make_scheduler, runner, settings, create_batch, make_key, make_result):
    scheduler, budgets = make_scheduler(max_concurrent=3), totals_of(settings.ledger).budgets
    first, _ = create_batch(key=make_key(budget_usd=10, tags={"team": "search"})), create_batch(key=make_key("bob"))
    accept_all_inputs(scheduler, runner)
    (run,) = (handle for handle in runner.handles if handle.kind == "run")
    assert (run.arguments[0].batch_id, run.arguments[0].budget_usd) == (first, 2)
    assert [budgets.reserved_by_batches(account) for account in ("alice", "team=search", "*")] == [2, 2, 2]
    result = make_result(first)
    finish(scheduler, run, replace(result, record=replace(result.record, tags='{"team": "search"}')))
    assert [budgets.spent_usd(account) for account in ("alice", "team=search", "*")] == [0.5, 0.5, 0.5]
    scheduler.tick()
    assert runner.handles[-1].arguments[0].owner == "bob", "both batches use the endpoint's budget"


@pytest.mark.usefixtures("shared_budgets")
def test_spent_tag_budget_ends_a_batch(scheduler, runner, settings, create_batch, make_key, spent_usd):
    spent_usd["team=search"] = 3.0
    create_batch(key=make_key(budget_usd=10, tags={"team": "search"}))
    accept_all_inputs(scheduler, runner)
    assert (runner.handles[-1].kind, runner.handles[-1].arguments[1]) == ("collect", "insufficient_quota")
    budgets = totals_of(settings.ledger).budgets
    spent_usd["team=search"] = 2.0
    budgets.reserve_request("1", "team=search", None, 1.0)
    other = create_batch(key=make_key("bob", tags={"team": "search"}))
    accept_all_inputs(scheduler, runner)
    assert (budgets.reserved_by_batch(other, "*"), budgets.reserved_by_batch(other, "team=search")) == (0, 0), (
        "the batch must wait for the request's reservation"
    )


@pytest.fixture
def current_keys(make_key):
    """The endpoint's current keys by name. A test can change them."""
    return {"alice": make_key()}


@pytest.fixture
def scheduler_with_keys(store, runner, settings, spent_usd, current_keys, clock):
    """A scheduler that looks up `current_keys`."""

    def current_key(key):
        return current_keys.get(key.name)

    return Scheduler(store, runner, settings, spent_usd=spent_usd.__getitem__, current_key=current_key, now=clock)


def test_batch_of_a_revoked_key_is_cancelled(
    scheduler_with_keys, runner, store, create_batch, current_keys, make_result
):
    running, waiting = create_batch(), create_batch()
    accept_all_inputs(scheduler_with_keys, runner)
    run = runner.handles[-1]
    unvalidated = create_batch()
    current_keys.clear()
    scheduler_with_keys.tick()
    assert run.reason == "key_revoked"
    collect = runner.handles[-1]
    assert (collect.kind, collect.arguments[0].batch_id, collect.arguments[1]) == ("collect", waiting, "key_revoked")
    for handle, batch_id in ((run, running), (collect, waiting)):
        handle.answer = make_result(batch_id, "key_revoked", num_completed=1, num_failed=2)
    scheduler_with_keys.tick()
    assert [api_object(store, batch_id)["status"] for batch_id in (running, waiting, unvalidated)] == ["cancelled"] * 3
    for batch_id in (running, waiting, unvalidated):
        (error,) = api_object(store, batch_id)["errors"]["data"]
        assert (error["code"], "was revoked" in error["message"]) == ("key_revoked", True)


def test_batch_fails_if_its_key_loses_the_model(
    scheduler_with_keys, runner, create_batch, store, current_keys, make_key
):
    create_batch()
    accept_all_inputs(scheduler_with_keys, runner)
    run = runner.handles[-1]
    current_keys["alice"] = make_key(models=["other", "m"])
    scheduler_with_keys.tick()
    assert run.reason is None
    current_keys["alice"] = make_key(models=["other"])
    scheduler_with_keys.tick()
    assert run.reason == "model_not_allowed"


def test_batch_uses_the_current_limits_of_its_key(scheduler_with_keys, runner, create_batch, current_keys, make_key):
    create_batch(key=make_key(budget_usd=1))
    current_keys["alice"] = make_key(budget_usd=5, models=["m"])
    accept_all_inputs(scheduler_with_keys, runner)
    check, run = runner.handles
    assert check.arguments[1].key.models == ("m",)
    assert run.arguments[0].budget_usd == 5


def test_batch_of_a_removed_model_fails(make_scheduler, store, runner, running_batch, make_result):
    batch_id, _ = running_batch
    scheduler = make_scheduler(models={})
    scheduler.tick()
    finish(scheduler, runner.handles[-1], make_result(batch_id, "batch_failed", num_completed=0, num_failed=3))
    assert api_object(store, batch_id)["errors"]["data"][0]["code"] == "model_not_found"


def test_expired_files_are_deleted_unless_a_batch_uses_them(scheduler, store, upload, create_batch, clock):
    used, unused = upload(store, expires_at=200.0), upload(store, expires_at=200.0)
    create_batch(input_file_id=used.id)
    clock.now += 3600
    scheduler.tick()
    assert store.contents_path(used).exists()
    assert not store.contents_path(unused).exists()
    assert store.files("alice") == []


@pytest.mark.parametrize(
    ("names", "num_running", "last_start_by_key", "expected"),
    [
        ("aaabcb", 0, {}, [0, 3, 4, 1, 5, 2]),  # keys take turns; for each key, the oldest batch is first
        ("aab", 1, {"a": 1}, [0, 2, 1]),  # a key with a running batch waits for others
        ("abc", 0, {"a": 2, "b": 1}, [2, 1, 0]),  # the key that started a batch last comes last
    ],
)
def test_keys_take_turns(make_batch_request, make_key, names, num_running, last_start_by_key, expected):
    requests = [make_batch_request(key=make_key(name)) for name in names]
    batches = [Batch(request=request, progress=BatchProgress()) for request in requests]
    running = {batch.id for batch in batches[:num_running]}
    assert scheduling_order(batches, running, last_start_by_key) == [batches[index] for index in expected]
