"""The environment variables of an engine's processes; set them before vLLM is imported.

LD_PRELOAD affects only child processes. On CPUs, vLLM computes in worker processes, which inherit it.
"""

import os
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

from peagle.engine import vllm_drafts, vllm_plugin
from peagle.engine.compile_cache import cache_root
from peagle.engine.lookup import MIN_NGRAM
from peagle.engine.spec import EngineSpec
from peagle.errors import CapacityError
from peagle.hardware import Hardware
from peagle.ports import is_service_link
from peagle.private import require_short_sockets

_SYSTEM_LIBRARY_FOLDERS = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib", "/opt/conda/lib")
# Defaults that the user may override. Redirects are disabled because an allowed host could redirect to any address that
# the engine's machine can reach. The last variable limits the compiled grammars in the engine's memory; vLLM's default
# is 512 MB.
_DEFAULTS = {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0", "VLLM_XGRAMMAR_CACHE_MB": "64"}
_BINDING_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
# The variables at the start of this process, without those of an earlier engine.
_INHERITED: Mapping[str, str] = dict(os.environ)
_TCMALLOC_PATTERNS = ("libtcmalloc_minimal.so*", "libtcmalloc.so*")


def environment(
    spec: EngineSpec,
    hardware: Hardware,
    *,
    engine_index: int = 0,
    num_engines_on_node: int = 1,
    inherited: Mapping[str, str] = _INHERITED,
) -> dict[str, str]:
    """Return variables for engine `engine_index` of `num_engines_on_node`, and create the folder for compiled code.

    Raises:
        CapacityError: fewer physical cores than ranks of the node's engines (CPU only).
        ConfigError: there is no safe folder for compiled code (CPU only).
    """
    variables = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    variables |= {name: value for name, value in _DEFAULTS.items() if name not in inherited}
    # Set even if unused, since an earlier engine in this process may have set them.
    drafter = spec.drafter
    variables[vllm_drafts.LOOKUP] = str(MIN_NGRAM[drafter.method]) if drafter and drafter.lookup else ""
    variables[vllm_drafts.VERIFY] = drafter.verify if drafter else ""
    models = [spec.model] + ([drafter.model] if drafter and drafter.has_head else [])
    if all(Path(model).is_dir() for model in models):
        variables["HF_HUB_OFFLINE"] = "1"  # all files are local
    if (user_plugins := inherited.get("VLLM_PLUGINS")) is not None and vllm_plugin.NAME not in user_plugins.split(","):
        variables["VLLM_PLUGINS"] = ",".join([*filter(None, [user_plugins]), vllm_plugin.NAME])
    if hardware.platform == "cpu":
        user_binding = inherited.get(_BINDING_VARIABLE, "")
        # The user's binding is for a single engine; several engines would share those cores.
        if user_binding and num_engines_on_node == 1:
            variables[_BINDING_VARIABLE] = user_binding
        else:
            variables |= _thread_binding(spec, hardware, engine_index, num_engines_on_node)
        variables |= _preload(inherited.get("LD_PRELOAD", "")) | cache_root(inherited)
        return variables
    # FlashInfer runs `ninja` from this interpreter's folder, which is not in PATH unless the environment is activated.
    interpreter_folder = str(Path(sys.executable).parent)
    entries = [entry for entry in inherited.get("PATH", "").split(os.pathsep) if entry]
    if interpreter_folder not in entries:
        variables["PATH"] = os.pathsep.join([*entries, interpreter_folder])
    return variables


def set_environment(
    spec: EngineSpec, hardware: Hardware, *, engine_index: int = 0, num_engines_on_node: int = 1
) -> None:
    """Set this process's variables for an engine, and remove variables that vLLM would mistake for its own.

    Raises:
        CapacityError, ConfigError: see `environment`; the path of vLLM's sockets is too long; or vLLM would not load
            the plug-in that drafts need.
    """
    if spec.drafter:
        vllm_plugin.require_installed()
    # Kubernetes sets this variable for a service called "vllm", and vLLM refuses to start with it.
    if is_service_link(os.environ.get("VLLM_PORT", "")):
        del os.environ["VLLM_PORT"]
    sockets = os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir()
    require_short_sockets("vLLM", sockets, num_bytes=len(f"/{uuid.UUID(int=0)}"))
    os.environ |= environment(spec, hardware, engine_index=engine_index, num_engines_on_node=num_engines_on_node)


def find_preload_libraries() -> dict[str, Path]:
    """Return the paths of Intel's OpenMP (wheel intel-openmp) and tcmalloc (Debian's libtcmalloc-minimal4), if found.

    Speculation on CPU is much slower with GNU's OpenMP; vLLM warns about it (`v1/worker/cpu_worker.py`).
    """
    libraries = {}
    folders = [Path(sys.prefix) / "lib"]
    folders += [folder for pattern in _SYSTEM_LIBRARY_FOLDERS for folder in sorted(Path("/").glob(pattern[1:]))]
    for name, patterns in (("libtcmalloc", _TCMALLOC_PATTERNS), ("libiomp5", ("libiomp5.so",))):
        paths = (path for folder in folders for pattern in patterns for path in sorted(folder.glob(pattern)))
        if path := next(paths, None):
            libraries[name] = path
    return libraries


def _preload(inherited: str) -> dict[str, str]:
    """Return LD_PRELOAD with more libraries, but never a second OpenMP runtime, which vLLM rejects."""
    entries = [entry for entry in inherited.replace(" ", ":").split(":") if entry]
    for name, path in find_preload_libraries().items():
        has_openmp = any(omp in inherited for omp in ("libiomp", "libomp", "libgomp"))
        if name not in inherited and not (name == "libiomp5" and has_openmp):
            entries.append(str(path))
    return {"LD_PRELOAD": ":".join(entries)} if entries else {}


def _thread_binding(spec: EngineSpec, hardware: Hardware, engine_index: int, num_engines: int) -> dict[str, str]:
    """Return variables that bind this engine to its own range of physical cores.

    By default, vLLM on CPU binds every engine to the first NUMA node except its last core: engines of a node would
    share those cores, and on a machine with two cores only one would be used. Measured on 2 cores (SmolLM2-135M, bf16,
    eager, vllm-cpu 0.29, libiomp5): 31.5 output tokens/s at concurrency 1 by default, 44.9 with both cores bound. At
    concurrency 8: 205 and 203.

    >>> hw = Hardware(platform="cpu", memory_gib=8, free_memory_gib=8, num_cpus=4, core_ids=(0, 1, 2, 3))
    >>> _thread_binding(EngineSpec(model="m"), hw, engine_index=1, num_engines=2)
    {'VLLM_CPU_OMP_THREADS_BIND': '2,3'}
    """
    if hardware.is_cpu_quota:
        # Under a CPU quota cores cannot be pinned, and additional threads would be throttled.
        # Spinning at a barrier costs quota too; 5 ms is what vLLM itself sets for bound threads.
        threads = max(1, hardware.num_cpus // (num_engines * spec.accelerators_per_node))
        return {_BINDING_VARIABLE: "nobind", "OMP_NUM_THREADS": str(threads), "KMP_BLOCKTIME": "5"}
    num_ranks = num_engines * spec.accelerators_per_node
    num_cores = len(hardware.core_ids)
    if num_ranks > num_cores:
        raise CapacityError(
            f"the engines of this node ({num_engines}) need {num_ranks} cores, one per rank; the node has {num_cores}",
            hint="use fewer engines on this node",
        )
    # After the loss of another node, this node may have more engines than planned. Then engines share cores.
    first_rank = engine_index % num_engines * spec.accelerators_per_node
    cores_by_rank = []
    for rank in range(first_rank, first_rank + spec.accelerators_per_node):
        cores = hardware.core_ids[rank * num_cores // num_ranks : (rank + 1) * num_cores // num_ranks]
        cores_by_rank.append(",".join(map(str, cores)))
    return {_BINDING_VARIABLE: "|".join(cores_by_rank)}
