"""API keys: made, kept as hashes, compared in constant time, revoked.

A key is 32 random bytes, so one SHA-256 is enough to store it safely: there is nothing to guess, and a slow hash for
passwords would only slow every request. It knows a file and an environment variable; what a key may do is `limits.py`.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field

from peagle.economics.shared_budgets import Every
from peagle.economics.tags import TagOptions
from peagle.errors import ConfigError
from peagle.files import changing, make_folder, write_atomic
from peagle.private import SECRET_MODE
from peagle.records import read_list, record_of
from pipelines.online.gateway.watched import WatchedFile

ENVIRONMENT = "PEAGLE_API_KEYS"
_PREFIX = "pk-"
_LEAST_LENGTH = 16  # of a key that a user made up
_NO_HASH = "0" * 64  # no key has it
LOCAL_NAME = "local"  # in usage, where there are no keys


class KeyRecord(TagOptions):
    """A key as it is stored, and what it may do; null is no limit.

    Attributes:
        name: of whom it is; usage and cost carry it.
        sha256: of the key, in hexadecimal.
        models: names of models that it may use.
        max_parallel_requests: requests to engines that it may have under way at once.
        budget_usd: what all its requests and batches together may cost.
        budget_every: the period for which that is; null is all time.
        max_stored_mib, max_stored_files: what it may keep, outputs of its batches included; null is as for all keys.
        max_unfinished_batches: likewise.
        expires_at: Unix time from which on it does not hold.
        is_operator: it sees the usage of all keys, not only its own.
        tags: of all its requests and batches.
        request_tags: names of tags that its requests may set themselves.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]*$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    created_at: float = 0.0
    models: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    requests_per_min: int | None = Field(default=None, ge=1)
    input_tokens_per_min: int | None = Field(default=None, ge=1)
    output_tokens_per_min: int | None = Field(default=None, ge=1)
    max_parallel_requests: int | None = Field(default=None, ge=1)
    budget_usd: float | None = Field(default=None, gt=0)
    budget_every: Every | None = None
    max_stored_mib: int | None = Field(default=None, ge=1)
    max_stored_files: int | None = Field(default=None, ge=1)
    max_unfinished_batches: int | None = Field(default=None, ge=1)
    expires_at: float | None = Field(default=None, gt=0)
    is_operator: bool = False
    request_tags: tuple[Annotated[str, Field(min_length=1)], ...] = ()

    @property
    def account(self) -> str:
        """The account of a key's spending.

        Not its name alone, which a revoked key may have had.
        """
        return f"{self.name} {self.created_at}" if self.created_at else self.name

    def describe_budget(self) -> str:
        """Its budget in words, for whoever it stops."""
        period = f" a {self.budget_every}" if self.budget_every else ""
        return f"the budget of ${self.budget_usd or 0:g}{period} of this key"

    def is_expired(self) -> bool:
        """Whether its time is over, by this machine's clock."""
        return self.expires_at is not None and self.expires_at <= time.time()

    def without_hash(self) -> Self:
        """As it may be stored and sent elsewhere."""
        return self.model_copy(update={"sha256": _NO_HASH})


def new_key(name: str, **limits: Any) -> tuple[str, KeyRecord]:
    """A key, and what to store of it. The key itself is stored nowhere.

    Raises:
        ConfigError: not a name, or not limits.
    """
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, _record({"name": name, "sha256": digest(key), "created_at": time.time(), **limits}, where="the key")


def rotated(record: KeyRecord) -> tuple[str, KeyRecord]:
    """A new key in place of one, which no longer holds.

    Its name, limits, files and spending stay.
    """
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, record.model_copy(update={"sha256": digest(key)})


def changed(record: KeyRecord, **limits: Any) -> KeyRecord:
    """A key with other limits; its secret and its spending stay.

    Raises:
        ConfigError: not limits.
    """
    return _record({**record.model_dump(), **limits}, where="the key")


