"""Find and read the ledgers that a user names: of runs and of endpoints, local or on S3.

A run that is named twice counts once. A batch that an endpoint has billed counts only in the endpoint's ledger.
"""

import glob
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from peagle.economics.account import require_devices, require_sessions
from peagle.economics.baseline import recorded_baseline
from peagle.economics.ledger import REQUEST_FILES, SESSION_FILES, read_session_at, read_sessions
from peagle.economics.prices import Price
from peagle.economics.report.figures import cost_notes
from peagle.economics.request_work import read_request_totals
from peagle.economics.spending import Ledger, SpendingGroup, day_of
from peagle.economics.tags import tags_to_text
from peagle.economics.usage import EngineFacts, EngineSession, Work, interpolate_session
from peagle.errors import ConfigError
from peagle.hardware import Hardware
from peagle.private import user_path
from peagle.profiles.baselines import Benchmark
from peagle.runs.directory import RunDirectory, uses_fake_engine
from peagle.runs.meter import is_lent
from peagle.storage import StoragePath, is_remote, storage_path

_RESPONSES = "responses"  # the folder of `TrainConfig.responses_folder`


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLedgers:
    """Ledgers, and notes for the user about their limitations."""

    ledgers: tuple[Ledger, ...]
    notes: tuple[str, ...]


def find_ledgers(sources: Sequence[str], benchmark: Benchmark | None = None) -> FoundLedgers:
    """Return the ledgers of all sources, each once. With `benchmark`, its step times replace those of the ledgers.

    Raises:
        ConfigError: a source is missing, or is neither a run nor an endpoint's state.
        PeagleError: a file is damaged.
    """
    runs, state_folders, other_names = _find_folders(sources)
    endpoints = [_endpoint_ledger(name, folder) for name, folder in state_folders.items()]
    billed = {group.session_id for ledger in endpoints for group in ledger.work}
    unbilled = {name: run for name, run in runs.items() if _batch_id(run.manifest()) not in billed}
    notes = []
    if num_billed := len(runs) - len(unbilled):
        notes.append(f"{_count(num_billed, 'batch run')} counted in an endpoint's ledger.")
    if other_names:
        names = _shorten(sorted(other_names))
        notes.append(f"{_count(len(other_names), 'folder')} without a run or an endpoint's state: {names}")
    incomparable = []
    if benchmark:
        for name, run in unbilled.items():
            run_info = run.manifest()["run"]
            hardware = Hardware.from_dict(run_info["hardware"]).describe() if "hardware" in run_info else ""
            if (hardware, run_info.get("precision")) != (benchmark.hardware, benchmark.precision):
                incomparable.append(name)
    if incomparable:
        runs_text = _count(len(incomparable), "run")
        notes.append(f"{runs_text} with other hardware or precision than the baseline: {_shorten(incomparable)}")
    ledgers = [_with_benchmark(ledger, benchmark) for ledger in endpoints]
    ledgers += [
        _with_benchmark(_run_ledger(name, run), None if name in incomparable else benchmark)
        for name, run in unbilled.items()
    ]
    names_by_note: defaultdict[str, list[str]] = defaultdict(list)
    for ledger in ledgers:
        for note in cost_notes(ledger.sessions):
            names_by_note[note].append(ledger.run)
    notes += [
        f"{note} ({len(names)} of {len(ledgers)} sources: {_shorten(names)})" for note, names in names_by_note.items()
    ]
    return FoundLedgers(ledgers=tuple(ledgers), notes=tuple(notes))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _shorten(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}, ..."


def ledger_folders(sources: Sequence[str]) -> dict[str, StoragePath]:
    """Return the ledger folder of each source, by name; raises the errors of `find_ledgers`."""
    runs, state_folders, _ = _find_folders(sources)
    return {name: run.ledger for name, run in runs.items()} | {
        name: state / "ledger" for name, state in state_folders.items()
    }


def _find_folders(sources: Sequence[str]) -> tuple[dict[str, RunDirectory], dict[str, StoragePath], list[str]]:
    """Return runs, endpoints' states, and the names of other folders."""
    folders = _classify({name: folder for source in sources for name, folder in _expand(source).items()})
    missing = [source for source in sources if not _is_glob(source) and not storage_path(source).is_dir()]
    if missing or not (folders[0] or folders[1]):
        raise ConfigError(
            f"{', '.join(missing or sources)}: neither a run nor an endpoint's state folder",
            hint="use run directories (with run.json) or --state folders of `peagle serve` (with ledger/)",
        )
    return folders


def _with_benchmark(ledger: Ledger, benchmark: Benchmark | None) -> Ledger:
    """Return the ledger with the benchmark's step times in sessions of the same engine."""

    def with_baseline(session: EngineSession) -> EngineSession:
        baseline = benchmark.baseline(session) if benchmark else None
        return replace(session, baseline=baseline.to_text()) if baseline else session

    return replace(ledger, sessions=tuple(map(with_baseline, ledger.sessions)))


