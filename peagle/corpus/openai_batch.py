"""The OpenAI batch format: one request a line, with `custom_id`, `method`, `url` and `body`.

It checks the envelope; what is in a body is checked where prompts and sampling parameters are
(`peagle/requests/builder.py`). A body is carried as JSON text: bodies differ from row to row.
"""

from typing import Any

import pyarrow as pa

from peagle.corpus.rows import RawRow
from peagle.corpus.schema import json_text
from peagle.errors import shown

URLS = ("/v1/chat/completions", "/v1/completions")
BATCH_COLUMNS = ("custom_id", "method", "url", "body")
BATCH_SCHEMA = pa.schema([*[(name, pa.string()) for name in BATCH_COLUMNS[:3]], json_text("body")])


def is_batch(columns: dict[str, Any]) -> bool:
    """Whether a row has the columns that a request of a batch needs."""
    return {"custom_id", "url", "body"} <= set(columns)


def batch_row(columns: dict[str, Any], where: str) -> RawRow:
    """The row, with what is wrong with its envelope if something is."""
    error = envelope_error(columns)
    return RawRow(columns, error=f"{where}: {error}", reason="invalid") if error else RawRow(columns)


def envelope_error(columns: dict[str, Any]) -> str | None:
    """What is wrong with a request around its body, or None."""
    missing = [name for name in BATCH_COLUMNS if columns.get(name) is None]
    if missing:
        return f"the request has no {' and no '.join(missing)}"
    if unknown := sorted(set(columns) - set(BATCH_COLUMNS)):
        return f"unknown key {shown(unknown[0])}: a request has {', '.join(BATCH_COLUMNS)}"
    custom_id, url = columns["custom_id"], columns["url"]
    if not isinstance(custom_id, str) or not custom_id:
        return f"custom_id must be text that is not empty, not {shown(custom_id)}"
    if columns["method"] != "POST":
        return f"method must be POST, not {shown(columns['method'])}"
    if url not in URLS:
        return f"url must be {' or '.join(URLS)}, not {shown(url)}"
    if not isinstance(columns["body"], dict):
        return f"body must be a JSON object, not a {type(columns['body']).__name__}"
    return None
