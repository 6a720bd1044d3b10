import json

import pytest

from pipelines.batch.config import GenerateConfig
from pipelines.batch.plan import (
    Retry,
    auto_rows_per_unit,
    make_plan,
    plan_from_bytes,
    plan_to_bytes,
    retries_from_bytes,
    retries_to_bytes,
    unit_from_json,
    unit_to_json,
)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(n)}) + "\n" for n in range(10)))
    return path


def test_a_plan_survives_its_file(corpus, tmp_path):
    plan = make_plan(GenerateConfig(input=str(corpus), output=tmp_path, rows_per_unit=4))
    assert plan_from_bytes(plan_to_bytes(plan)) == plan
    assert [unit.span.num_rows for unit in plan.units] == [4, 4, 2]


def test_ids_are_row_numbers_of_the_whole_corpus(corpus, tmp_path):
    plan = make_plan(GenerateConfig(input=str(corpus), output=tmp_path, rows_per_unit=4))
    ids = [unit.row_id(index) for unit in plan.units for index in range(unit.span.num_rows)]
    assert ids == [f"{n:09d}" for n in range(10)]


def test_planning_twice_gives_the_same_plan(corpus, tmp_path):
    config = GenerateConfig(input=str(corpus), output=tmp_path, limit=7)
    assert make_plan(config) == make_plan(config)
    assert make_plan(config).num_rows == 7


@pytest.mark.parametrize(("rows", "engines", "expected"), [(1, 8, 1), (48, 1, 3), (10_000, 2, 256), (10**9, 1, 256)])
def test_units_are_many_enough_and_not_too_many(rows, engines, expected):
    assert auto_rows_per_unit(rows, engines) == expected


def test_a_retry_reads_rows_where_its_unit_read_them_and_keeps_their_ids(corpus, tmp_path):
    plan = make_plan(GenerateConfig(input=str(corpus), output=tmp_path, rows_per_unit=4))
    retries = [Retry(unit=3, supersedes=1, rows=(0, 3)), Retry(unit=4, supersedes=3, rows=(3,))]
    assert retries_from_bytes(retries_to_bytes(retries)) == retries
    again = plan.with_retries(retries)
    assert again.units[:3] == plan.units
    first, second = again.units[3:]
    assert (first.span, first.num_rows, first.attempt) == (plan.units[1].span, 2, 2)
    assert [first.row_id(index) for index in range(2)] == ["000000004", "000000007"]
    assert (second.row_id(0), second.attempt, second.supersedes) == ("000000007", 3, 3)
    assert again.num_rows == 10
    assert [unit_from_json(unit_to_json(unit)) for unit in again.units] == list(again.units)
