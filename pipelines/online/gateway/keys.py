"""API keys and budgets, stored in files that are reloaded when they change.

A key is 32 random bytes, so a single SHA-256 is a safe hash. A slow password hash would only slow down requests.
"""

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Self, TypeVar

from pydantic import ConfigDict, Field

from peagle.economics.shared_budgets import (
    BUDGETS_NAME,
    ENDPOINT_ACCOUNT,
    Every,
    SharedBudget,
    read_budgets,
    tag_accounts,
)
from peagle.economics.tags import TagOptions
from peagle.errors import ConfigError
from peagle.files import locked_for_update, make_folder, write_atomic
from peagle.private import SECRET_MODE
from peagle.records import read_list, validate_record

T = TypeVar("T")
_RELOAD_S = 1.0
_log = logging.getLogger("ray.serve")


class WatchedFile(Generic[T]):
    """The records of a file, reloaded when it changes.

    While the file cannot be read, for example in the middle of an edit, the previous records stay valid. A deleted file
    has no records.
    """

    def __init__(self, path: Path, read: Callable[[Path], tuple[T, ...]]) -> None:
        self._path = path
        self._read = read
        self._records: tuple[T, ...] = ()
        self._version: tuple[int, int] | None = None
        self._logged_version: tuple[int, int] | None = None  # the latest invalid version, which was logged
        self._next_check = 0.0

    def records(self) -> tuple[T, ...]:
        """Return the records, at most a second old. Raises ConfigError if the file could never be read."""
        if time.monotonic() >= self._next_check:
            self._reload()
            self._next_check = time.monotonic() + _RELOAD_S
        return self._records

    def _reload(self) -> None:
        version = _version(self._path)
        if version == self._version:
            return
        try:
            self._records, self._version = self._read(self._path), version
        except ConfigError as error:
            if self._version is None:
                raise
            if version != self._logged_version:  # retried each time, but logged once
                self._logged_version = version
                _log.error("%s; the previous records stay valid", error.message)


def _version(path: Path) -> tuple[int, int]:
    """Return a value that changes with the file. Missing and unreadable files have versions, too."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    except OSError as error:
        return -1, error.errno or 0
    return status.st_mtime_ns, status.st_ino


ENVIRONMENT = "PEAGLE_API_KEYS"
_PREFIX = "pk-"
_MIN_KEY_CHARS = 16  # for user-defined keys
_NO_HASH = "0" * 64  # matches no key
LOCAL_NAME = "local"  # the key name of requests to an endpoint without keys


class KeyRecord(TagOptions):
    """A stored API key with its limits; null is unlimited, except where noted.

    `tags` are added to all requests and batches of the key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # owner of the key, shown in usage and cost
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]*$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")  # SHA-256 of the key, hexadecimal
    created_at: float = 0.0
    models: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    requests_per_min: int | None = Field(default=None, ge=1)
    input_tokens_per_min: int | None = Field(default=None, ge=1)
    output_tokens_per_min: int | None = Field(default=None, ge=1)
    max_parallel_requests: int | None = Field(default=None, ge=1)  # concurrent requests to engines
    budget_usd: float | None = Field(default=None, gt=0)  # budget for all requests and batches of the key together
    budget_every: Every | None = None  # the budget's period; null is all time
    # Both limits of stored files include the outputs of batches; null is the endpoint's default.
    max_stored_mib: int | None = Field(default=None, ge=1)
    max_stored_files: int | None = Field(default=None, ge=1)
    max_unfinished_batches: int | None = Field(default=None, ge=1)  # null is the endpoint's default
    expires_at: float | None = Field(default=None, gt=0)  # Unix time
    is_operator: bool = False  # may read the usage of all keys
    # names of tags that the key's requests may set themselves
    request_tags: tuple[Annotated[str, Field(min_length=1)], ...] = ()

    @property
    def account(self) -> str:
        """The account of the key's spend. It is not the name, since a revoked key might have had the same name."""
        return f"{self.name} {self.created_at}" if self.created_at else self.name

    def describe_budget(self) -> str:
        period = f" a {self.budget_every}" if self.budget_every else ""
        return f"the budget of ${self.budget_usd or 0:g}{period} for this key"

    def is_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= time.time()

    def without_hash(self) -> Self:
        """Return a copy without the hash, safe to store or send elsewhere."""
        return self.model_copy(update={"sha256": _NO_HASH})


def new_key(name: str, **limits: Any) -> tuple[str, KeyRecord]:
    """Create a key. Returns the secret, which is not stored anywhere, and the record."""
    secret = _PREFIX + secrets.token_urlsafe(32)
    values = {"name": name, "sha256": digest(secret), "created_at": time.time(), **limits}
    return secret, _record(values, where="the key")


def rotate(record: KeyRecord) -> tuple[str, KeyRecord]:
    """Return a new secret and its record. The old secret becomes invalid; name, limits, files and spend stay."""
    secret = _PREFIX + secrets.token_urlsafe(32)
    return secret, record.model_copy(update={"sha256": digest(secret)})


