"""`make audit-deps` with a fake pip-audit. An unreachable service must not look like "no vulnerabilities"."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_audit(tmp_path, script):
    program = tmp_path / "audit" / "bin" / "pip-audit"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{script}\n')
    program.chmod(0o755)
    command = ["make", "audit-deps", f"VENV={tmp_path}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_both_lock_files_are_audited(tmp_path):
    completed = run_audit(tmp_path, "echo 'No known vulnerabilities found'")
    assert completed.returncode == 0, completed.stderr
    files = [line.split()[-1] for line in (tmp_path / "calls").read_text().splitlines()]
    assert files == [f"{tmp_path}/audit/{lock}.txt" for lock in ("cpu", "cuda")]
    for name in ("cpu", "cuda"):
        locked = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
        audited = (tmp_path / "audit" / f"{name}.txt").read_text().splitlines()
        assert len(audited) == len(locked)
        assert not [line for line in audited if "+" in line.partition(" ")[0]]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'requests.exceptions.ConnectionError: no such host' >&2; exit 1", "nothing was audited"),
        ("echo 'Found 1 known vulnerability in 1 package' >&2; exit 1", "Found 1 known vulnerability"),
    ],
)
def test_make_fails_if_the_audit_fails(tmp_path, script, message):
    completed = run_audit(tmp_path, script)
    assert completed.returncode != 0
    assert message in completed.stderr
