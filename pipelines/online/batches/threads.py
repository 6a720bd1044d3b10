"""Threads for what waits for a disk or a store: of their own, so that slow files keep no other request waiting."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

_MOST = 32
_Answer = TypeVar("_Answer")
_threads = ThreadPoolExecutor(_MOST, thread_name_prefix="files")


async def in_thread(function: Callable[..., _Answer], *arguments: Any) -> _Answer:
    """What a function answers that may take a while."""
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(function, *arguments))
