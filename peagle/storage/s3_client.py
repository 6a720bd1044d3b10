"""A client for S3 stores: objects, first writers, listings; patient with faults.

What passes (500, 503, SlowDown, cut connections, timeouts) is asked again, with growing random pauses, for a bounded
time. So a write may have been done although its answer was lost, and is then done twice. That is harmless where it
replaces, and where only the first writer may win, each writer leaves its mark in the object's metadata and knows itself
again (`docs/decisions/0008-exactly-once-on-s3.md`).

It knows addresses and bytes; it knows no run.
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

from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.session import Session

from peagle.errors import StorageError
from peagle.storage import s3_errors

_Answer = TypeVar("_Answer")
_PATIENCE_S = 120.0
SHORT_PATIENCE_S = 15.0  # with a store that has not answered yet, or does not any more
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 10.0
_MARK = "peagle-writer"
_making = threading.Lock()  # of the store; two would not share what they keep
_KEPT, _KEPT_BYTES = 4096, 1 << 15  # small objects that are read again and again, such as heartbeats


@dataclass(frozen=True, slots=True)
class Address:
    """An object, or where the names of a folder's objects begin."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


@dataclass(frozen=True, slots=True)
class Listed:
    """One name of a folder's listing; a folder within it has no `etag` and no bytes."""

    name: str
    etag: str | None
    num_bytes: int = 0


def marked(writer: str) -> dict[str, str]:
    """The metadata by which a writer knows its object again."""
    return {_MARK: writer}


