"""Whether the input of a run is still what it was planned from.

It reads the whole corpus again, as planning did, and keeps nothing of it.
"""

from pathlib import Path
from typing import Any

from peagle.corpus.files import SourceFile, discover
from peagle.corpus.scan import find, scan
from peagle.corpus.workload import Workload
from peagle.errors import InputError
from pipelines.batch.audit_unit import Finding
from pipelines.batch.plan import Plan


def input_findings(plan: Plan, manifest: dict[str, Any]) -> tuple[list[Finding], list[str]]:
    """What is wrong with the input, and notes; files that are no longer there are a note."""
    formats = {unit.span.path: unit.span.format for unit in plan.units}
    files: list[SourceFile] = []
    for path, kind in formats.items():
        try:
            files += discover(path, kind)
        except InputError as error:
            if "://" in path or not Path(path).exists():
                return [], [f"the input was not compared: {error.message}"]
            return [Finding(kind="input", where=path, message=error.message)], []
    limit = manifest["fingerprint"]["corpus"]["limit"]
    wrong = _differs(files, plan, limit)
    # A file without a row is part of the fingerprint and of no unit: only the corpus as it was named has it.
    if wrong is None or _named_corpus_is_same(plan, manifest["config"], limit):
        return [], []
    return [Finding(kind="input", where=", ".join(formats), message=wrong)], []


def _differs(files: list[SourceFile], plan: Plan, limit: int | None) -> str | None:
    try:
        _, _, fingerprint = scan(files, plan.cut, limit, Workload(), like=plan.corpus_fingerprint)
    except InputError as error:
        return error.message
    return None if fingerprint == plan.corpus_fingerprint else "the input is not what it was when the run was planned"


def _named_corpus_is_same(plan: Plan, config: dict[str, Any], limit: int | None) -> bool:
    try:
        files = find(config["input"], config["input_format"], outside=config["output"])
        return _differs(files, plan, limit) is None
    except InputError:
        return False
