import json

import pytest

from pipelines.batch.config import GenerateConfig
from pipelines.batch.plan import auto_rows_per_unit, make_plan, plan_from_bytes, plan_to_bytes


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
