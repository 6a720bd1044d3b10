"""A run with its corpus and directory on a faulty S3 server is killed and resumed. Every id occurs once."""

import io
import json
import signal
import time

import pyarrow.parquet as pq
import pytest

from jobs import cli
from peagle.runs.directory import RunDirectory
from peagle.runs.status import StatusReader
from peagle.storage import storage_path, write_atomic

NUM_ROWS = 30
OUTPUT = "s3://bucket/runs/first"

pytestmark = pytest.mark.timeout(400)


def rows_of(run):
    tables = [pq.read_table(io.BytesIO(run.unit_path(unit).read_bytes())) for unit in sorted(run.committed())]
    return [row for table in tables for row in table.to_pylist()]


def file_names(folder):
    return {path.name for path in folder.iterdir()}


def test_killed_run_on_faulty_s3_resumes_without_loss(s3, peagle, capsys):
    prompts = [{"prompt": f"row {n}"} for n in range(NUM_ROWS)] + [{"prompt": 7}]
    write_atomic(
        storage_path("s3://bucket/corpus") / "a.jsonl", "".join(json.dumps(row) + "\n" for row in prompts).encode()
    )
    run = RunDirectory(OUTPUT)
    arguments = [
        "generate", "--engine", "fake", "--fake", '{"token_s": 0.05}', "--input", "s3://bucket/corpus/a.jsonl",
        "--output", OUTPUT, "--rows-per-unit", 1, "--max-num-seqs", 2, "--heartbeat-s", 0.5, "--output-format", "jsonl",
    ]  # fmt: skip
    first = peagle(*arguments)
    deadline = time.monotonic() + 200
    while len(run.committed()) < 3:
        assert first.poll() is None, first.stdout.read()
        assert time.monotonic() < deadline, "no unit was committed"
        time.sleep(0.2)
    assert StatusReader(run).read().state == "running"
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    committed_before = run.committed()
    assert 3 <= len(committed_before) < NUM_ROWS

    s3.fail_often(0.1, seed=1)
    second = peagle(*arguments, "--fake", "{}")
    stdout, _ = second.communicate(timeout=250)
    s3.reset_faults()
    assert second.returncode == 0, stdout
    assert "report: s3://bucket/runs/first/report.html" in stdout
    assert [row["id"] for row in rows_of(run)] == [f"{n:09d}" for n in range(NUM_ROWS)]
    assert [letter["id"] for letter in run.dead_letters()] == [f"{NUM_ROWS:09d}"]
    assert committed_before <= run.committed()
    assert not file_names(run.suspects)
    assert len(file_names(run.failed)) == 1
    logs = file_names(run.root / "logs")
    assert any(name.startswith("driver-") for name in logs)
    assert any(name.startswith("engine-") for name in logs)

    lines = (run.root / "export" / "jsonl" / "output.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [f"{n:09d}" for n in range(NUM_ROWS)]
    for command in (["status"], ["report"], ["export", "--format", "parquet"]):
        assert cli.run([command[0], OUTPUT, *command[1:]]) == 0
    stdout = capsys.readouterr().out
    for part in (
        "finished",
        f"{NUM_ROWS + 1} of {NUM_ROWS + 1} committed",
        f"{NUM_ROWS} rows, 1 dead letters as parquet",
    ):
        assert part in stdout
    exported = pq.read_table(io.BytesIO((run.root / "export" / "parquet" / "output.parquet").read_bytes()))
    assert exported.num_rows == NUM_ROWS
