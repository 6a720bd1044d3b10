"""A plug-in of vLLM that writes down when tokens came: one line "seconds tokens requests" for each step of the engine.

It wraps `OutputProcessor.process_outputs`, through which every engine passes, whoever drives it: so four systems are
measured at the same place by the same clock. vLLM finds it by its entry point when this folder is on PYTHONPATH, and
loads it into each of its processes; the file is the one that TOKEN_CLOCK names. Nothing happens without that variable.
With TOKEN_CLOCK_FROM=request the first line, of no tokens, is the moment at which the first request is made.
"""

import os
import time
from pathlib import Path
from typing import Any


def register() -> None:
    """Called by vLLM (`vllm.plugins.load_general_plugins`), once in each process that makes engine arguments."""
    path = os.environ.get("TOKEN_CLOCK")
    if path is None:
        return
    from vllm.v1.engine.output_processor import OutputProcessor

    if hasattr(OutputProcessor, "token_clock"):
        return
    OutputProcessor.token_clock = path
    process_outputs = OutputProcessor.process_outputs
    steps = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115 - open as long as the process is there

    def timed(self: Any, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        if num_tokens := sum(len(output.new_token_ids) for output in outputs):
            steps.write(f"{time.monotonic():.6f} {num_tokens} {len(self.request_states)}\n")
        return process_outputs(self, outputs, *args, **kwargs)

    OutputProcessor.process_outputs = timed
    if os.environ.get("TOKEN_CLOCK_FROM") != "request":
        return
    add_request = OutputProcessor.add_request

    def beginning(self: Any, *args: Any, **kwargs: Any) -> Any:
        OutputProcessor.add_request = add_request  # the first request alone is of interest
        steps.write(f"{time.monotonic():.6f} 0 0\n")
        return add_request(self, *args, **kwargs)

    OutputProcessor.add_request = beginning
