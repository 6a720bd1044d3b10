import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peagle.economics.usage import EngineSession, UnitUsage
from peagle.errors import ConfigError, PeagleError
from peagle.speculation import SpeculationStats
from pipelines.batch.inputs.span import Span
from pipelines.batch.plan import Plan, WorkUnit
from pipelines.batch.retries import plan_retry
from pipelines.batch.rundir import RunDirectory
from pipelines.batch.suspects import Note, UnitNotes


def usage(**changes):
    values = {
        "session_id": "s",
        "num_rows": 2,
        "num_failed_rows": 0,
        "num_prompt_tokens": 10,
        "num_cached_tokens": 0,
        "num_output_tokens": 20,
        "busy_s": 1.0,
        "speculation": SpeculationStats.empty(),
        "started_at": 1.0,
        "finished_at": 2.0,
    }
    return UnitUsage(**{**values, **changes})


@pytest.fixture
def run(tmp_path):
    span = Span(path="a.jsonl", format="jsonl", first_row=0, num_rows=2)
    plan = Plan(
        units=(WorkUnit(unit=0, first_id=0, span=span),),
        rows_per_unit=2,
        schema=pa.schema([("prompt", pa.string())]),
        corpus_fingerprint="c",
    )
    run = RunDirectory(tmp_path / "run")
    run.create({"schema": 1}, plan)
    return run


TABLE = pa.table({"id": ["0", "1"], "response": ["a", "b"]})


def test_a_unit_is_committed_when_its_file_exists(run):
    assert run.committed() == set()
    assert run.commit(0, TABLE, usage(), [])
    assert run.committed() == {0}
    assert pq.read_table(run.unit_path(0)).to_pylist() == TABLE.to_pylist()
    assert list(run.usages()) == [usage()]


def test_the_first_commit_wins_with_its_rows_its_usage_and_its_letters(run):
    first = [{"id": "1", "reason": "first"}]
    assert run.commit(0, TABLE.slice(0, 1), usage(num_rows=1, num_failed_rows=1), first)
    assert not run.commit(0, TABLE, usage(num_rows=2), [{"id": "1", "reason": "second"}])
    assert pq.read_table(run.unit_path(0)).num_rows == 1
    assert list(run.dead_letters()) == first
    assert len(list(run.failed.iterdir())) == 1


def test_what_killed_attempts_left_is_not_valid_and_is_cleared(run):
    (run.failed / "unit-00000000.deadbeef.jsonl").write_text('{"id": "0", "reason": "orphan"}\n')
    (run.suspects / ".unit-00000000.session.json.deadbeef.tmp").write_text("{")
    UnitNotes(run.suspects, 0, "session").write(Note(rows=(1,), alone=True, died=True))
    run.commit(0, TABLE, usage(), [])
    assert list(run.dead_letters()) == []
    assert run.remove_leftovers() == 2
    assert [*run.failed.iterdir(), *run.suspects.iterdir()] == []


def test_a_unit_whose_rows_all_failed_is_a_committed_file_without_rows(run):
    letters = [{"id": str(n), "reason": "x"} for n in range(2)]
    assert run.commit(0, TABLE.slice(0, 0), usage(num_rows=0, num_failed_rows=2), letters)
    assert pq.read_table(run.unit_path(0)).schema.names == ["id", "response"]
    assert list(run.dead_letters()) == letters


def test_sessions_are_replaced_by_their_next_heartbeat(run):
    def session(busy_s):
        return EngineSession(
            session_id="s",
            engine_index=0,
            hostname="h",
            num_devices=2,
            device="vcpu",
            started_at=10.0,
            last_seen_at=15.0 + busy_s,
            load_s=5.0,
            compile_s=0.0,
            busy_s=busy_s,
            idle_s=0.0,
            num_output_tokens=3,
            ended=False,
        )

    run.write_session(session(1.0))
    run.write_session(session(2.0))
    assert run.sessions() == [session(2.0)]


def test_opening_clears_what_killed_writers_left(run):
    leftover = run.data / ".unit-00000000.parquet.0123.tmp"
    leftover.touch()
    run.open()
    assert not leftover.exists()


def test_a_folder_with_other_files_is_refused(tmp_path, run):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="holds other files"):
        RunDirectory(tmp_path).create({}, run.plan())


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, run):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDirectory(tmp_path / "file" / "run").create({}, run.plan())


def test_what_is_no_run_says_so(tmp_path):
    with pytest.raises(ConfigError, match="no run directory"):
        RunDirectory(tmp_path).manifest()


@pytest.mark.parametrize("content", [b"", b"PAR1 cut off"])
def test_a_damaged_unit_is_named_with_the_way_out(run, content):
    run.unit_path(0).write_bytes(content)
    with pytest.raises(PeagleError, match=r"unit-00000000\.parquet is damaged(.|\n)*delete that file"):
        list(run.usages())


def test_a_foreign_parquet_file_is_named(run):
    pq.write_table(TABLE, run.unit_path(0))
    with pytest.raises(PeagleError, match="not written by peagle"):
        list(run.usages())


def letter(row_id, reason="x"):
    return {"id": f"{row_id:09d}", "reason": reason}


def test_a_retry_answers_for_the_rows_that_it_takes_up(run):
    assert run.commit(0, TABLE.slice(0, 1), usage(num_rows=1, num_failed_rows=1), [letter(1)])
    plan = plan_retry(run, run.plan())
    assert [(unit.unit, unit.supersedes, unit.rows) for unit in plan.units[1:]] == [(1, 0, (1,))]
    assert run.plan() == plan
    assert plan.num_rows == 2
    assert list(run.dead_letters()) == []
    assert [one.num_failed_rows for one in run.usages()] == [0]

    assert plan_retry(run, plan) == plan
    assert run.commit(1, TABLE.slice(1, 0), usage(num_rows=0, num_failed_rows=1), [letter(1, "again")])
    assert list(run.dead_letters()) == [letter(1, "again")]
    assert [one.num_failed_rows for one in run.usages()] == [0, 1]
    assert run.remove_leftovers() == 0

    third = plan_retry(run, run.plan())
    assert (third.units[-1].unit, third.units[-1].supersedes, third.units[-1].attempt) == (2, 1, 3)
    assert run.commit(2, TABLE.slice(1), usage(num_rows=1), [])
    assert list(run.dead_letters()) == []
    assert sum(one.num_rows for one in run.usages()) == 2


def test_without_dead_letters_there_is_nothing_to_retry(run):
    run.commit(0, TABLE, usage(), [])
    assert plan_retry(run, run.plan()) == run.plan()
    assert run.retries() == []


def test_a_damaged_plan_of_a_retry_is_named(run):
    (run.root / "plan-0001.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(ConfigError, match=r"plan-0001\.parquet is damaged"):
        run.plan()


def test_a_stop_carries_its_grace_until_the_run_goes_on(run):
    assert run.stop_grace_s() is None
    run.request_stop(7.5)
    assert run.stop_grace_s() == 7.5
    run.open()
    assert run.stop_grace_s() is None
