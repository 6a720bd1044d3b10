import pyarrow as pa

from peagle.corpus.rows import Span
from peagle.economics.usage import UnitUsage
from peagle.speculation import SpeculationStats
from pipelines.batch.answers import describe_answers
from pipelines.batch.plan import Plan, WorkUnit
from pipelines.batch.rows import OUTPUT_SCHEMA
from pipelines.batch.rundir import RunDirectory

USAGE = UnitUsage(
    session_id="s", num_rows=1, num_failed_rows=0, num_prompt_tokens=8, num_cached_tokens=0, num_output_tokens=6,
    busy_s=1.0, speculation=SpeculationStats.empty(), started_at=1.0, finished_at=2.0,
)  # fmt: skip


def run_with(root, responses):
    units = tuple(
        WorkUnit(unit=unit, first_id=unit, span=Span(path="a", format="jsonl", first_row=unit, num_rows=1))
        for unit in range(len(responses))
    )
    plan = Plan(units=units, rows_per_unit=1, schema=pa.schema([("x", pa.string())]), corpus_fingerprint="c")
    run = RunDirectory(root)
    run.create({"run_id": "r"}, plan)
    for unit, response in enumerate(responses):
        row = {**dict.fromkeys(OUTPUT_SCHEMA.names), "id": f"{unit:09d}", "response": response}
        run.commit(unit, pa.Table.from_pylist([row], schema=OUTPUT_SCHEMA), USAGE, [])
    return run


def test_where_the_answers_are_and_the_first_two(root):
    said = describe_answers(run_with(root, ["\n  one\n\ttwo\n", "a\nb\nc\nd\ne", "third"])).splitlines()
    assert said[0] == f"answers: {root}/data, column response of unit-*.parquet; the first 2:"
    assert said[1:4] == ["  000000000", "  |   one", "  |     two"]
    assert said[4:] == ["  000000001", "  | a", "  | b", "  | c", "  | d", "  | ..."]


def test_an_answer_cannot_steer_the_terminal(root):
    assert "\x1b" not in describe_answers(run_with(root, ["\x1b[2J\x07gone" + "x" * 500]))


def test_a_run_without_answers_says_nothing(root):
    assert describe_answers(run_with(root, [])) == ""
