import pytest

from peagle.economics.ledger import append_request
from peagle.economics.prices import Price
from pipelines.online.answers import Tally
from pipelines.online.cost import CostView

PRICE = Price.fixed(usd_per_hour=72, device="vcpu", num_devices=2)  # 0.01 USD a device-second, as the account's


@pytest.fixture
def view(engine_account, clock, tmp_path):
    clock.now += 5
    engine_account.ready()
    for request_id, key, tokens, busy_s in (("1", "alice", 100, 2), ("2", "bob", 300, 3)):
        request = engine_account.begin(request_id, key)
        request.tally = Tally(num_prompt_tokens=10, num_output_tokens=tokens)
        clock.now += busy_s
        append_request(tmp_path / "ledger", request.finish("ok"))
    clock.now += 10
    engine_account.end()
    return CostView(tmp_path / "ledger", PRICE)


def test_an_operator_sees_every_key_and_where_the_money_went(view):
    report = view.report()
    assert report["by_key"]["alice"]["usd"] == pytest.approx(2 * 2 * 0.01)
    assert report["by_key"]["bob"]["tokens_per_busy_usd"] == pytest.approx(300 / 0.06)
    assert report["total"]["num_output_tokens"] == 400
    assert report["account"]["usd"]["total"] == pytest.approx(20 * 2 * 0.01)
    assert report["account"]["usd"]["idle"] == pytest.approx(10 * 2 * 0.01)
    assert report["account"]["tokens_per_usd"] == pytest.approx(400 / 0.4)


def test_a_key_sees_its_own_requests_and_nothing_of_the_whole(view):
    report = view.report("alice")
    assert report["total"]["num_requests"] == 1
    assert set(report) == {"window_s", "total", "by_model"}


def test_a_window_leaves_out_what_ended_before_it(view):
    assert view.report(window_s=1e-9)["total"]["num_requests"] == 0
    assert view.report(window_s=3600)["total"]["num_requests"] == 2
