"""What clients send to make a file or a batch: checked, with OpenAI's error objects for what is wrong.

It knows the fields of the API; it keeps nothing.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from python_multipart.multipart import parse_options_header

from peagle.errors import shown
from pipelines.online.batches.records import BATCH_PREFIX, INPUT, Order, new_id
from pipelines.online.errors import ApiError
from pipelines.online.keys import KeyRecord

MAX_FIELD_BYTES = 1024  # of a form, but for the file
_MAX_NAME_CHARS = 255
_DEFAULT_NAME = "upload.jsonl"
_CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")


class ExpiresAfter(BaseModel):
    """When a file is to be deleted: between an hour and thirty days."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2592000)


class NewBatch(BaseModel):
    """The body of POST /v1/batches."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None

    def order(self, key: KeyRecord, now: float, expires_at: float) -> Order:
        """The batch of this key."""
        expires = self.output_expires_after
        return Order(
            id=new_id(BATCH_PREFIX),
            key=key.without_hash(),
            endpoint=self.endpoint,
            input_file_id=self.input_file_id,
            completion_window=self.completion_window,
            created_at=now,
            expires_at=expires_at,
            metadata=self.metadata,
            output_expires_s=None if expires is None else expires.seconds,
        )


def read_form(form: Mapping[str, Any]) -> tuple[Any, str, int | None]:
    """The fields of POST /v1/files: the upload, its name, and the seconds of its life.

    Raises:
        ApiError: 400 or 422, with the field that is at fault.
    """
    upload, purpose = form.get("file"), form.get("purpose")
    if upload is None or isinstance(upload, str):
        raise _no_file()
    if purpose != INPUT:
        message = f"purpose: this endpoint keeps files for batches only: {INPUT!r}, not {shown(purpose)}"
        raise ApiError(400, message, code="invalid_purpose", param="purpose")
    if upload.size == 0:
        raise ApiError(400, "file: it is empty", code="empty_file", param="file")
    return upload, _name_of(upload.filename or _DEFAULT_NAME), _expiry(form)


def _expiry(form: Mapping[str, Any]) -> int | None:
    given = {name: form[key] for name in ExpiresAfter.model_fields if (key := f"expires_after[{name}]") in form}
    if not given:
        return None
    try:
        return ExpiresAfter.model_validate(given).seconds
    except ValidationError as error:
        first = error.errors()[0]
        param = f"expires_after[{first['loc'][0]}]"
        raise ApiError(422, f"{param}: {first['msg']}", code="invalid_value", param=param) from None


def require_form(content_type: str) -> None:
    """Refuse what is no form with files, which would be held whole, and forms that are not in UTF-8: they may name any
    encoding that Python has, and some take minutes to read.

    Raises:
        ApiError: 400 or 415.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise _no_file()
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in _CHARSETS:
        raise ApiError(415, f"content-type: send the form in UTF-8, not {shown(charset)}", code="unsupported_charset")


def _no_file() -> ApiError:
    return ApiError(400, "file: send the file as multipart/form-data", code="missing_file", param="file")


def upload_bytes(headers: Mapping[str, str], most: int) -> int:
    """Bytes of a body that has not come: as it says of itself, or `most` where it says nothing."""
    length = headers.get("content-length", "")
    return min(int(length), most) if length.isdecimal() and "transfer-encoding" not in headers else most


def _name_of(filename: str) -> str:
    """The last part of a path, without what is no text."""
    name = re.split(r"[/\\]", filename)[-1]
    kept = "".join(char if char.isprintable() else "_" for char in name)
    return kept[-_MAX_NAME_CHARS:].strip() or _DEFAULT_NAME
