"""Grammars compiled at a lower priority than an engine's steps.

vLLM 0.29 compiles schemas, regular expressions and grammars in threads of its core. They take the processor from the
steps of every request; here these threads give way, and xgrammar's own threads inherit that.
"""

import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

NICE = 10  # about a tenth of a core beside threads that compute without pause


def compile_behind_steps() -> None:
    """Lower the priority of the threads in which vLLM's core compiles grammars."""
    from vllm.v1.structured_output import StructuredOutputManager

    begin = StructuredOutputManager.__init__
    if hasattr(begin, "__wrapped__"):
        return

    @functools.wraps(begin)
    def begin_behind(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        if threads := getattr(self, "executor", None):  # none without a tokenizer
            threads.shutdown(wait=False)
            self.executor = ThreadPoolExecutor(max_workers=threads._max_workers, initializer=_give_way)

    StructuredOutputManager.__init__ = begin_behind


def _give_way() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
