"""Records of files and batches, and their OpenAI API objects."""

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
WINDOW_S = 24 * 3600  # the only `completion_window`, 24h

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelled"]
FINAL: frozenset[Status] = frozenset({"completed", "failed", "expired", "cancelled"})
CANCELLING = "cancelling"
"""The status of a cancelled batch that has not ended yet."""


def new_id(prefix: str) -> str:
    """Return a random id. Ids sort by creation time."""
    return f"{prefix}{int(time.time() * 1000):012x}{secrets.token_hex(8)}"


def created_at_of(name: str) -> float:
    """Return the Unix time at which `new_id` returned this id."""
    return int(re.split("[-_]", name)[1][:12], 16) / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of an API key."""

    id: str
    owner: str  # name of the API key
    filename: str
    purpose: str
    num_bytes: int
    created_at: float
    at: str  # path of the contents, relative to the batch folder
    expires_at: float | None = None
    batch_id: str | None = None  # the batch that wrote it; None means an upload

    def to_api_object(self) -> dict[str, Any]:
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
class BatchRequest:
    """A batch as the client created it. Immutable."""

    id: str
    key: KeyRecord  # the key and its limits at creation, without the hash. The scheduler uses the current limits
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: float
    expires_at: float
    metadata: Mapping[str, str] | None = None
    output_expires_s: int | None = None  # lifetime of the output files; None if they never expire

    def to_dict(self) -> dict[str, Any]:
        # asdict() would convert the key recursively.
        return {name: getattr(self, name) for name in self.__slots__} | {"key": self.key.model_dump(mode="json")}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "BatchRequest":
        return cls(**{**values, "key": KeyRecord.model_validate(values["key"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """The progress of a batch. Times are Unix times."""

    status: Status = "validating"
    model: str | None = None
    # num_requests, prompt_tokens, output_tokens: known after validation; tokens are upper bounds
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
    usage: Mapping[str, Any] | None = None  # OpenAI's usage object, once the batch has ended
    # OpenAI's error objects (code, message, param, line) of a failed batch
    errors: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "BatchProgress":
        return cls(**{**values, "errors": tuple(values["errors"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    request: BatchRequest
    progress: BatchProgress
    cancelling_at: float | None = None

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def is_over(self) -> bool:
        return self.progress.status in FINAL

    def to_api_object(self) -> dict[str, Any]:
        request, progress = self.request, self.progress
        is_cancelling = self.cancelling_at is not None and not self.is_over
        times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelled")
        return {
            "id": request.id,
            "object": "batch",
            "endpoint": request.endpoint,
            "model": progress.model,
            "errors": {"object": "list", "data": list(progress.errors)} if progress.errors else None,
            "input_file_id": request.input_file_id,
            "completion_window": request.completion_window,
            "status": CANCELLING if is_cancelling else progress.status,
            "output_file_id": progress.output_file_id,
            "error_file_id": progress.error_file_id,
            "created_at": int(request.created_at),
            "expires_at": int(request.expires_at),
            "cancelling_at": _seconds(self.cancelling_at),
            **{f"{name}_at": _seconds(getattr(progress, f"{name}_at")) for name in times},
            "request_counts": {
                "total": progress.num_requests,
                "completed": progress.num_completed,
                "failed": progress.num_failed,
            },
            "usage": progress.usage,
            "metadata": request.metadata,
        }


def _seconds(unix_time: float | None) -> int | None:
    return None if unix_time is None else int(unix_time)
