"""A real engine passes its self-check; an engine with a wrong kernel fails it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("drafter", "fault", "num_tokens"),
    [("peagle", "break_verification", 32), ("none", "break_sampling", 16)],
)
def test_wrong_kernel_is_detected(drafter, fault, num_tokens, embedded_target, tmp_path):
    script, out = Path(__file__).with_name("wrong_kernels.py"), tmp_path / "checks.json"
    command = [sys.executable, str(script), drafter, fault, str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    first, repeated, with_fault = json.loads(out.read_text())
    assert [check["outcome"] for check in (first, repeated)] == ["passed", "passed"]
    assert first["num_tokens"] == num_tokens
    assert with_fault["outcome"] == "failed"
    assert "of the greedy answer is" in with_fault["seen"]
