"""A log of requests with prompts, only where `log_prompts` asks for it.

It is for whoever runs the endpoint.

A line of JSON for each request that was let in: what the client sent, and whose it was; never the key itself. It knows
files, no HTTP.
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
    """One file for each start of the ingress, which its owner alone can read.

    Args:
        folder: made with the first request.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"prompts-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}.jsonl"
        self._lock = threading.Lock()

    async def write(self, *, request_id: str, key: str, model: str, path: str, body: bytes) -> None:
        """Log a request; one that cannot be written is answered all the same.

        Args:
            key: its name.
            body: as the client sent it, which is JSON.
        """
        head = {"request_id": request_id, "received_at": time.time(), "key": key, "model": model, "path": path}
        try:
            await asyncio.to_thread(self._append, head, body)
        except OSError as error:
            _log.error("request %s is not in the log of prompts: %s", request_id, error)

    def _append(self, head: Mapping[str, object], body: bytes) -> None:
        line = json.dumps({**head, "body": json.loads(body)}).encode()
        with self._lock:  # a client that leaves while its request is written does not end the writing
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.touch(mode=0o600)
            append_line(self._path, line)
