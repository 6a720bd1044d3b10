import asyncio
import threading
from dataclasses import replace
from datetime import date

import pytest

from peagle.economics.ledger import RequestReader, append_request, write_batch
from peagle.economics.prices import Price
from peagle.economics.spending import Days, charges, day_of
from peagle.economics.statement import statement
from peagle.economics.usage import EngineFacts
from peagle.engine.interface import SelfCheck
from peagle.runs.ledgers import find_ledgers
from pipelines.online.cost import CostView, requested_period
from pipelines.online.errors import ApiError
from pipelines.online.replica.account import EngineAccount
from pipelines.online.totals import totals_of
from pipelines.online.wire import AnswerTally, Context
from tests.unit.economics.month import timestamp, write_endpoint
from tests.unit.pipelines.online.ledgers import make_request_usage

PRICE = Price.fixed(usd_per_hour=72, device="vcpu", num_devices=2)  # 0.01 USD per device-second, as in `engine_account`


@pytest.fixture
def view(engine_account, clock, tmp_path):
    clock.now += 5
    engine_account.ready()
    for request_id, key, tokens, busy_s in (("1", "alice", 100, 2), ("2", "bob", 300, 3)):
        request = engine_account.begin(Context(request_id=request_id, key=key))
        request.tally = AnswerTally(num_prompt_tokens=10, num_output_tokens=tokens)
        clock.now += busy_s
        append_request(tmp_path / "ledger", request.finish("ok"))
    clock.now += 10
    engine_account.end()
    return CostView(tmp_path / "ledger", PRICE)


def test_operator_sees_all_keys_and_the_account(view):
    report = view.report()
    assert report["by_key"]["alice"]["usd"] == pytest.approx(2 * 2 * 0.01)
    assert report["by_key"]["bob"]["tokens_per_busy_usd"] == pytest.approx(300 / 0.06)
    assert report["total"]["num_output_tokens"] == 400
    # The engine runs for 20 s: 5 s start, 5 s busy, 10 s idle.
    assert report["account"]["usd"]["total"] == pytest.approx(20 * 2 * 0.01)
    assert report["account"]["usd"]["idle"] == pytest.approx(10 * 2 * 0.01)
    assert report["account"]["tokens_per_usd"] == pytest.approx(400 / 0.4)


def test_key_sees_only_its_own_cost(view):
    report = view.report("alice")
    assert report["total"]["num_requests"] == 1
    assert set(report) == {"window_s", "total", "by_model"}


def test_report_counts_self_checks(view, engine_account, clock, tmp_path):
    assert view.report()["self_checks"] == {"passed": 0, "failed": 0, "skipped": 0, "unchecked": 1}
    checked = EngineAccount(tmp_path / "ledger", engine_account._engine, heartbeat_s=300, monotonic=clock)
    checked.self_check = SelfCheck(outcome="passed").to_json()
    checked.end()
    assert view.report()["self_checks"]["passed"] == 1


