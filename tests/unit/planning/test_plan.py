import json
from pathlib import Path

import pydantic
import pytest

from jobs.cli import run as command
from peagle.economics.prices import Price, PriceTable
from peagle.errors import ConfigError, PriceError
from peagle.planning.config import PlanConfig
from peagle.planning.plan import make_plan, text_plan
from peagle.planning.sweeps import read_sweep, read_sweeps


@pytest.fixture
def plan(sweep, prices):
    def plan(**options):
        measured = options.pop("measured", None) or [sweep()]
        values = {"measured": measured, "prices": prices, "tokens": "20M", "within": "8h"} | options
        return make_plan(PlanConfig(**values))

    return plan


CELL = {"method": "none", "k": 0, "concurrency": 4, "output_tokens_per_s": 100.0, "start_s": 60.0}


@pytest.fixture
def write_report(tmp_path):
    """Return a function that writes the report of a benchmark on a machine with the accelerator BIG."""

    def write_report(name="report.json", **changes):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        values = {
            "model": "m", "labels": [], "cells": [CELL], "price": None, "engine": {"tensor_parallel_size": 1},
            "hardware": {"platform": "cuda", "num_cpus": 8, "accelerator": "BIG"},
        }  # fmt: skip
        path.write_text(json.dumps(values | changes))
        return path

    return write_report


def test_cheapest_machines_within_the_deadline_are_chosen(plan):
    chosen = plan()["chosen"]
    # One machine generates 400 tokens/s for 8 h minus 180 s to provision it and 100 s to start its engines: 11.4 M
    # tokens. Spot costs a quarter of on-demand.
    assert (chosen["num_machines"], chosen["num_engines"], chosen["market"]) == (2, 4, "spot")
    assert (chosen["method"], chosen["concurrency"], chosen["place"]) == ("none", 8, "own here")
    assert chosen["hours"] == pytest.approx(20e6 / 800 / 3600 + 280 / 3600, rel=0.02)
    assert chosen["usd"] == pytest.approx(2 * 1.0 * (20e6 / 800 + 100) / 3600, rel=0.02)
    assert 0 < chosen["lost_share"] < 0.02


def test_latency_limit_determines_the_drafter(plan):
    result = plan(max_tpot_ms=22)
    assert (result["chosen"]["method"], result["chosen"]["k"]) == ("peagle", 3)
    by_factor = {row["factor"]: row for row in result["sensitivity"]}  # factors of the acceptance length
    assert by_factor[1.0]["usd"] == result["chosen"]["usd"]
    assert by_factor[0.8]["output_tokens_per_s"] == pytest.approx(40)
    assert by_factor[0.8]["num_machines"] > by_factor[1.2]["num_machines"]
    assert min(row["acceptance_length"] for row in result["sensitivity"]) >= 1


def test_break_even_acceptance_length(plan):
    # With at most 30 ms per token, P-EAGLE generates 50 tokens/s at an acceptance length of 1.6, no drafter at most 40.
    assert plan(max_tpot_ms=30)["break_even_acceptance_length"] == pytest.approx(1.28)
    assert plan()["break_even_acceptance_length"] is None


def test_sensitivity_names_exceeded_limits(plan):
    result = plan(max_tpot_ms=22, max_machines=9)  # 20 ms per token at acceptance length 1.6, with 8 machines
    by_factor = {row["factor"]: row["beyond"] for row in result["sensitivity"]}
    assert by_factor == {
        0.7: "exceeds the latency limits", 0.8: "exceeds the latency limits", 0.9: "exceeds the latency limits",
        1.0: None, 1.1: None, 1.2: None,
    }  # fmt: skip
    assert result["least_acceptance_length"] == pytest.approx(1.6 * 20 / 22, abs=1e-3)
    text = text_plan(result)
    assert "not possible" in text
    assert "exceeds the latency limits" in text
    assert "Below an acceptance length of 1.45, the choice exceeds a given limit." in text
    with_loose_limit = plan(max_tpot_ms=30)
    assert with_loose_limit["least_acceptance_length"] is None or with_loose_limit["least_acceptance_length"] < 1.1
    assert {row["beyond"] for row in with_loose_limit["sensitivity"] if row["factor"] >= 0.9} == {None}


