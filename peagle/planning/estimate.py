"""A fleet of equal machines in closed form: time, cost, losses.

Pure arithmetic.

A machine starts its engines, works, and is interrupted at a rate `r` (spot notices, failures). Each interruption costs
the work in open units and another start, both paid for, and the wait for a new machine, which is not. So of a second
after the first start

    u = exp(-r * start) * (1 - r * lost)

is work, and for `work` seconds of it each machine is paid for `start + work / u`.

Worked by hand: 3,600 s of work, 100 s to start, 0.05 interruptions an hour, 60 s lost and 300 s until a machine is
replaced: u = exp(-0.00139) * (1 - 0.00083) = 0.9978; 3,708 s are paid, and 3,708 * (1 + 0.05 / 3600 * 300) = 3,723 s
pass.
"""

import math
from dataclasses import dataclass

from peagle.economics.account import Shares
from peagle.economics.prices import Price


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine at work.

    Attributes:
        num_engines: engines on it.
        devices_per_engine: of the machine's devices; those that no engine holds are paid for as well.
        tokens_per_s: of one engine.
        start_s: until an engine is up.
        lost_s: work of an engine that an interruption loses.
        interruptions_per_h: of one machine.
        replace_s: from an interruption to a new machine.
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
        """The share of work in a second after the first start.

        0 where interruptions leave none.
        """
        rate = self.interruptions_per_h / 3600
        return math.exp(-rate * self.start_s) * max(1 - rate * self.lost_s, 0.0)

    @property
    def wall_per_paid(self) -> float:
        """Seconds that pass for one that is paid.

        Waiting for a new machine is free, and takes its time.
        """
        return 1 + self.interruptions_per_h / 3600 * self.replace_s

    @property
    def sustained_tokens_per_s(self) -> float:
        """Of the machine in the long run, interruptions included."""
        return self.num_engines * self.tokens_per_s * self.useful_share / self.wall_per_paid

    @property
    def usd_per_sustained_h(self) -> float:
        """USD an hour of a sustained service.

        A machine that is being replaced is not paid for.
        """
        return self.price.usd_per_hour / self.wall_per_paid


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A fleet's run.

    Attributes:
        wall_s: from asking for machines to the last token.
        device_s: where the paid seconds go, as in a run's account.
    """

    num_machines: int
    wall_s: float
    device_s: Shares
    usd: float
    num_tokens: float

    @property
    def usd_per_million_tokens(self) -> float:
        """Dollars for a million output tokens, everything included."""
        return self.usd / self.num_tokens * 1e6

    @property
    def lost_share(self) -> float:
        """Of the cost, what interruptions take: lost work and starts beyond the first."""
        return self.device_s.lost / self.device_s.total


def estimate(machine: Machine, num_machines: int, num_tokens: float, *, provision_s: float = 0.0) -> Estimate | None:
    """A run of so many tokens; None where interruptions leave no time for work.

    Starts after interruptions are among `lost`, the first ones are `load`.
    """
    if machine.useful_share <= 0:
        return None
    work_s = num_tokens / (num_machines * machine.num_engines * machine.tokens_per_s)
    paid_s = machine.start_s + work_s / machine.useful_share
    held = machine.num_engines * machine.devices_per_engine * num_machines
    unused = machine.price.num_devices * num_machines - held
    device_s = Shares(
        load=held * machine.start_s,
        busy=held * work_s,
        idle=unused * paid_s,
        lost=held * (paid_s - machine.start_s - work_s),
    )
    return Estimate(
        num_machines=num_machines,
        wall_s=provision_s + paid_s * machine.wall_per_paid,
        device_s=device_s,
        usd=device_s.times(machine.price.usd_per_device_s).total,
        num_tokens=num_tokens,
    )


def machines_for(machine: Machine, num_tokens: float, within_s: float, *, provision_s: float = 0.0) -> int | None:
    """The fewest machines that are done in time.

    None where starting alone takes too long.
    """
    work_left_s = (within_s - provision_s) / machine.wall_per_paid - machine.start_s
    if work_left_s <= 0 or machine.useful_share <= 0:
        return None
    per_machine = machine.num_engines * machine.tokens_per_s * machine.useful_share * work_left_s
    return max(1, math.ceil(num_tokens / per_machine - 1e-9))
