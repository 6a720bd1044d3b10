import json
import shutil
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from jobs import cli
from peagle.economics.ledger import sessions_to_parquet
from peagle.runs.audit import Finding, audit_files
from peagle.runs.lease import hold_lease
from peagle.runs.plan import Retry, plan_to_bytes
from peagle.runs.prepare import plan_retry
from peagle.runs.report import make_report

UNIT_1 = "unit-00000001.parquet"


def audit_run(run):
    return audit_files(run, run.manifest())


def finding_kinds(run):
    return [finding.kind for finding in audit_run(run).findings]


def single_finding(run):
    (finding,) = audit_run(run).findings
    return finding


def rewrite_unit(run, unit, change=lambda table: table, **usage):
    """Change the table or the usage of a committed unit."""
    path = run.unit_path(unit)
    table = change(pq.read_table(path))
    metadata = {b"peagle.failed": run.dead_letters_name(unit).encode()}
    metadata[b"peagle.usage"] = replace(run.usage(unit), **usage).to_json()
    pq.write_table(table.replace_schema_metadata(metadata), path)


def test_finished_run_is_clean(finished_run):
    make_report(finished_run)
    audit = audit_run(finished_run)
    assert (audit.findings, audit.notes, audit.is_finished) == ([], [], True)
    assert (audit.num_units, audit.num_rows, audit.num_failed_rows, audit.num_rows_left) == (4, 6, 1, 0)
    assert audit.rows_by_unit == {0: 2, 1: 2, 2: 2, 3: 0}
    assert audit.num_output_tokens == sum(usage.num_output_tokens for usage in finished_run.usages())


def test_unfinished_run_has_only_notes(plan_run):
    run = plan_run().generate(0, 2)
    (run.data / ".unit-00000001.parquet.0.tmp").touch()
    (run.failed / "unit-00000001.cafe.jsonl").touch()
    audit = audit_run(run)
    assert (audit.findings, audit.is_finished, audit.num_rows_left) == ([], False, 3)
    assert audit.notes == [
        "not committed yet: 2 units with 3 rows",
        "2 files of unfinished attempts, to be removed by the next attempt",
    ]


def test_files_of_killed_attempts_are_found_and_removed(finished_run):
    (finished_run.data / ".unit-00000001.parquet.0.tmp").touch()
    (finished_run.failed / "unit-00000001.cafe.jsonl").touch()
    with hold_lease(finished_run.root, expiry_s=30, command=["peagle"], announce=print):
        assert finding_kinds(finished_run) == []  # the lease holder may be writing them
    assert finding_kinds(finished_run) == ["leftover", "leftover"]
    finished_run.remove_leftovers()
    assert finding_kinds(finished_run) == []


def test_missing_row_is_lost(finished_run):
    usage = finished_run.usage(1)
    rewrite_unit(finished_run, 1, lambda table: table.slice(0, 1))
    findings = audit_run(finished_run).findings
    lost = Finding(kind="lost", where=UNIT_1, message="000000003: planned, but in no row and no dead letter")
    assert lost in findings
    assert Finding(kind="usage", where=UNIT_1, message="num_rows is 2 in the footer, but 1 were counted") in findings
    assert usage == finished_run.usage(1)  # the footer has not changed


def test_repeated_row_and_row_of_another_unit_are_found(finished_run):
    rewrite_unit(finished_run, 1, lambda table: table.take([0, 0]))
    assert {"doubled", "lost"} <= set(finding_kinds(finished_run))
    shutil.copy(finished_run.unit_path(0), finished_run.unit_path(1))
    messages = {finding.kind: finding.message for finding in audit_run(finished_run).findings}
    assert messages["foreign"] == "000000000, 000000001: not in this unit"
    assert "lost" in messages


@pytest.mark.parametrize("name", ["num_output_tokens", "num_prompt_tokens", "num_rows", "num_failed_rows"])
def test_wrong_usage_is_found(finished_run, name):
    value = getattr(finished_run.usage(1), name)
    rewrite_unit(finished_run, 1, **{name: value - 1 if value else 1})
    finding = single_finding(finished_run)
    assert (finding.kind, finding.where) == ("usage", UNIT_1)
    assert finding.message.startswith(f"{name} is ")


def test_wrong_draft_counts_are_found(finished_run):
    rewrite_unit(finished_run, 1, speculation=finished_run.usage(1).speculation + finished_run.usage(1).speculation)
    # One for each of num_drafts, num_draft_tokens and num_accepted_tokens.
    assert finding_kinds(finished_run) == ["usage", "usage", "usage"]


