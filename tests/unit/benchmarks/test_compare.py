"""What the comparison with peers takes from its command line."""

import sys
from pathlib import Path

import pytest

from benchmarks.peers.compare import _options

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
