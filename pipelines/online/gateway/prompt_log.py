"""A log of admitted requests with their prompts, enabled by `log_prompts`.

One JSON line per request with the client's body and the key's name, never the key itself.
"""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from peagle.files import append_line

_log = logging.getLogger("ray.serve")


class PromptLog:
    """A log file per start of the ingress, readable only by its owner.

    Args:
        folder: created with the first request.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"prompts-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}.jsonl"
        self._lock = threading.Lock()

    async def write(self, *, request_id: str, key: str, model: str, path: str, body: bytes) -> None:
        """Log a request. If that fails, the request is served anyway.

        Args:
            key: its name.
            body: the client's JSON.
        """
        head = {"request_id": request_id, "received_at": time.time(), "key": key, "model": model, "path": path}
        try:
            await asyncio.to_thread(self._append, head, body)
        except OSError as error:
            _log.error("cannot write request %s to the prompt log: %s", request_id, error)

    def _append(self, head: Mapping[str, object], body: bytes) -> None:
        line = json.dumps({**head, "body": json.loads(body)}).encode()
        with self._lock:  # a client that disconnects does not stop the thread
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.touch(mode=0o600)
            append_line(self._path, line)
