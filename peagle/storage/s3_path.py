"""`s3://bucket/key` with the methods of `pathlib.Path` that a run needs.

A folder is a key prefix, so it exists if an object with this prefix exists. The S3 client is imported at first use.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from peagle.errors import ConfigError

if TYPE_CHECKING:
    from peagle.storage.s3_client import Address, ObjectStore

SCHEME = "s3://"
READ_AHEAD_BYTES = 1 << 22  # 4 MiB of memory for each open object


@dataclass(frozen=True, slots=True)
class ObjectStat:
    st_size: int


@dataclass(frozen=True, slots=True)
class S3Path:
    """An object or a folder of a bucket. `etag` identifies the version of the object in a listing."""

    bucket: str
    key: str
    etag: str | None = field(default=None, compare=False, repr=False)

    @classmethod
    def parse(cls, url: str) -> "S3Path":
        """Parse a URL; raises ConfigError if the bucket or the folder is missing."""
        bucket, _, key = url.removeprefix(SCHEME).partition("/")
        parts = key.strip("/").split("/")
        if not bucket or not all(parts) or {".", ".."} & set(parts):
            raise ConfigError(f"{url!r} does not name a folder in a bucket", hint=f"use {SCHEME}BUCKET/FOLDER")
        return cls(bucket, "/".join(parts))

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}"

    def __truediv__(self, name: str) -> "S3Path":
        return S3Path(self.bucket, f"{self.key}/{name}")

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def stem(self) -> str:
        base, dot, _ = self.name.rpartition(".")
        return base if base and dot else self.name

    # --- reading

    def exists(self) -> bool:
        try:
            self._store.size(self._address)
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Whether an object has this prefix."""
        return next(self._store.entries(self._address, page_size=1), None) is not None

    def stat(self) -> ObjectStat:
        return ObjectStat(self._store.size(self._address))

    def iterdir(self) -> Iterator["S3Path"]:
        return self.glob("*")

    def glob(self, pattern: str) -> Iterator["S3Path"]:
        """Yield the entries of the folder that match a pattern of `*` and `?`."""
        name_prefix = pattern.replace("?", "*").partition("*")[0]
        for entry in self._store.entries(self._address, name_prefix):
            if fnmatchcase(entry.name, pattern):
                yield S3Path(self.bucket, f"{self.key}/{entry.name}", entry.etag)

    def read_bytes(self) -> bytes:
        return self._store.read(self._address, self.etag)

    def open(self, mode: str = "rb") -> Any:
        """Open the object to read, in binary mode."""
        from peagle.storage.s3_files import open_to_read

        if mode != "rb":
            raise io.UnsupportedOperation(f"{self}: objects can only be opened with mode 'rb'")
        return open_to_read(self._store, self._address, READ_AHEAD_BYTES)

    def presigned_url(self, valid_s: int, disposition: str) -> str:
        """Return a URL that gives anyone temporary read access; see `storage.presigned_url`."""
        headers = {"ResponseContentDisposition": disposition, "ResponseContentType": "application/octet-stream"}
        return self._store.presigned_url(self._address, valid_s, **headers)

    # --- writing

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a folder exists with its first object."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object; no error if it does not exist."""
        self._store.delete(self._address)

    def write(self, data: bytes) -> None:
        self._store.write(self._address, data)

    def write_once(self, data: bytes) -> bool:
        """Create the object unless it exists; return whether it was created."""
        return self._store.write_once(self._address, data)

    def writer(self) -> Any:
        """Open a file that replaces the object when the block ends without an error."""
        from peagle.storage.s3_files import open_to_write

        return open_to_write(self._store, self._address)

    def abort_uploads(self, older_than_s: float) -> int:
        """Abort multipart uploads of at least this age into this folder; return their number."""
        from peagle.storage.s3_files import abort_uploads

        return abort_uploads(self._store, self._address, older_than_s)

    def require_conditional_writes(self) -> None:
        """Check conditional writes with a temporary object in this folder; raises StorageError."""
        from peagle.storage.s3_files import require_conditional_writes

        require_conditional_writes(self._address)

    @property
    def _store(self) -> "ObjectStore":
        from peagle.storage.s3_client import store

        return store()

    @property
    def _address(self) -> "Address":
        from peagle.storage.s3_client import Address

        return Address(self.bucket, self.key)