def test_service_has_machines_and_dollars_per_hour(plan):
    result = plan(tokens=None, within=None, tokens_per_s=1000, market="on_demand", target_utilisation=1)
    assert result["chosen"]["num_machines"] == 3  # 400 tokens/s per machine
    assert result["chosen"]["usd_per_h"] == 12
    assert result["chosen"]["usd_per_million_tokens"] == pytest.approx(12 / 3.6)
    assert "machines used to 100% of their capacity" in text_plan(result)


def test_another_machine_with_the_same_accelerator_can_be_priced(plan):
    chosen = plan(instance_types="box-8")["chosen"]
    assert (chosen["instance_type"], chosen["num_machines"], chosen["num_engines"]) == ("box-8", 1, 8)


def test_benchmark_reports_are_read(plan, write_report):
    price = Price.fixed(usd_per_hour=0.1, device="vcpu", num_devices=2).to_dict()
    hardware = {"platform": "cpu", "num_cpus": 2}
    options = {"measured": [write_report(labels=["DUMMY WEIGHTS: x"], price=price, hardware=hardware)], "within": None}
    result = plan(**options, tokens=360_000)
    assert result["labels"] == ["DUMMY WEIGHTS: x"]
    assert result["chosen"]["usd"] == pytest.approx((3600 + 60) / 3600 * 0.1)
    with pytest.raises(
        ConfigError, match="with --usd-per-hour, not an instance type, so it has no spot price"
    ) as error:
        plan(**options, tokens=360_000, market="spot")
    assert "--instance-types" in error.value.hint
    with pytest.raises(ConfigError, match="measured on CPUs, but box-2 has BIG: its speed is unknown"):
        plan(**options, tokens=360_000, instance_types="box-2")


@pytest.mark.parametrize(
    "notes",
    [
        {"caveats": ["Not finished: 3 passes are left."], "notes": ["P-EAGLE: a head"]},
        {"notes": ["Not finished: 3 passes are left."]},  # reports of earlier versions have no `caveats`
    ],
)
def test_caveats_of_a_benchmark_are_in_the_plan(notes, plan, write_report):
    text = text_plan(plan(measured=[write_report(**notes)], instance_types="box-2", within=None))
    assert "report.json: Not finished: 3 passes are left." in text.splitlines()
    assert "a head" not in text


def test_engine_larger_than_its_machine_is_refused(plan, sweep, write_report):
    hardware, table = {"platform": "cpu", "num_cpus": 4}, PriceTable.load()
    with pytest.raises(ConfigError, match=r"priced as c7a\.large, which has 2 devices, .* use 4") as error:
        plan(measured=[write_report(price=table.price("c7a.large").to_dict(), hardware=hardware)], within=None)
    assert "repeat `peagle bench` with --usd-per-hour, which reuses all measurements" in error.value.hint
    stated_price = Price.fixed(usd_per_hour=0.2, device="vcpu", num_devices=4).to_dict()
    result = plan(measured=[write_report(price=stated_price, hardware=hardware)], tokens=360_000, within=None)
    assert result["chosen"]["usd"] == pytest.approx(3660 / 3600 * 0.2)
    with pytest.raises(ConfigError, match=r"box-2 has 2 devices, but an engine of sweep\.json uses 4"):
        plan(measured=[sweep(devices_per_engine=4, instance_type="box-8")], instance_types="box-2")


@pytest.mark.parametrize("price", [None, {"usd_per_hour": 3.0, "device": "accelerator", "num_devices": 1}])
def test_instance_type_must_have_the_accelerator_of_the_report(price, plan, write_report):
    hardware = {"platform": "cuda", "num_cpus": 8, "accelerator": "NVIDIA BIG 80GB"}
    file = write_report(price=price and Price.fixed(**price).to_dict(), hardware=hardware)
    assert plan(measured=[file], within=None, instance_types="box-8")["chosen"]["num_engines"] == 8
    for other_type, other_device in (("small-2", "LITTLE"), ("cpu-2", "no accelerator")):
        with pytest.raises(ConfigError, match=f"measured on NVIDIA BIG 80GB, but {other_type} has {other_device}"):
            plan(measured=[file], within=None, instance_types=other_type)


