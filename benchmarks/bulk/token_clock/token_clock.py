"""A vLLM plug-in that records the times of tokens: a line "seconds tokens requests" for each step of the engine.

It wraps `OutputProcessor.process_outputs`, which every driver of an engine uses, so different systems are measured at
the same place with the same clock. vLLM finds the plug-in by its entry point if this folder is on PYTHONPATH, and loads
it into each of its processes. The lines are appended to the file TOKEN_CLOCK; without that variable, the plug-in does
nothing. With TOKEN_CLOCK_FROM=request, the first line has the time of the first request, and no tokens.
"""

import os
import time
from pathlib import Path
from typing import Any


def register() -> None:
    """Install the clock. vLLM calls this in each process that creates engine arguments (`load_general_plugins`)."""
    path = os.environ.get("TOKEN_CLOCK")
    if path is None:
        return
    from vllm.v1.engine.output_processor import OutputProcessor

    if hasattr(OutputProcessor, "token_clock"):
        return
    OutputProcessor.token_clock = path
    process_outputs = OutputProcessor.process_outputs
    steps = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115 - open until the process ends

    def process_and_record(self: Any, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        if num_tokens := sum(len(output.new_token_ids) for output in outputs):
            steps.write(f"{time.monotonic():.6f} {num_tokens} {len(self.request_states)}\n")
        return process_outputs(self, outputs, *args, **kwargs)

    OutputProcessor.process_outputs = process_and_record
    if os.environ.get("TOKEN_CLOCK_FROM") != "request":
        return
    add_request = OutputProcessor.add_request

    def record_first_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        OutputProcessor.add_request = add_request  # only the first request is recorded
        steps.write(f"{time.monotonic():.6f} 0 0\n")
        return add_request(self, *args, **kwargs)

    OutputProcessor.add_request = record_first_request
