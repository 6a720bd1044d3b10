"""Files and batches: as they are kept, and as OpenAI's API shows them.

Pure records. A batch is what was asked for (`Order`, written once), how far it is (`BatchProgress`, rewritten) and when
somebody cancelled it; each of the three has one writer.
"""

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pipelines.online.gateway.keys import KeyRecord

BATCH_PREFIX = "batch_"
FILE_PREFIX = "file-"
INPUT, OUTPUT = "batch", "batch_output"  # purposes of files
WINDOW_S = 24 * 3600

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelled"]
FINAL: frozenset[Status] = frozenset({"completed", "failed", "expired", "cancelled"})
CANCELLING = "cancelling"
"""What is shown of a batch that somebody cancelled and that has not ended yet."""


def new_id(prefix: str) -> str:
    """A random id; ids sort by the time of their making, to the millisecond."""
    return f"{prefix}{int(time.time() * 1000):012x}{secrets.token_hex(8)}"


def made_at(name: str) -> float:
    """The Unix time at which an id was made."""
    return int(re.split("[-_]", name)[1][:12], 16) / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a key.

    Attributes:
        owner: name of the key.
        at: where its bytes are, in the folder of the batches.
        expires_at: when it is deleted; None is never.
        batch_id: whose output it is; None where a client uploaded it.
    """

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: float
    at: str
    expires_at: float | None = None
    batch_id: str | None = None

    def show(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": int(self.created_at),
            "expires_at": _seconds(self.expires_at),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A batch as it was asked for.

    Attributes:
        key: of whom it is, and what that key might do when it was asked for, without the key's hash; the scheduler asks
            what it may do now.
        output_expires_s: life of the files that the batch makes; None is without end.
    """

    id: str
    key: KeyRecord
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: float
    expires_at: float
    metadata: Mapping[str, str] | None = None
    output_expires_s: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        # Not asdict(), which would rebuild the key.
        return {name: getattr(self, name) for name in self.__slots__} | {"key": self.key.model_dump(mode="json")}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Order":
        """The inverse of `to_dict`."""
        return cls(**{**values, "key": KeyRecord.model_validate(values["key"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """How far a batch is; times are Unix times.

    Attributes:
        num_requests: of the input, once it was checked.
        prompt_tokens, output_tokens: of all its requests at most, likewise; 0 in older records.
        usage: OpenAI's usage object, of an ended batch.
        errors: of a failed batch, as OpenAI's error objects (code, message, param, line).
    """

    status: Status = "validating"
    model: str | None = None
    num_requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    num_completed: int = 0
    num_failed: int = 0
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    completed_at: float | None = None
    failed_at: float | None = None
    expired_at: float | None = None
    cancelled_at: float | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    usage: Mapping[str, Any] | None = None
    errors: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "BatchProgress":
        """The inverse of `to_dict`."""
        return cls(**{**values, "errors": tuple(values["errors"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch at one moment."""

    order: Order
    progress: BatchProgress
    cancelling_at: float | None = None

    @property
    def id(self) -> str:
        """Of the batch."""
        return self.order.id

    @property
    def is_over(self) -> bool:
        """Whether nothing of it will change any more."""
        return self.progress.status in FINAL

    def show(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        order, progress = self.order, self.progress
        is_cancelling = self.cancelling_at is not None and not self.is_over
        times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelled")
        return {
            "id": order.id,
            "object": "batch",
            "endpoint": order.endpoint,
            "model": progress.model,
            "errors": {"object": "list", "data": list(progress.errors)} if progress.errors else None,
            "input_file_id": order.input_file_id,
            "completion_window": order.completion_window,
            "status": CANCELLING if is_cancelling else progress.status,
            "output_file_id": progress.output_file_id,
            "error_file_id": progress.error_file_id,
            "created_at": int(order.created_at),
            "expires_at": int(order.expires_at),
            "cancelling_at": _seconds(self.cancelling_at),
            **{f"{name}_at": _seconds(getattr(progress, f"{name}_at")) for name in times},
            "request_counts": {
                "total": progress.num_requests,
                "completed": progress.num_completed,
                "failed": progress.num_failed,
            },
            "usage": progress.usage,
            "metadata": order.metadata,
        }


def _seconds(at: float | None) -> int | None:
    return None if at is None else int(at)
