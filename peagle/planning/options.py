"""All possible fleets (machine type, market and measured cell) that meet the limits, with their cost.

A machine is paid for as a whole, and runs as many engines as its devices allow. A cell was measured on one instance
type; its speed also applies to other types with the same accelerator. Published speeds apply to every machine with
the same accelerator.

A machine starts its engines, works, and is interrupted at a rate `r` (spot interruptions, failures). Each interruption
loses the work in open units and needs another start. Both are paid for; waiting for a new machine is not. The useful
fraction of the time after the first start is

    u = exp(-r * start) * (1 - r * lost)

so for `work` seconds of work, `start + work / u` seconds are paid per machine.

Example: 3,600 s of work, 100 s to start, 0.05 interruptions per hour, 60 s lost and 300 s to replace a machine:
u = exp(-0.00139) * (1 - 0.00083) = 0.9978; 3,708 s are paid, and 3,708 * (1 + 0.05 / 3600 * 300) = 3,723 s pass.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from peagle.economics.account import TotalsByUse
from peagle.economics.prices import MARKETS, Price, PriceTable, same_accelerator
from peagle.errors import ConfigError, PriceError
from peagle.planning.config import PlanConfig
from peagle.planning.sweeps import Sweep
from peagle.profiles.measurements import Cell

ASSUMED_START_S = 300.0  # start time of an engine with published speeds


def _applicable_prices(
    config: PlanConfig, sweeps: Sequence[Sweep], table: PriceTable, reasons: list[str]
) -> list[tuple[Sweep, Price]]:
    """Return each sweep with each price of a machine to which its speeds apply. Add to `reasons` why others do not."""
    applicable: list[tuple[Sweep, Price]] = []
    mismatches: dict[str, list[str]] = {}
    for sweep in sweeps:
        for price in _prices(config, sweep, table, reasons):
            if (mismatch := _mismatch(sweep, price, table)) is None:
                applicable.append((sweep, price))
            else:
                mismatches.setdefault(price.instance_type, []).append(mismatch)
    applicable_types = {price.instance_type for _, price in applicable}
    for name, messages in mismatches.items():
        if name not in applicable_types:
            raise ConfigError(
                "\n  ".join(dict.fromkeys(messages)),
                hint=f"measure on this type: {' or '.join(dict.fromkeys(sweep.remeasure for sweep in sweeps))}; "
                "or use instance types with the same accelerator",
            )
        reasons += messages
    return applicable


def _prices(config: PlanConfig, sweep: Sweep, table: PriceTable, reasons: list[str]) -> list[Price]:
    """Return the prices of the machines of a sweep, one for each region and market."""
    if sweep.stated_price is not None and not config.instance_types:
        if config.market == "spot":
            raise ConfigError(
                f"{sweep.name} was measured with --usd-per-hour, not an instance type, so it has no spot price",
                hint="set --instance-types to the machine, or leave --market out",
            )
        return [sweep.stated_price]
    allowed = [
        offer
        for offer in table.offers
        if config.provider in (None, offer.provider) and config.region in (None, offer.region)
    ]
    instance_types = list(config.instance_types)
    if not instance_types and sweep.is_published:
        matching = [offer for offer in allowed if same_accelerator(offer.accelerator, sweep.accelerator or "")]
        instance_types = list(dict.fromkeys(offer.instance_type for offer in matching))
    elif not instance_types and sweep.instance_type:
        instance_types = [sweep.instance_type]
    if not instance_types:
        reason = f"no price for a machine with {sweep.accelerator}"
        raise PriceError(
            f"{sweep.name}: {reason}" if sweep.is_published else f"{sweep.name} was measured without a price",
            hint="set --instance-types to the machine",
        )
    prices: list[Price] = []
    errors: list[PriceError] = []
    markets = MARKETS if config.market == "both" else (config.market,)
    for name in instance_types:
        locations: list[tuple[str | None, str | None]] = [
            (offer.provider, offer.region) for offer in allowed if offer.instance_type == name
        ]
        for market, (provider, region) in product(markets, locations or [(config.provider, config.region)]):
            try:
                prices.append(table.price(name, market=market, provider=provider, region=region))
            except PriceError as error:
                errors.append(error)
    if not prices:
        raise errors[0]
    if config.instance_types or sweep.instance_type:  # missing markets matter only for named machines
        reasons += [error.message for error in errors]
    return prices


def _mismatch(sweep: Sweep, price: Price, table: PriceTable) -> str | None:
    """Return why the measured speed does not apply to a machine, or None."""
    if sweep.instance_type == price.instance_type or price is sweep.stated_price:
        return None
    if sweep.instance_type is None:
        # Without an instance type, only the accelerator can be compared.
        measured_on = sweep.accelerator or "CPUs"
        is_same = same_accelerator(price.accelerator, measured_on) if sweep.accelerator else price.accelerator is None
    else:
        accelerators = {offer.accelerator for offer in table.offers if offer.instance_type == sweep.instance_type}
        described = ", ".join(str(accelerator or "no accelerator") for accelerator in accelerators)
        measured_on = f"{sweep.instance_type} ({described or 'not in the price table'})"
        is_same = price.accelerator is not None and (not accelerators or price.accelerator in accelerators)
    if is_same:
        return None
    return (
        f"{sweep.name} was measured on {measured_on}, but {price.instance_type} has"
        f" {price.accelerator or 'no accelerator'}: its speed is unknown"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine with its engines. Devices without an engine are also paid for.

    `lost_s` is the engine time lost per interruption, `replace_s` the time from an interruption to a new machine.
    """

    price: Price
    num_engines: int
    devices_per_engine: int
    tokens_per_s: float
    start_s: float
    lost_s: float = 0.0
    interruptions_per_h: float = 0.0
    replace_s: float = 0.0

    @property
    def useful_share(self) -> float:
        """The fraction of useful time after the first start; 0 if interruptions leave none."""
        rate = self.interruptions_per_h / 3600
        return math.exp(-rate * self.start_s) * max(1 - rate * self.lost_s, 0.0)

    @property
    def wall_per_paid(self) -> float:
        """Elapsed seconds per paid second. Waiting for a new machine is not paid."""
        return 1 + self.interruptions_per_h / 3600 * self.replace_s

    @property
    def sustained_tokens_per_s(self) -> float:
        """Long-run tokens per second of the machine, including interruptions."""
        return self.num_engines * self.tokens_per_s * self.useful_share / self.wall_per_paid


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The estimated time and cost of a job on a fleet.

    `wall_s` is the time from requesting machines to the last token. `device_s` has the paid device-seconds by use, as
    in a run's account.
    """

    num_machines: int
    wall_s: float
    device_s: TotalsByUse
    usd: float
    num_tokens: float

    @property
    def usd_per_million_tokens(self) -> float:
        return self.usd / self.num_tokens * 1e6

    @property
    def lost_share(self) -> float:
        """The fraction of the cost that is lost to interruptions: lost work and later starts."""
        return self.device_s.lost / self.device_s.total


def estimate(machine: Machine, num_machines: int, num_tokens: float, *, provision_s: float = 0.0) -> Estimate | None:
    """Return the estimate for `num_tokens`, or None if interruptions leave no useful time.

    The first start of each engine counts as `load`; starts after interruptions count as `lost`.
    """
    if machine.useful_share <= 0:
        return None
    work_s = num_tokens / (num_machines * machine.num_engines * machine.tokens_per_s)
    paid_s = machine.start_s + work_s / machine.useful_share
    num_used_devices = machine.num_engines * machine.devices_per_engine * num_machines
    device_s = TotalsByUse(
        load=num_used_devices * machine.start_s,
        busy=num_used_devices * work_s,
        idle=(machine.price.num_devices * num_machines - num_used_devices) * paid_s,
        lost=num_used_devices * (paid_s - machine.start_s - work_s),
    )
    return Estimate(
        num_machines=num_machines,
        wall_s=provision_s + paid_s * machine.wall_per_paid,
        device_s=device_s,
        usd=device_s.scaled(machine.price.usd_per_device_s).total,
        num_tokens=num_tokens,
    )


def count_machines(machine: Machine, num_tokens: float, within_s: float, *, provision_s: float = 0.0) -> int | None:
    """Return the fewest machines that finish in time, or None if starting takes too long."""
    paid_s_after_start = (within_s - provision_s) / machine.wall_per_paid - machine.start_s
    if paid_s_after_start <= 0 or machine.useful_share <= 0:
        return None
    tokens_per_machine = machine.num_engines * machine.tokens_per_s * machine.useful_share * paid_s_after_start
    return max(1, math.ceil(num_tokens / tokens_per_machine - 1e-9))  # a rounding error must not add a machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A fleet: machines of one type and market, and the measured cell of their engines.

    `estimate` is None for a service.
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
        return self.num_machines * self.machine.price.usd_per_hour / self.machine.wall_per_paid

    @property
    def usd(self) -> float:
        """The cost to minimise: of the job, or per hour of the service."""
        return self.estimate.usd if self.estimate else self.usd_per_h

    def usd_per_million_tokens(self, tokens_per_s: float | None) -> float:
        """Return USD per million tokens. A service is assumed to generate `tokens_per_s`."""
        if self.estimate:
            return self.estimate.usd_per_million_tokens
        assert tokens_per_s is not None, "a service sets tokens_per_s"
        return self.usd_per_h / 3600 / tokens_per_s * 1e6


def find_fleets(config: PlanConfig, sweeps: Sequence[Sweep], table: PriceTable) -> tuple[list[Fleet], list[str]]:
    """Return all fleets that meet the goal, from cheapest to most expensive, and reasons why other fleets do not."""
    fleets: list[Fleet] = []
    reasons: list[str] = []
    for sweep, price in _applicable_prices(config, sweeps, table, reasons):
        if price.num_devices < sweep.devices_per_engine:
            if sweep.instance_type == price.instance_type:
                raise ConfigError(
                    f"{sweep.name} is priced as {price.instance_type}, which has {price.num_devices} devices, but its "
                    f"engines use {sweep.devices_per_engine}: it was measured on another machine",
                    hint="repeat `peagle bench` with --usd-per-hour, which reuses all measurements; in a sweep file, "
                    "correct instance_type or devices_per_engine",
                )
            reasons.append(
                f"{price.instance_type} has {price.num_devices} devices, but an engine of {sweep.name} uses "
                f"{sweep.devices_per_engine}"
            )
            continue
        fleets += _fleets_at_price(config, sweep, price, reasons)
    return sorted(fleets, key=lambda fleet: (fleet.usd, fleet.num_machines)), list(dict.fromkeys(reasons))


def with_cell(fleet: Fleet, cell: Cell, config: PlanConfig) -> Fleet | None:
    """Return a fleet of the same machine type and market with another cell; None if no number of machines suffices."""
    return _fleet(config, fleet.sweep, cell, fleet.machine.price)


def exceeded_limit(fleet: Fleet, config: PlanConfig) -> str | None:
    """Return a message about the limit that a fleet exceeds, or None."""
    if not _within_limits(config, fleet.cell):
        return "exceeds the latency limits"
    if config.max_machines is not None and fleet.num_machines > config.max_machines:
        return f"needs more machines than --max-machines {config.max_machines}"
    return None


def _within_limits(config: PlanConfig, cell: Cell) -> bool:
    return cell.is_within(max_tpot_ms=config.max_tpot_ms, max_ttft_ms=config.max_ttft_ms)


def _fleets_at_price(config: PlanConfig, sweep: Sweep, price: Price, reasons: list[str]) -> Iterator[Fleet]:
    fitting = [cell for cell in sweep.cells if _within_limits(config, cell)]
    if not fitting:
        has_latencies = any(cell.tpot_s or cell.ttft_s for cell in sweep.cells)
        reason = "no measurement is within the latency limits" if has_latencies else "its latencies are unknown"
        reasons.append(f"{sweep.name}: {reason}")
    for cell in fitting:
        fleet = _fleet(config, sweep, cell, price)
        if fleet is None:
            reasons.append(
                f"{price.instance_type} {price.market}: starting and replacing machines leaves no time for work"
            )
        elif limit := exceeded_limit(fleet, config):
            reasons.append(f"{price.instance_type} {price.market}: {limit}")
        else:
            yield fleet


def _fleet(config: PlanConfig, sweep: Sweep, cell: Cell, price: Price) -> Fleet | None:
    machine = _machine_of(config, sweep, cell, price)
    if config.tokens_per_s is not None:
        sustained = machine.sustained_tokens_per_s * config.target_utilisation
        if sustained <= 0:
            return None
        num_machines_for_rate = max(1, -int(-config.tokens_per_s // sustained))
        return Fleet(sweep=sweep, cell=cell, machine=machine, num_machines=num_machines_for_rate, estimate=None)
    assert config.tokens is not None, "a plan is for a job or a service"
    num_machines: int | None = 1
    if config.within is not None:
        num_machines = count_machines(machine, config.tokens, config.within, provision_s=config.provision_s)
    if num_machines is None:
        return None
    job = estimate(machine, num_machines, config.tokens, provision_s=config.provision_s)
    if job is None:
        return None
    return Fleet(sweep=sweep, cell=cell, machine=machine, num_machines=num_machines, estimate=job)


def _machine_of(config: PlanConfig, sweep: Sweep, cell: Cell, price: Price) -> Machine:
    """Return a machine with as many engines as fit."""
    start_s = cell.start_s if config.start_s is None else config.start_s
    if start_s is None and sweep.is_published:
        start_s = ASSUMED_START_S
    if start_s is None:
        hint = "add start_s to the file, or set --start-s"
        raise ConfigError(f"{sweep.name} does not say how long an engine takes to start", hint=hint)
    spot_interruptions_per_h = config.spot_interruptions_per_h if price.market == "spot" else 0.0
    return Machine(
        price=price,
        num_engines=price.num_devices // sweep.devices_per_engine,
        devices_per_engine=sweep.devices_per_engine,
        tokens_per_s=cell.output_tokens_per_s,
        start_s=start_s,
        lost_s=_lost_s(cell) if config.lost_s is None else config.lost_s,
        interruptions_per_h=spot_interruptions_per_h + config.failures_per_h,
        replace_s=config.replace_s,
    )


def with_acceptance_factor(cell: Cell, factor: float) -> Cell:
    """Return the cell at `factor` times its acceptance length: tokens per step change; step times do not."""
    assert cell.acceptance_length is not None, "the cell has a drafter"
    return cell.model_copy(
        update={
            "acceptance_length": cell.acceptance_length * factor,
            "output_tokens_per_s": cell.output_tokens_per_s * factor,
            "tpot_s": cell.tpot_s and {name: seconds / factor for name, seconds in cell.tpot_s.items()},
        }
    )


def _lost_s(cell: Cell) -> float:
    if cell.response_tokens is None:
        return 60.0  # seconds, an assumption
    # Open units have 3 rows per concurrent request (peagle/corpus/cutting.py); on average half of this work is lost.
    return 3 / 2 * cell.concurrency * cell.response_tokens / cell.output_tokens_per_s