class ObjectStore:
    """A store, by the AWS variables of this process. It may be shared by threads.

    Args:
        patience_s: how long a request is repeated.

    Raises:
        StorageError: the variables, or the files that they name, make no sense.
    """

    def __init__(self, *, patience_s: float = _PATIENCE_S) -> None:
        config = Config(
            retries={"total_max_attempts": 1},  # it is repeated here, where a lost answer is understood
            connect_timeout=10,
            read_timeout=30,
            max_pool_connections=64,
            signature_version="s3v4",  # presigned URLs would have the old one, which newer regions refuse
        )
        try:
            self.api: Any = Session().create_client("s3", config=config, region_name=os.environ.get("AWS_REGION"))
        except (*s3_errors.ERRORS, ValueError) as error:
            raise s3_errors.refused("the object store cannot be reached", error) from error
        self._patience_s = patience_s
        self._kept: OrderedDict[tuple[Address, str], bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._is_lost = False  # it did not answer with all patience, and has not since

    # --- reading

    def read(self, at: Address, etag: str | None = None) -> bytes:
        """An object's bytes.

        Args:
            etag: of a listing; what was read of this very content before is not read again.

        Raises:
            FileNotFoundError: there is none.
            StorageError: here and below, what does not pass.
        """
        with self._lock:
            if etag is not None and (kept := self._kept.get((at, etag))) is not None:
                return kept
        data, found_etag = self.ask(f"{at}: cannot be read", at, lambda: self._get(at))
        if etag is not None and len(data) <= _KEPT_BYTES:
            with self._lock:
                self._kept[at, found_etag] = data
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        return data

    def read_range(self, at: Address, first: int, last: int, etag: str) -> bytes:
        """Bytes `first` to `last`, both included, of an object with this content.

        Raises:
            StorageError: it was replaced meanwhile; pieces of two contents would make neither.
        """

        def piece() -> tuple[bytes, str]:
            try:
                return self._get(at, Range=f"bytes={first}-{last}", IfMatch=etag)
            except ClientError as error:
                if s3_errors.status_of(error) != 412:
                    raise
                raise StorageError(f"{at}: was replaced while it was read", hint="repeat the command") from error

        data, _ = self.ask(f"{at}: cannot be read", at, piece)
        return data

    def read_tail(self, at: Address, num_bytes: int) -> tuple[bytes, int, str]:
        """The last bytes of an object, its size, and the mark of its content.

        Raises:
            FileNotFoundError: there is none.
        """

        def tail() -> tuple[bytes, int, str]:
            answer = self.api.get_object(Bucket=at.bucket, Key=at.key, Range=f"bytes=-{num_bytes}")
            data = answer["Body"].read()
            return data, int(answer.get("ContentRange", f"/{len(data)}").rpartition("/")[2]), answer["ETag"]

        try:
            return self.ask(f"{at}: cannot be read", at, tail)
        except StorageError as error:
            if error.__cause__ is not None and s3_errors.code_of(error.__cause__) == "InvalidRange":  # type: ignore[arg-type]
                return b"", 0, ""  # an empty object has no last bytes
            raise

    def size(self, at: Address) -> int:
        """An object's size in bytes.

        Raises:
            FileNotFoundError: there is none.
        """
        answer = self.ask(f"{at}: cannot be read", at, lambda: self.api.head_object(Bucket=at.bucket, Key=at.key))
        return int(answer["ContentLength"])

    def names(self, folder: Address, prefix: str = "", *, page: int = 1000) -> Iterator[Listed]:
        """The names directly in a folder that begin with `prefix`, sorted within a page."""
        begin = f"{folder.key}/" if folder.key else ""
        more: dict[str, str] = {}
        while True:
            ask = functools.partial(
                self.api.list_objects_v2,
                Bucket=folder.bucket,
                Prefix=begin + prefix,
                Delimiter="/",
                MaxKeys=page,
                **more,
            )
            answer = self.ask(f"{folder}: cannot be listed", folder, ask)
            for item in answer.get("Contents", ()):
                if name := item["Key"].removeprefix(begin):  # some tools make an empty object for the folder itself
                    yield Listed(name, item["ETag"], item["Size"])
            for item in answer.get("CommonPrefixes", ()):
                yield Listed(item["Prefix"].removeprefix(begin).rstrip("/"), None)
            if not answer.get("NextContinuationToken"):
                return
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    def presigned_url(self, at: Address, valid_s: int, **how: str) -> str:
        """A URL with which anybody can read an object for a while.

        Whether it is there or not.

        Args:
            how: what the answer is to say of it, as `get_object` names it.

        Raises:
            StorageError: this process has no credentials.
        """
        wanted = {"Bucket": at.bucket, "Key": at.key, **how}
        try:
            return str(self.api.generate_presigned_url("get_object", Params=wanted, ExpiresIn=valid_s))
        except s3_errors.ERRORS as error:
            raise s3_errors.refused(f"{at}: no URL can be made", error) from error

    # --- writing

    def write(self, at: Address, data: bytes) -> None:
        """Replace an object; a reader sees the old bytes or the new ones."""
        put = functools.partial(self.api.put_object, Bucket=at.bucket, Key=at.key, Body=data)
        self.ask(f"{at}: cannot be written", at, put)

    def write_once(self, at: Address, data: bytes) -> bool:
        """Create an object unless the name is taken.

        One writer alone gets True, even if its answer was lost.
        """
        writer = uuid.uuid4().hex

        def put() -> bool:
            try:
                self.api.put_object(Bucket=at.bucket, Key=at.key, Body=data, IfNoneMatch="*", Metadata=marked(writer))
            except ClientError as error:
                if s3_errors.status_of(error) != 412:
                    raise
                return self.writer_of(at, taken=error) == writer
            return True

        return self.ask(f"{at}: cannot be written", at, put)

    def writer_of(self, at: Address, taken: ClientError) -> str | None:
        """The mark of an object's writer, asked once.

        Raises:
            ClientError: `taken`, for which it is asked, where the object is gone in the meantime.
        """
        try:
            found: str | None = self.api.head_object(Bucket=at.bucket, Key=at.key)["Metadata"].get(_MARK)
        except ClientError as error:
            if s3_errors.is_missing(error):
                raise taken from error
            raise
        return found

    def delete(self, at: Address) -> None:
        """Delete an object, if there is one."""
        ask = functools.partial(self.api.delete_object, Bucket=at.bucket, Key=at.key)
        self.ask(f"{at}: cannot be deleted", at, ask)

    # --- asking

    def _get(self, at: Address, **how: str) -> tuple[bytes, str]:
        answer = self.api.get_object(Bucket=at.bucket, Key=at.key, **how)
        return answer["Body"].read(), answer["ETag"]

    def ask(self, what: str, at: Address, call: Callable[[], _Answer]) -> _Answer:
        """The answer to `call`, repeated while its faults may pass and patience lasts.

        Args:
            what: could not be done, for the error.

        Raises:
            FileNotFoundError: there is no such object.
            StorageError: what does not pass.
        """
        began_at = time.monotonic()
        patience_s = min(self._patience_s, SHORT_PATIENCE_S) if self._is_lost else self._patience_s
        for number in itertools.count(1):
            try:
                answer = call()
                self._is_lost = False
                return answer
            except s3_errors.ERRORS as error:
                if s3_errors.is_missing(error):
                    raise FileNotFoundError(f"{at}: no such object") from error
                if not s3_errors.passes(error):
                    raise s3_errors.refused(what, error) from error
                pause_s = min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(number - 1, 16)) * random.uniform(0.5, 1)
                passed_s = time.monotonic() - began_at
                if passed_s + pause_s > patience_s:
                    self._is_lost = True
                    raise s3_errors.unavailable(what, error, passed_s, number) from error
            time.sleep(pause_s)
        raise AssertionError("patience ends before numbers do")


def store() -> ObjectStore:
    """The store of this process: one, however many threads are the first to ask."""
    with _making:
        return _store()


def forget_store() -> None:
    """Make a new store when one is asked for again: the AWS variables have changed."""
    with _making:
        _store.cache_clear()


@functools.cache
def _store() -> ObjectStore:
    return ObjectStore()
