"""A plan, from its configuration to its report: the cheapest fleet, others beside it, and how sure that is.

    config -> sweeps, price table -> options -> the cheapest -> sensitivity to acceptance, simulated runs

It starts nothing and measures nothing; every figure that is assumed or simulated says so.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from peagle.bench.setups import setup_label
from peagle.bench.summary import percentile
from peagle.economics.prices import PriceTable
from peagle.errors import ConfigError
from peagle.planning.config import PlanConfig
from peagle.planning.options import Option, options, scaled, with_cell, within_limits
from peagle.planning.simulation import Fleet, simulate
from peagle.planning.sweeps import read_sweeps
from peagle.speculation import break_even_acceptance_length

SCHEMA = 1
SIMULATED = "SIMULATED, not measured"
_FACTORS = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
_MOST_UNITS = 1_000_000  # of all simulated runs, some ten seconds: beyond, units are larger
_UNIT_S = 60.0


def make_plan(config: PlanConfig) -> dict[str, Any]:
    """The plan as JSON-ready data.

    Raises:
        ConfigError: bad usage, or nothing that was measured can do it; the reasons are named.
        PriceError: no price is known for a machine.
    """
    sweeps = read_sweeps(config.measured)
    if len({sweep.model for sweep in sweeps}) > 1:
        raise ConfigError(
            f"the measurements are of several models: {', '.join(sorted({sweep.model for sweep in sweeps}))}",
            hint="plan for one model at a time",
        )
    found, reasons = options(config, sweeps, PriceTable.load(config.prices))
    if not found:
        raise ConfigError(
            "no fleet can do it:\n  " + "\n  ".join(reasons),
            hint="allow more time, latency or machines, or measure other hardware",
        )
    chosen = found[0]
    return {
        "schema": SCHEMA,
        "model": chosen.sweep.model,
        "wanted": config.model_dump(mode="json"),
        "labels": [label for sweep in sweeps for label in sweep.labels],
        "chosen": option_dict(chosen, config),
        "options": [option_dict(option, config) for option in _best_of_each(found)],
        "sensitivity": _sensitivity(chosen, config),
        "break_even_acceptance_length": _break_even(chosen, config),
        "simulated": _simulated(chosen, config),
        "notes": [*reasons, *_doubts(chosen)],
    }


def option_dict(option: Option, config: PlanConfig) -> dict[str, Any]:
    """An option's figures."""
    cell, price, found = option.cell, option.machine.price, option.estimate
    return {
        "instance_type": price.instance_type,
        "place": f"{price.provider} {price.region}".strip(),
        "market": price.market,
        "usd_per_machine_h": price.usd_per_hour,
        "measured": option.sweep.name,
        "precision": option.sweep.precision,
        "method": cell.method,
        "k": cell.k,
        "label": setup_label(cell.method, cell.k),
        "concurrency": cell.concurrency,
        "output_tokens_per_s": cell.output_tokens_per_s,
        "acceptance_length": cell.acceptance_length,
        "num_machines": option.num_machines,
        "num_engines": option.num_engines,
        "hours": found.wall_s / 3600 if found else None,
        "usd": found.usd if found else None,
        "usd_per_h": option.usd_per_h,
        "usd_per_million_tokens": option.usd_per_million_tokens(config.tokens_per_s),
        "lost_share": found.lost_share if found else 1 - option.machine.useful_share,
        "device_s": asdict(found.device_s) if found else None,
    }


def fleet_of(option: Option, config: PlanConfig) -> Fleet:
    """The option as something to simulate; a service is simulated for an hour of work.

    Larger units would draw the end out, which waits for the last one, and be too long for a notice; so they are
    larger only where `config.seeds` runs would take too long to simulate.
    """
    machine = option.machine
    work_s = config.tokens / machine.tokens_per_s if config.tokens else option.num_engines * 3600
    fewest = option.num_engines * 4
    num_units = max(fewest, min(math.ceil(work_s / _UNIT_S), _MOST_UNITS // max(config.seeds, 1)))
    return Fleet(
        num_machines=option.num_machines,
        engines_per_machine=machine.num_engines,
        num_units=num_units,
        unit_s=work_s / num_units,
        start_s=machine.start_s,
        provision_s=config.provision_s,
        replace_s=config.replace_s,
        failures_per_h=config.failures_per_h,
        interruptions_per_h=machine.interruptions_per_h - config.failures_per_h,
        notice_s=config.notice_s,
    )


def _best_of_each(found: Sequence[Option]) -> list[Option]:
    """The cheapest of each machine, market and kind (with and without a drafter), cheapest first."""
    best: dict[tuple[str, str, bool], Option] = {}
    for option in found:
        best.setdefault((option.machine.price.instance_type, option.market, option.cell.drafts), option)
    return list(best.values())


def _sensitivity(chosen: Option, config: PlanConfig) -> list[dict[str, Any]]:
    """The same machines and cell, were more or less accepted than measured; nothing where speed does not follow it."""
    length = chosen.cell.acceptance_length
    if length is None or not chosen.cell.drafts_each_step:
        return []
    rows = []
    for factor in _FACTORS:
        if not 1 <= length * factor <= chosen.cell.k + 1:
            continue
        option = with_cell(chosen, scaled(chosen.cell, factor), config)
        if option is not None:
            rows.append(option_dict(option, config) | {"factor": factor})
    return rows


def _break_even(chosen: Option, config: PlanConfig) -> float | None:
    """The acceptance length below which no speculation, at its best concurrency within the limits, is cheaper."""
    length = chosen.cell.acceptance_length
    plain = [cell for cell in chosen.sweep.cells if not cell.drafts and within_limits(config, cell)]
    if length is None or not plain or not chosen.cell.drafts_each_step:
        return None
    best = max(cell.output_tokens_per_s for cell in plain)
    # Of one engine; a token of a step without drafts takes 1 / speed, and so on.
    return break_even_acceptance_length(length / chosen.cell.output_tokens_per_s, 1 / best)


def _simulated(chosen: Option, config: PlanConfig) -> dict[str, Any] | None:
    if not config.seeds or chosen.estimate is None:
        return None
    fleet = fleet_of(chosen, config)
    runs = [simulate(fleet, seed) for seed in range(config.seeds)]
    hours = [run.wall_s / 3600 for run in runs]
    usd = [run.machine_s / 3600 * chosen.machine.price.usd_per_hour for run in runs]
    return {
        "label": SIMULATED,
        "seeds": config.seeds,
        "fleet": asdict(fleet),
        "is_coarse": round(fleet.unit_s) > _UNIT_S,
        "hours": {"p50": statistics.median(hours), "p95": percentile(hours, 95)},
        "usd": {"p50": statistics.median(usd), "p95": percentile(usd, 95)},
        "useful_share": statistics.median(run.useful_share for run in runs),
        "machines_gone": statistics.mean(run.num_gone for run in runs),
        "in_time": None if config.within is None else sum(hour * 3600 <= config.within for hour in hours) / len(hours),
    }


def _doubts(chosen: Option) -> list[str]:
    cell, price = chosen.cell, chosen.machine.price
    notes = [f"The price may be wrong: {price.doubt}."] if price.doubt else []
    if cell.spread:
        notes.append(f"The speed's repeats spread over {cell.spread:.0%} of it, and so do hours and dollars.")
    unused = price.num_devices - chosen.machine.num_engines * chosen.machine.devices_per_engine
    if unused:
        notes.append(f"{unused} of {price.num_devices} devices of each machine hold no engine, and are paid for.")
    return notes
