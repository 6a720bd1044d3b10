"""`peagle serve keys`: add, change, list and revoke the endpoint's API keys."""

import argparse
import contextlib
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.serve_budgets import ledger_of
from peagle.private import user_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipelines.online.gateway.keys import KeyRecord

# Field of a key's record for each flag.
_FIELD_BY_FLAG = {
    "requests_per_min": "requests_per_min",
    "input_tokens_per_min": "input_tokens_per_min",
    "output_tokens_per_min": "output_tokens_per_min",
    "max_parallel_requests": "max_parallel_requests",
    "budget_usd": "budget_usd",
    "every": "budget_every",
    "max_stored_mib": "max_stored_mib",
    "max_stored_files": "max_stored_files",
    "max_unfinished_batches": "max_unfinished_batches",
    "expires_at": "expires_at",
    "model": "models",
    "tag": "tags",
    "request_tag": "request_tags",
    "operator": "is_operator",
}
_MAX_EXPIRES_AT = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
HELP = """\
Manage the endpoint's API keys in a file that contains only their hashes. A running endpoint applies a change within a
second.

  peagle serve keys add alice --keys keys.json --requests-per-min 60 --output-tokens-per-min 20000 --budget-usd 5
  peagle serve keys add carol --keys keys.json --max-parallel-requests 4 --expires-in-days 30
  peagle serve keys set carol --keys keys.json --input-tokens-per-min 100000
  peagle serve keys add dave --keys keys.json --tag team=search --request-tag project
  peagle serve keys set alice --keys keys.json --budget-usd 20 --without requests-per-min
  peagle serve keys rotate alice --keys keys.json
  peagle serve keys add eve --keys keys.json --budget-usd 500 --every month
  peagle serve keys list --keys keys.json --state runs/serve
  peagle serve keys revoke alice --keys keys.json

`add` and `rotate` print the key once; it cannot be shown again. `rotate` replaces the secret of a key, and the old
secret stops working; `set` changes the given limits. Both keep the key's files, batches and spending. A key that is
added under the name of a revoked key sees that key's files and batches; its spending starts at 0.
"""
COMMON = (
    "keys", "requests_per_min", "output_tokens_per_min", "max_parallel_requests", "budget_usd", "every",
    "expires_in_days", "model", "without", "state",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=list(_ACTIONS))
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of the key; not used by list")
    parser.add_argument(
        "--keys", type=Path, default=Path("keys.json"), metavar="PATH", help="file of the keys (default: %(default)s)"
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="PATH",
        help="for list: --state of the endpoint, to show each key's spending and remaining budget",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--requests-per-min", type=int, metavar="N", help="requests a minute")
    limits.add_argument("--input-tokens-per-min", type=int, metavar="N", help="prompt tokens a minute")
    limits.add_argument("--output-tokens-per-min", type=int, metavar="N", help="output tokens a minute")
    limits.add_argument("--max-parallel-requests", type=int, metavar="N", help="maximum concurrent requests")
    limits.add_argument("--budget-usd", type=float, metavar="X", help="maximum cost of the key's requests and batches")
    limits.add_argument("--every", choices=["day", "week", "month"], help="budget period, in UTC (default: all time)")
    limits.add_argument("--max-stored-mib", type=int, metavar="N", help="MiB of stored files")
    limits.add_argument("--max-stored-files", type=int, metavar="N", help="stored files and batches")
    limits.add_argument("--max-unfinished-batches", type=int, metavar="N", help="unfinished batches")
    expiry = limits.add_mutually_exclusive_group()
    expiry.add_argument("--expires-in-days", type=float, metavar="X", help="days until the key expires")
    expiry.add_argument("--expires-at", metavar="TIME", help="expiry, as 2027-01-31 (UTC) or 2027-01-31T12:00+01:00")
    limits.add_argument(
        "--model", action="append", metavar="NAME", help="model that the key may use; may be repeated (default: all)"
    )
    limits.add_argument(
        "--tag", action="append", metavar="KEY=VALUE", help="tag for the key's spending; may be repeated"
    )
    limits.add_argument(
        "--request-tag",
        action="append",
        metavar="KEY",
        help="a tag that the key's requests may set (X-Peagle-Tags: KEY=VALUE); may be repeated",
    )
    limits.add_argument(
        "--operator", action="store_true", default=None, help="may see the usage of all keys at /v1/cost"
    )
    limits.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="LIMIT",
        choices=[name.replace("_", "-") for name in _FIELD_BY_FLAG],
        help="for set: name of the flag whose limit is removed; may be repeated",
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.errors import ConfigError

    if args.name is None and args.action != "list":
        raise ConfigError(f"{args.action} requires the name of a key")
    if args.without and args.action != "set":
        raise ConfigError(f"--without cannot be used with {args.action}", hint="`set` removes a limit of a key")
    return _ACTIONS[args.action](user_path(args.keys), args)


def _list(path: Path, args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from pipelines.online.gateway.keys import read_keys

    records = read_keys(path)
    budgets: list[dict[str, Any]] = [{} for _ in records]
    if args.state:
        from pipelines.online.gateway.budget_watch import budget_status
        from pipelines.online.totals import Totals

        totals = Totals(ledger_of(args.state))
        totals.catch_up()
        budgets = [budget_status(record, totals.budgets) for record in records]
    for record, budget in zip(records, budgets, strict=True):
        fields = (f"{name}={value}" for name, value in budget.items() if value is not None)
        print(*_describe(record), *fields, sep="  ")
    keys = [record.model_dump(mode="json", exclude={"sha256"}) for record in records]
    return 0, {"keys": [key | budget for key, budget in zip(keys, budgets, strict=True)]}


def _add(path: Path, args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from pipelines.online.gateway.keys import edit_keys, new_key

    key, record = new_key(args.name, **_limits_from(args))
    with edit_keys(path, create=True) as records:
        records.append(record)
    print(key)
    return 0, {"name": args.name, "key": key}


def _limits_from(args: argparse.Namespace) -> dict[str, Any]:
    """Return the limits in the arguments, by field of a key's record.

    Raises:
        ConfigError: the expiry time is invalid or in the past.
    """
    values = {field: getattr(args, flag) for flag, field in _FIELD_BY_FLAG.items() if flag != "expires_at"}
    values["expires_at"] = _expires_at(args)
    return {field: value for field, value in values.items() if value is not None}


def _set(path: Path, args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from pipelines.online.gateway.keys import KeyRecord, with_limits

    removed = [_FIELD_BY_FLAG[flag.replace("-", "_")] for flag in args.without]
    defaults = {field: KeyRecord.model_fields[field].get_default(call_default_factory=True) for field in removed}
    with _edit(path, args.name) as (records, index):
        records[index] = with_limits(records[index], **{**defaults, **_limits_from(args)})
        record = records[index]
    print(*_describe(record), sep="  ")
    return 0, record.model_dump(mode="json", exclude={"sha256"})


def _rotate(path: Path, args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from pipelines.online.gateway.keys import rotate

    with _edit(path, args.name) as (records, index):
        key, records[index] = rotate(records[index])
    print(key)
    return 0, {"name": args.name, "key": key}


@contextlib.contextmanager
def _edit(path: Path, name: str) -> "Iterator[tuple[list[KeyRecord], int]]":
    """Yield the keys of a file and the index of one of them; write the keys when the block ends.

    Raises:
        ConfigError: there is no key of this name.
    """
    from peagle.errors import ConfigError, did_you_mean
    from pipelines.online.gateway.keys import edit_keys

    with edit_keys(path) as records:
        names = [record.name for record in records]
        if name not in names:
            raise ConfigError(f"keys {path}: there is no key {name!r}", hint=did_you_mean(name, names))
        yield records, names.index(name)


def _describe(record: "KeyRecord") -> list[str]:
    """Return a key's name and limits for the list."""
    limits = record.model_dump(exclude={"name", "sha256", "created_at", "expires_at", "tags"}, exclude_none=True)
    parts = [record.name, *(f"{field}={value}" for field, value in limits.items() if value)]
    parts += [f"tag {key}={value}" for key, value in record.tags.items()]
    if record.expires_at is not None:
        parts.append(f"expires_at={datetime.fromtimestamp(record.expires_at, UTC):%Y-%m-%dT%H:%M:%SZ}")
    return [*parts, "expired"] if record.is_expired() else parts


def _expires_at(args: argparse.Namespace) -> float | None:
    """Return the Unix time at which a key expires, or None.

    Raises:
        ConfigError: the time is invalid or in the past.
    """
    from peagle.errors import ConfigError

    now = time.time()
    if args.expires_in_days is not None:
        expires_at, option = now + 86_400 * float(args.expires_in_days), f"--expires-in-days {args.expires_in_days:g}"
    elif args.expires_at is not None:
        option = f"--expires-at {args.expires_at}"
        try:
            moment = datetime.fromisoformat(args.expires_at)
        except ValueError:
            hint = "write the time as 2027-01-31 or 2027-01-31T12:00+01:00"
            raise ConfigError(f"{option}: not a valid time", hint=hint) from None
        expires_at = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    else:
        return None
    if not now < expires_at < _MAX_EXPIRES_AT:
        raise ConfigError(f"{option}: not a valid expiry time", hint="use a future time before the year 10000")
    return expires_at


def _revoke(path: Path, args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    with _edit(path, args.name) as (records, index):
        del records[index]
    print(f"revoked {args.name}")
    return 0, {"name": args.name}


_ACTIONS = {"add": _add, "set": _set, "rotate": _rotate, "list": _list, "revoke": _revoke}
