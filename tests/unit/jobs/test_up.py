import socket
from types import SimpleNamespace

import pytest

from jobs import cli
from peagle.errors import EngineError
from pipelines.online import background


@pytest.fixture
def background_calls(monkeypatch, tmp_path):
    """Record the endpoints that `peagle up` starts. If `error` is set, the start fails with that error."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    background_calls = SimpleNamespace(config=None, port=None, ended=[], error=None)
    endpoint = background.Endpoint(
        folder=tmp_path / "endpoints" / "m", state=tmp_path, url="http://x/v1", pid=1, born_at=0.0, started_at=0.0,
        stop_s=1.0,
    )  # fmt: skip

    def start(config, *, port):
        background_calls.config, background_calls.port = config, port
        return endpoint

    def wait_until_up(endpoint, announce):
        if background_calls.error:
            raise background_calls.error

    monkeypatch.setattr(background, "start", start)
    monkeypatch.setattr(background, "wait_until_up", wait_until_up)
    monkeypatch.setattr(background, "end", lambda endpoint: background_calls.ended.append(endpoint))
    return background_calls


def test_up_takes_model_and_serve_flags(background_calls, capsys):
    assert cli.run(["up", "org/model", "--max-num-seqs", "2", "--idle-timeout", "30m", "--port", "8123"]) == 0
    config = background_calls.config
    assert (config.model, config.max_num_seqs, config.idle_timeout) == ("org/model", 2, 1800)
    assert background_calls.port == 8123
    assert "m is up at http://x/v1; `peagle down m` stops it" in capsys.readouterr().out


def test_up_chooses_a_free_port(background_calls):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        used_port = other.getsockname()[1]
        assert cli.run(["up", "--port", str(used_port)]) == 0
        assert background_calls.port == used_port
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", 8000))
            other.listen()
        except OSError:
            pass  # already in use
        assert cli.run(["up"]) == 0
    assert background_calls.port != 8000


@pytest.mark.parametrize(("error", "code"), [(EngineError("no"), 1), (KeyboardInterrupt(), 3)])
def test_endpoint_whose_start_failed_is_stopped(background_calls, error, code):
    background_calls.error = error
    assert cli.run(["up", "m"]) == code
    assert [endpoint.name for endpoint in background_calls.ended] == ["m"]


def test_up_list_prints_endpoints(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    endpoint = SimpleNamespace(
        name="m", status=lambda: "up", url="http://x/v1", started_at=0.0, usd=lambda: 1.5, log=tmp_path, state=tmp_path
    )
    other = SimpleNamespace(**{**vars(endpoint), "name": "n", "status": lambda: "starting", "usd": lambda: None})
    monkeypatch.setattr(background, "endpoints", lambda: [endpoint, other])
    assert cli.run(["up", "--list"]) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:3] == ["m", "up", "http://x/v1"]
    assert "$1.50" in first
    assert "unknown" in second


def test_down_stops_an_endpoint_once(monkeypatch, capsys, tmp_path):
    ended = []
    endpoint = SimpleNamespace(
        name="m", status=lambda: "ended", url="u", started_at=0.0, usd=lambda: 0.25, log=tmp_path, state=tmp_path,
        process=lambda: None if ended else 1,
    )  # fmt: skip
    monkeypatch.setattr(background, "find", lambda name: endpoint)
    monkeypatch.setattr(background, "end", ended.append)
    assert cli.run(["down", "m"]) == 0
    assert ended == [endpoint]
    assert "m has stopped; its engines cost $0.250" in capsys.readouterr().out
    assert cli.run(["down"]) == 0
    assert "m has already stopped" in capsys.readouterr().out
    assert ended == [endpoint]
