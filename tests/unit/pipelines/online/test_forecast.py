import pytest

from peagle.errors import ConfigError
from pipelines.online.config import ServeConfig
from pipelines.online.forecast import forecast, resolve_unset_options
from pipelines.online.sagemaker import SageMakerConfig


def config(tmp_path, **options):
    return ServeConfig(engine="fake", state=tmp_path / "state", batches=tmp_path / "batches", **options)


def test_forecast_writes_nothing(tmp_path):
    result = forecast(config(tmp_path, usd_per_hour=1, max_replicas=3, min_replicas=0), print)
    lines = dict(result.lines())
    assert lines["address"] == "http://127.0.0.1:8000/v1"
    assert lines["API keys"] == "none; only this machine can connect"
    assert "0 to 3 engine(s)" in lines["model"]
    assert lines["engines cost"].startswith("$0 to $")
    assert result.usd_per_h(is_maximum=True) == pytest.approx(3 / result.price.num_devices)
    assert list(tmp_path.iterdir()) == []


def test_forecast_reports_who_has_access(tmp_path, monkeypatch):
    options = {"engine": "fake", "model": "fake", "state": tmp_path / "state", "usd_per_hour": 1}
    result = forecast(SageMakerConfig(**options), print)
    assert dict(result.lines())["API keys"].startswith("none; anyone who can connect to 0.0.0.0:8080")
    assert result.to_dict()["access"] == dict(result.lines())["API keys"]
    monkeypatch.setenv("PEAGLE_API_KEYS", "a=0123456789abcdef0123456789abcdef")
    assert forecast(SageMakerConfig(**options), print).access() == "required"


def test_forecast_for_other_machines(tmp_path, chat_target):
    models = [{"name": "a", "max_replicas": 2}, {"name": "b", "max_replicas": 1}]
    options = {"model": str(chat_target), "models": models, "instance_type": "g7e.2xlarge"}
    result = forecast(ServeConfig(state=tmp_path / "state", **options), print)
    assert (result.is_for_this_machine, result.num_nodes) == (False, 3)
    assert result.usd_per_h(is_maximum=True) == pytest.approx(3 * 3.36312)
    assert [model["name"] for model in result.to_dict()["models"]] == ["a", "b"]
    rows = resolve_unset_options(ServeConfig(state=tmp_path / "state", **options))
    assert rows["b.max_num_seqs"] == (256, "default on cuda")
    assert rows["b.precision"][1].startswith("price table: 1 x RTX PRO 6000")
    assert "instance_type" not in rows


def test_forecast_refuses_an_endpoint_that_would_not_start(tmp_path):
    with pytest.raises(ConfigError, match=r"host 0\.0\.0\.0: without API keys"):
        forecast(config(tmp_path, host="0.0.0.0", usd_per_hour=1), print)
