"""An object as a file to write, from the beginning to the end; it appears when it is whole.

A large one goes up in parts, so that no more than one part of it is held. It knows one object, and what killed writers
left of others.
"""

import contextlib
import functools
import io
import uuid
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO, cast

from botocore.exceptions import ClientError

from peagle.storage import s3_errors
from peagle.storage.s3_client import Address, ObjectStore, marked

_PART_BYTES = 1 << 26  # a store takes 10,000 parts, and some want all of one size


@contextlib.contextmanager
def open_to_write(store: ObjectStore, at: Address) -> Iterator[BinaryIO]:
    """A file that replaces an object when the block ends, and changes nothing when it fails."""
    writer = _Writer(store, at)
    try:
        yield cast(BinaryIO, writer)
        writer.finish()
    except BaseException:
        writer.give_up()
        raise


def abort_uploads(store: ObjectStore, folder: Address, older_than_s: float) -> int:
    """Forget what killed writers had sent of large objects into a folder; the number of these.

    Others may be writing there, and whose an upload is does not show. So its age by the store's own clock decides.
    """
    ask = functools.partial(store.api.list_multipart_uploads, Bucket=folder.bucket, Prefix=f"{folder.key}/")
    listed = store.ask(f"{folder}: cannot be listed", folder, ask)
    now = parsedate_to_datetime(listed["ResponseMetadata"]["HTTPHeaders"]["date"])
    uploads = listed.get("Uploads", ())
    old = [upload for upload in uploads if max(0.0, (now - upload["Initiated"]).total_seconds()) >= older_than_s]
    for upload in old:
        _abort(store, Address(folder.bucket, upload["Key"]), upload["UploadId"])
    return len(old)


def _abort(store: ObjectStore, at: Address, upload: str) -> None:
    ask = functools.partial(store.api.abort_multipart_upload, Bucket=at.bucket, Key=at.key, UploadId=upload)
    store.ask(f"{at}: cannot be written", at, ask)


class _Writer(io.RawIOBase):
    def __init__(self, store: ObjectStore, at: Address) -> None:
        self._store, self._at = store, at
        self._writer = uuid.uuid4().hex
        self._pending = bytearray()
        self._position = 0
        self._upload: str | None = None
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
        if self._upload is None:
            self._store.write(self._at, bytes(self._pending))
            return
        if self._pending:
            self._send(len(self._pending))
        self._ask(self._complete)

    def give_up(self) -> None:
        if self._upload is not None:
            _abort(self._store, self._at, self._upload)

    def _send(self, num_bytes: int) -> None:
        """Begin the upload if it is not begun, and send its next part."""
        if self._upload is None:
            begun = self._ask(self._request("create_multipart_upload", Metadata=marked(self._writer)))
            self._upload = str(begun["UploadId"])
        part, self._pending = bytes(self._pending[:num_bytes]), self._pending[num_bytes:]
        number = len(self._parts) + 1
        sent = self._ask(self._request("upload_part", UploadId=self._upload, PartNumber=number, Body=part))
        self._parts.append({"PartNumber": number, "ETag": sent["ETag"]})

    def _complete(self) -> None:
        parts = {"Parts": self._parts}
        try:
            self._request("complete_multipart_upload", UploadId=self._upload, MultipartUpload=parts)()
        except ClientError as error:
            # Perhaps it was done before, and the answer was lost.
            if s3_errors.code_of(error) != "NoSuchUpload" or self._store.writer_of(self._at, error) != self._writer:
                raise

    def _request(self, name: str, **how: Any) -> Any:
        return functools.partial(getattr(self._store.api, name), Bucket=self._at.bucket, Key=self._at.key, **how)

    def _ask(self, call: Any) -> Any:
        return self._store.ask(f"{self._at}: cannot be written", self._at, call)
