"""Time the parts of a decoding step on the device, inside vLLM's worker.

vLLM (0.24 to 0.29, model runner V1) opens a named scope around each part of a step ("gpu_model_runner: forward").
While timing is on, both ends of each scope are recorded: by a CUDA event, which gets its time when the device reaches
it, or by the clock on a CPU. So the time of a part includes the device's waits for the host.

Pass `worker_extension_cls="step_timer.StepTimer"` to vLLM, and call the methods with `collective_rpc`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_PREFIX = "gpu_model_runner: "
_FIRST_PART = "preprocess"
_COPY_BYTES = 512 * 1024**2
_NUM_COPIES = 20
_NUM_KERNELS = 15


class StepTimer:
    """Methods that vLLM adds to its worker."""

    model_runner: Any

    def begin_step_times(self) -> None:
        """Start to time every step."""
        import vllm.v1.worker.gpu_model_runner as module

        self._step_marks = _Marks(self.model_runner)
        self._scope_of_vllm = module.record_function_or_nullcontext
        module.record_function_or_nullcontext = self._step_marks.scope

    def end_step_times(self) -> list[dict[str, float]]:
        """Stop, and return each step: `began_s`, `num_requests` and the milliseconds of each part by its name."""
        import vllm.v1.worker.gpu_model_runner as module

        module.record_function_or_nullcontext = self._scope_of_vllm
        return self._step_marks.steps()

    def begin_step_trace(self) -> None:
        """Start to time every step and to trace the device's kernels. Tracing slows steps down: ignore their times."""
        on_gpu = self.model_runner.device.type == "cuda"
        activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
        self._step_trace = torch.profiler.profile(activities=[activity])
        self.begin_step_times()
        self._step_trace.start()

    def end_step_trace(self) -> dict[str, Any]:
        """Stop, and return `num_steps`, `busy_ms` of all kernels, and the slowest kernels with their ms and calls."""
        self._step_trace.stop()
        on_gpu = self.model_runner.device.type == "cuda"
        rows = [
            (e.key, (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1000, e.count)
            for e in self._step_trace.key_averages()
        ]
        rows.sort(key=lambda row: row[1], reverse=True)
        return {
            "num_steps": len(self.end_step_times()),
            "busy_ms": sum(ms for _, ms, _ in rows),
            "kernels": [{"name": name[:120], "ms": ms, "calls": calls} for name, ms, calls in rows[:_NUM_KERNELS]],
        }

    def copy_bytes_per_s(self) -> float:
        """Return the bytes per second that a plain copy on the device reads and writes: the usable memory bandwidth."""
        source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=self.model_runner.device)
        copy = torch.empty_like(source)
        copy.copy_(source)
        seconds = []
        for _ in range(_NUM_COPIES):
            _wait(source.device)
            start = time.perf_counter()
            copy.copy_(source)
            _wait(source.device)
            seconds.append(time.perf_counter() - start)
        return 2 * _COPY_BYTES / sorted(seconds)[_NUM_COPIES // 2]


class _Marks:
    """The finished scopes in order, with the times of both ends."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._marks: list[tuple[str, float, Any, Any, int]] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        began_s, start = time.perf_counter(), self._mark()
        try:
            yield
        finally:
            num_requests = self._runner.input_batch.num_reqs
            self._marks.append((name.removeprefix(_PREFIX), began_s, start, self._mark(), num_requests))

    def steps(self) -> list[dict[str, float]]:
        """Group the scopes into steps, which start with the first part, and add up parts with the same name."""
        _wait(self._runner.device)
        steps: list[dict[str, float]] = []
        for name, began_s, start, end, num_requests in self._marks:
            if name == _FIRST_PART:
                steps.append({"began_s": began_s, "num_requests": num_requests})
            if steps:
                elapsed_ms = (end - start) * 1000 if isinstance(start, float) else start.elapsed_time(end)
                steps[-1][name] = steps[-1].get(name, 0.0) + elapsed_ms
        return steps

    def _mark(self) -> Any:
        if self._runner.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
