"""What vLLM does otherwise where peagle is installed: a plug-in that it loads (`vllm.general_plugins`).

| what | on | vLLM | the test that fails when vLLM has mended it |
|---|---|---|---|
| Sampling with drafts uses memory that nobody wrote (`cpu_sampler.py`, issue 55005) | CPU | 0.29 to 0.32 | `test_cpu_sampler.py::test_vllms_own_kernel_is_still_wrong` |
| Compiled code is stored, and compiled again at each start (`compile_cache.py`) | CPU | 0.29 to 0.32 | `test_compile_cache.py::test_vllm_still_fails_to_load_what_it_compiled` |
| Compiled code is keyed by which cores compute (`compile_cache.py`) | CPU | 0.29 to 0.32 | `test_compile_cache.py::test_vllm_still_tells_cores_apart` |
| Grammars are compiled at the priority of steps (`grammar_priority.py`) | all | 0.29 | none: it does no harm |
| A core outlives its starter, keeps its device and waits for requests for ever | all | 0.24 to 0.32 | none: it does no harm |

Ray ends what a lost worker leaves, but not where it was lost itself: hence the last line.
"""  # noqa: E501

import multiprocessing
import os
import threading
from importlib.metadata import entry_points
from typing import Any

from peagle.errors import ConfigError

NAME = "peagle"
_GROUP = "vllm.general_plugins"


def register() -> None:
    """What vLLM calls in each of its processes, before a worker installs its kernels and compiles."""
    end_with_starter()

    from peagle.engine import grammar_priority

    grammar_priority.compile_behind_steps()

    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from peagle.engine import compile_cache, cpu_sampler

        compile_cache.load_compiled()
        compile_cache.share_between_cores()
        cpu_sampler.replace_kernel()
        cpu_sampler.probe_before_loading()


def end_with_starter() -> None:
    """End this process when the one that spawned it is gone, by kill -9 too.

    Under Ray vLLM spawns its core. One that is forked (an engine without Ray on a CPU) does not come here: it inherits
    that the plug-ins have been loaded.
    """
    if (starter := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_after, args=(starter,), name="end-with-starter", daemon=True).start()


def require() -> None:
    """Refuse an installation whose vLLM would not find the plug-in.

    Raises:
        ConfigError: peagle is on the path, but not installed.
    """
    if not any(plugin.name == NAME for plugin in entry_points(group=_GROUP)):
        raise ConfigError(
            "vLLM would not load peagle's plug-in, without which it samples wrongly on CPUs where there are drafts: "
            f"the environment has no entry point {NAME!r} in {_GROUP!r}",
            hint="install peagle into it: pip install --no-deps -e . in its checkout",
        )


def _end_after(starter: Any) -> None:
    starter.join()
    os._exit(1)
