"""A client for S3 stores: reads, writes, conditional writes and listings, with retries.

Transient errors are retried with exponential backoff and jitter for a bounded time. A retry may repeat a write whose
response was lost. This is harmless if the write replaces an object. After a conditional write, the writer recognises
its own object by the object's metadata (`docs/decisions/0008-exactly-once-on-s3.md`).
"""

import functools
import itertools
import os
import random
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from botocore import exceptions
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError
from botocore.session import Session

from peagle.errors import StorageError

_Result = TypeVar("_Result")
_PATIENCE_S = 120.0  # how long transient errors are retried
SHORT_PATIENCE_S = 15.0  # for a store that never responded, or stopped responding
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 10.0
_WRITER_KEY = "peagle-writer"
_store_lock = threading.Lock()
_MAX_CACHED, _MAX_CACHED_BYTES = 4096, 1 << 15  # for small objects, such as heartbeats; bytes are per object


# --- errors

ERRORS = (exceptions.BotoCoreError, ClientError, ResponseParserError)
_TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
_TRANSIENT_CODES = {
    "ConditionalRequestConflict",  # two conditional writes of one key at the same moment
    "InternalError",
    "OperationAborted",
    "PreconditionFailed",  # an object existed, but was deleted before its writer could be determined
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
}
_TRANSIENT = (
    exceptions.HTTPClientError,
    exceptions.ConnectionError,
    exceptions.IncompleteReadError,
    exceptions.CredentialRetrievalError,
    ResponseParserError,
)
_CHECK_CREDENTIALS = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, here and on every node"
_CHECK_ENDPOINT = "check AWS_ENDPOINT_URL and AWS_REGION, here and on every node"
_GRANT_ACCESS = "allow s3:GetObject, PutObject, DeleteObject, AbortMultipartUpload and ListBucket there"
_HINTS = {
    "NoSuchBucket": f"create the bucket, or name another one; {_CHECK_ENDPOINT}",
    "InvalidBucketName": "use a valid bucket name",
    "AccessDenied": f"{_GRANT_ACCESS}; {_CHECK_CREDENTIALS}",
    "AllAccessDisabled": f"{_GRANT_ACCESS}; {_CHECK_CREDENTIALS}",
    "403": f"{_GRANT_ACCESS}; {_CHECK_CREDENTIALS}",
    "InvalidAccessKeyId": _CHECK_CREDENTIALS,
    "SignatureDoesNotMatch": _CHECK_CREDENTIALS,
    "InvalidToken": _CHECK_CREDENTIALS,
    "ExpiredToken": f"the credentials have expired; {_CHECK_CREDENTIALS}",
    "RequestTimeTooSkewed": "set this machine's clock, which is wrong",
    "PermanentRedirect": _CHECK_ENDPOINT,
    "AuthorizationHeaderMalformed": _CHECK_ENDPOINT,
    "QuotaExceeded": "free space in the bucket",
    "EntityTooLarge": "use smaller units in a new run: --rows-per-unit",
}


def code_of(error: Exception) -> str:
    """Return the error code of S3; empty if the store did not respond."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def status_of(error: Exception) -> int:
    """Return the HTTP status; 0 if the store did not respond."""
    if not isinstance(error, ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_missing(error: Exception) -> bool:
    """Whether the object does not exist. After a HEAD request, the bucket may be missing instead."""
    return code_of(error) in ("NoSuchKey", "404")


def is_transient(error: Exception) -> bool:
    if isinstance(error, exceptions.SSLError):
        return False
    return isinstance(error, _TRANSIENT) or status_of(error) in _TRANSIENT_STATUS or code_of(error) in _TRANSIENT_CODES


def permanent_error(what: str, error: Exception) -> StorageError:
    """Return the StorageError for a permanent error. Its message starts with `what`."""
    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return StorageError(f"{what}: there are no credentials ({error})", hint=_CHECK_CREDENTIALS)
    return StorageError(f"{what}: {error}", hint=_HINTS.get(code_of(error), f"{_CHECK_ENDPOINT}; {_CHECK_CREDENTIALS}"))


# --- the client


@dataclass(frozen=True, slots=True)
class Address:
    """A bucket with the key of an object, or the prefix of a folder."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


