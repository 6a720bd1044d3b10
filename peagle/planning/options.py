"""All possible fleets: machine, market and measured cell within the limits.

Machines are rented whole and run as many engines as their devices allow.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from peagle.economics.prices import Price, PriceTable
from peagle.errors import ConfigError
from peagle.planning.config import PlanConfig
from peagle.planning.estimate import Estimate, Machine, estimate, machines_for
from peagle.planning.pricing import pairs, require_other
from peagle.planning.sweeps import Sweep
from peagle.profiles.measurements import Cell

# Rows in open units per concurrent request (peagle/corpus/cutting.py); on average half of their work is lost.
_OPEN_ROWS_PER_REQUEST = 3
_UNKNOWN_LOST_S = 60.0  # without response lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A fleet of equal machines.

    Attributes:
        estimate: of a job; None for a service.
    """

    sweep: Sweep
    cell: Cell
    machine: Machine
    num_machines: int
    estimate: Estimate | None

    @property
    def market(self) -> str:
        return self.machine.price.market

    @property
    def num_engines(self) -> int:
        return self.num_machines * self.machine.num_engines

    @property
    def usd_per_h(self) -> float:
        return self.num_machines * self.machine.usd_per_sustained_h

    @property
    def usd(self) -> float:
        """The cost that is minimised: of the job, or per hour of a service."""
        return self.estimate.usd if self.estimate else self.usd_per_h

    def usd_per_million_tokens(self, tokens_per_s: float | None) -> float:
        """Return USD per million tokens; for a service at the required rate."""
        if self.estimate:
            return self.estimate.usd_per_million_tokens
        assert tokens_per_s is not None, "a service has a rate"
        return self.usd_per_h / 3600 / tokens_per_s * 1e6


def options(config: PlanConfig, sweeps: Sequence[Sweep], table: PriceTable) -> tuple[list[Option], list[str]]:
    """Return all fleets that meet the goal, the cheapest first, and why others do not."""
    found: list[Option] = []
    reasons: list[str] = []
    for sweep, price in pairs(config, sweeps, table, reasons):
        if price.num_devices < sweep.devices_per_engine:
            require_other(sweep, price)
            reasons.append(
                f"{price.instance_type} has {price.num_devices} devices, and an engine of {sweep.name} holds "
                f"{sweep.devices_per_engine}"
            )
            continue
        found += _of_price(config, sweep, price, reasons)
    return sorted(found, key=lambda option: (option.usd, option.num_machines)), list(dict.fromkeys(reasons))


def with_cell(option: Option, cell: Cell, config: PlanConfig) -> Option | None:
    """Return the same machine and market with another cell, or None if no number of machines is enough."""
    return _option(config, option.sweep, cell, option.machine.price)


def exceeded_limit(option: Option, config: PlanConfig) -> str | None:
    if not _within_limits(config, option.cell):
        return "exceeds the latency limits"
    if config.max_machines is not None and option.num_machines > config.max_machines:
        return f"needs more than {config.max_machines} machines"
    return None


def _within_limits(config: PlanConfig, cell: Cell) -> bool:
    return cell.is_within(max_tpot_ms=config.max_tpot_ms, max_ttft_ms=config.max_ttft_ms)


def _of_price(config: PlanConfig, sweep: Sweep, price: Price, reasons: list[str]) -> Iterable[Option]:
    fitting = [cell for cell in sweep.cells if _within_limits(config, cell)]
    if not fitting:
        has_latencies = any(cell.tpot_s or cell.ttft_s for cell in sweep.cells)
        fault = "no measurement is within the latency limits" if has_latencies else "its latencies are unknown"
        reasons.append(f"{sweep.name}: {fault}")
    for cell in fitting:
        option = _option(config, sweep, cell, price)
        if option is None:
            reasons.append(f"{price.instance_type} {price.market}: starting and replacing machines takes all the time")
        elif why := exceeded_limit(option, config):
            reasons.append(f"{price.instance_type} {price.market}: {why}")
        else:
            yield option


def _option(config: PlanConfig, sweep: Sweep, cell: Cell, price: Price) -> Option | None:
    machine = machine_of(config, sweep, cell, price)
    num, found = _fewest(config, machine), None
    if num is None:
        return None
    if config.tokens is not None:
        found = estimate(machine, num, config.tokens, provision_s=config.provision_s)
        if found is None:
            return None
    return Option(sweep=sweep, cell=cell, machine=machine, num_machines=num, estimate=found)


def _fewest(config: PlanConfig, machine: Machine) -> int | None:
    if config.tokens_per_s is not None:
        sustained = machine.sustained_tokens_per_s * config.target_utilisation
        return max(1, -int(-config.tokens_per_s // sustained)) if sustained > 0 else None
    assert config.tokens is not None, "a plan is of a job or of a service"
    if config.within is None:
        return 1
    return machines_for(machine, config.tokens, config.within, provision_s=config.provision_s)


def machine_of(config: PlanConfig, sweep: Sweep, cell: Cell, price: Price) -> Machine:
    """Return a machine with as many engines as fit."""
    start_s = cell.start_s if config.start_s is None else config.start_s
    if start_s is None:
        raise ConfigError(
            f"{sweep.name} has no start time of an engine",
            hint="set --start-s" if sweep.is_published else "add start_s to it, or set --start-s",
        )
    spot = config.spot_interruptions_per_h if price.market == "spot" else 0.0
    return Machine(
        price=price,
        num_engines=price.num_devices // sweep.devices_per_engine,
        devices_per_engine=sweep.devices_per_engine,
        tokens_per_s=cell.output_tokens_per_s,
        start_s=start_s,
        lost_s=_lost_s(cell) if config.lost_s is None else config.lost_s,
        interruptions_per_h=spot + config.failures_per_h,
        replace_s=config.replace_s,
    )


def scaled(cell: Cell, factor: float) -> Cell:
    """Return the cell at another acceptance length.

    The time of a step and the time to the first token stay; tokens per step change by `factor`.
    """
    assert cell.acceptance_length is not None, "it drafts"
    assert cell.drafts_each_step, "its speed follows its length"
    return cell.model_copy(
        update={
            "acceptance_length": cell.acceptance_length * factor,
            "output_tokens_per_s": cell.output_tokens_per_s * factor,
            "tpot_s": cell.tpot_s and {name: seconds / factor for name, seconds in cell.tpot_s.items()},
        }
    )


def _lost_s(cell: Cell) -> float:
    if cell.response_tokens is None:
        return _UNKNOWN_LOST_S
    return _OPEN_ROWS_PER_REQUEST / 2 * cell.concurrency * cell.response_tokens / cell.output_tokens_per_s
