"""Output to closed pipes, to encodings that lack a character, and with file names that are not UTF-8."""

import json
import os
import subprocess
import sys

import pytest

PEAGLE = [sys.executable, "-m", "jobs.cli"]
SIGPIPE_CODE = 141


def run(*argv, **environment):
    """Run `peagle`. Return the finished process, with its output as bytes."""
    return subprocess.run(
        [*PEAGLE, *argv], capture_output=True, env={**os.environ, **environment}, timeout=120, check=False
    )


@pytest.mark.parametrize("argv", [["models"], ["models", "--json", "-"], ["generate", "--help"], ["doctor"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_pipe_ends_command_silently(argv, unbuffered):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with subprocess.Popen(
        [*PEAGLE, *argv], stdout=write_end, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}
    ) as process:
        os.close(write_end)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode in (0, SIGPIPE_CODE)
    assert b"roken" not in stderr  # neither "BrokenPipeError" nor "broken pipe"
    assert stderr == b"" or "--json" in argv  # with --json -, text is on standard error


def test_pipe_into_head_prints_no_error():
    command = f"set -o pipefail; {sys.executable} -m jobs.cli models | head -1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert (result.stdout.count("\n"), result.stderr) == (1, "")
    assert result.returncode in (0, SIGPIPE_CODE)


def test_unencodable_text_is_escaped(tmp_path):
    path = tmp_path / "é\u2713.json"
    path.write_text("[]")
    result = run("serve", "keys", "revoke", "é", "--keys", str(path), "--json", "-", PYTHONIOENCODING="ascii")
    assert result.returncode == 2, result.stderr
    assert "UnicodeEncodeError" not in result.stderr.decode("ascii")
    assert json.loads(result.stdout.decode("ascii"))["message"]


@pytest.mark.parametrize("flag", ["--input", "--output", "--config", "--prompt-template", "--json"])
def test_argument_that_is_not_utf_8_is_refused(tmp_path, flag):
    argument = os.fsencode(tmp_path) + b"/caf\xe9"
    result = run("generate", flag, argument)
    assert (result.returncode, result.stdout) == (2, b"")
    assert b"caf\\xe9' is not UTF-8" in result.stderr


def test_variable_that_is_not_utf_8_is_refused():
    result = run("generate", "--output", "x", "--input", "y", PEAGLE_PROMPT_COLUMN=os.fsdecode(b"\xe9"))
    assert result.returncode == 2
    assert b"PEAGLE_PROMPT_COLUMN is not UTF-8" in result.stderr
