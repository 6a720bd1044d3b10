import shlex

import pytest

from jobs import cli, flags
from peagle.economics.prices import Price, PriceTable
from peagle.errors import ConfigError, PriceError
from peagle.planning.config import PlanConfig
from peagle.planning.options import Fleet, Machine, count_machines, estimate
from peagle.planning.plan import make_plan, text_plan
from pipelines.batch.config import GenerateConfig
from pipelines.online.config import ServeConfig

QWEN = "qwen3-coder-30b-a3b-instruct"


def plan(**options):
    return make_plan(PlanConfig(**({"measured": QWEN, "tokens": "2B", "start_s": 300} | options)))


def test_every_machine_with_the_accelerator_is_compared():
    result = plan()
    with_b200 = {offer.instance_type for offer in PriceTable.load().offers if offer.accelerator == "B200"}
    assert {option["instance_type"] for option in result["options"]} == with_b200
    assert (result["chosen"]["method"], result["chosen"]["k"], result["chosen"]["concurrency"]) == ("peagle", 7, 128)
    hours = {
        option["num_engines"]: option["hours"]
        for option in result["options"]
        if option["k"] == 7 and option["lost_share"] == 0
    }
    assert hours[8] == pytest.approx((2e9 / (8 * 23_329) + 300 + 180) / 3600)


def test_region_and_provider_can_be_set():
    result = plan(provider="lambda", market="on_demand")
    assert {option["place"] for option in result["options"]} == {"lambda us-east-1"}
    with pytest.raises(PriceError, match="no price for a machine with B200") as error:
        plan(provider="azure")
    assert "--instance-types" in error.value.hint


def test_other_accelerators_are_refused_with_a_command():
    with pytest.raises(ConfigError, match=r"was measured on B200, but p5\.48xlarge has H100: its speed") as error:
        plan(instance_types="p5.48xlarge")
    assert f"on this type: peagle bench --model {QWEN} --precision fp8 --methods none,peagle" in error.value.hint


def test_limit_without_published_latencies_is_refused():
    with pytest.raises(ConfigError, match="its latencies are unknown"):
        plan(max_tpot_ms=20)


def test_published_and_measured_speeds_are_compared(sweep):
    cells = [{"method": "peagle", "k": 7, "concurrency": 128, "output_tokens_per_s": 20_000.0}]
    own_sweep = sweep(model=QWEN, instance_type="p5.48xlarge", cells=cells)
    result = plan(measured=[own_sweep, QWEN], market="on_demand")
    assert {option["measured"] for option in result["options"]} == {"sweep.json", f"{QWEN} (published, one B200)"}
    assert "measured in" in text_plan(result)


def machine(**changes):
    values = {"num_engines": 1, "devices_per_engine": 1, "tokens_per_s": 100.0, "start_s": 100.0} | changes
    price = Price.fixed(usd_per_hour=3.6, device="accelerator", num_devices=int(values["num_engines"]))
    return Machine(price=price, **values)  # type: ignore[arg-type]


INTERRUPTED = {"interruptions_per_h": 0.05, "lost_s": 60.0, "replace_s": 300.0}


def test_estimate_without_interruptions_loses_no_work():
    result = estimate(machine(), 2, 720_000, provision_s=180)
    assert result.wall_s == pytest.approx(180 + 100 + 3600)
    assert result.usd == pytest.approx(2 * 3700 * 0.001)
    assert (result.device_s.load, result.device_s.busy, result.device_s.lost) == (200, 7200, 0)
    assert result.usd_per_million_tokens == pytest.approx(7.4 / 0.72)


def test_estimate_with_interruptions_matches_the_module_docstring():
    result = estimate(machine(**INTERRUPTED), 1, 360_000)
    assert result.device_s.total == pytest.approx(3708.0, abs=0.1)  # the example at the top of options.py
    assert result.wall_s == pytest.approx(3723.5, abs=0.1)
    assert result.lost_share == pytest.approx(8.0 / 3708, rel=0.01)


def test_devices_without_an_engine_are_idle():
    price = Price.fixed(usd_per_hour=3.6, device="accelerator", num_devices=3)
    result = estimate(Machine(price=price, num_engines=1, devices_per_engine=2, tokens_per_s=100, start_s=0), 1, 1e5)
    assert (result.device_s.busy, result.device_s.idle) == (2000, 1000)
    assert result.usd == pytest.approx(1000 * 0.001)


@pytest.mark.parametrize("changes", [{}, INTERRUPTED, {"interruptions_per_h": 2.0, "lost_s": 30.0, "num_engines": 4}])
def test_number_of_machines_is_the_smallest_that_meets_the_deadline(changes):
    candidate = machine(**changes)
    num_machines = count_machines(candidate, 50e6, 7200, provision_s=180)
    assert num_machines > 2
    for count, meets_deadline in ((num_machines, True), (num_machines - 1, False)):
        result = estimate(candidate, count, 50e6, provision_s=180)
        assert (result.wall_s <= 7200 + 1e-6) is meets_deadline


def test_service_does_not_pay_while_a_machine_is_replaced():
    candidate = machine(interruptions_per_h=12.0, replace_s=300.0, start_s=0.0)
    assert candidate.wall_per_paid == 2
    assert candidate.sustained_tokens_per_s == 50
    fleet = Fleet(sweep=None, cell=None, machine=candidate, num_machines=2, estimate=None)
    assert fleet.usd_per_h == 3.6


def test_plan_with_published_speeds_prints_a_valid_command(capsys):
    assert cli.run(["plan", "--model", QWEN, "--tokens", "2B"]) == 0
    text = capsys.readouterr().out
    assert "300 s to start an engine" in text
    words = shlex.split(text.splitlines()[-1])
    assert words[:8] == ["peagle", "generate", "--model", QWEN, "--drafter", "peagle", "--num-speculative-tokens", "7"]
    config = flags.load(GenerateConfig, cli.parser_of("generate").parse_args(words[2:]))
    chosen = plan(measured=[], model=QWEN, start_s=None)["chosen"]
    assert (config.engines, config.instance_type) == (str(chosen["num_engines"]), chosen["instance_type"])
    service = make_plan(PlanConfig(model=QWEN, tokens_per_s=20_000))["command"]
    flags.load(ServeConfig, cli.parser_of("serve").parse_args(service[2:]))


def test_plan_needs_a_source(capsys):
    assert cli.run(["plan", "--tokens", "2B"]) == 2
    assert "set model, to use its published speeds, or measured" in capsys.readouterr().err
