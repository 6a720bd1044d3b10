"""Simulation of a fleet, event by event, over several seeds.

Machines come late, fail or are taken away; engines work off units.

SimPy's clock, seeded random numbers, nothing measured: what comes out is simulated, and is labelled so wherever it is
shown. A unit is committed whole or lost; one that is lost goes back to the queue. Engines idle until the last unit is
committed, as a fixed number of them does in a run.

    machine   waits until it is there, starts its engines, and is there until it fails, is taken away, or all is done
    engine    loads, then takes one unit after the other; a notice lets it finish the unit that it has, if there is time
    driver    hands a unit out and takes its receipt, one at a time

    job       all of its units; when the last one is committed, and whether that is in time
    service   an hour from when its first engines are up; the tokens/s that it sustains
"""

import math
import random
import statistics
from collections import deque
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import Any

import simpy

from peagle.bench.record import percentile
from peagle.economics.account import Shares
from peagle.planning.config import PlanConfig
from peagle.planning.estimate import Machine
from peagle.planning.options import Option

Events = Generator[Any, Any, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The fleet to simulate.

    Attributes:
        unit_s: mean engine time of a unit; `unit_spread` is its standard deviation over the mean.
        provision_s: until the first machine is there; afterwards `machines_per_min` join, None for all at once.
        failures_per_h, interruptions_per_h: of a machine; the second come with `notice_s` of warning.
        driver_s: the driver's time for a unit, in which it can do nothing else.
    """

    num_machines: int
    engines_per_machine: int
    num_units: int
    unit_s: float
    start_s: float
    unit_spread: float = 0.2
    provision_s: float = 0.0
    machines_per_min: float | None = None
    replace_s: float = 0.0
    failures_per_h: float = 0.0
    interruptions_per_h: float = 0.0
    notice_s: float = 0.0
    driver_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.num_machines, self.engines_per_machine, self.num_units) < 1 or self.unit_s <= 0:
            raise ValueError("a fleet has machines, engines and units of some length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The outcome: engine seconds by share.

    Paid seconds are those of machines that are there.

    Attributes:
        wall_s: from asking for machines to the last commit, or to the moment at which the run was to end.
        machine_s: paid.
        num_gone: machines that failed or were taken away.
    """

    wall_s: float
    machine_s: float
    engine_s: Shares
    num_gone: int

    @property
    def useful_share(self) -> float:
        """Of the paid engine time, what became committed units."""
        return self.engine_s.busy / self.engine_s.total


def simulate(fleet: Fleet, seed: int, *, until_s: float | None = None) -> Simulated:
    """Simulate a fleet to its last unit or to `until_s`.

    An unfinished unit counts as far as it got.
    """
    run = _Run(fleet, random.Random(seed))
    for number in range(fleet.num_machines):
        run.env.process(run.machine(number))
    run.env.run(until=run.done if until_s is None else until_s)
    return run.result()


class _Run:
    def __init__(self, fleet: Fleet, draw: random.Random) -> None:
        self.env = simpy.Environment()
        self.done = self.env.event()
        self._fleet, self._draw = fleet, draw
        self._waiting = deque(self._unit_s() for _ in range(fleet.num_units))
        self._more = self.env.event()  # replaced whenever a unit comes back
        self._num_left = fleet.num_units
        self._driver = simpy.Resource(self.env)
        self._spent = {"load": 0.0, "busy": 0.0, "idle": 0.0, "lost": 0.0}
        self._open: dict[int, tuple[str, float]] = {}  # what each engine is doing, and since when
        self._machine_s, self._num_gone = 0.0, 0
        self._present: dict[int, float] = {}

    def result(self) -> Simulated:
        """The account at the end: what is open then is over."""
        for engine in list(self._open):
            self._close(engine)
        self._machine_s += sum(self.env.now - since for since in self._present.values())
        return Simulated(
            wall_s=self.env.now, machine_s=self._machine_s, engine_s=Shares(**self._spent), num_gone=self._num_gone
        )

    def machine(self, number: int) -> Events:
        """One slot of the fleet, and the machines that take it one after the other."""
        fleet, env = self._fleet, self.env
        lag_s = number / fleet.machines_per_min * 60 if fleet.machines_per_min else 0.0
        yield env.timeout(fleet.provision_s + lag_s)
        while self._num_left:
            self._present[number] = env.now
            slots = range(number * fleet.engines_per_machine, (number + 1) * fleet.engines_per_machine)
            drain = env.event()
            engines = [env.process(self._engine(slot, drain)) for slot in slots]
            failure, notice = (
                env.timeout(self._life(fleet.failures_per_h)),
                env.timeout(self._life(fleet.interruptions_per_h)),
            )
            yield failure | notice
            if not failure.processed:
                drain.succeed()
                yield env.all_of(engines) | env.timeout(fleet.notice_s)
            for slot, engine in zip(slots, engines, strict=True):
                if engine.is_alive:
                    engine.interrupt()
                else:
                    self._close(slot)
            self._num_gone += 1
            self._machine_s += env.now - self._present.pop(number)
            yield env.timeout(fleet.replace_s)

    def _engine(self, slot: int, drain: simpy.Event) -> Events:
        unit: float | None = None
        try:
            yield from self._spend(slot, "load", self.env.timeout(self._fleet.start_s))
            while not drain.triggered:
                if not self._waiting:
                    yield from self._spend(slot, "idle", self._more | drain)
                    continue
                unit = self._waiting.popleft()
                yield from self._spend(slot, "busy", self.env.timeout(unit))
                unit = None
                self._num_left -= 1
                if not self._num_left:
                    self.done.succeed()
                yield from self._report(slot)
            self._open[slot] = ("idle", self.env.now)  # drained, and paid for until its machine goes
        except simpy.Interrupt:
            doing, since = self._open.pop(slot)
            self._spent["lost" if doing == "busy" else doing] += self.env.now - since
            if unit is not None:
                self._waiting.append(unit)
                self._more.succeed()
                self._more = self.env.event()

    def _report(self, slot: int) -> Events:
        """Have the driver take the receipt and hand out the next unit.

        Engines wait in line for it.
        """
        if not self._fleet.driver_s:
            return
        with self._driver.request() as turn:
            yield from self._spend(slot, "idle", turn)
            yield from self._spend(slot, "idle", self.env.timeout(self._fleet.driver_s))

    def _spend(self, slot: int, doing: str, until: Any) -> Events:
        self._open[slot] = (doing, self.env.now)
        yield until
        self._close(slot)

    def _close(self, slot: int) -> None:
        doing, since = self._open.pop(slot)
        self._spent[doing] += self.env.now - since

    def _unit_s(self) -> float:
        fleet = self._fleet
        return max(0.1 * fleet.unit_s, self._draw.gauss(fleet.unit_s, fleet.unit_spread * fleet.unit_s))

    def _life(self, per_h: float) -> float:
        return self._draw.expovariate(per_h / 3600) if per_h else float("inf")


SIMULATED = "SIMULATED, not measured"
_MOST_UNITS = 1_000_000  # of all simulated runs, some ten seconds: beyond, units are larger
_MOST_EVENTS = 1.2  # times that: units that are done again and engines that start anew; beyond, seeds are fewer
_UNIT_S = 60.0
_SERVICE_S = 3600.0
_MORE = 1.25  # units of a service beyond those of its hour, and one for each engine: it never runs out of them


def simulated(option: Option, config: PlanConfig) -> tuple[dict[str, Any] | None, list[str]]:
    """The simulated outcomes of a fleet, and notes on them.

    None where no run was asked for, or one is too much.
    """
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
    """Seconds of a unit: a minute, or more where interruptions lose more.

    An interruption without notice loses half a unit.
    """
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
