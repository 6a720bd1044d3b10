"""Objects of an S3 store as file objects, and a check of conditional writes.

Reads are large, because a request takes longer than the transfer of a megabyte. Large objects are uploaded in parts.
"""

import contextlib
import functools
import io
import uuid
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO, cast

from botocore.exceptions import ClientError

from peagle.errors import StorageError
from peagle.storage import s3_client
from peagle.storage.s3_client import Address, ObjectStore, code_of, writer_metadata

_TAIL_BYTES = 1 << 16  # enough for a Parquet footer, and usually for a whole unit


def open_to_read(store: ObjectStore, address: Address, read_ahead: int) -> BinaryIO:
    """Open an object as a seekable file. Each request reads at least `read_ahead` bytes from the store."""
    return cast(BinaryIO, io.BufferedReader(_Reader(store, address, read_ahead), _TAIL_BYTES))


class _Reader(io.RawIOBase):
    def __init__(self, store: ObjectStore, address: Address, read_ahead: int) -> None:
        self._store, self._address, self._read_ahead = store, address, read_ahead
        self._tail, self._size, self._etag = store.read_tail(address, _TAIL_BYTES)
        self._tail_start = self._size - len(self._tail)
        self._piece, self._piece_start = b"", 0
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._read_some(min(len(buffer), self._size - self._position))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _read_some(self, num_bytes: int) -> bytes:
        """Return 1 to `num_bytes` bytes at the current position, or none at the end of the object."""
        if num_bytes <= 0:
            return b""
        if (start := self._position - self._tail_start) >= 0:
            return self._tail[start : start + num_bytes]
        start = self._position - self._piece_start
        if not 0 <= start < len(self._piece):
            last = min(self._position + max(num_bytes, self._read_ahead), self._tail_start) - 1
            self._piece = self._store.read_range(self._address, self._position, last, self._etag)
            self._piece_start = self._position
            start = 0
        return self._piece[start : start + num_bytes]


_PART_BYTES = 1 << 26  # 64 MiB; S3 accepts 10,000 parts; some stores require parts of equal size


@contextlib.contextmanager
def open_to_write(store: ObjectStore, address: Address) -> Iterator[BinaryIO]:
    """Open a file that replaces an object when the block ends without an error."""
    writer = _Writer(store, address)
    try:
        yield cast(BinaryIO, writer)
        writer.finish()
    except BaseException:
        writer.abort()
        raise


def abort_uploads(store: ObjectStore, folder: Address, older_than_s: float) -> int:
    """Abort the multipart uploads that killed writers left in a folder; return their number.

    An upload does not name its writer, so all uploads that are old enough by the store's clock are aborted.
    """
    list_uploads = functools.partial(store.api.list_multipart_uploads, Bucket=folder.bucket, Prefix=f"{folder.key}/")
    listing = store.request(f"{folder}: cannot be listed", folder, list_uploads)
    now = parsedate_to_datetime(listing["ResponseMetadata"]["HTTPHeaders"]["date"])
    uploads = listing.get("Uploads", ())
    old_uploads = [
        upload for upload in uploads if max(0.0, (now - upload["Initiated"]).total_seconds()) >= older_than_s
    ]
    for upload in old_uploads:
        _abort(store, Address(folder.bucket, upload["Key"]), upload["UploadId"])
    return len(old_uploads)


def _abort(store: ObjectStore, address: Address, upload_id: str) -> None:
    parameters = {"Bucket": address.bucket, "Key": address.key, "UploadId": upload_id}
    abort = functools.partial(store.api.abort_multipart_upload, **parameters)
    store.request(f"{address}: cannot be written", address, abort)


class _Writer(io.RawIOBase):
    """Collects data, and uploads it in one request or, if it is large, in parts."""

    def __init__(self, store: ObjectStore, address: Address) -> None:
        self._store, self._address = store, address
        self._writer_id = uuid.uuid4().hex
        self._pending = bytearray()
        self._position = 0
        self._upload_id: str | None = None
        self._parts: list[dict[str, Any]] = []

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        self._pending += data
        self._position += len(data)
        while len(self._pending) >= _PART_BYTES:
            self._send(_PART_BYTES)
        return len(data)

    def finish(self) -> None:
        if self._upload_id is None:
            self._store.write(self._address, bytes(self._pending))
            return
        if self._pending:
            self._send(len(self._pending))
        self._request(self._complete)

    def abort(self) -> None:
        if self._upload_id is not None:
            _abort(self._store, self._address, self._upload_id)

    def _send(self, num_bytes: int) -> None:
        """Start the upload if necessary, and send its next part."""
        if self._upload_id is None:
            upload = self._request(
                self._operation("create_multipart_upload", Metadata=writer_metadata(self._writer_id))
            )
            self._upload_id = str(upload["UploadId"])
        part, self._pending = bytes(self._pending[:num_bytes]), self._pending[num_bytes:]
        number = len(self._parts) + 1
        result = self._request(self._operation("upload_part", UploadId=self._upload_id, PartNumber=number, Body=part))
        self._parts.append({"PartNumber": number, "ETag": result["ETag"]})

    def _complete(self) -> None:
        parts = {"Parts": self._parts}
        try:
            self._operation("complete_multipart_upload", UploadId=self._upload_id, MultipartUpload=parts)()
        except ClientError as error:
            # An earlier attempt might have succeeded, although its response was lost.
            if code_of(error) != "NoSuchUpload" or self._store.writer_of(self._address, error) != self._writer_id:
                raise

    def _operation(self, name: str, **parameters: Any) -> Any:
        return functools.partial(
            getattr(self._store.api, name), Bucket=self._address.bucket, Key=self._address.key, **parameters
        )

    def _request(self, call: Any) -> Any:
        return self._store.request(f"{self._address}: cannot be written", self._address, call)


_NUM_TRIALS = 3


def require_conditional_writes(folder: Address) -> None:
    """Raise StorageError unless the store is writable and supports conditional writes."""
    store = ObjectStore(patience_s=s3_client.SHORT_PATIENCE_S)
    try:
        for _ in range(_NUM_TRIALS):  # another driver may delete the trial object, so that the second PUT succeeds
            address = Address(folder.bucket, f"{folder.key}/0.{uuid.uuid4().hex}.json")
            is_exclusive = store.write_once(address, b"{}") and not store.write_once(address, b"{}")
            store.delete(address)
            if is_exclusive:
                return
    except StorageError as error:
        if code_of(error.__cause__) != "NotImplemented":  # type: ignore[arg-type]
            raise
    raise StorageError(
        f"{folder}: this store has no conditional writes (PUT with If-None-Match: *), so two engines could commit"
        " the same unit",
        hint="use a store that supports them, or write to a local disk and copy the run at the end",
    )
