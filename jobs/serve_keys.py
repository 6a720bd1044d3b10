"""`peagle serve keys`: make, list and revoke the endpoint's API keys."""

import argparse
from pathlib import Path
from typing import Any

HELP = """\
API keys of the endpoint, in a file that holds only their hashes. A running endpoint sees a change within a second.

  peagle serve keys add alice --keys keys.json --requests-per-min 60 --output-tokens-per-min 20000 --budget-usd 5
  peagle serve keys list --keys keys.json
  peagle serve keys revoke alice --keys keys.json

`add` prints the key once; nobody can read it again.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `peagle serve keys`."""
    parser.add_argument("action", choices=["add", "list", "revoke"])
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the key: add and revoke need it")
    parser.add_argument(
        "--keys", type=Path, default=Path("keys.json"), metavar="PATH", help="the file (default: %(default)s)"
    )
    limits = parser.add_argument_group("limits of a new key")
    limits.add_argument("--requests-per-min", type=int, metavar="N", help="requests a minute")
    limits.add_argument("--output-tokens-per-min", type=int, metavar="N", help="output tokens a minute")
    limits.add_argument("--budget-usd", type=float, metavar="X", help="what its requests may cost in all")
    limits.add_argument("--max-stored-mib", type=int, metavar="N", help="MiB of files that it may keep")
    limits.add_argument("--max-stored-files", type=int, metavar="N", help="files that it may keep, and batches")
    limits.add_argument("--max-unfinished-batches", type=int, metavar="N", help="batches that have not ended")
    limits.add_argument(
        "--model", action="append", metavar="NAME", help="a model it may use; may be repeated (default: all)"
    )
    limits.add_argument("--operator", action="store_true", help="it sees the usage of all keys at /v1/cost")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """One change, or the list."""
    from peagle.errors import ConfigError
    from pipelines.online.keys import read_keys

    path: Path = args.keys.expanduser()
    if args.action == "list":
        records = read_keys(path)
        for record in records:
            limits = record.model_dump(exclude={"name", "sha256", "created_at"}, exclude_none=True)
            print(record.name, *(f"{field}={value}" for field, value in limits.items() if value), sep="  ")
        return 0, {"keys": [record.model_dump(mode="json", exclude={"sha256"}) for record in records]}
    if args.name is None:
        raise ConfigError(f"{args.action} needs the name of a key")
    return (_add if args.action == "add" else _revoke)(path, args)


def _add(path: Path, args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from pipelines.online.keys import changing_keys, new_key

    key, record = new_key(
        args.name,
        models=args.model,
        requests_per_min=args.requests_per_min,
        output_tokens_per_min=args.output_tokens_per_min,
        budget_usd=args.budget_usd,
        max_stored_mib=args.max_stored_mib,
        max_stored_files=args.max_stored_files,
        max_unfinished_batches=args.max_unfinished_batches,
        is_operator=args.operator,
    )
    with changing_keys(path, create=True) as records:
        records.append(record)
    print(key)
    return 0, {"name": args.name, "key": key}


def _revoke(path: Path, args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.errors import ConfigError, did_you_mean
    from pipelines.online.keys import changing_keys

    with changing_keys(path) as records:
        names = [record.name for record in records]
        if args.name not in names:
            hint = did_you_mean(args.name, names)
            raise ConfigError(f"keys {path}: there is no key called {args.name!r}", hint=hint)
        records[:] = [record for record in records if record.name != args.name]
    print(f"{args.name} is revoked")
    return 0, {"name": args.name}
