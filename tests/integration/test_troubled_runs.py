"""Runs with failing rows and engines, timeouts and budgets, on a real Ray cluster with the fake engine."""

import json
import shlex

import pyarrow.dataset as ds
import pytest

from jobs import cli
from peagle.runs.directory import RunDirectory

pytestmark = pytest.mark.usefixtures("ray_cluster")


def generate(corpus, output, *flags):
    return cli.run(["generate", "--engine", "fake", "--input", str(corpus), "--output", str(output), *map(str, flags)])


def outcomes(output):
    """Return the outcome by id: "done", or the reason of the dead letter. Every id must occur once."""
    table = ds.dataset(output / "data", format="parquet").to_table(columns=["id"])
    result = [(int(row["id"]), "done") for row in table.to_pylist()]
    result += [(int(failed["id"]), failed["reason"]) for failed in RunDirectory(output).dead_letters()]
    assert len(dict(result)) == len(result)
    return dict(result)


# `die_on`: the engine reports that it died. `kill_on`: its actor's process is killed. `hang_on`: it hangs.
@pytest.mark.parametrize("trait", ["die_on", "kill_on", "hang_on"])
def test_row_that_kills_engines_becomes_a_dead_letter(write_jsonl, tmp_path, trait):
    corpus = write_jsonl([{"prompt": "arsenic" if n == 4 else f"bread {n}"} for n in range(12)])
    output = tmp_path / "run"
    flags = ["--rows-per-unit", 3, "--max-num-seqs", 4, "--engine-timeout-s", 3]
    assert generate(corpus, output, "--fake", json.dumps({trait: "arsenic"}), *flags) == 0
    assert outcomes(output) == {**dict.fromkeys(range(12), "done"), 4: "engine_died"}
    run = RunDirectory(output)
    assert len(run.sessions()) > 1
    assert not list(run.suspects.iterdir())


def test_run_ends_after_repeated_engine_crashes(write_jsonl, tmp_path, capsys):
    corpus = write_jsonl([{"prompt": f"arsenic {n}"} for n in range(60)])
    output = tmp_path / "run"
    flags = ["--rows-per-unit", 2, "--max-num-seqs", 4]
    assert generate(corpus, output, "--fake", '{"die_on": "arsenic"}', *flags) == 1
    stderr = capsys.readouterr().err
    assert "without finishing a row" in stderr
    assert "logs/" in stderr
    assert len(RunDirectory(output).sessions()) < 15


def test_timed_out_rows_are_dead_letters_and_can_be_retried(write_jsonl, tmp_path, capsys):
    rows = [{"prompt": str(n), "sampling": {"max_tokens": 1 if n % 3 else 30}} for n in range(9)]
    corpus, output = write_jsonl(rows), tmp_path / "run"
    flags = ["--rows-per-unit", 2, "--output-format", "jsonl"]
    assert generate(corpus, output, *flags, "--fake", '{"token_s": 0.4}', "--row-timeout-s", 1) == 0
    assert outcomes(output) == {n: "done" if n % 3 else "time_limit" for n in range(9)}
    mtimes_before = {path: path.stat().st_mtime_ns for path in (output / "data").iterdir()}

    assert generate(corpus, output, *flags, "--retry-failed") == 0
    assert "failed rows to retry: 3" in capsys.readouterr().out
    assert outcomes(output) == dict.fromkeys(range(9), "done")
    assert {path: path.stat().st_mtime_ns for path in mtimes_before} == mtimes_before
    exported = ds.dataset(output / "export" / "jsonl" / "output.jsonl", format="json").to_table()
    assert exported.column("prompt").to_pylist() == [str(n) for n in range(9)]
    assert generate(corpus, output, *flags, "--retry-failed") == 0
    stdout = capsys.readouterr().out
    assert "there are no failed rows to retry" in stdout
    assert "is already finished" in stdout


def test_run_stops_at_its_budget_and_can_be_continued(write_jsonl, tmp_path, capsys):
    corpus, output = write_jsonl([{"prompt": str(n)} for n in range(60)]), tmp_path / "run"
    budget_usd, usd_per_s, heartbeat_s = 24.0, 1.0, 0.5
    flags = [
        "--rows-per-unit", 1, "--max-num-seqs", 1, "--fake", '{"token_s": 0.1}', "--heartbeat-s", heartbeat_s,
        "--usd-per-hour", 3600 * usd_per_s, "--budget-usd", budget_usd, "--grace-s", 1,
    ]  # fmt: skip
    assert generate(corpus, output, *flags) == 3
    stderr = capsys.readouterr().err
    assert "the budget of $24.00 is reached" in stderr
    run = RunDirectory(output)
    assert 0 < len(run.committed()) < 60
    assert (
        sum(session.last_seen_at - session.started_at for session in run.sessions()) * usd_per_s
        <= budget_usd + heartbeat_s * usd_per_s
    )
    command = shlex.split(stderr.rpartition("this continues the run: ")[2])
    assert cli.run([*command[1:], "--fake", "{}"]) == 0
    assert outcomes(output) == dict.fromkeys(range(60), "done")


def test_run_with_too_many_failed_rows_stops(write_jsonl, tmp_path, capsys):
    rows = [{"prompt": f"row {n}" if n % 2 else n} for n in range(80)]
    corpus, output = write_jsonl(rows), tmp_path / "run"
    flags = ["--rows-per-unit", 1, "--max-num-seqs", 1, "--fake", '{"token_s": 0.1}', "--grace-s", 1]
    assert generate(corpus, output, *flags, "--max-failed-rows", 3) == 1
    stderr = capsys.readouterr().err
    assert "more than --max-failed-rows 3" in stderr
    assert "invalid_prompt; for example row 0000000" in stderr
    assert len(RunDirectory(output).committed()) < 80
