"""`peagle cost` of a large month: a million requests of an endpoint and a thousand units of a bulk run."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from peagle.economics.ledger import append_beat, write_session
from tests.unit.economics.month import BULK_SESSION, SERVING, make_request_usage, make_unit_usage, timestamp, write_run

NUM_REQUESTS, NUM_ENGINES, NUM_UNITS = 1_000_000, 4, 1000
MONTH_S = 30 * 86_400
MAX_S, MAX_BYTES = 10.0, 2**30
KEYS = [f"key{number}" for number in range(20)]


def write_month(root):
    """Write a ledger of four engines that run for all of November, and a bulk run."""
    ledger = root / "serve" / "ledger"
    ledger.mkdir(parents=True)
    month_start, requests_per_engine = timestamp(11, 1, 0), NUM_REQUESTS // NUM_ENGINES
    record = json.loads(
        make_request_usage("KEY", usd=0.001, busy_s=1.0, tokens=200, finished_at=month_start + 1).to_json()
    )
    for engine in range(NUM_ENGINES):
        name = f"engine{engine}"
        states = {"load_s": 600.0, "busy_s": 1.0 * requests_per_engine, "idle_s": MONTH_S - 600.0 - requests_per_engine}
        for day in range(1, 31):
            part = {state: seconds * day / 30 for state, seconds in states.items()}
            times = {"started_at": month_start, "last_seen_at": month_start + day * 86_400, "ended": day == 30}
            beat = replace(SERVING, session_id=name, **times, **part)
            append_beat(ledger, beat)
        write_session(ledger, beat)
        record["usage"]["session_id"] = name
        with (ledger / f"requests-{name}.jsonl").open("w") as file:
            for number in range(requests_per_engine):
                finished_at = month_start + 1 + number * (MONTH_S - 2) / requests_per_engine
                record["request_id"], record["key"] = f"{name}-{number:032x}", KEYS[number % len(KEYS)]
                record["usage"] |= {"started_at": finished_at - 1, "finished_at": finished_at}
                file.write(json.dumps(record) + "\n")
    units = [
        make_unit_usage(
            "bulk", busy_s=30.0, tokens=50_000, finished_at=timestamp(11, 30, 20) + 3 * number, num_rows=500
        )
        for number in range(NUM_UNITS)
    ]
    write_run(root / "bulk", [BULK_SESSION], units)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_month_of_a_million_records(tmp_path):
    write_month(tmp_path)
    command = [sys.executable, "-m", "jobs.cli", "cost", "serve", "bulk", "--month", "2026-11", "--by", "day,key"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    started_at_s = time.monotonic()
    with (tmp_path / "out.json").open("wb") as out:
        process = subprocess.Popen([*command, "--format", "json"], cwd=tmp_path, env=environment, stdout=out)
        _, status, used = os.wait4(process.pid, 0)
    took_s, peak_bytes = time.monotonic() - started_at_s, used.ru_maxrss * 1024
    cpu_s = used.ru_utime + used.ru_stime  # unlike wall time, it does not depend on other jobs on the machine
    process.returncode = os.waitstatus_to_exitcode(status)
    print(f"{took_s:.1f} s, {cpu_s:.1f} s of CPU, {peak_bytes / 2**20:.0f} MiB")  # noqa: T201
    assert process.returncode == 0
    total = json.loads((tmp_path / "out.json").read_bytes())["total"]
    assert total["num_requests"] == NUM_REQUESTS + 500 * NUM_UNITS
    assert total["usd"]["attributed"] == pytest.approx(1000 + 30_000 * 0.10264 / 3600, abs=1e-5)
    assert (cpu_s < MAX_S, peak_bytes < MAX_BYTES) == (True, True)
