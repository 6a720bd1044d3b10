import io
import itertools
import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from peagle.corpus.cutting import Cut
from peagle.corpus.rows import Span
from peagle.runs.plan import (
    Retry,
    WorkUnit,
    chunks,
    longest_first,
    make_plan,
    plan_from_bytes,
    plan_to_bytes,
    retries_from_bytes,
    retries_to_bytes,
    unit_from_json,
    unit_to_json,
)
from pipelines.batch.config import GenerateConfig


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(n)}) + "\n" for n in range(10)))
    return path


def test_plan_round_trip(corpus, tmp_path):
    plan = make_plan(GenerateConfig(input=str(corpus), output=tmp_path, rows_per_unit=4))
    assert plan_from_bytes(plan_to_bytes(plan)) == plan
    assert plan.notes == ()
    assert [unit.span.num_rows for unit in plan.units] == [4, 4, 2]


def test_plan_stores_notes(corpus, tmp_path):
    (tmp_path / "b.json").write_bytes(b"{}")
    plan = make_plan(GenerateConfig(input=str(tmp_path), output=tmp_path / "run"))
    assert len(plan.notes) == 1
    assert plan.notes[0].startswith(f"input {tmp_path}: b.json ignored: unknown format")
    assert plan_from_bytes(plan_to_bytes(plan)) == plan


def test_planning_is_deterministic(corpus, tmp_path):
    config = GenerateConfig(input=str(corpus), output=tmp_path, limit=7)
    assert make_plan(config) == make_plan(config)
    assert make_plan(config).num_rows == 7


def test_small_units_are_cut_from_the_first_rows_and_the_cut_is_stored(corpus, tmp_path):
    config = GenerateConfig(input=str(corpus), output=tmp_path, max_num_seqs=1, engines=1)
    plan = make_plan(config, Cut(rows_per_unit=4, small=(2, 1)))
    assert [unit.num_rows for unit in plan.units] == [2, 1, 4, 3]
    reloaded = plan_from_bytes(plan_to_bytes(plan))
    assert reloaded == plan
    assert make_plan(config, reloaded.cut) == plan
    assert make_plan(config).corpus_fingerprint == plan.corpus_fingerprint


def test_old_plan_without_work_or_cut_can_be_resumed(corpus, tmp_path):
    plan = make_plan(GenerateConfig(input=str(corpus), output=tmp_path, rows_per_unit=4))
    table = pq.read_table(io.BytesIO(plan_to_bytes(plan))).drop_columns(["work"])
    metadata = {key: value for key, value in table.schema.metadata.items() if key != b"peagle.small_units"}
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata), sink)
    old_plan = plan_from_bytes(sink.getvalue())
    assert [unit.num_rows for unit in old_plan.units] == [4, 4, 2]
    assert {unit.work for unit in old_plan.units} == {0}
    resumed = make_plan(GenerateConfig(input=str(corpus), output=tmp_path, engines=8), old_plan.cut)
    assert [unit.span for unit in resumed.units] == [unit.span for unit in plan.units]


def test_work_of_units_and_retries_is_estimated_from_max_tokens_and_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a", "sampling": {"max_tokens": 1000}}, {"prompt": "b"}, {"prompt": "c" * 4000}, {"prompt": "d"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = make_plan(GenerateConfig(input=str(path), output=tmp_path, rows_per_unit=1, max_tokens=100))
    assert [unit.work for unit in plan.units] == [1001, 100, 200, 100]
    (one_unit,) = make_plan(GenerateConfig(input=str(path), output=tmp_path, rows_per_unit=9, max_tokens=100)).units
    assert one_unit.work == 1401
    assert replace(one_unit, rows=(0,)).work == 350, "a retry of one of its four rows"


def test_retry_keeps_span_and_ids(corpus, tmp_path):
    plan = make_plan(GenerateConfig(input=str(corpus), output=tmp_path, rows_per_unit=4))
    retries = [Retry(unit=3, supersedes=1, rows=(0, 3)), Retry(unit=4, supersedes=3, rows=(3,))]
    assert retries_from_bytes(retries_to_bytes(retries)) == retries
    reloaded = plan.with_retries(retries)
    assert reloaded.units[:3] == plan.units
    first, second = reloaded.units[3:]
    assert (first.span, first.num_rows, first.attempt) == (plan.units[1].span, 2, 2)
    assert [first.row_id(index) for index in range(2)] == ["000000004", "000000007"]
    assert (second.row_id(0), second.attempt, second.supersedes) == ("000000007", 3, 3)
    assert reloaded.num_rows == 10
    assert [unit_from_json(unit_to_json(unit)) for unit in reloaded.units] == list(reloaded.units)


def test_unit_whose_file_was_deleted_runs_without_retried_rows(corpus, tmp_path):
    plan = make_plan(GenerateConfig(input=str(corpus), output=tmp_path, rows_per_unit=4))
    plan = plan.with_retries([Retry(unit=3, supersedes=0, rows=(1, 2)), Retry(unit=4, supersedes=3, rows=(2,))])
    assert plan.retried_rows() == {0: {1, 2}, 3: {2}}
    assert [(unit.unit, unit.rows) for unit in plan.remaining_units({1, 2, 4})] == [(0, (0, 3)), (3, (1,))]
    assert [unit.unit for unit in plan.remaining_units({0, 2, 3})] == [1, 4]
    ids = [unit.row_id(index) for unit in plan.remaining_units(()) for index in range(unit.num_rows)]
    assert sorted(ids) == [f"{n:09d}" for n in range(10)]
    assert plan.remaining_units(())[0].work == plan.units[0].work // 2


def make_unit(number, work):
    return WorkUnit(
        unit=number, first_id=number, span=Span(path="a", format="csv", first_row=number, num_rows=1, work=work)
    )


def test_longest_units_come_first():
    works = [10, 1000, 9, 1001, 600, 0, 0]
    units = [make_unit(number, work) for number, work in enumerate(works)]
    # Units of similar work keep their order, since work is compared in powers of two.
    assert [unit.unit for unit in longest_first(units)] == [1, 3, 4, 0, 2, 5, 6]


def test_chunks_keep_the_order_and_end_with_single_units():
    units = [make_unit(number, 0) for number in range(20_000)]
    all_chunks = chunks(units)
    assert list(itertools.chain(*all_chunks)) == units
    assert all(len(chunk) == 1 for chunk in all_chunks[-512:])  # a chunk has at most 1/512 of the remaining units
    assert len(all_chunks) < 3_000
    assert max(map(len, all_chunks)) <= 256
    assert chunks(units[:3]) == [units[:1], units[1:2], units[2:3]]
