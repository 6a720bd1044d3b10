"""A tuning, from its configuration to its profile.

One engine runs after another; each finished pass is kept at once.

    config -> space and prompts -> (search says what is next -> engine, pass) until it has the answer -> profile

    tune.json      what is measured, on what (written once)
    cells/         a finished pass each; the rounds that were decided; engine time so far
    profile.yaml   the answer: `peagle generate --profile`, `peagle serve --profile`
    logs/          what the engines print

It knows neither Ray nor HTTP. A pass has so many prompts for each request at once, other ones in each repeat, and the
same ones for all engines.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle import hardware
from peagle.bench.closed_loop import run_loop
from peagle.bench.engine import Listener, PeakMemory, Start, memory_reader, with_engine
from peagle.bench.folder import MeasurementFolder, default_folder, digest
from peagle.bench.plan import Pass
from peagle.bench.prompts import Dataset, Prompt, build_dataset, read_dataset
from peagle.bench.record import PassRecord, make_record, summarise
from peagle.catalog.targets import resolve_model
from peagle.economics.report.figures import in_words_s
from peagle.engine.interface import Engine
from peagle.engine.vllm import start_engine
from peagle.errors import EngineError
from peagle.profiles.profile import SCHEMA, Profile, write_profile
from peagle.requests.prompts import Tokenizer
from peagle.requests.tokenizer import load_tokenizer
from peagle.tuning.answer import answer
from peagle.tuning.config import TuneConfig
from peagle.tuning.halving import Arm, Search, Turn, score
from peagle.tuning.space import Candidate, Space, make_space

DEFAULT_FOLDER = Path("runs/tune")
_MIN_PROMPTS = 6  # of a pass: fewer are no sample of anything
_SPENT = "engine-time"


def tune(
    config: TuneConfig,
    listener: Listener,
    *,
    start: Start = start_engine,
    tokenizer_of: Callable[[str, str | None], Tokenizer] = load_tokenizer,
) -> tuple[Profile, Path]:
    """Search until the answer is found or the budget is spent.

    Returns the profile and its file.

    Args:
        start: starts an engine.
        tokenizer_of: the tokenizer of a folder, or of a hub id and its revision.

    Raises:
        ConfigError: bad usage; no engine was started. Or: nothing meets the limits, and the nearest is named.
        EngineError: no engine started.
    """
    rows = read_dataset(config)
    model = resolve_model(config.model, announce=listener.say)
    space = make_space(config, hardware.detect(), model)
    assert space.plan.spec.max_model_len is not None, "make_plan() sets it"
    dataset = build_dataset(config, rows, tokenizer_of(model.path, model.revision), space.plan.spec.max_model_len)
    fingerprint = _fingerprint(config, space, dataset)
    root = config.output or default_folder(DEFAULT_FOLDER, fingerprint)
    folder = MeasurementFolder(root, name="tune", schema=SCHEMA, fingerprint=fingerprint)
    run = _Run(config, space, dataset, folder, listener, start)
    run.announce()
    run.measure()
    profile = answer(config, space, dataset, run.search, run.records)
    path = config.profile_output or folder.root / "profile.yaml"
    write_profile(path, profile)
    return profile, path


def prompts_of(prompts: Sequence[Prompt], *, concurrency: int, waves: int, repeat: int) -> list[Prompt]:
    """The prompts of a pass.

    Each repeat goes on where the one before ended, and begins again at the end.
    """
    num = max(concurrency * waves, _MIN_PROMPTS)
    return [prompts[(repeat * num + place) % len(prompts)] for place in range(num)]


class _Run:
    """The measurements of one command, earlier ones included."""

    def __init__(
        self,
        config: TuneConfig,
        space: Space,
        dataset: Dataset,
        folder: MeasurementFolder,
        listener: Listener,
        start: Start,
    ) -> None:
        self._config, self._space, self._dataset, self._folder = config, space, dataset, folder
        self._listener, self._start = listener, start
        self._read_memory = memory_reader(space.plan.hardware)
        self.records: dict[Arm, list[PassRecord]] = {}
        self._rounds_name = f"rounds-{digest(str(config.goal()) + str(space.arms))}"
        rounds, cuts = folder.find(self._rounds_name, _rounds) or ((), ())
        self.search = Search(
            space.arms,
            score=self._score,
            budget_s=config.budget_min * 60,
            spent_s=folder.find(_SPENT, lambda kept: float(kept["engine_s"])) or 0.0,
            rounds=rounds,
            cuts=cuts,
        )
        for arm in space.arms:
            self._find(arm)

    def announce(self) -> None:
        """Announce the passes to measure and those that exist already."""
        plan, dataset, say = self._space.plan, self._dataset, self._listener.say
        where = f"{plan.hardware.describe()}, {', '.join(p.precision.describe() for p in self._space.plans)}"
        say(f"{len(dataset.prompts)} prompts of {dataset.name}; {plan.model.name} on {where}")
        for note in self._space.notes:
            say(f"  {note}")
        for reason, count in dataset.rejected.items():
            say(f"  {count} rows give no prompt: {reason}")
        num_done = sum(map(len, self.records.values()))
        say(
            f"  {len(self._space.arms)} configurations on {len(self._space.candidates)} engines; {num_done} passes are "
            f"done already, with {in_words_s(self.search.spent_s)} of {in_words_s(self._config.budget_min * 60)}"
        )

    def measure(self) -> None:
        """Start engines as the search wants them, and keep each up while it is wanted.

        Raises:
            EngineError: not a single engine could be measured, and nothing was by earlier commands.
        """
        while (turn := self.search.next()) is not None:
            candidate = self._space.candidates[turn.arm.engine]
            try:
                self._visit(candidate, turn)
            except EngineError as error:
                self._listener.say(f"  {candidate.label} is left out: {error.message}")
                self.search.fail(candidate.name, error.message)
                is_last = len(self.search.failed) == len(self._space.candidates)
                if is_last and not self.search.ranked(self._space.arms):
                    raise

    def _visit(self, candidate: Candidate, first: Turn) -> None:
        """One engine, from its start until the search wants another."""
        self._listener.say(f"{candidate.label}: starting the engine")
        before, up_since = self.search.spent_s, time.monotonic()

        def count() -> None:
            self.search.spent_s = before + time.monotonic() - up_since
            self._folder.keep(_SPENT, {"engine_s": self.search.spent_s})

        async def use(engine: Engine, start_s: float) -> None:
            turn: Turn | None = first
            while turn is not None and turn.arm.engine == candidate.name:
                record = await self._measure(engine, candidate, turn, start_s)
                count()
                self._tell(candidate, turn, record)
                turn = self.search.next(candidate.name)
                self._folder.keep(self._rounds_name, _rounds_to_dict(self.search))

        try:
            plan = self._space.plan
            with_engine(candidate.spec, plan.hardware, self._start, self._folder.log(candidate.name), use)
        finally:
            count()

    async def _measure(self, engine: Engine, candidate: Candidate, turn: Turn, start_s: float) -> PassRecord:
        concurrency = turn.arm.concurrency
        prompts = prompts_of(
            self._dataset.prompts, concurrency=concurrency, waves=self._config.waves, repeat=turn.repeat
        )
        with PeakMemory(self._read_memory) as peak:
            loop = await run_loop(
                engine,
                prompts,
                sampling=self._config.sampling(),
                concurrency=concurrency,
                progress=self._listener.progress,
                num_warm_up=concurrency,
            )
        one = Pass(setup=candidate.setup, concurrency=concurrency, repeat=turn.repeat)
        record = make_record(one, loop, engine, start_s=start_s, peak_memory_gib=peak.gib)
        self._folder.keep(_name(turn), record.to_dict())
        self._add(turn, record)
        return record

    def _tell(self, candidate: Candidate, turn: Turn, record: PassRecord) -> None:
        search, budget_s = self.search, self._config.budget_min * 60
        rest_s = min(search.pending_s(candidate.name), max(budget_s - search.spent_s, 0.0))
        left_s = max(budget_s - search.spent_s, 0.0)
        speed = f"{record.output_tokens_per_s:.1f} output tokens/s"
        self._listener.say(
            f"round {len(search.rounds)}, {in_words_s(search.spent_s)} of {in_words_s(budget_s)}: {candidate.label}, "
            f"{turn.arm.concurrency} at once, pass {turn.repeat + 1}: {speed}; "
            f"about {in_words_s(rest_s)} left of this round, at most {in_words_s(left_s)} in all"
        )

    def _find(self, arm: Arm) -> None:
        repeat = 0
        while (record := self._folder.find(_name(Turn(arm=arm, repeat=repeat)), PassRecord.from_dict)) is not None:
            self._add(Turn(arm=arm, repeat=repeat), record)
            repeat += 1

    def _add(self, turn: Turn, record: PassRecord) -> None:
        self.records.setdefault(turn.arm, []).append(record)
        self.search.add(turn, start_s=record.start_s, pass_s=record.wall_s)

    def _score(self, arm: Arm) -> Any:
        records = self.records.get(arm)
        if not records:
            return None
        return score(summarise(records, usd_per_s=self._space.plan.usd_per_s), self._config)


def _fingerprint(config: TuneConfig, space: Space, dataset: Dataset) -> dict[str, Any]:
    """The settings that all passes of a folder share.

    Methods, K, precisions, the goal, and sizes up to the largest can change.
    """
    found = space.plan.fingerprint(dataset)
    del found["precision"]
    return found | {"waves": config.waves}


def _name(turn: Turn) -> str:
    return f"{turn.arm.engine}-c{turn.arm.concurrency}-r{turn.repeat}"


def _rounds_to_dict(search: Search) -> dict[str, Any]:
    """The rounds after the first, and the arms that the budget kept out of each.

    The first has all arms.
    """

    def listed(rounds: Sequence[Sequence[Arm]]) -> list[list[list[Any]]]:
        return [[[arm.engine, arm.concurrency, arm.drafts] for arm in arms] for arms in rounds[1:]]

    return {"rounds": listed(search.rounds), "cuts": listed(search.cuts)}


def _rounds(kept: Mapping[str, Any]) -> tuple[list[list[Arm]], list[list[Arm]]]:
    def arms(rounds: Sequence[Sequence[Any]]) -> list[list[Arm]]:
        return [
            [Arm(engine=engine, concurrency=concurrency, drafts=drafts) for engine, concurrency, drafts in one]
            for one in rounds
        ]

    return arms(kept["rounds"]), arms(kept.get("cuts", []))  # tunings of before did not keep cuts
