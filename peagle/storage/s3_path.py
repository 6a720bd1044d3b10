"""`s3://bucket/key` with the methods of `pathlib.Path` that a run needs.

A folder is what the names of its objects begin with, so it is there when one of them is. It holds names only; what
talks to the store is imported when it is asked for something.
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
READ_AHEAD_BYTES = 1 << 22  # that whoever reads an open object holds of it


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """The facts of an object that are asked for."""

    st_size: int


@dataclass(frozen=True, slots=True)
class S3Path:
    """An object or a folder of a bucket.

    Attributes:
        etag: of the content that a listing saw.
    """

    bucket: str
    key: str
    etag: str | None = field(default=None, compare=False, repr=False)

    @classmethod
    def parse(cls, url: str) -> "S3Path":
        """The path that a URL names.

        Raises:
            ConfigError: it names no bucket, or no folder in it.
        """
        bucket, _, key = url.removeprefix(SCHEME).partition("/")
        parts = key.strip("/").split("/")
        if not bucket or not all(parts) or {".", ".."} & set(parts):
            raise ConfigError(f"{url!r} names no folder of a bucket", hint=f"write {SCHEME}BUCKET/FOLDER")
        return cls(bucket, "/".join(parts))

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}"

    def __truediv__(self, name: str) -> "S3Path":
        return S3Path(self.bucket, f"{self.key}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The last part without its suffix."""
        before, dot, _ = self.name.rpartition(".")
        return before if before and dot else self.name

    # --- asking

    def exists(self) -> bool:
        """Whether there is such an object."""
        try:
            self._store.size(self._address)
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Whether there is an object in it."""
        return next(self._store.names(self._address, page=1), None) is not None

    def stat(self) -> ObjectStat:
        """Its size.

        Raises:
            FileNotFoundError: there is no such object.
        """
        return ObjectStat(self._store.size(self._address))

    def iterdir(self) -> Iterator["S3Path"]:
        """All that is in the folder."""
        return self.glob("*")

    def glob(self, pattern: str) -> Iterator["S3Path"]:
        """The direct contents of the folder that match `*` and `?` in a name."""
        literal = pattern.replace("?", "*").partition("*")[0]
        for listed in self._store.names(self._address, literal):
            if fnmatchcase(listed.name, pattern):
                yield S3Path(self.bucket, f"{self.key}/{listed.name}", listed.etag)

    def read_bytes(self) -> bytes:
        """The object.

        Raises:
            FileNotFoundError: there is no such object.
        """
        return self._store.read(self._address, self.etag)

    def open(self, mode: str = "rb") -> Any:
        """The object as a file to read, in binary.

        Raises:
            FileNotFoundError: there is no such object.
        """
        from peagle.storage.s3_files import open_to_read

        if mode != "rb":
            raise io.UnsupportedOperation(f"{self}: an object is opened to be read, in binary")
        return open_to_read(self._store, self._address, READ_AHEAD_BYTES)

    def presigned_url(self, valid_s: int, disposition: str) -> str:
        """A URL with which anybody can read the object for a while.

        Args:
            disposition: `Content-Disposition` of the answer.

        Raises:
            StorageError: this process has no credentials.
        """
        how = {"ResponseContentDisposition": disposition, "ResponseContentType": "application/octet-stream"}
        return self._store.presigned_url(self._address, valid_s, **how)

    # --- changing

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a folder is there with its first object."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object. Whether there was one, the store does not say."""
        self._store.delete(self._address)

    def write(self, data: bytes) -> None:
        """Replace the object."""
        self._store.write(self._address, data)

    def write_once(self, data: bytes) -> bool:
        """Create the object unless the name is taken."""
        return self._store.write_once(self._address, data)

    def writer(self) -> Any:
        """A context with a file that replaces the object when it is whole."""
        from peagle.storage.s3_files import open_to_write

        return open_to_write(self._store, self._address)

    def abort_uploads(self, older_than_s: float) -> int:
        """Abort killed writers' uploads of large objects into this folder.

        Returns their number.

        Args:
            older_than_s: since they began.
        """
        from peagle.storage.s3_files import abort_uploads

        return abort_uploads(self._store, self._address, older_than_s)

    def require_conditional_writes(self) -> None:
        """Require that the store can hold a run, by a short-lived object here.

        Raises:
            StorageError: it cannot.
        """
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