def with_limits(record: KeyRecord, **limits: Any) -> KeyRecord:
    """Return the key with other limits; the secret and the spend stay."""
    return _record({**record.model_dump(), **limits}, where="the key")


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def find(key: str, records: Sequence[KeyRecord]) -> KeyRecord | None:
    """Return the record of a key. Compares with every record in constant time."""
    key_digest, match = digest(key), None
    for record in records:
        if hmac.compare_digest(key_digest, record.sha256):
            match = record
    return match


def read_keys(path: Path) -> tuple[KeyRecord, ...]:
    """Return the keys of a file; none if the file does not exist. Raises ConfigError if it is invalid."""
    values = read_list(path, "keys", hint="`peagle serve keys add` writes such files")
    return tuple(_record(value, where=f"keys {path}") for value in values)


def write_keys(path: Path, records: Sequence[KeyRecord]) -> None:
    """Replace the file, readable only by its owner. Raises ConfigError if a name is used twice."""
    names = [record.name for record in records]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"keys {path}: a key named {min(repeated)} already exists", hint="choose another name")
    data = json.dumps([record.model_dump(mode="json") for record in records], indent=2) + "\n"
    try:
        write_atomic(path, data.encode(), mode=SECRET_MODE)
    except OSError as error:
        raise ConfigError(f"keys {path}: cannot be written: {error}") from error


@contextlib.contextmanager
def edit_keys(path: Path, *, create: bool = False) -> Iterator[list[KeyRecord]]:
    """Lock a key file, yield its keys, and write them back at the end. `create` creates the folder."""
    with contextlib.ExitStack() as stack:
        try:
            if create:
                make_folder(path.parent)
            stack.enter_context(locked_for_update(path))
        except OSError as error:
            raise ConfigError(f"keys {path}: cannot be written: {error}") from error
        records = list(read_keys(path))
        yield records
        write_keys(path, records)


def keys_from_environment(environment: Mapping[str, str] = os.environ) -> tuple[KeyRecord, ...]:
    """Return the keys in `PEAGLE_API_KEYS`, comma-separated NAME=KEY pairs; they have no limits."""
    records = []
    for entry in filter(None, (part.strip() for part in environment.get(ENVIRONMENT, "").split(","))):
        name, separator, key = (part.strip() for part in entry.partition("="))
        if not separator or len(key) < _MIN_KEY_CHARS:
            raise ConfigError(f"{ENVIRONMENT}: expected NAME=KEY, with a KEY of at least {_MIN_KEY_CHARS} characters")
        records.append(_record({"name": name, "sha256": digest(key)}, where=ENVIRONMENT))
    return tuple(records)


class KeyRing:
    """The valid keys: fixed keys, and the keys in a file that is reloaded when it changes.

    While the file cannot be read, the keys that were read last remain valid, even if they were revoked in the meantime.
    Every method raises ConfigError if the file could never be read.
    """

    def __init__(self, path: Path | None, fixed: Sequence[KeyRecord] = ()) -> None:
        self._file = WatchedFile(path, read_keys) if path is not None else None
        self._fixed = tuple(fixed)

    def find(self, key: str) -> KeyRecord | None:
        return find(key, self.all())

    def all(self) -> tuple[KeyRecord, ...]:
        return self._fixed + (self._file.records() if self._file else ())

    def current(self, key: KeyRecord) -> KeyRecord | None:
        """Return the key of this name with its current limits and without its hash, or None if revoked or expired."""
        if key == LOCAL:
            return LOCAL  # for a batch that was created before the endpoint had keys; LOCAL cannot be revoked
        for record in self.all():
            if record.name == key.name and not record.is_expired():
                return record.without_hash()
        return None


def _record(values: Any, *, where: str) -> KeyRecord:
    record = validate_record(KeyRecord, values, where=where)
    if record.name == LOCAL_NAME:  # the key would own the files and usage of requests without a key
        raise ConfigError(
            f"{where}: name: {LOCAL_NAME!r} is reserved for requests without a key", hint="choose another name"
        )
    return record


LOCAL = KeyRecord(name=LOCAL_NAME, sha256=_NO_HASH, is_operator=True)
"""The key record of all clients of an endpoint without keys."""


Payer = KeyRecord | SharedBudget
"""Anything with an account and a budget."""


class SharedBudgets:
    """The budgets of a ledger's tags and endpoint, reloaded when they change."""

    def __init__(self, ledger: Path) -> None:
        self._file = WatchedFile(ledger / BUDGETS_NAME, read_budgets)

    def all(self) -> tuple[SharedBudget, ...]:
        return self._file.records()

    def of_tags(self, tags: str) -> list[SharedBudget]:
        """Return the budgets that apply to these tags, in the format of ledger records."""
        accounts = tag_accounts(tags)
        return [budget for budget in self._file.records() if budget.account in accounts]

    def of_endpoint(self) -> list[SharedBudget]:
        return [budget for budget in self._file.records() if budget.account == ENDPOINT_ACCOUNT]
