"""The work of an engine actor on its node: claim a slot, fetch the model, start vLLM or join another node's engine."""

import contextlib
import fcntl
import os
import shutil
import sys
import threading
import time
from pathlib import Path

from peagle import hardware
from peagle.catalog.local import local_spec
from peagle.engine.arguments import NodeRank
from peagle.engine.compile_cache import note_compiled
from peagle.engine.spec import EngineSpec
from peagle.engine.vllm import VllmEngine, follow_engine, start_engine
from peagle.errors import CapacityError
from peagle.private import SECRET_MODE, temporary_folder

_MAX_SLOTS = 1024
# With at least this many concurrent requests, OpenMP threads do not yield. On 2 cores, yielding was usually faster at
# up to 4 requests, and slower at 16.
_MIN_SEQS_WITHOUT_YIELD = 8


def claim_slot(slot_group: str) -> int:
    """Claim the smallest free slot number of a run or an endpoint on this node.

    Engines on a node divide its cores by slot. The claim is a file lock, which the kernel releases when the process
    exits, so a restarted engine gets the slot of the crashed engine.
    """
    folder = temporary_folder(f"slots-{slot_group}")
    for slot in range(_MAX_SLOTS):
        descriptor = os.open(folder / f"slot-{slot}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, SECRET_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            return slot  # the descriptor stays open until the process ends
    raise CapacityError(f"more than {_MAX_SLOTS} engines of one run on one node")


def redirect_output(log: Path) -> None:
    """Redirect the output of this process and its children to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def rotate_log_forever(log: Path, *, max_bytes: int = 64 << 20, every_s: float = 10.0) -> None:
    """Start a thread that moves a log to `LOG.1` whenever it is too large, until this process ends.

    The log is copied and truncated, so writers keep their descriptors, which must be in append mode.
    """

    def watch() -> None:
        while True:
            time.sleep(every_s)
            with contextlib.suppress(OSError):
                if log.stat().st_size > max_bytes:
                    shutil.copyfile(log, log.with_name(f"{log.name}.1"))
                    os.truncate(log, 0)

    threading.Thread(target=watch, daemon=True).start()


def openmp_variables(spec: EngineSpec) -> dict[str, str]:
    """Return variables for a CPU engine that shares its cores with Ray and a driver."""
    # Intel's OpenMP yields the core while it waits for its other threads, and a busy process returns the core late
    # (benchmarks/bulk/OVERHEAD.md).
    return {"KMP_USE_YIELD": "0"} if spec.max_num_seqs >= _MIN_SEQS_WITHOUT_YIELD else {}


def set_threads(spec: EngineSpec) -> None:
    """Let the next engine of this Ray process use all cores of its slot."""
    os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the logical CPUs of the actor
    for name, value in openmp_variables(spec).items():
        os.environ.setdefault(name, value)


def start_vllm(
    spec: EngineSpec, *, engine_index: int, num_engines_on_node: int, node_rank: NodeRank | None = None
) -> VllmEngine:
    """Start an engine on this node.

    Args:
        node_rank: rank of the leader, for an engine on several nodes.

    Raises:
        EngineError: vLLM failed to start.
        PeagleError: the node cannot run the engine, or the model is not available here.
    """
    set_threads(spec)
    detected = hardware.detect()
    engine = start_engine(
        local_spec(spec),
        detected,
        engine_index=engine_index,
        num_engines_on_node=num_engines_on_node,
        node_rank=node_rank,
    )
    note_compiled(spec, os.environ)
    return engine


def start_only_engine(spec: EngineSpec, _: hardware.Hardware) -> VllmEngine:
    """Start the only engine on this node. Raises like `start_vllm`."""
    return start_vllm(spec, engine_index=0, num_engines_on_node=1)


def run_follower_ranks(spec: EngineSpec, *, engine_index: int, num_engines_on_node: int, node_rank: NodeRank) -> None:
    """Run this node's ranks of an engine that another node leads, until they end. Raises like `start_vllm`."""
    set_threads(spec)
    follow_engine(
        local_spec(spec),
        hardware.detect(),
        engine_index=engine_index,
        num_engines_on_node=num_engines_on_node,
        node_rank=node_rank,
    )