def digest(key: str) -> str:
    """The stored form of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def find(key: str, records: Sequence[KeyRecord]) -> KeyRecord | None:
    """The record of `key`.

    Every record is compared, whole: the time tells nothing of which one came close.
    """
    presented, found = digest(key), None
    for record in records:
        if hmac.compare_digest(presented, record.sha256):
            found = record
    return found


def read_keys(path: Path) -> tuple[KeyRecord, ...]:
    """The keys of a file; none where it does not exist.

    Raises:
        ConfigError: it is no file of keys.
    """
    values = read_list(path, "keys", hint="`peagle serve keys add` writes such files")
    return tuple(_record(value, where=f"keys {path}") for value in values)


def write_keys(path: Path, records: Sequence[KeyRecord]) -> None:
    """Replace the file; only its owner can read it.

    Raises:
        ConfigError: a name is there twice, or the file cannot be written.
    """
    names = [record.name for record in records]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"keys {path}: there is a key called {min(repeated)} already", hint="choose another name")
    data = json.dumps([record.model_dump(mode="json") for record in records], indent=2) + "\n"
    try:
        write_atomic(path, data.encode(), mode=SECRET_MODE)
    except OSError as error:
        raise ConfigError(f"keys {path}: cannot be written: {error}") from error


@contextlib.contextmanager
def changing_keys(path: Path, *, create: bool = False) -> Iterator[list[KeyRecord]]:
    """The keys of a file; as they are at the end of the `with`, they are written.

    Whoever else changes it waits.

    Args:
        create: make its folder.

    Raises:
        ConfigError: as `read_keys` and `write_keys`.
    """
    with contextlib.ExitStack() as stack:
        try:
            if create:
                make_folder(path.parent)
            stack.enter_context(changing(path))
        except OSError as error:
            raise ConfigError(f"keys {path}: cannot be written: {error}") from error
        records = list(read_keys(path))
        yield records
        write_keys(path, records)


def keys_from_environment(environment: Mapping[str, str] = os.environ) -> tuple[KeyRecord, ...]:
    """Keys in `PEAGLE_API_KEYS`, NAME=KEY separated by commas; without limits.

    Raises:
        ConfigError: an entry is no such pair, or its key is short enough to be guessed.
    """
    records = []
    for entry in filter(None, (part.strip() for part in environment.get(ENVIRONMENT, "").split(","))):
        name, separator, key = (part.strip() for part in entry.partition("="))
        if not separator or len(key) < _LEAST_LENGTH:
            raise ConfigError(f"{ENVIRONMENT}: each entry must be NAME=KEY with {_LEAST_LENGTH} characters or more")
        records.append(_record({"name": name, "sha256": digest(key)}, where=ENVIRONMENT))
    return tuple(records)


class KeyRing:
    """The valid keys: fixed ones, and those of a file that is read when changed.

    While the file cannot be read the keys that were read last go on holding, revoked ones too.
    """

    def __init__(self, path: Path | None, fixed: Sequence[KeyRecord] = ()) -> None:
        self._file = WatchedFile(path, read_keys) if path is not None else None
        self._fixed = tuple(fixed)

    def find(self, key: str) -> KeyRecord | None:
        """The record of a key that holds now.

        Raises:
            ConfigError: the file cannot be read, and never could be.
        """
        return find(key, self._records())

    def all(self) -> tuple[KeyRecord, ...]:
        """All keys of this moment.

        Raises:
            ConfigError: as `find`.
        """
        return self._records()

    def present(self, key: KeyRecord) -> KeyRecord | None:
        """The key of this name with its present rights, without its hash.

        None if it was revoked, or has expired.

        Raises:
            ConfigError: as `find`.
        """
        if key == LOCAL:
            return LOCAL  # this machine's, from when there were no keys: nobody can revoke it
        there = (record for record in self._records() if record.name == key.name and not record.is_expired())
        return next((record.without_hash() for record in there), None)

    def _records(self) -> tuple[KeyRecord, ...]:
        return self._fixed + (self._file.now() if self._file else ())


def _record(values: Any, *, where: str) -> KeyRecord:
    record = record_of(KeyRecord, values, where=where)
    if record.name == LOCAL_NAME:  # it would own the files and the usage of an endpoint that had no keys
        raise ConfigError(
            f"{where}: name: {LOCAL_NAME!r} stands for requests without a key", hint="choose another name"
        )
    return record


LOCAL = KeyRecord(name=LOCAL_NAME, sha256=_NO_HASH, is_operator=True)
"""Whoever asks an endpoint without keys, which only this machine can reach."""
