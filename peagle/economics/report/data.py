"""The report of a run, or a comparison of several reports, as data.

The terminal summary, report.json and report.html are all made from the result of `report_dict`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from peagle import speculation
from peagle.economics.account import Account
from peagle.economics.baseline import recorded_baseline
from peagle.economics.report.figures import FIGURES, SHARES, format_share
from peagle.economics.savings import Savings, spot_savings, work_savings
from peagle.economics.usage import Work
from peagle.errors import PeagleError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Facts about a run. Only the model is required.

    The default label is the model and its drafter. Times are Unix seconds or ISO 8601, and stored as ISO 8601 in UTC.
    """

    model: str
    label: str | None = None
    path: str | None = None
    drafter: str | None = None
    num_speculative_tokens: int | None = None
    precision: str | None = None
    concurrency: int | None = None
    num_engines: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    num_input_rows: int | None = None
    started_at: str | float | None = None
    finished_at: str | float | None = None
    complete: bool | None = None
    break_even_acceptance_length: float | None = None
    baseline: dict[str, Any] | None = None
    is_stand_in: bool = False

    def __post_init__(self) -> None:
        for name in ("started_at", "finished_at"):
            object.__setattr__(self, name, _to_utc(name, getattr(self, name)))
        if self.label is None:
            k = f" K={self.num_speculative_tokens}" if self.num_speculative_tokens else ""
            label = f"{self.model} with {self.drafter}{k}" if self.drafter else f"{self.model}, no drafter"
            object.__setattr__(self, "label", label)


def _to_utc(name: str, moment: str | float | None) -> str | None:
    if moment is None:
        return None
    try:
        time = datetime.fromisoformat(moment) if isinstance(moment, str) else datetime.fromtimestamp(moment, UTC)
        return time.astimezone(UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError) as error:
        raise PeagleError(f"{name} of the run is not a time: {moment!r} ({error})") from error


SCHEMA = 1
LARGE_WASTE = 0.10  # larger shares of the cost get a note


