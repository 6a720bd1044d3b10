"""Audit a run: its files, and a sample of its rows against the target alone.

It puts the two together, and tells people and machines; what is checked is in `audit_files.py` and `audit_rows.py`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.bench.engine import Start
from peagle.errors import ConfigError, PeagleError
from peagle.runs.audit_files import FilesAudit, audit_files
from peagle.runs.audit_rows import AuditedEngine, RowAudit, audit_rows, choose, require_target
from peagle.runs.audit_unit import Finding
from peagle.runs.directory import RunDirectory
from peagle.tables import aligned

_SHOWN = 50


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The findings of an audit.

    `target` and `rows` are of the rows that were generated again; None and empty without.
    """

    path: str
    files: FilesAudit
    target: AuditedEngine | None = None
    seed: int = 0
    rows: tuple[RowAudit, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether every file is as planned, and no row differs by more than a tie."""
        return not self.files.findings and not self._outcomes()["different"]

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        files = self.files
        counted = {name: value for name, value in vars(files).items() if name.startswith("num_")}
        again = None
        if self.target is not None:
            again = {
                "precision": self.target.precision,
                "max_tie": self.target.max_tie,
                "seed": self.seed,
                **{f"num_{outcome}": count for outcome, count in self._outcomes().items()},
                "rows": [row.to_dict() for row in self.rows],
            }
        return {
            "path": self.path,
            "ok": self.is_clean,
            "complete": files.is_finished,
            **counted,
            "findings": [finding.to_dict() for finding in files.findings],
            "notes": files.notes,
            "regenerated": again,
        }

    def describe(self) -> str:
        """All of it, for people."""
        files = self.files
        lines = {
            "units": f"{files.num_units:,} of {files.num_units_planned:,} committed",
            "rows": f"{files.num_rows:,} committed, {files.num_failed_rows:,} dead letters, "
            f"{files.num_rows_left:,} left, of {files.num_rows_planned:,} planned",
            "output tokens": f"{files.num_output_tokens:,} committed, {files.num_lost_tokens:,} lost",
        }
        if self.target is not None:
            told = ", ".join(f"{count:,} {outcome}" for outcome, count in self._outcomes().items())
            lines["without drafter"] = told
            lines["a tie"] = f"the two tokens' log-probabilities are at most {self.target.max_tie:g} apart"
        said = [self.path, *(f"  {name:<16} {value}" for name, value in lines.items())]
        said += [f"  note: {note}" for note in files.notes]
        said += _table_of_rows(self.rows) + _table_of_findings(files.findings)
        return "\n".join([*said, "all right" if self.is_clean else "NOT ALL RIGHT"])

    def _outcomes(self) -> dict[str, int]:
        counts = Counter(row.verdict.outcome if row.verdict else "skipped" for row in self.rows)
        return {outcome: counts[outcome] for outcome in ("same", "tie", "different", "skipped")}


def audit(
    run: RunDirectory,
    *,
    num_rows: int,
    seed: int,
    max_tie: float | None,
    announce: Callable[[str], None],
    start: Start,
) -> Audit:
    """Audit a run; it writes nothing into the run directory.

    Args:
        num_rows: rows to generate again; 0 for none.
        max_tie: margin that counts as a tie; None for that of the precision.
        start: the target on this machine.

    Raises:
        ConfigError: there is no run, or its rows cannot be generated here.
        EngineError: the engine did not start or died.
    """
    if not run.exists:
        raise ConfigError(f"{run} is no run directory: it has no run.json")
    try:
        manifest = run.manifest()
    except PeagleError as error:
        finding = Finding(kind="damaged", where="run.json", message=error.message)
        return Audit(path=str(run), files=FilesAudit(findings=[finding]))
    target = require_target(manifest, max_tie) if num_rows else None
    files = audit_files(run, manifest)
    if target is None:
        return Audit(path=str(run), files=files)
    positions = choose(files.rows_of, num_rows, seed)
    rows = audit_rows(run, manifest, target, positions, announce, start)
    return Audit(path=str(run), files=files, target=target, seed=seed, rows=tuple(rows))


def _table_of_rows(rows: Sequence[RowAudit]) -> list[str]:
    """Every row that is not simply the same."""
    table = [("row", "outcome", "token", "margin", "run", "target alone")]
    skipped: Counter[str] = Counter()
    for row in rows:
        verdict = row.verdict
        if verdict is None:
            skipped[row.skipped] += 1
        elif verdict.outcome != "same":
            margin = "-" if verdict.margin is None else f"{verdict.margin:.4f}"
            taken = "(not likely there)" if verdict.committed is None else repr(verdict.committed)
            table.append((row.id, verdict.outcome, str(verdict.position), margin, taken, repr(verdict.target)))
    lines = [f"  skipped {count:,}: {reason}" for reason, count in skipped.items()]
    return lines + [f"  {line}" for line in aligned(table)] * (len(table) > 1)


def _table_of_findings(findings: Sequence[Finding]) -> list[str]:
    lines = [f"  {one.kind:<8} {one.where}: {one.message}" for one in findings[:_SHOWN]]
    more = len(findings) - _SHOWN
    return lines + [f"  ... and {more:,} more; --json FILE has them all"] * (more > 0)
