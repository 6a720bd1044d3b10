"""The chosen fleet event by event, over several seeds: what a plan says as SIMULATED.

    job       all of its units; when the last one is committed, and whether that is in time
    service   an hour from when its first engines are up; the tokens/s that it sustains

It knows options and the simulation; it knows neither prices beyond the fleet's own nor how a fleet was chosen.
"""

import math
import statistics
from dataclasses import asdict
from typing import Any

from peagle.bench.summary import percentile
from peagle.planning.config import PlanConfig
from peagle.planning.estimate import Machine
from peagle.planning.options import Option
from peagle.planning.simulation import Fleet, simulate

SIMULATED = "SIMULATED, not measured"
_MOST_UNITS = 1_000_000  # of all simulated runs, some ten seconds: beyond, units are larger
_MOST_EVENTS = 1.2  # times that: units that are done again and engines that start anew; beyond, seeds are fewer
_UNIT_S = 60.0
_SERVICE_S = 3600.0
_MORE = 1.25  # units of a service beyond those of its hour, and one for each engine: it never runs out of them


def simulated(option: Option, config: PlanConfig) -> tuple[dict[str, Any] | None, list[str]]:
    """What came of a fleet; and what has to be said of it. None where no run was asked for, or one is too much."""
    if not config.seeds:
        return None, []
    fleet = _fleet(option, config)
    seeds = min(config.seeds, int(_MOST_EVENTS * _MOST_UNITS / _num_events(fleet, option)))
    if not seeds:
        return None, [f"Not simulated: {option.num_engines:,} engines, with what is done again, are too much for it."]
    fewer = f"Simulated with {seeds} of {config.seeds} seeds: more would take too long."
    found = _service(fleet, option, config, seeds) if option.estimate is None else _job(fleet, option, config, seeds)
    return {"label": SIMULATED, "seeds": seeds, "fleet": asdict(fleet)} | found, [fewer] if seeds < config.seeds else []


def _fleet(option: Option, config: PlanConfig) -> Fleet:
    """The option as something to simulate.

    Larger units would draw the end out, which waits for the last one; so they are larger only where `config.seeds` runs
    would take too long to simulate. A service has no end that could wait.
    """
    machine, unit_s = option.machine, _unit_s(option.machine)
    if config.tokens:
        work_s = config.tokens / machine.tokens_per_s
        num_units = max(option.num_engines * 4, min(math.ceil(work_s / unit_s), _MOST_UNITS // config.seeds))
    else:
        work_s = option.num_engines * (_SERVICE_S * _MORE + unit_s)
        num_units = math.ceil(work_s / unit_s)
    return Fleet(
        num_machines=option.num_machines,
        engines_per_machine=machine.num_engines,
        num_units=num_units,
        unit_s=work_s / num_units,
        start_s=machine.start_s,
        provision_s=config.provision_s,
        machines_per_min=config.machines_per_min,
        replace_s=config.replace_s,
        failures_per_h=config.failures_per_h,
        interruptions_per_h=machine.interruptions_per_h - config.failures_per_h,
        notice_s=config.notice_s,
    )


def _unit_s(machine: Machine) -> float:
    """A minute; more where an interruption loses more than half of that, which is what one without notice takes."""
    return max(_UNIT_S, 2 * machine.lost_s) if machine.interruptions_per_h else _UNIT_S


def _num_events(fleet: Fleet, option: Option) -> float:
    """Units of a run, those that are done again included, and engines that start anew."""
    rate = (fleet.failures_per_h + fleet.interruptions_per_h) / 3600
    expected_s = option.estimate.wall_s if option.estimate else _SERVICE_S
    again = math.exp(min(rate * fleet.unit_s, 100.0))  # tries until one is not interrupted
    return fleet.num_units * again + option.num_engines * rate * expected_s


def _job(fleet: Fleet, option: Option, config: PlanConfig, seeds: int) -> dict[str, Any]:
    runs = [simulate(fleet, seed) for seed in range(seeds)]
    hours = [run.wall_s / 3600 for run in runs]
    usd = [run.machine_s / 3600 * option.machine.price.usd_per_hour for run in runs]
    return {
        "is_coarse": round(fleet.unit_s) > round(_unit_s(option.machine)),
        "hours": {"p50": statistics.median(hours), "p95": percentile(hours, 95)},
        "usd": {"p50": statistics.median(usd), "p95": percentile(usd, 95)},
        "useful_share": statistics.median(run.useful_share for run in runs),
        "machines_gone": statistics.mean(run.num_gone for run in runs),
        "in_time": None if config.within is None else sum(hour * 3600 <= config.within for hour in hours) / seeds,
    }


def _service(fleet: Fleet, option: Option, config: PlanConfig, seeds: int) -> dict[str, Any]:
    assert config.tokens_per_s is not None, "a service has a rate"
    until_s = fleet.provision_s + fleet.start_s + _SERVICE_S
    runs = [simulate(fleet, seed, until_s=until_s) for seed in range(seeds)]
    speeds = [run.engine_s.busy * option.machine.tokens_per_s / _SERVICE_S for run in runs]
    least = config.tokens_per_s * (1 - 1e-9)  # seconds that add up to an hour do so nearly
    return {
        "tokens_per_s": {"p50": statistics.median(speeds), "p5": percentile(speeds, 5)},
        "useful_share": statistics.median(run.useful_share for run in runs),
        "machines_gone": statistics.mean(run.num_gone for run in runs),
        "sustained": sum(speed >= least for speed in speeds) / seeds,
    }