def test_report_covers_only_its_window(engine_account, clock, tmp_path):
    start = engine_account._started_at

    def write_request(seconds, request_id):
        request = engine_account.begin(Context(request_id=request_id, key="alice"))
        request.tally = AnswerTally(num_output_tokens=100)
        clock.now += seconds
        record = request.finish("ok")
        finished_at = start + clock.now - 100  # the fake clock starts at 100
        usage = replace(record.usage, started_at=finished_at - seconds, finished_at=finished_at)
        append_request(tmp_path / "ledger", replace(record, usage=usage))

    engine_account.ready()
    write_request(50, "before")
    clock.now += 70
    for _ in range(5):
        engine_account.heartbeat()  # one heartbeat per minute
        clock.now += 60
    write_request(20, "within")
    clock.now += 30
    engine_account.end()
    view = CostView(tmp_path / "ledger", PRICE, now=lambda: start + clock.now - 100)
    report = view.report(window_s=240)
    # The engine runs for 470 s, and 240 s before its end are second 230. Windows start at a whole minute.
    window_s = 470 - ((start + 230) // 60 * 60 - start)
    assert report["total"]["num_requests"] == 1
    assert report["account"]["device_s"]["busy"] == pytest.approx(2 * 20)
    assert report["account"]["device_s"]["idle"] == pytest.approx(2 * (window_s - 20))
    assert view.report()["account"]["device_s"]["total"] == pytest.approx(2 * 470)


@pytest.mark.parametrize("second", [0.5, 17.0, 42.0])
def test_tokens_per_dollar_do_not_depend_on_the_window(tmp_path, clock, monkeypatch, second):
    """For 630 s, requests of 1 s and 100 tokens run one after the other."""
    start, clock_start = 1_800_000_000 + second, clock.now
    monkeypatch.setattr("pipelines.online.replica.account.time.time", lambda: start + clock.now - clock_start)
    engine = EngineFacts(model="m", drafter=None, num_devices=2, device="vcpu", usd_per_device_s=0.01)
    account = EngineAccount(tmp_path / "ledger", engine, heartbeat_s=300, monotonic=clock)
    account.ready()
    for number in range(630):
        request = account.begin(Context(request_id=str(number), key="alice"))
        request.tally = AnswerTally(num_output_tokens=100)
        clock.now += 1
        request.write("ok")
        if number % 5 == 4:
            account.heartbeat()
    account.end()
    view = CostView(tmp_path / "ledger", PRICE, now=lambda: start + 630)
    for window_s in (60, 300, None):
        # The first request of a window might have started before the window.
        assert view.report(window_s=window_s)["account"]["tokens_per_usd"] == pytest.approx(100 / 0.02, rel=0.02)


def test_batch_counts_for_its_key_but_not_for_the_engines(view, tmp_path):
    before = view.report()["account"]
    (record, *_) = RequestReader(tmp_path / "ledger").new()
    usage = replace(record.usage, session_id="batch_1", num_rows=7, num_failed_rows=2)
    write_batch(tmp_path / "ledger", replace(record, request_id="batch_1", key="carol", usd=3.0, usage=usage))
    report = view.report()
    assert report["by_key"]["carol"]["num_requests"] == 9
    assert report["by_key"]["carol"]["num_failed"] == 2
    assert report["total"]["num_requests"] == 2 + 9
    assert view.spent_usd("carol") == 3.0
    assert report["account"] == before
    assert report["by_key"]["carol"]["requests_at_once"] is None


def test_report_has_the_mean_number_of_concurrent_requests(engine_account, clock, tmp_path):
    engine_account.ready()
    first = engine_account.begin(Context(request_id="1", key="alice"))
    clock.now += 2
    second = engine_account.begin(Context(request_id="2", key="alice"))
    clock.now += 2
    records = [request.finish("ok") for request in (first, second)]
    # The fake clock does not set the records' wall times.
    for record, duration_s in zip(records, (4, 2), strict=True):
        usage = replace(record.usage, finished_at=record.usage.started_at + duration_s)
        append_request(tmp_path / "ledger", replace(record, usage=usage))
    engine_account.end()
    result = CostView(tmp_path / "ledger", PRICE).report()["by_model"]
    (model,) = result.values()
    assert model["requests_at_once"] == pytest.approx(1.5)
    assert model["num_drafts"] == 0


def test_first_read_of_the_ledger_blocks_no_threads(tmp_path, monkeypatch):
    """Requests that wait for the read must not occupy the threads that other requests need."""
    may_end = threading.Event()
    monkeypatch.setattr(RequestReader, "iter_new", lambda reader: iter(may_end.wait(10) and ()))
    monkeypatch.setattr("pipelines.online.totals._MAX_WAIT_S", 0.1)
    view = CostView(tmp_path, PRICE)
    with pytest.raises(ApiError) as error:
        asyncio.run(view.require_loaded())
    assert (error.value.status, error.value.headers()) == (503, {"retry-after": "5"})
    assert view.spent_usd("alice") is None
    may_end.set()
    monkeypatch.setattr("pipelines.online.totals._MAX_WAIT_S", 10)
    asyncio.run(view.require_loaded())
    assert view.spent_usd("alice") == 0


@pytest.mark.parametrize(("window_days", "step_s"), [(1, 60), (10, 3600), (90, 86_400)])
def test_window_starts_at_a_whole_minute_hour_or_day(tmp_path, monkeypatch, window_days, step_s):
    monkeypatch.setattr("pipelines.online.totals._MIN_UNSAVED", 0)  # merge old requests after each read
    now = 1_800_000_000.0
    window_start = (now - window_days * 86_400) // step_s * step_s
    for number, finished_at in enumerate((window_start - 1, window_start, window_start + step_s - 1, now)):
        append_request(tmp_path, make_request_usage(str(number), started_at=finished_at - 0.5, finished_at=finished_at))
    result = CostView(tmp_path, PRICE, now=lambda: now).report("alice", window_s=window_days * 86_400)
    assert result["total"]["num_requests"] == 3


def test_statement_equals_the_output_of_the_command(tmp_path):
    write_endpoint(tmp_path)
    view = CostView(tmp_path / "ledger", PRICE)
    days = Days(day_of(timestamp(11, 3, 12)), day_of(timestamp(11, 4, 12)))
    for by in (("key", "day"), ("tag:team",), ("model", "drafter", "instance"), ()):
        (ledger,) = find_ledgers([str(tmp_path)]).ledgers
        assert view.statement(by, days) == statement(charges(ledger, days), by, days)
    by_key = {row["key"]: row["usd"] for row in view.statement(("key",), Days())["rows"]}
    assert by_key["alice"]["total"] == 6.88
    assert by_key[""]["overhead"] == pytest.approx(8700 * 6.88 / 3600)  # 600 s loading, 8100 s idle


def test_statement_of_a_key_has_only_its_cost(tmp_path):
    write_endpoint(tmp_path)
    result = CostView(tmp_path / "ledger", PRICE).statement(("key",), Days(), "bob")
    assert [row["key"] for row in result["rows"]] == ["bob"]
    assert result["total"]["usd"] == {
        "attributed": 3.44, "loading": 0.0, "idle": 0.0, "overhead": 0.0, "lost": 0.0, "total": 3.44,
    }  # fmt: skip


def test_statement_survives_a_restart(tmp_path, monkeypatch):
    """After the restart, the statement is read from the checkpoint."""
    write_endpoint(tmp_path)
    monkeypatch.setattr("pipelines.online.totals._MIN_UNSAVED", 0)
    before = CostView(tmp_path / "ledger", PRICE).statement(("key", "tag", "drafter"), Days())
    totals_of.cache_clear()
    monkeypatch.setattr(RequestReader, "iter_new", lambda reader: iter(()))
    assert CostView(tmp_path / "ledger", PRICE).statement(("key", "tag", "drafter"), Days()) == before


@pytest.mark.parametrize(
    ("period", "param"),
    [  # start, end, by, window_s
        ((None, None, "kye", None), "by"),
        ((date(2026, 11, 2), date(2026, 11, 1), None, None), "end"),
        ((None, None, "key", 60.0), "window_s"),
    ],
)
def test_invalid_period_is_refused(period, param):
    with pytest.raises(ApiError) as error:
        requested_period(*period)
    assert (error.value.status, error.value.param) == (400, param)