def test_wrong_dead_letters_are_found(finished_run):
    path = finished_run.failed / finished_run.dead_letters_name(3)
    letter = json.loads(path.read_text())
    path.write_text(json.dumps({**letter, "id": "000000000"}) + "\n")
    assert finding_kinds(finished_run) == ["lost", "foreign"]
    path.write_text(json.dumps({**letter, "unit": 2}) + "\n")
    assert single_finding(finished_run).message == "line 1: unit is 2, but 3 in the plan"
    path.write_text("{cut o")
    assert finding_kinds(finished_run) == ["damaged"]
    path.unlink()
    assert finding_kinds(finished_run) == ["missing"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:100],
        lambda data: data[:-10],
        lambda data: data[:4] + bytes(196) + data[200:],
    ],
)
def test_truncated_or_overwritten_unit_is_damaged(finished_run, damage):
    path = finished_run.unit_path(1)
    path.write_bytes(damage(path.read_bytes()))
    finding = single_finding(finished_run)
    assert (finding.kind, finding.where) == ("damaged", UNIT_1)


def test_wrong_columns_are_found(finished_run):
    rewrite_unit(finished_run, 1, lambda table: table.drop_columns(["ttft_s"]))
    assert single_finding(finished_run).message == "the columns differ from the plan: ttft_s"
    rewrite_unit(finished_run, 0, lambda table: table.set_column(0, table.column_names[0], table["num_output_tokens"]))
    assert "column 'prompt' is int32, but string in the plan" in [f.message for f in audit_run(finished_run).findings]


def test_row_of_another_model_is_found(finished_run):
    def with_other_model(table):
        return table.set_column(table.column_names.index("model"), "model", [["other"] * 2])

    rewrite_unit(finished_run, 1, with_other_model)
    assert single_finding(finished_run).message == "column 'model' has 'other', but the run used 'fake'"


def test_files_that_do_not_belong_to_the_run_are_found(finished_run):
    for name in ("thesis.tex", "data/unit-x.parquet", "failed/notes.txt", "ledger/session.csv"):
        (finished_run.root / name).touch()
    shutil.copy(finished_run.unit_path(0), finished_run.unit_path(9))
    findings = audit_run(finished_run).findings
    assert {finding.where for finding in findings} == {
        "thesis.tex", "data/unit-x.parquet", "failed/notes.txt", "ledger/session.csv", "data/unit-00000009.parquet",
    }  # fmt: skip
    assert {finding.kind for finding in findings} == {"foreign"}


def plan_path(run):
    return run.root / run.manifest()["plan"]


def test_plan_that_the_manifest_does_not_name_is_found(finished_run):
    (finished_run.root / "plan.0123456789ab.parquet").write_bytes(b"")
    assert (single_finding(finished_run).kind, single_finding(finished_run).where) == (
        "leftover",
        "plan.0123456789ab.parquet",
    )
    assert finished_run.remove_leftovers() == 1
    assert audit_run(finished_run).findings == []


def test_damaged_plan_and_plan_of_another_corpus_are_found(finished_run, plan_run):
    other = plan_run([{"prompt": f"other {n}"} for n in range(7)], name="other").generate()
    shutil.copy(plan_path(other), plan_path(finished_run))
    assert any(
        "for a different corpus than run.json" in finding.message for finding in audit_run(finished_run).findings
    )
    plan_path(finished_run).write_bytes(b"PAR1 cut off")
    assert finding_kinds(finished_run) == ["damaged"]


def test_ledger_must_have_one_session_per_engine_with_its_tokens(finished_run):
    path = finished_run.ledger / "session-engine.parquet"
    session = replace(finished_run.sessions()[0], num_output_tokens=1)
    finished_run.write_session(session)
    assert single_finding(finished_run).kind == "ledger"
    finished_run.write_session(replace(session, ended=False))
    assert finding_kinds(finished_run) == [], "the engine was killed between its last commit and the next heartbeat"
    copy = finished_run.ledger / "session-merged-1.parquet"
    shutil.copy(path, copy)
    assert finding_kinds(finished_run) == [], "a copy might be left by a compaction of the ledger"
    copy.write_bytes(sessions_to_parquet([replace(session, ended=False, num_output_tokens=2)]))
    assert single_finding(finished_run).message == "engine process engine is recorded twice"
    copy.unlink()
    path.write_bytes(b"PAR1")
    assert finding_kinds(finished_run) == ["damaged", *["ledger"] * 4]  # one for each unit


def test_retry_must_match_dead_letters(plan_run):
    fake_run = plan_run()
    run = fake_run.generate(refusing={"000000003"})
    plan_retry(run, run.plan())
    audit = audit_run(run)
    assert (audit.findings, audit.num_rows_left, audit.num_failed_rows) == ([], 2, 0)
    fake_run.generate(4, 5)
    audit = audit_run(run)
    assert (audit.findings, audit.num_rows, audit.num_failed_rows, audit.num_rows_left) == ([], 6, 1, 0)
    # Row 1 of unit 0 did not fail. Row 1 of unit 1 is already retried in unit 4.
    run.add_retries([Retry(unit=6, supersedes=0, rows=(1,)), Retry(unit=7, supersedes=1, rows=(1,))], number=2)
    assert [(finding.kind, finding.where) for finding in audit_run(run).findings] == [
        ("doubled", "unit-00000000.parquet"), ("plan", "unit 4"), ("plan", "unit 7"),
    ]  # fmt: skip
    assert finding_kinds(make_run_with_retry(plan_run, Retry(unit=4, supersedes=0, rows=(1,)))) == ["plan"]
    assert finding_kinds(make_run_with_retry(plan_run, Retry(unit=4, supersedes=0, rows=(0, 1, 2)))) == ["plan"]


