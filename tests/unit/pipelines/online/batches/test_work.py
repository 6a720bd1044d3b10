import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from usage_records import engine_session, unit_usage

from peagle.economics.prices import Price
from pipelines.batch.request import Allowance
from pipelines.online.batches import work
from pipelines.online.batches.records import Batch, BatchProgress
from pipelines.online.batches.scheduler import make_task
from pipelines.online.batches.work import UNEXECUTED_MESSAGES, RunCounts, StopRequest, collect, run_batch

PRICE = Price(
    instance_type="i", provider="p", region="r", market="fixed", usd_per_hour=36, device="vcpu", num_devices=1,
    accelerator=None, source="test", as_of="2026-11-26",
)  # fmt: skip


def usage_of(session_id):
    return unit_usage(
        session_id, num_rows=3, num_prompt_tokens=12, num_cached_tokens=4, num_output_tokens=30, busy_s=4.0
    )


def session_of(session_id):
    return engine_session(session_id, load_s=2.0, busy_s=8.0, num_output_tokens=60)


@pytest.fixture
def task(store, settings, upload, make_batch_request):
    lines = b"".join(json.dumps({"custom_id": name}).encode() + b"\n" for name in ("a", "b"))
    request = make_batch_request(upload(store, lines + b"\n").id)
    return make_task(Batch(request=request, progress=BatchProgress(model="m")), settings, store)


@pytest.mark.parametrize("reason", UNEXECUTED_MESSAGES)
def test_unexecuted_requests_are_in_the_error_file(task, reason):
    result = collect(task, reason)
    assert (result.num_completed, result.num_failed, result.output, result.record) == (0, 2, None, None)
    with open(task.errors, "rb") as file:  # noqa: PTH123
        data = file.read()
    assert len(data) == result.errors
    lines = [json.loads(line) for line in data.splitlines()]
    assert [line["custom_id"] for line in lines] == ["a", "b"]
    assert {line["error"]["code"] for line in lines} == {reason}
    assert all(line["response"] is None for line in lines)


def test_task_has_the_engine_and_the_sampling_defaults(task):
    assert task.config == {
        "engine": "fake", "usd_per_hour": 1, "input_format": "openai-batch", "temperature": 1.0, "max_tokens": 1000,
        "tags": {},
    }  # fmt: skip
    assert task.neighbours.slot_group == "app"
    assert task.commits == {"org/model": "abc"}


def test_batch_has_the_tags_of_endpoint_and_key(store, settings, upload, make_batch_request, make_key):
    batch_model = settings.models["m"]
    tagged = replace(batch_model, config={**batch_model.config, "tags": {"site": "lab", "team": "all"}})
    key = make_key("alice").model_copy(update={"tags": {"team": "search"}})
    batch = Batch(request=make_batch_request(upload(store, b"{}\n").id, key=key), progress=BatchProgress(model="m"))
    task = make_task(batch, replace(settings, models={"m": tagged}), store)
    assert task.config["tags"] == {"site": "lab", "team": "search"}


def test_run_of_a_batch_has_the_served_name(task, monkeypatch):
    served_names = []
    monkeypatch.setattr(work.run, "generate", lambda request, _: served_names.append(request.served_name))
    run_batch(task, StopRequest(), RunCounts(), Allowance(usd=None))
    assert served_names == ["m"]


def test_cost_limit_of_a_run_can_change(task, monkeypatch):
    allowance, budgets_usd = Allowance(usd=None), []

    def generate(request, _):
        budgets_usd.append(request.budget_usd)
        allowance.usd = 5.0
        budgets_usd.append(request.budget_usd)

    monkeypatch.setattr(work.run, "generate", generate)
    run_batch(replace(task, budget_usd=2.0), StopRequest(), RunCounts(), allowance)
    assert budgets_usd == [2.0, 5.0]


def test_record_of_a_batch_excludes_lent_engines(task, monkeypatch):
    """The limit of a resumed run is the remaining budget plus the previous cost of the lent engines."""
    own, lent = (usage_of(name) for name in ("s", "s-lent"))
    monkeypatch.setattr(work, "make_report", lambda run: None)
    directory = SimpleNamespace(
        exists=True,
        manifest=lambda: {"run": {"drafter": None}, "config": {}, "price": PRICE.to_dict()},
        usages=lambda: iter([own, lent, lent]),
        sessions=lambda: [session_of("s"), session_of("s-lent")],
    )
    record = work._record(task, directory, None)
    assert (record.is_batch, record.usage.num_rows, record.usd) == (True, 3, pytest.approx(10 * PRICE.usd_per_device_s))
    assert work._usage(task, directory.usages()).num_rows == 9
    budgets_usd = []
    monkeypatch.setattr(work, "RunDirectory", lambda _: directory)
    monkeypatch.setattr(work.run, "generate", lambda request, _: budgets_usd.append(request.budget_usd))
    monkeypatch.setattr(work, "collect", lambda *_: None)
    directory.manifest = lambda: {"config": task.config, "price": PRICE.to_dict()}
    run_batch(replace(task, budget_usd=2.0), StopRequest(), RunCounts(), Allowance(usd=None))
    assert budgets_usd == [pytest.approx(2.0 + 10 * PRICE.usd_per_device_s)]


def test_lender_bills_the_key_of_the_batch(store, settings, upload, make_batch_request, make_key):
    models = {"m": replace(settings.models["m"], lent_slots=16)}
    settings_with_lender = replace(
        settings, models=models, application="peagle", deployments={"m": "LLM:m"}, cache_salt=lambda key: key.name
    )
    batch = Batch(request=make_batch_request(upload(store).id, key=make_key("bob")), progress=BatchProgress(model="m"))
    lender = make_task(batch, settings_with_lender, store).lender
    assert (lender.deployment, lender.application, lender.num_slots) == ("LLM:m", "peagle", 16)
    assert (lender.context.request_id, lender.context.key, lender.cache_salt) == (batch.id, "bob", "bob")
    assert make_task(batch, settings, store).lender is None
