"""Time, cost and losses of a fleet of equal machines, in closed form.

A machine starts its engines, works, and is interrupted at a rate `r` (spot interruptions, failures). Each interruption
loses the work in open units and needs another start, which are paid, and waits for a new machine, which is not. The
useful fraction of the time after the first start is

    u = exp(-r * start) * (1 - r * lost)

so for `work` seconds of work, `start + work / u` seconds are paid per machine.

Example: 3,600 s of work, 100 s to start, 0.05 interruptions per hour, 60 s lost and 300 s to replace a machine:
u = exp(-0.00139) * (1 - 0.00083) = 0.9978; 3,708 s are paid, and 3,708 * (1 + 0.05 / 3600 * 300) = 3,723 s pass.
"""

import math
from dataclasses import dataclass

from peagle.economics.account import Shares
from peagle.economics.prices import Price


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine with its engines.

    Attributes:
        devices_per_engine: unused devices of the machine are paid as well.
        tokens_per_s: of one engine.
        start_s: time to start an engine.
        lost_s: engine time lost per interruption.
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

    @property
    def usd_per_sustained_h(self) -> float:
        """USD per hour of a sustained service, without the time of replacements."""
        return self.price.usd_per_hour / self.wall_per_paid


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The run of a fleet.

    Attributes:
        wall_s: from requesting machines to the last token.
        device_s: paid device-seconds, as in a run's account.
    """

    num_machines: int
    wall_s: float
    device_s: Shares
    usd: float
    num_tokens: float

    @property
    def usd_per_million_tokens(self) -> float:
        return self.usd / self.num_tokens * 1e6

    @property
    def lost_share(self) -> float:
        """The fraction of the cost lost by interruptions: lost work and later starts."""
        return self.device_s.lost / self.device_s.total


def estimate(machine: Machine, num_machines: int, num_tokens: float, *, provision_s: float = 0.0) -> Estimate | None:
    """Return the estimate for `num_tokens`, or None if interruptions leave no useful time.

    Starts after interruptions are `lost`, first starts are `load`.
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
    """Return the fewest machines that finish in time, or None if starting takes too long."""
    work_left_s = (within_s - provision_s) / machine.wall_per_paid - machine.start_s
    if work_left_s <= 0 or machine.useful_share <= 0:
        return None
    per_machine = machine.num_engines * machine.tokens_per_s * machine.useful_share * work_left_s
    return max(1, math.ceil(num_tokens / per_machine - 1e-9))
