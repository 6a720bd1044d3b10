import time

import pytest

from peagle.economics.ledger import RequestReader, append_request, read_sessions
from peagle.economics.usage import EngineFacts
from pipelines.online.replica.account import EngineAccount
from pipelines.online.wire import Context

ENGINE = EngineFacts(model="m", drafter=None, num_devices=1, device="vcpu", usd_per_device_s=1)


def session(tmp_path):
    (result,) = read_sessions(tmp_path / "ledger")
    return result


def test_session_accounts_for_every_second(engine_account, clock, tmp_path):
    clock.now += 10
    engine_account.ready(compile_s=4)
    clock.now += 5
    request = engine_account.begin(Context(request_id="r", key="alice"))
    clock.now += 3
    request.finish("ok")
    engine_account.end()
    result = session(tmp_path)
    assert [result.load_s, result.compile_s, result.idle_s, result.busy_s] == pytest.approx([6, 4, 5, 3])
    assert (result.num_devices, result.ended) == (2, True)


def test_concurrent_requests_share_busy_seconds(engine_account, clock):
    engine_account.ready()
    first, second = (engine_account.begin(Context(request_id=name, key="a")) for name in ("1", "2"))
    clock.now += 4
    assert first.finish("ok").usage.busy_s == pytest.approx(2)
    clock.now += 1
    assert second.finish("ok").usage.busy_s == pytest.approx(3)


def test_request_is_billed_per_choice(engine_account, clock):
    engine_account.ready()
    contexts = [Context(request_id="r", key="a", num_choices=number) for number in (1, 3)]
    one_choice, three_choices = map(engine_account.begin, contexts)
    clock.now += 4
    assert three_choices.finish("ok").usage.busy_s == pytest.approx(3)
    clock.now += 1
    assert one_choice.finish("ok").usage.busy_s == pytest.approx(2)


def test_incomplete_request_record_is_read_once_complete(engine_account, tmp_path):
    reader = RequestReader(tmp_path / "ledger")
    record = engine_account.begin(Context(request_id="r", key="alice")).finish("ok")
    path = tmp_path / "ledger" / f"requests-{engine_account.session_id}.jsonl"
    path.write_bytes(record.to_json()[:20])
    assert reader.new() == []
    path.write_bytes(record.to_json() + b"\n")
    assert reader.new() == [record]
    append_request(tmp_path / "ledger", record)
    assert len(reader.new()) == 1
    assert reader.new() == []


@pytest.mark.parametrize("first_outcome", ["ok", "failed"])
def test_retried_request_is_billed_once(engine_account, clock, tmp_path, first_outcome):
    asked_at = time.time()
    crashed_account = EngineAccount(tmp_path / "ledger", ENGINE, monotonic=clock)
    for account in (crashed_account, engine_account):
        account.ready()
    request = crashed_account.begin(Context(request_id="r", key="alice"))
    clock.now += 3
    request.write(first_outcome)
    for request_id, first_asked_at in (("r", asked_at), ("another", asked_at), ("not retried", None)):
        request = engine_account.begin(Context(request_id=request_id, key="alice", first_asked_at=first_asked_at))
        clock.now += 1
        request.write("ok")
    crashed_account.end()
    records = RequestReader(tmp_path / "ledger").new()
    assert sum(record.request_id == "r" for record in records) == 1
    assert sum(record.usd > 0 for record in records) == 3


def test_heartbeats_continue_after_a_write_error(tmp_path, monkeypatch):
    written = []

    def write(_, session):
        written.append(session)
        if len(written) == 2:
            raise OSError("no space left on device")

    monkeypatch.setattr("pipelines.online.replica.account.write_session", write)
    account = EngineAccount(tmp_path, ENGINE, heartbeat_s=0.01)
    deadline = time.monotonic() + 10
    while len(written) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    account.end()
    assert len(written) >= 4
