"""The result of one run as data, and the sentences that its reader should not miss.

`report_dict` is the only source: the terminal's summary, report.json and report.html are made from it and
nothing else, so a report can be made again from its file. It knows accounts; not where they come from.
"""

from collections.abc import Mapping
from typing import Any

from peagle import speculation
from peagle.economics.cost import Account
from peagle.economics.report.figures import SHARES, in_words_share
from peagle.economics.report.run_info import RunInfo
from peagle.errors import PeagleError

SCHEMA = 1
# Above this a share of the cost deserves a sentence: somebody can do something about it.
LARGE_WASTE = 0.10
LARGE_START = 0.50


def report_dict(account: Account, run: Mapping[str, object]) -> dict[str, Any]:
    """Everything a report shows, ready for JSON.

    Args:
        account: what the run delivered and cost.
        run: the fields of `RunInfo`; only `model` is required, and unknown keys are refused.

    Returns:
        `schema`, `run`, `account` (with derived figures), `shares` (of the cost, summing to 1) and `notes`
        (sentences that the reader should not miss).

    Raises:
        PeagleError: `run` has an unknown key, no model, or a value of the wrong kind.
    """
    info = RunInfo.from_dict(run)
    total_usd = account.total_usd
    shares = {name: getattr(account.usd, name) / total_usd if total_usd else 0.0 for name in SHARES}
    return {
        "schema": SCHEMA,
        "run": info.to_dict(),
        "account": account.to_dict(),
        "shares": shares,
        "notes": _notes(account, info, shares),
    }


def check_report(report: object) -> dict[str, Any]:
    """The same report, if it is one that this version can show.

    Raises:
        PeagleError: it is not.
    """
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise PeagleError(
            f"not a report of schema {SCHEMA}", hint="make it again from its run directory: peagle report RUN"
        )
    if missing := {"run", "account", "shares", "notes"} - set(report):
        raise PeagleError(f"the report lacks {', '.join(sorted(missing))}")
    return report


def _notes(account: Account, info: RunInfo, shares: Mapping[str, float]) -> list[str]:
    candidates = (
        _completeness_note(account, info),
        f"{account.num_failed_rows:,} rows could not be done; failed/ says why." if account.num_failed_rows else None,
        speculation.note(account.speculation, break_even=info.break_even_acceptance_length),
        *_share_notes(shares, account),
        f"The price may be wrong: {account.price.doubt}." if account.price.doubt else None,
    )
    return [note for note in candidates if note]


def _completeness_note(account: Account, info: RunInfo) -> str | None:
    if info.complete is not False:
        return None
    of_all = f" of {info.num_input_rows:,}" if info.num_input_rows is not None else ""
    done = account.num_rows + account.num_failed_rows
    return f"The run is not finished: {done:,}{of_all} rows so far. The same command continues it."


def _share_notes(shares: Mapping[str, float], account: Account) -> list[str]:
    notes = []
    if shares["lost"] > LARGE_WASTE:
        notes.append(
            f"{in_words_share(shares['lost'])} of the cost was lost work: {account.num_lost_tokens:,} tokens "
            "were generated and never committed. Smaller work units lose less when an engine is killed."
        )
    if shares["idle"] > LARGE_WASTE:
        notes.append(
            f"{in_words_share(shares['idle'])} of the cost was idle time: fewer engines, or more rows, would use it."
        )
    start = shares["load"] + shares["compile"]
    if start > LARGE_START:
        notes.append(
            f"{in_words_share(start)} of the cost went into loading and compiling. An engine pays that "
            "once, so a longer run spreads it over more tokens."
        )
    return notes