def _expand(source: str) -> dict[str, StoragePath]:
    """Return the folders that a source or glob names, by name."""
    if not _is_glob(source):
        return {source: storage_path(source)}
    if "://" not in source:
        names = sorted(glob.glob(str(user_path(source))))  # noqa: PTH207 - Path.glob() does not accept absolute patterns
        return {name: storage_path(name) for name in names if storage_path(name).is_dir()}
    folder, _, pattern = source.rstrip("/").rpartition("/")
    if _is_glob(folder) or "[" in pattern:
        raise ConfigError(f"{source}: on S3, only the last part of the path may contain * and ?")
    return {str(path): path for path in sorted(storage_path(folder).glob(pattern), key=str)}


def _is_glob(source: str) -> bool:
    return any(character in source for character in "*?[")


def _classify(folders: Mapping[str, StoragePath]) -> tuple[dict[str, RunDirectory], dict[str, StoragePath], list[str]]:
    """Return runs, endpoints' states, and the names of other folders. A folder with several names gets the first."""
    runs, state_folders, other_names = dict[str, RunDirectory](), dict[str, StoragePath](), list[str]()
    response_runs = {name: _response_runs(name, folder) for name, folder in folders.items()}
    named_folders = [*folders.items(), *(named for by_name in response_runs.values() for named in by_name.items())]
    by_location = {}
    for name, folder in reversed(named_folders):
        location = str(folder) if is_remote(folder) else str(user_path(str(folder)).resolve())
        by_location[location] = (name, folder)
    for name, folder in by_location.values():
        run = RunDirectory(folder)
        if run.exists and "plan" in run.manifest():  # the run.json of a training run has no plan
            runs[name] = run
        elif _has_ledger(folder):
            state_folders[name] = folder
        elif not response_runs.get(name):
            other_names.append(name)
    return dict(sorted(runs.items())), dict(sorted(state_folders.items())), other_names


def _response_runs(name: str, folder: StoragePath) -> dict[str, StoragePath]:
    """Return the bulk runs that generated the responses for a training run, by name."""
    runs = sorted((folder / _RESPONSES).glob("*"), key=str)
    return {f"{name.rstrip('/')}/{_RESPONSES}/{run.name}": run for run in runs if RunDirectory(run).exists}


def _has_ledger(folder: StoragePath) -> bool:
    """Return whether a folder has the ledger of an endpoint, a benchmark or a training run."""
    return any(next((folder / "ledger").glob(files), None) for files in (SESSION_FILES, REQUEST_FILES))


def require_runs(locations: Sequence[str]) -> None:
    """Raise ConfigError if a location is the state of an endpoint. The hint is the command that shows its cost."""
    for location in locations:
        if not RunDirectory(location).exists and _has_ledger(storage_path(location)):
            raise ConfigError(
                f"{location} is the state of an endpoint, not a run",
                hint=f"peagle cost {location} --by day,key shows its cost and savings",
            )


def _batch_id(manifest: dict[str, Any]) -> str | None:
    """Return the id of the batch (`/v1/batches`) that a run executes, or None."""
    command = list(manifest.get("command") or [])
    return str(command[2]) if command[:2] == ["POST", "/v1/batches"] and len(command) > 2 else None


def _endpoint_ledger(name: str, state: StoragePath) -> Ledger:
    ledger = state / "ledger"
    work = read_request_totals(ledger)  # before the sessions, so that every request has a session

    def at_time(session: EngineSession, moment: float) -> EngineSession:
        return read_session_at(ledger, session, moment)

    return Ledger(run=name, sessions=read_sessions(ledger), work=work, session_at=at_time)


def _run_ledger(name: str, run: RunDirectory) -> Ledger:
    manifest = run.manifest()
    price, run_info = Price.from_dict(manifest["price"]), manifest["run"]
    concurrency = run_info.get("concurrency") or 0  # units do not record their concurrency
    tags = tags_to_text(manifest.get("config", {}).get("tags") or {})
    # Usage of borrowed engines is in the ledger of their endpoint.
    usages = [usage for usage in run.usages() if not is_lent(usage.session_id)]
    sessions = []
    for session in run.sessions():
        if is_lent(session.session_id):
            continue
        facts = EngineFacts.priced(
            price,
            model=run_info["model"],
            drafter=run_info["drafter"],
            num_devices=session.num_devices,
            device=session.device,
            tags=tags,
            num_speculative_tokens=run_info.get("num_speculative_tokens"),
            baseline=recorded_baseline(run_info),
            is_stand_in=uses_fake_engine(manifest),
        )
        sessions.append(replace(session, **asdict(facts)))
    require_devices(sessions, price)
    require_sessions(sessions, {usage.session_id for usage in usages})
    usd_per_s = {session.session_id: session.num_devices * session.usd_per_device_s for session in sessions}
    work: defaultdict[SpendingGroup, Work] = defaultdict(Work)
    for usage in usages:
        group = SpendingGroup(
            day_of(usage.finished_at), usage.session_id, "", run_info["model"], run_info["drafter"], tags
        )
        usd = usage.busy_s * usd_per_s[usage.session_id]
        work[group] += Work.of(usage, usd, request_s=usage.busy_s * concurrency)
    return Ledger(
        run=name,
        sessions=sessions,
        work=work,
        session_at=lambda session, moment: interpolate_session(moment, None, session),
    )
