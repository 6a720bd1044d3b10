"""What the comparison with peers takes from its command line, and what it says of a run."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.peers.compare import _options, drafting, require_same

NEEDED = ["compare.py", "--folder", "runs", "--output", "result.json"]


def test_a_llama_server_that_is_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*NEEDED, "--llama-server", str(tmp_path / "llama-server")])
    with pytest.raises(SystemExit) as refused:
        _options()
    assert refused.value.code == 2
    assert f"{tmp_path / 'llama-server'} is no program that can be run" in capsys.readouterr().err


def test_a_llama_server_is_a_path_and_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [*NEEDED, "--llama-server", sys.executable])
    assert _options().llama_server == sys.executable
    monkeypatch.setattr(sys, "argv", NEEDED)
    assert _options().llama_server is None


@pytest.mark.parametrize(
    ("systems", "says"), [(["peagle"], "the others are shown over vllm"), (["vllm", "llama.cpp"], "--llama-server")]
)
def test_systems_that_cannot_be_compared_are_refused(
    systems: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*NEEDED, "--systems", *systems])
    with pytest.raises(SystemExit):
        _options()
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("has_it", [True, False])
def test_int8_is_compared_where_the_hardware_has_it(has_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.hardware.Hardware.supports_int8", has_it)
    monkeypatch.setattr(sys, "argv", NEEDED)
    systems = _options().systems
    assert ("peagle-int8" in systems) == has_it
    assert systems[0] == "vllm"
    assert "llama.cpp" not in systems


def test_what_was_measured_otherwise_is_not_taken_for_this(tmp_path: Path) -> None:
    engine = {"max_num_seqs": 8, "kv_cache_memory_bytes": 6131065815}
    job = {"system": "vllm", "engine": engine, "sampling": {"max_tokens": 128}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    require_same(tmp_path, job)
    require_same(tmp_path, job | {"engine": engine | {"kv_cache_memory_bytes": 5998847591}})
    for change in ({"sampling": {"max_tokens": 64}}, {"engine": engine | {"max_num_seqs": 1}}):
        with pytest.raises(SystemExit, match=f"another {next(iter(change))}; name another --folder"):
            require_same(tmp_path, job | change)


@pytest.mark.parametrize(
    ("drafter", "length", "found"),
    [
        ({"method": "peagle", "num_speculative_tokens": 3, "model": "m"}, 2.5, ("peagle", 3, 2.5)),
        (None, None, ("none", None, None)),
    ],
)
def test_a_run_says_what_it_drafted_with(tmp_path: Path, drafter, length, found) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"engine": {"drafter": drafter}}))
    account = {"speculation": {"acceptance_length": length}}
    (tmp_path / "report.json").write_text(json.dumps({"account": account}))
    assert tuple(drafting(tmp_path).values()) == found