def test_plan_with_ngram_lookups_has_no_sensitivity_to_acceptance(plan, sweep):
    cells = [
        {"method": "none", "k": 0, "concurrency": 1, "output_tokens_per_s": 40.0},
        {"method": "ngram", "k": 3, "concurrency": 1, "output_tokens_per_s": 46.0, "acceptance_length": 3.0},
    ]
    result = plan(measured=[sweep(cells=cells)], within=None)
    assert result["chosen"]["method"] == "ngram"
    assert result["sensitivity"] == []
    assert result["break_even_acceptance_length"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"within": "4m"}, "leaves no time for work"),
        ({"max_tpot_ms": 5}, "no measurement is within the latency limits"),
        ({"max_machines": 1}, "needs more machines than --max-machines 1"),
        ({"max_ttft_ms": 500}, "no measurement is within"),
    ],
)
def test_impossible_goals_are_refused_with_reasons(options, message, plan):
    with pytest.raises(ConfigError, match=message) as error:
        plan(**options)
    assert "allow more time" in error.value.hint


@pytest.mark.parametrize(
    ("options", "error", "message", "hint"),
    [
        ({"instance_types": "box-9"}, PriceError, "no price for the instance type 'box-9'", "box"),
        ({"instance_types": "small-2"}, ConfigError, "small-2 has LITTLE: its speed is unknown", "measure on this"),
        ({"instance_types": "cpu-2"}, ConfigError, "cpu-2 has no accelerator: its speed is unknown", "measure on this"),
        ({"region": "nowhere"}, PriceError, "no price for box-2 at nowhere", "--usd-per-hour"),
    ],
)
def test_machines_without_price_or_measurement_are_refused(options, error, message, hint, plan):
    with pytest.raises(error, match=message) as exception:
        plan(**options)
    assert hint in exception.value.hint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peagle_sweep": 2}, "peagle_sweep must be 1, not 2"),
        ({"modle": "m"}, "unknown key 'modle'"),
        ({"source": None}, "source is required"),
        ({"devices_per_engine": "1"}, "devices_per_engine is required"),
        ({"cells": []}, "cells must be a non-empty list"),
        ({"cells": [3]}, "cell 1: must be a mapping"),
        ({"cells": [{"method": "none", "k": 0, "concurrency": 1}]}, "cell 1: output_tokens_per_s: Field required"),
        ({"cells": [CELL | {"method": "peagle"}]}, "k must be 0 with method none"),
        (
            {"cells": [CELL | {"method": "medusa", "k": 3}]},
            r"sweep.json, cell 1: method: 'medusa' is not one of none, peagle, eagle3, dflash, dspark, ngram, suffix",
        ),
        (
            {"cells": [CELL, CELL | {"method": "peagle", "k": 7, "acceptance_length": 9.2}]},
            r"sweep.json, cell 2: acceptance_length 9.2: a step yields at most k \+ 1 = 8",
        ),
        ({"devices_per_engine": -1}, r"sweep.json: devices per engine must be an integer of at least 1, got -1"),
        ({"devices_per_engine": True}, "devices per engine must be an integer of at least 1, got True"),
        ({"start_s": float("inf")}, "start_s: Input should be a finite number"),
        ({"start_s": None}, "does not say how long an engine takes to start"),
    ],
)
def test_invalid_sweeps_are_refused(changes, message, sweep, plan):
    with pytest.raises(ConfigError, match=message) as error:
        plan(measured=[sweep(**changes)])
    assert error.value.hint


def test_each_measured_file_has_its_own_machines(plan, sweep):
    little_cells = [{"method": "none", "k": 0, "concurrency": 8, "output_tokens_per_s": 100.0}]
    files = [sweep("big.json"), sweep("little.json", instance_type="small-2", cells=little_cells)]
    result = plan(measured=files, instance_types="box-2,small-2", within=None)
    measured_types = {(option["measured"], option["instance_type"]) for option in result["options"]}
    assert measured_types == {("big.json", "box-2"), ("little.json", "small-2")}
    assert "little.json was measured on small-2 (LITTLE), but box-2 has BIG: its speed is unknown" in result["notes"]
    with pytest.raises(ConfigError, match="cpu-2 has no accelerator: its speed is unknown") as error:
        plan(measured=files, instance_types="box-2,cpu-2")
    assert "big.json was" in error.value.message
    assert "little.json was" in error.value.message