def make_run_with_retry(plan_run, retry):
    """Return a run in which all rows of unit 0 failed, with the given retry."""
    run = plan_run(name=f"run-{len(retry.rows)}").generate(refusing={"000000000", "000000001"})
    run.add_retries([retry], number=1)
    return run


def test_regenerated_unit_must_skip_retried_rows(plan_run):
    fake_run = plan_run(rows_per_unit=4)
    run = fake_run.generate(refusing={"000000001", "000000002"})
    plan = plan_retry(run, run.plan())
    fake_run.generate(2, 3)
    run.unit_path(0).unlink()
    audit = audit_run(run)
    assert ([finding.kind for finding in audit.findings], audit.num_rows_left) == (["lost"], 2)
    fake_run.generate(0, refusing={"000000003"})
    run.remove_leftovers()  # the dead letters of the deleted file
    audit = audit_run(run)
    assert (audit.findings, audit.num_rows, audit.num_failed_rows, audit.num_rows_left) == ([], 5, 2, 0)
    plan_retry(run, plan)
    fake_run.generate(4, 5)
    audit = audit_run(run)
    assert (audit.findings, audit.num_rows, audit.num_failed_rows, audit.num_rows_left) == ([], 6, 1, 0)
    run.unit_path(0).unlink()
    fake_run._commit(plan.units[0], ())
    run.remove_leftovers()
    assert "doubled" in finding_kinds(run)


def test_missing_unit_of_a_run_with_a_report_is_lost(finished_run):
    make_report(finished_run)
    finished_run.unit_path(2).unlink()
    assert single_finding(finished_run).kind == "lost"
    (finished_run.root / "report.json").write_text("{")
    assert single_finding(finished_run).where == "report.json"


def test_missing_retried_unit_is_lost(plan_run):
    fake_run = plan_run()
    run = fake_run.generate(0, 1, refusing={"000000003"})
    make_report(run)
    plan_retry(run, run.plan())
    assert finding_kinds(run) == []
    fake_run.generate(2, 3, 4, 5)
    run.unit_path(0).unlink()
    assert finding_kinds(run) == []  # the existing report counts only units that exist
    make_report(run)
    run.unit_path(2).unlink()
    assert single_finding(run).message == "1 committed unit missing since report.json was written"


def test_changed_input_is_found_and_missing_input_is_a_note(finished_run, tmp_path):
    corpus = tmp_path / "run.jsonl"
    data = corpus.read_bytes()
    corpus.write_bytes(data.replace(b"say 1", b"say 9"))
    assert single_finding(finished_run).kind == "input"
    corpus.write_bytes(b"")
    assert "the file is empty" in single_finding(finished_run).message
    corpus.unlink()
    audit = audit_run(finished_run)
    assert audit.findings == []
    assert "the input was not compared" in audit.notes[0]


def test_input_of_older_runs_is_compared_with_their_fingerprint(finished_run):
    plan = finished_run.plan()
    # Fingerprints of older versions have no prefix.
    older_plan = replace(plan, corpus_fingerprint=plan.corpus_fingerprint.removeprefix("2:"))
    plan_path(finished_run).write_bytes(plan_to_bytes(older_plan))
    manifest = (finished_run.root / "run.json").read_text()
    (finished_run.root / "run.json").write_text(
        manifest.replace(plan.corpus_fingerprint, older_plan.corpus_fingerprint)
    )
    assert audit_run(finished_run).findings == []


def test_corpus_with_an_empty_file_has_no_findings(plan_run, tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n\n")
    (folder / "b.jsonl").write_text('{"prompt": "x"}\n')
    run = plan_run(input=str(folder)).generate()
    assert finding_kinds(run) == []


def test_audit_command_exits_with_1_and_names_findings(finished_run, capsys):
    assert cli.run(["audit", str(finished_run), "--no-regenerate"]) == 0
    assert capsys.readouterr().out.endswith("clean\n")
    finished_run.unit_path(1).write_bytes(b"")
    assert cli.run(["audit", str(finished_run), "--no-regenerate"]) == 1
    output = capsys.readouterr().out
    assert "damaged" in output
    assert UNIT_1 in output
    assert cli.run(["audit", str(finished_run), "--no-regenerate", "--json", "-"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["regenerated"], len(result["findings"])) == (False, None, 1)
    (finished_run.root / "run.json").write_text("{")
    assert cli.run(["audit", str(finished_run)]) == 1
    assert "run.json is damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sample", "0"], "--sample must be at least 1, got 0"),
        (["--max-tie", "-1"], "--max-tie must be 0 or more, got -1"),
        ([], "not a run directory"),
    ],
)
def test_invalid_flags_and_folders_exit_with_2(tmp_path, capsys, flags, message):
    assert cli.run(["audit", str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err
