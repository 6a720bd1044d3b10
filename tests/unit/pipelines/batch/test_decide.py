import pytest

from peagle.errors import ConfigError, PriceError
from peagle.runs.directory import RunDirectory
from pipelines.batch import decide as module
from pipelines.batch.config import GenerateConfig
from pipelines.batch.decide import hardware_for
from pipelines.batch.request import RunRequest
from pipelines.batch.run import create_or_continue


def request_of(config):
    return RunRequest(config=config, command=["peagle", "generate"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [("inspect", 2, None)]),
        ({"accelerator_type": "H100"}, [("require", 2, "H100", 3, 900.0), ("inspect", 2, "H100")]),
        ({"accelerator_type": "any"}, [("require", 2, None, 3, 900.0), ("inspect", 2, "any")]),
        (
            {"accelerator_type": "any", "engines": "3", "nodes_per_engine": 2},
            [("require", 1, None, 3, 900.0), ("inspect", 1, "any")],
        ),
    ],
)
def test_accelerators_are_requested_before_inspection(monkeypatch, tmp_path, options, expected):
    calls = []
    options = {"engines": "3:9"} | options
    config = GenerateConfig(
        input="i", output=tmp_path, cluster_wait_s=900, tensor_parallel_size=2, usd_per_hour=1, **options
    )
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(module.ray, "room_for", lambda placement: 0)
    monkeypatch.setattr(
        module.ray,
        "require_capacity",
        lambda p, n, *, wait_s, check, announce: calls.append(("require", p.num_gpus, p.accelerator_type, n, wait_s)),
    )
    monkeypatch.setattr(
        module.inspection,
        "inspect",
        lambda *, accelerators_per_engine, nodes_per_engine, accelerator_type: calls.append(
            ("inspect", accelerators_per_engine // nodes_per_engine, accelerator_type)
        ),
    )
    hardware_for(request_of(config), RunDirectory(tmp_path), print)
    assert calls == expected


@pytest.mark.parametrize("kind", ["H100", "any"])
def test_nodes_without_price_are_not_requested(monkeypatch, tmp_path, kind):
    config = GenerateConfig(input="i", output=tmp_path, engines="2", accelerator_type=kind)
    calls = []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(module.ray, "require_capacity", lambda *_, **__: calls.append("require"))
    monkeypatch.setattr(module.inspection, "inspect", lambda **_: calls.append("inspect"))
    monkeypatch.setattr(module.ray, "room_for", lambda placement: 1)
    with pytest.raises(PriceError, match="without an instance type"):
        hardware_for(request_of(config), RunDirectory(tmp_path), print)
    assert calls == []
    monkeypatch.setattr(module.ray, "room_for", lambda placement: 2)
    hardware_for(request_of(config), RunDirectory(tmp_path), print)
    assert calls == ["require", "inspect"]


def test_run_describes_its_price(resolved_run):
    _, run = resolved_run(usd_per_hour=None, instance_type="c7a.large")
    assert run.describe().splitlines()[-1].endswith("(c7a.large, on-demand, aws us-east-1; stated)")


def test_run_started_on_cpus_cannot_continue_on_accelerators(resolved_run):
    request, run = resolved_run()
    create_or_continue(request, run)
    config = run.config.model_copy(update={"accelerator_type": "H100"})
    with pytest.raises(ConfigError, match=r"was started on .*accelerator_type H100 cannot continue it"):
        hardware_for(request_of(config), run.directory, print)
