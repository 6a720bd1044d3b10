import os
import resource
import subprocess
import sys

import pytest
from devices import cpu
from ray._private.utils import validate_socket_filepath

from jobs import doctor
from jobs.cli import run
from peagle import hardware
from peagle.errors import ConfigError
from pipelines.cluster import startable

GIB = 1024**3
UNLIMITED = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch, tmp_path):
    """Limits of this process; unlimited unless the test sets them."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    values = {}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: values.get(kind, (UNLIMITED, UNLIMITED)))
    monkeypatch.setattr(startable, "_PIDS_MAX_FILES", (tmp_path / "pids.max",))
    return values


TOO_LOW_LIMITS = [
    (resource.RLIMIT_NOFILE, (256, 256), "the limit of open files is 256, and Ray and an engine need 1,024"),
    (resource.RLIMIT_AS, (8 * GIB, UNLIMITED), "the limit of address space is 8 GiB"),
    (resource.RLIMIT_DATA, (8 * GIB, UNLIMITED), "the limit of data is 8 GiB"),
    (resource.RLIMIT_FSIZE, (GIB // 2, UNLIMITED), "the limit of file size is 0.5 GiB"),
    (resource.RLIMIT_NPROC, (500, UNLIMITED), "the limit of processes and threads is 500"),
]


@pytest.mark.parametrize(("kind", "values", "message"), TOO_LOW_LIMITS)
def test_too_low_process_limit_is_refused(limits, monkeypatch, kind, values, message):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(hardware, "detect", cpu)
    limits[kind] = values
    with pytest.raises(ConfigError, match=message) as error:
        startable.require_startable()
    assert "`ulimit -" in error.value.hint
    (obstacle,) = startable.obstacles()
    assert obstacle.message.startswith(message)


def test_soft_and_root_limits_are_ignored(limits, monkeypatch):
    limits[resource.RLIMIT_NOFILE] = (256, 65536)  # Ray raises the soft limit
    limits[resource.RLIMIT_NPROC] = (10, 10)
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # the limit of processes does not apply to root
    assert startable.obstacles() == []


def test_open_file_limit_grows_with_cpus(limits, monkeypatch):
    monkeypatch.setattr(hardware, "detect", lambda: cpu(num_cpus=192))
    limits[resource.RLIMIT_NOFILE] = (2048, 2048)
    with pytest.raises(ConfigError, match="need 3,072"):
        startable.require_startable()


@pytest.mark.parametrize(
    ("max_pids", "current", "is_refused"), [("max", 9, False), ("4096", 9, False), ("512", 9, True)]
)
def test_too_low_pids_limit_is_refused(limits, tmp_path, max_pids, current, is_refused):
    (tmp_path / "pids.max").write_text(f"{max_pids}\n")
    (tmp_path / "pids.current").write_text(f"{current}\n")
    assert any("limited to 512 processes" in error.message for error in startable.obstacles()) == is_refused


@pytest.mark.parametrize(
    ("name", "value", "is_refused"),
    [
        ("PYTHONOPTIMIZE", "2", True),
        ("PYTHONOPTIMIZE", "1", False),
        ("PYTHONOPTIMIZE", "", False),
        ("PYTHONWARNINGS", "error", True),
        ("PYTHONWARNINGS", "ignore,error::DeprecationWarning", True),
        ("PYTHONWARNINGS", "ignore::DeprecationWarning", False),
    ],
)
def test_python_variables_that_break_ray_are_refused(limits, monkeypatch, name, value, is_refused):
    monkeypatch.setenv(name, value)
    assert [name in error.message for error in startable.obstacles()] == [True] * is_refused


def test_doctor_lists_all_obstacles(limits, monkeypatch):
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    monkeypatch.setenv("RAY_TMPDIR", "/" + 100 * "x")
    limits[resource.RLIMIT_NOFILE] = (64, 64)
    problems = "\n".join(doctor.find_problems(cpu(), dict.fromkeys(("ray", "vllm", "torch"), "1")))
    for part in ("the limit for Ray", "open files is 64", "PYTHONOPTIMIZE=2"):
        assert part in problems


def test_command_refuses_low_limit_before_a_run(tmp_path):
    """Unlike in the other tests, the limit is real: it is set with `ulimit`."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    arguments = ["generate", "--engine", "fake", "--usd-per-hour", "1", "--input", "in.jsonl", "--output", "run"]
    limited = f"ulimit -n 200; exec {sys.executable} -m jobs.cli {' '.join(arguments)}"
    result = subprocess.run(["bash", "-c", limited], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert "the limit of open files is 200, and Ray and an engine need" in result.stderr
    assert not (tmp_path / "run").exists()


def test_too_long_temporary_folder_is_refused(monkeypatch, tmp_path, capsys):
    """The limit of peagle equals Ray's: Ray refuses a path that is one byte longer."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    max_length = 107 - len(startable._RAY_SOCKET)
    monkeypatch.setenv("RAY_TMPDIR", (longest_folder := "/" + (max_length - 1) * "x"))
    startable.require_startable()
    validate_socket_filepath(longest_folder + startable._RAY_SOCKET)
    monkeypatch.setenv("RAY_TMPDIR", longest_folder + "x")
    with pytest.raises(Exception, match="107 bytes"):
        validate_socket_filepath(longest_folder + "x" + startable._RAY_SOCKET)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    arguments = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "run")]
    assert run(["generate", "--engine", "fake", *arguments]) == 2
    assert f"the limit for Ray is {max_length}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
