"""The node's side of an engine actor: its slot, its model, starting vLLM.

Or following another node's.

A run's driver may sit on another machine, so nothing that depends on the node is decided there.
"""

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
from peagle.engine.spec import EngineSpec
from peagle.engine.vllm import VllmEngine, follow_engine, start_engine
from peagle.errors import CapacityError
from peagle.private import SECRET_MODE, temporary_folder

_MAX_SLOTS = 1024
# With 4 requests at once and fewer an engine on 2 cores was mostly faster with yields, with 16 without.
_MANY_SEQS = 8
_YIELD = "KMP_USE_YIELD"


def claim_slot(slot_group: str) -> int:
    """Claim the smallest slot number free on this node under this name.

    The name is a run's, or an endpoint's.

    Engines that share a node divide its cores by it. The claim is a file lock, which the kernel gives back when the
    process ends, however it ends; so a restarted engine takes the place of the one that died.
    """
    folder = temporary_folder(f"slots-{slot_group}")
    for slot in range(_MAX_SLOTS):
        descriptor = os.open(folder / f"slot-{slot}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, SECRET_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            return slot  # the descriptor stays open as long as the process lives
    raise CapacityError(f"more than {_MAX_SLOTS} engines of one run on one node")


def redirect_output(log: Path) -> None:
    """Send this process's and its children's output to a file.

    Not to whoever started it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def keep_short(log: Path, *, most_bytes: int = 64 << 20, every_s: float = 10.0) -> None:
    """Move what a growing log has to `LOG.1` whenever it is too long, until this process ends.

    Its writers keep their descriptor, which must append.
    """

    def watch() -> None:
        while True:
            time.sleep(every_s)
            with contextlib.suppress(OSError):
                if log.stat().st_size > most_bytes:
                    shutil.copyfile(log, log.with_name(f"{log.name}.1"))
                    os.truncate(log, 0)

    threading.Thread(target=watch, daemon=True).start()


def beside_ray(spec: EngineSpec) -> dict[str, str]:
    """Variables for a CPU engine beside Ray and a driver on its cores.

    Variables that are set already stay.

    Intel's OpenMP yields the core while it waits for its other threads, and hardly gets it back from a process that
    computes: docs/bulk.md, "What it costs".
    """
    return {} if spec.max_num_seqs < _MANY_SEQS or _YIELD in os.environ else {_YIELD: "0"}


def set_threads(spec: EngineSpec) -> None:
    """Have the next engine of this Ray process compute on the cores it is given."""
    os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the actor's logical CPUs; an engine's cores are bound
    os.environ |= beside_ray(spec)


def start_vllm(
    spec: EngineSpec, *, engine_index: int, num_engines_on_node: int, node_rank: NodeRank | None = None
) -> VllmEngine:
    """Start the engine that `spec` describes on this node.

    Args:
        node_rank: the leader's, of an engine on several nodes.

    Raises:
        EngineError: vLLM does not start.
        PeagleError: the node cannot run it, or the model is not to be had here.
    """
    return start_engine(
        _prepared(spec),
        hardware.detect(),
        engine_index=engine_index,
        num_engines_on_node=num_engines_on_node,
        node_rank=node_rank,
    )


def start_alone(spec: EngineSpec, _: hardware.Hardware) -> VllmEngine:
    """Start the only engine on this node; errors as `start_vllm`."""
    return start_vllm(spec, engine_index=0, num_engines_on_node=1)


def follow_vllm(spec: EngineSpec, *, engine_index: int, num_engines_on_node: int, node_rank: NodeRank) -> None:
    """Compute this node's ranks of an engine that another node leads, until they end.

    Raises:
        EngineError, PeagleError: as `start_vllm`.
    """
    follow_engine(
        _prepared(spec),
        hardware.detect(),
        engine_index=engine_index,
        num_engines_on_node=num_engines_on_node,
        node_rank=node_rank,
    )


def _prepared(spec: EngineSpec) -> EngineSpec:
    set_threads(spec)
    return local_spec(spec)