def test_text_names_file_and_precision_of_measurements(plan, write_report):
    reports = [write_report(f"{name}/report.json", precision="fp8 weights, fp8 KV cache") for name in ("a", "b")]
    text = text_plan(plan(measured=reports, instance_types="box-2", within=None))
    source = f"{reports[0]} (fp8 weights, fp8 KV cache)"
    assert f", as measured in {source}; " in text
    assert text.count(source) > 1, "the table's rows name the report, too"
    single = text_plan(plan(measured=reports[:1], instance_types="box-2", within=None))
    assert "measured in" not in single


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": "many"}, "not a number of tokens, such as 2e9"),
        ({"tokens": 5, "tokens_per_s": 5}, "either tokens .a job. or tokens_per_s"),
        ({}, "either tokens"),
        ({"tokens_per_s": 5, "within": "3h"}, "within requires tokens"),
        ({"tokens": 5, "target_utilisation": 0.5}, "target_utilisation requires tokens_per_s"),
        ({"tokens_per_s": 5, "target_utilisation": 1.1}, "less than or equal to 1"),
        ({"tokens": 5, "within": "soon"}, "not a duration, such as 24h"),
        ({"tokens": 5, "measured": []}, "set model, to use its published speeds"),
        ({"tokens_per_s": "1e400"}, "should be a finite number"),
        ({"tokens": 5, "within": f"{'9' * 400}h"}, "should be a finite number"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        PlanConfig(**({"measured": ["x.json"]} | options))


def test_plan_command_prints_the_chosen_machines_and_assumptions(sweep, prices, tmp_path, capsys):
    arguments = ["--measured", str(sweep()), "--prices", str(prices), "--tokens", "20M", "--within", "8h"]
    assert command(["plan", *arguments, "--max-tpot-ms", "22", "--json", str(tmp_path / "p.json")]) == 0
    printed = capsys.readouterr().out
    assert "x box-2 spot: " in printed
    assert "! sweep.json: external measurement (a blog)" in printed
    assert "Assumed, not measured: 0.05 interruptions per hour" in printed
    assert json.loads((tmp_path / "p.json").read_text())["chosen"]["method"] == "peagle"


QWEN = "qwen3-coder-30b-a3b-instruct"


@pytest.mark.parametrize("name", [QWEN, "Qwen/Qwen3-Coder-30B-A3B-Instruct"])
def test_published_speeds_are_read_as_a_sweep(name):
    (sweep,) = read_sweeps([Path(name)])
    assert (sweep.name, sweep.model) == (f"{QWEN} (published, one B200)", QWEN)
    assert (sweep.accelerator, sweep.devices_per_engine, sweep.precision) == ("B200", 1, "FP8")
    assert (sweep.is_published, sweep.instance_type, sweep.stated_price) == (True, None, None)
    speeds = {(cell.method, cell.k, cell.concurrency): cell.output_tokens_per_s for cell in sweep.cells}
    assert len(speeds) == 7 * 5, "SPEED-Bench, because HumanEval ends at 8 concurrent requests"
    assert (speeds["peagle", 7, 128], speeds["none", 0, 1]) == (23_329, 294)
    assert {(cell.start_s, cell.acceptance_length) for cell in sweep.cells} == {(None, None)}
    (label,) = sweep.labels
    assert "published, one B200): SPEED-Bench, Code, FP8; AWS machine learning blog" in label
    assert "https://aws.amazon.com/" in label


def test_remeasure_command_has_the_same_cells():
    assert read_sweep(Path(QWEN)).remeasure == (
        f"peagle bench --model {QWEN} --precision fp8 --methods none,peagle -k 3,7,11 --concurrency 1,4,8,32,128"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing.json", "no such file or model"), ("gpt-oss-20b", "gpt-oss-20b has no published speeds")],
)
def test_unknown_files_and_models_are_refused(name, message):
    with pytest.raises(ConfigError, match=f"measured {name}: {message}") as error:
        read_sweep(Path(name))
    assert error.value.hint.endswith(f"one of these models with published speeds: {QWEN}")
