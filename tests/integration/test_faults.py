"""The endpoint with the fake engine on real Ray Serve: clients disconnect, and an engine is killed under load."""

import json
import subprocess
import sys

import pytest

FAULTS = ("clients that vanish", "the engine's process")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_requests_during_faults_have_only_allowed_outcomes(tmp_path):
    command = [
        sys.executable, "-m", "tests.faults", "--clients", "8", "--seconds", "3", "--folder", str(tmp_path / "state"),
        "--report", str(tmp_path / "report"), "--only", *FAULTS,
    ]  # fmt: skip
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    (report,) = (tmp_path / "report").glob("*.json")
    result = json.loads(report.read_text())["faults"]
    assert [row["fault"] for row in result] == list(FAULTS)
    assert result[1]["outcomes"]["answered"] > 0