def report_dict(account: Account, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a report for JSON. `shares` are fractions of the cost, `notes` sentences for the reader."""
    info = RunInfo(**run)
    total_usd = account.total_usd
    shares = {name: getattr(account.usd, name) / total_usd if total_usd else 0.0 for name in SHARES}
    return {
        "schema": SCHEMA,
        "run": asdict(info),
        "account": account.to_dict(),
        "shares": shares,
        "saved": _savings(account, info).to_dict(),
        "notes": _notes(account, info, shares),
    }


def _savings(account: Account, info: RunInfo) -> Savings:
    usd = account.usd
    work = Work(
        num_requests=account.num_rows,
        num_output_tokens=account.num_output_tokens,
        num_drafts=account.speculation.num_drafts,
        num_accepted_tokens=account.speculation.num_accepted_tokens,
        busy_s=account.busy_s,
        request_s=account.busy_s * (info.concurrency or 0),
        usd=usd.busy,
    )
    step_times = recorded_baseline({"baseline": info.baseline})
    savings = work_savings(work, has_drafter=info.drafter is not None, baseline=step_times)
    return savings + spot_savings(account.price, kept_usd=usd.total - usd.lost, lost_usd=usd.lost)


def check_report(report: object) -> dict[str, Any]:
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise PeagleError(
            f"not a report of schema {SCHEMA}", hint="create it again from the run directory: peagle report RUN"
        )
    if missing := {"run", "account", "shares", "notes"} - set(report):
        raise PeagleError(f"the report has no {', '.join(sorted(missing))}")
    return report


def _notes(account: Account, info: RunInfo, shares: Mapping[str, float]) -> list[str]:
    notes: list[str | None] = []
    if info.complete is False:
        of_total = f" of {info.num_input_rows:,}" if info.num_input_rows is not None else ""
        num_done = account.num_rows + account.num_failed_rows
        notes.append(
            f"The run is not finished: {num_done:,}{of_total} rows so far. Run the same command again to continue."
        )
    if account.num_failed_rows:
        notes.append(f"{account.num_failed_rows:,} rows failed; see failed/.")
    notes += [
        speculation.drafter_warning(
            account.speculation.acceptance_length, break_even=info.break_even_acceptance_length
        ),
        speculation.sources_note(account.speculation),
    ]
    if shares["lost"] > LARGE_WASTE:
        notes.append(
            f"{format_share(shares['lost'])} of the cost was lost work: {account.num_lost_tokens:,} tokens "
            "were generated but not committed. Smaller work units lose less when an engine crashes."
        )
    if shares["idle"] > LARGE_WASTE:
        notes.append(f"{format_share(shares['idle'])} of the cost was idle time. Use fewer engines or more rows.")
    startup_share = shares["load"] + shares["compile"]
    if startup_share > 0.5:
        notes.append(
            f"{format_share(startup_share)} of the cost was loading and compiling. "
            "Each engine loads once, so longer runs have a smaller share."
        )
    if account.price.doubt:
        notes.append(f"The price might be wrong: {account.price.doubt}.")
    if account.price.basis == "assumed":
        notes.append(
            f"Assuming a {account.price.instance_type}: the machine could not be identified or has no known price. "
            "Set --instance-type or --usd-per-hour."
        )
    return [note for note in notes if note]


# All of these are equal in runs that differ only in their drafter.
_CONDITIONS = ("model", "precision", "concurrency", "num_engines", "sampling", "hardware", "num_input_rows")


def compare(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare several reports. The baseline is the first run without a drafter, else the first run.

    `baseline` in the result is an index; each of the `figures` has `values`, and `ratios` to the baseline or None.
    """
    checked = [check_report(report) for report in reports]
    if not checked:
        raise PeagleError("there is no report to compare")
    baseline_index = next((i for i, report in enumerate(checked) if report["run"]["drafter"] is None), 0)
    figures = []
    for figure in FIGURES.values():
        values = [figure.value(report) for report in checked]
        ratios = [_ratio(value, values[baseline_index]) if figure.has_ratio else None for value in values]
        figures.append({"name": figure.name, "label": figure.label, "values": values, "ratios": ratios})
    return {
        "schema": SCHEMA,
        "labels": _labels(checked),
        "baseline": baseline_index,
        "figures": figures,
        "notes": _comparison_notes(checked, baseline_index),
    }


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _labels(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return unique labels of the runs, without the model if all runs have the same one."""
    labels = [str(report["run"]["label"]) for report in reports]
    models = {report["run"]["model"] for report in reports}
    if len(reports) > 1 and len(models) == 1:
        model = models.pop()
        labels = [label.removeprefix(f"{model} with ").removeprefix(f"{model}, ") for label in labels]
    return [
        f"{label} ({labels[: i + 1].count(label)})" if labels.count(label) > 1 else label
        for i, label in enumerate(labels)
    ]


def _comparison_notes(reports: Sequence[Mapping[str, Any]], baseline_index: int) -> list[str]:
    baseline_report = reports[baseline_index]
    notes = []
    for label, report in zip(_labels(reports), reports, strict=True):
        if report is baseline_report:
            continue
        differing = [name for name in _CONDITIONS if report["run"][name] != baseline_report["run"][name]]
        ratio = _ratio(report["account"]["tokens_per_busy_usd"], baseline_report["account"]["tokens_per_busy_usd"])
        adds_drafter = report["run"]["drafter"] is not None and baseline_report["run"]["drafter"] is None
        if adds_drafter and ratio is not None and ratio < 1 and set(differing) <= {"num_input_rows"}:
            notes.append(
                f"{label}: the drafter costs more than it saves, with {ratio:.2f} times the tokens per busy dollar."
            )
        if differing:
            conditions = ", ".join(name.removeprefix("num_").replace("_", " ") for name in differing)
            if "num_input_rows" in differing:
                conditions += "; loading is a larger share of the shorter run, so compare busy time"
            notes.append(f"{label} also differs from the baseline in {conditions}.")
    return notes
