"""All possible fleets: machine, market and measured cell within the limits.

Machines are rented whole, and hold as many engines as their devices allow.

It knows cells and prices; which machines a measurement holds for is `pricing.py`'s.
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

# Rows in open units for each request at once (peagle/corpus/cutting.py); half of that work is lost on average.
_OPEN_ROWS_PER_REQUEST = 3
_UNKNOWN_LOST_S = 60.0  # where response lengths were not kept


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
        """On-demand, spot, or a stated price."""
        return self.machine.price.market

    @property
    def num_engines(self) -> int:
        """Replicas in all."""
        return self.num_machines * self.machine.num_engines

    @property
    def usd_per_h(self) -> float:
        """Of the whole fleet while it is up."""
        return self.num_machines * self.machine.usd_per_sustained_h

    @property
    def usd(self) -> float:
        """The cost that options are compared by: of the job, or of an hour of service."""
        return self.estimate.usd if self.estimate else self.usd_per_h

    def usd_per_million_tokens(self, tokens_per_s: float | None) -> float:
        """Everything included; of a service at the rate that is wanted."""
        if self.estimate:
            return self.estimate.usd_per_million_tokens
        assert tokens_per_s is not None, "a service has a rate"
        return self.usd_per_h / 3600 / tokens_per_s * 1e6


def options(config: PlanConfig, sweeps: Sequence[Sweep], table: PriceTable) -> tuple[list[Option], list[str]]:
    """All fleets that do it, the cheapest first; and why others do not.

    Raises:
        PriceError: no price at all is known for a machine.
        ConfigError: an instance type has other accelerators than were measured, or cannot be what was; or spot is
            wanted of a machine whose price was stated.
    """
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
    """The same machine and market with another cell.

    None where no number of them does it.
    """
    return _option(config, option.sweep, cell, option.machine.price)


def why_beyond(option: Option, config: PlanConfig) -> str | None:
    """The limit that an option is beyond, in words; None where it keeps all of them."""
    if not _within_limits(config, option.cell):
        return "beyond the latency limits"
    if config.max_machines is not None and option.num_machines > config.max_machines:
        return f"more than {config.max_machines} machines are needed"
    return None


def _within_limits(config: PlanConfig, cell: Cell) -> bool:
    return cell.is_within(max_tpot_ms=config.max_tpot_ms, max_ttft_ms=config.max_ttft_ms)


def _of_price(config: PlanConfig, sweep: Sweep, price: Price, reasons: list[str]) -> Iterable[Option]:
    fitting = [cell for cell in sweep.cells if _within_limits(config, cell)]
    if not fitting:
        has_latencies = any(cell.tpot_s or cell.ttft_s for cell in sweep.cells)
        fault = "no measurement is within the latency limits" if has_latencies else "its latencies are not known"
        reasons.append(f"{sweep.name}: {fault}")
    for cell in fitting:
        option = _option(config, sweep, cell, price)
        if option is None:
            reasons.append(
                f"{price.instance_type} {price.market}: starting and replacing machines leaves no time for work"
            )
        elif why := why_beyond(option, config):
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
    """The fewest machines by the closed form.

    None where no number of them does it.
    """
    if config.tokens_per_s is not None:
        sustained = machine.sustained_tokens_per_s * config.target_utilisation
        return max(1, -int(-config.tokens_per_s // sustained)) if sustained > 0 else None
    assert config.tokens is not None, "a plan is of a job or of a service"
    if config.within is None:
        return 1
    return machines_for(machine, config.tokens, config.within, provision_s=config.provision_s)


def machine_of(config: PlanConfig, sweep: Sweep, cell: Cell, price: Price) -> Machine:
    """A machine with as many of these engines as it has devices for.

    Raises:
        ConfigError: nobody knows how long an engine takes to start.
    """
    start_s = cell.start_s if config.start_s is None else config.start_s
    if start_s is None:
        raise ConfigError(
            f"{sweep.name} does not say how long an engine takes to start",
            hint="say it with --start-s" if sweep.is_published else "give start_s in it, or --start-s",
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
    """The same cell at another acceptance length.

    A step takes as long, and yields that much more or less.

    So does a token take as much less or more; the time to the first one is not of a draft.
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