@dataclass(frozen=True, slots=True)
class ListEntry:
    """An entry of a listing; a subfolder has no `etag`."""

    name: str
    etag: str | None
    num_bytes: int = 0


def writer_metadata(writer: str) -> dict[str, str]:
    """Return the metadata that identifies the writer of an object."""
    return {_WRITER_KEY: writer}


class ObjectStore:
    """An object store, configured by the AWS variables. Thread-safe.

    Every method raises StorageError for a permanent error, and for a transient error that lasted `patience_s` seconds.
    """

    def __init__(self, *, patience_s: float = _PATIENCE_S) -> None:
        config = Config(
            retries={"total_max_attempts": 1},  # `request` retries instead, so that lost responses are recognised
            connect_timeout=10,
            read_timeout=30,
            max_pool_connections=64,
            signature_version="s3v4",  # the default for presigned URLs is v2, which newer regions refuse
        )
        try:
            self.api: Any = Session().create_client("s3", config=config, region_name=os.environ.get("AWS_REGION"))
        except (*ERRORS, ValueError) as error:
            raise permanent_error("the object store cannot be reached", error) from error
        self._patience_s = patience_s
        self._cache: OrderedDict[tuple[Address, str], bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._is_unresponsive = False  # whether the store has stopped responding; then retries end sooner

    # --- reading

    def read(self, address: Address, etag: str | None = None) -> bytes:
        """Return the content of an object; FileNotFoundError if it does not exist.

        With the `etag` of a listing, the content may come from the cache.
        """
        with self._lock:
            if etag is not None and (cached := self._cache.get((address, etag))) is not None:
                return cached
        data, read_etag = self.request(f"{address}: cannot be read", address, lambda: self._get(address))
        if etag is not None and len(data) <= _MAX_CACHED_BYTES:
            with self._lock:
                self._cache[address, read_etag] = data
                if len(self._cache) > _MAX_CACHED:
                    self._cache.popitem(last=False)
        return data

    def read_range(self, address: Address, first: int, last: int, etag: str) -> bytes:
        """Return bytes `first` to `last`, inclusive, of an object; StorageError if it no longer has this etag."""

        def get_range() -> tuple[bytes, str]:
            try:
                return self._get(address, Range=f"bytes={first}-{last}", IfMatch=etag)
            except ClientError as error:
                if status_of(error) != 412:
                    raise
                raise StorageError(f"{address}: was replaced while it was read", hint="repeat the command") from error

        data, _ = self.request(f"{address}: cannot be read", address, get_range)
        return data

    def read_tail(self, address: Address, num_bytes: int) -> tuple[bytes, int, str]:
        """Return the last bytes of an object, its size and its etag; FileNotFoundError if it does not exist."""

        def get_tail() -> tuple[bytes, int, str]:
            response = self.api.get_object(Bucket=address.bucket, Key=address.key, Range=f"bytes=-{num_bytes}")
            data = response["Body"].read()
            return data, int(response.get("ContentRange", f"/{len(data)}").rpartition("/")[2]), response["ETag"]

        try:
            return self.request(f"{address}: cannot be read", address, get_tail)
        except StorageError as error:
            if error.__cause__ is not None and code_of(error.__cause__) == "InvalidRange":  # type: ignore[arg-type]
                return b"", 0, ""  # a range of an empty object is an error
            raise

    def size(self, address: Address) -> int:
        """Return the size of an object in bytes; FileNotFoundError if it does not exist."""
        response = self.request(
            f"{address}: cannot be read", address, lambda: self.api.head_object(Bucket=address.bucket, Key=address.key)
        )
        return int(response["ContentLength"])

    def entries(self, folder: Address, prefix: str = "", *, page_size: int = 1000) -> Iterator[ListEntry]:
        """Yield the entries of a folder that start with `prefix`: in each page, sorted objects, then sorted folders."""
        key_prefix = f"{folder.key}/" if folder.key else ""
        continuation: dict[str, str] = {}
        while True:
            list_page = functools.partial(
                self.api.list_objects_v2,
                Bucket=folder.bucket,
                Prefix=key_prefix + prefix,
                Delimiter="/",
                MaxKeys=page_size,
                **continuation,
            )
            response = self.request(f"{folder}: cannot be listed", folder, list_page)
            for item in response.get("Contents", ()):
                if name := item["Key"].removeprefix(key_prefix):  # some tools create an object for the folder
                    yield ListEntry(name, item["ETag"], item["Size"])
            for item in response.get("CommonPrefixes", ()):
                yield ListEntry(item["Prefix"].removeprefix(key_prefix).rstrip("/"), None)
            if not response.get("NextContinuationToken"):
                return
            continuation = {"ContinuationToken": response["NextContinuationToken"]}

    def presigned_url(self, address: Address, valid_s: int, **parameters: str) -> str:
        """Return a URL for `get_object` that gives anyone temporary read access; the object need not exist."""
        parameters = {"Bucket": address.bucket, "Key": address.key, **parameters}
        try:
            return str(self.api.generate_presigned_url("get_object", Params=parameters, ExpiresIn=valid_s))
        except ERRORS as error:
            raise permanent_error(f"{address}: cannot create a URL", error) from error

    # --- writing

    def write(self, address: Address, data: bytes) -> None:
        """Create or replace an object atomically."""
        put = functools.partial(self.api.put_object, Bucket=address.bucket, Key=address.key, Body=data)
        self.request(f"{address}: cannot be written", address, put)

    def write_once(self, address: Address, data: bytes) -> bool:
        """Create an object unless it exists. Exactly one writer gets True, even if the store's response was lost."""
        writer = uuid.uuid4().hex

        def put() -> bool:
            try:
                self.api.put_object(
                    Bucket=address.bucket, Key=address.key, Body=data, IfNoneMatch="*", Metadata=writer_metadata(writer)
                )
            except ClientError as error:
                if status_of(error) != 412:
                    raise
                return self.writer_of(address, conflict=error) == writer
            return True

        return self.request(f"{address}: cannot be written", address, put)

    def writer_of(self, address: Address, conflict: ClientError) -> str | None:
        """Return the id of an object's writer, without retries; raise `conflict` if the object no longer exists."""
        try:
            writer: str | None = self.api.head_object(Bucket=address.bucket, Key=address.key)["Metadata"].get(
                _WRITER_KEY
            )
        except ClientError as error:
            if is_missing(error):
                raise conflict from error
            raise
        return writer

    def delete(self, address: Address) -> None:
        """Delete an object, if it exists."""
        delete = functools.partial(self.api.delete_object, Bucket=address.bucket, Key=address.key)
        self.request(f"{address}: cannot be deleted", address, delete)

    # --- requests

    def _get(self, address: Address, **parameters: str) -> tuple[bytes, str]:
        """Return the content and the etag of an object."""
        response = self.api.get_object(Bucket=address.bucket, Key=address.key, **parameters)
        return response["Body"].read(), response["ETag"]

    def request(self, what: str, address: Address, call: Callable[[], _Result]) -> _Result:
        """Return the result of `call`. Transient errors are retried for a bounded time. Messages start with `what`.

        Raises FileNotFoundError if the object does not exist.
        """
        started_at = time.monotonic()
        patience_s = min(self._patience_s, SHORT_PATIENCE_S) if self._is_unresponsive else self._patience_s
        for attempt in itertools.count(1):
            try:
                result = call()
                self._is_unresponsive = False
                return result
            except ERRORS as error:
                if is_missing(error):
                    raise FileNotFoundError(f"{address}: no such object") from error
                if not is_transient(error):
                    raise permanent_error(what, error) from error
                pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempt - 1, 16)) * random.uniform(0.5, 1)
                elapsed_s = time.monotonic() - started_at
                if elapsed_s + pause_s > patience_s:
                    self._is_unresponsive = True
                    raise StorageError(
                        f"{what}: failed {attempt} times within {elapsed_s:.0f} s; the last error: {error}",
                        hint="make sure that the store is reachable, then repeat the command: committed units are safe;"
                        f" {_CHECK_ENDPOINT}",
                    ) from error
            time.sleep(pause_s)
        raise AssertionError("unreachable")


def store() -> ObjectStore:
    """Return the store of this process; thread-safe."""
    with _store_lock:
        return _store()


def forget_store() -> None:
    """Make `store` create a new store, for example because the AWS variables have changed."""
    with _store_lock:
        _store.cache_clear()


@functools.cache
def _store() -> ObjectStore:
    return ObjectStore()
