import json

import pytest

from peagle.errors import CapacityError, ConfigError, InputError
from pipelines.batch import forecast as module
from pipelines.batch.config import GenerateConfig
from pipelines.batch.forecast import forecast, resolve_unset_options
from pipelines.batch.request import RunRequest
from pipelines.batch.run import create_or_continue


@pytest.fixture
def make_forecast(tmp_path, chat_target, write_jsonl):
    def make_forecast(rows=20, **options):
        corpus = write_jsonl([{"prompt": "What is it?"}] * rows)
        options = {"model": str(chat_target), "max_tokens": 50, "temperature": 0.0, **options}
        config = GenerateConfig(input=str(corpus), output=tmp_path / "run", **options)
        result = forecast(RunRequest(config=config, command=["peagle", "generate"]), print)
        assert not (tmp_path / "run").exists()
        return result, dict(result.lines())

    return make_forecast


def test_forecast_for_this_machine(make_forecast):
    result, lines = make_forecast(usd_per_hour=None)
    assert (result.is_for_this_machine, result.num_rows_left, result.num_engines) == (True, 20, 1)
    assert lines["rows"].startswith("20 in ")
    assert lines["prompts"] == "260 tokens, 13 per row (all rows)"
    assert lines["answers"] == "at most 1,000 tokens in total"
    assert lines["drafter"].startswith("none (")
    assert lines["price"].endswith("; assumed)")
    assert lines["memory"].startswith("fits by estimate")
    assert lines["expected"].startswith("unknown")
    assert "budget" not in lines


def test_forecast_for_other_machines(make_forecast):
    result, lines = make_forecast(instance_type="p5.48xlarge", engines="16", budget_usd=220.16)
    assert (result.is_for_this_machine, result.num_nodes) == (False, 2)
    assert "8 x H100 80GB HBM3" in lines["machine"]
    assert "2 of these machines" in lines["machine"]
    assert "of 71.7 GiB (weights " in lines["memory"]
    assert lines["price"] == "$55.04 per hour for 8 H100 (p5.48xlarge, on-demand, aws us-east-1; stated)"
    assert lines["engines cost"] == "$110.08 an hour"
    assert lines["budget"] == "$220.16 pays for 2 h 0 min of these engines"


def test_forecast_does_not_contact_the_cluster(make_forecast, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    assert "RAY_ADDRESS was not inspected" in make_forecast(usd_per_hour=1)[1]["machine"]
    assert "RAY_ADDRESS" not in make_forecast(instance_type="p5.48xlarge")[1]["machine"]


def test_known_speed_limits_time_and_cost(make_forecast, monkeypatch):
    from peagle.planning.expectation import Speed

    monkeypatch.setattr(
        module, "known_speed", lambda *_: Speed(tokens_per_s=10, concurrency=8, source="measured, a test")
    )
    result, lines = make_forecast(usd_per_hour=36.0)
    share = result.run.placement.num_devices / result.run.price.num_devices
    assert result.max_generation_s == 100
    assert result.to_dict()["most_usd"] == pytest.approx(1.0 * share)
    assert lines["expected"].startswith("at most 1 min 40 s and $")
    assert lines["expected"].endswith("10 tokens/s per engine with 8 concurrent requests (measured, a test)")


def test_forecast_can_be_written_as_json(make_forecast):
    assert json.loads(json.dumps(make_forecast()[0].to_dict()))["rows"] == 20


def test_forecast_of_an_existing_run(resolved_run):
    request, run = resolved_run()
    create_or_continue(request, run)
    result = forecast(request, print)
    assert dict(result.lines())["run"] == f"{run.directory}: continues, 12 rows left"
    assert run.directory.committed() == set()


def test_forecast_refuses_invalid_runs(make_forecast, tmp_path, write_jsonl):
    with pytest.raises(CapacityError, match="10000 engines need a CPU core each"):
        make_forecast(engines="10000")
    with pytest.raises(ConfigError, match="has no run, so there are no failed rows"):
        make_forecast(retry_failed=True)
    with pytest.raises(InputError, match="no column 'text'"):
        make_forecast(prompt_column="text")


def test_defaults_are_resolved_with_reasons(chat_target, tmp_path):
    config = GenerateConfig(input="not read", output=tmp_path / "run", model=str(chat_target), precision="bf16")
    result = resolve_unset_options(config)
    assert result["drafter"][0] == "none"
    assert result["drafter"][1].startswith("catalog: ")
    assert result["max_num_seqs"] == (8, "default on cpu")
    assert result["max_model_len"] == (512, "the model's own")
    assert result["instance_type"] == ("c7a.large", "assumed")
    assert "precision" not in result
