import json
from dataclasses import replace

import pytest

from pipelines.batch.request import Allowance
from pipelines.online.batches import work
from pipelines.online.batches.decisions import make_task
from pipelines.online.batches.records import Batch, BatchProgress
from pipelines.online.batches.work import UNEXECUTED, Counts, Stop, collect, run_batch


@pytest.fixture
def task(store, settings, upload, make_order):
    lines = b"".join(json.dumps({"custom_id": name}).encode() + b"\n" for name in ("a", "b"))
    order = make_order(upload(store, lines + b"\n").id)
    return make_task(Batch(order=order, progress=BatchProgress(model="m")), settings, store)


@pytest.mark.parametrize("reason", UNEXECUTED)
def test_a_batch_that_never_ran_says_so_of_each_request(task, reason):
    result = collect(task, reason)
    assert (result.num_completed, result.num_failed, result.output, result.record) == (0, 2, None, None)
    with open(task.errors, "rb") as file:  # noqa: PTH123
        data = file.read()
    assert len(data) == result.errors
    lines = [json.loads(line) for line in data.splitlines()]
    assert [line["custom_id"] for line in lines] == ["a", "b"]
    assert {line["error"]["code"] for line in lines} == {reason}
    assert all(line["response"] is None for line in lines)


def test_a_task_has_the_models_engine_and_the_defaults_of_the_routes(task):
    assert task.config == {
        "engine": "fake", "usd_per_hour": 1, "input_format": "openai-batch", "temperature": 1.0, "max_tokens": 1000,
        "tags": {},
    }  # fmt: skip
    assert task.neighbours.slot_group == "app"
    assert task.commits == {"org/model": "abc"}


def test_a_batch_has_the_tags_of_the_endpoint_and_of_its_key(store, settings, upload, make_order, make_key):
    recipe = settings.recipes["m"]
    tagged = replace(recipe, config={**recipe.config, "tags": {"site": "lab", "team": "all"}})
    key = make_key("alice").model_copy(update={"tags": {"team": "search"}})
    batch = Batch(order=make_order(upload(store, b"{}\n").id, key=key), progress=BatchProgress(model="m"))
    task = make_task(batch, replace(settings, recipes={"m": tagged}), store)
    assert task.config["tags"] == {"site": "lab", "team": "search"}


def test_a_run_knows_what_clients_call_its_model(task, monkeypatch):
    asked = []
    monkeypatch.setattr(work.run, "generate", lambda request, _: asked.append(request.served_name))
    run_batch(task, Stop(), Counts(), Allowance(usd=None))
    assert asked == ["m"]


def test_what_a_run_may_cost_changes_while_it_is_at_work(task, monkeypatch):
    allowance, seen = Allowance(usd=None), []

    def generate(request, _):
        seen.append(request.budget_usd)
        allowance.usd = 5.0
        seen.append(request.budget_usd)

    monkeypatch.setattr(work.run, "generate", generate)
    run_batch(replace(task, budget_usd=2.0), Stop(), Counts(), allowance)
    assert seen == [2.0, 5.0]
