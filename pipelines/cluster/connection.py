"""The connection of a command to Ray.

A remote cluster is joined immediately, because decisions depend on its nodes. A local cluster is only started when
engines need it. While connected, standard error is redirected to a file, because Ray and vLLM write to it.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from peagle.quiet import QuietStderr
from pipelines.cluster import ray
from pipelines.cluster.startable import require_startable

_IF_RAY_DIES = "Units in progress are lost, committed ones are saved. It is safe to continue with the same command"


class Connection:
    """A command's connection to a Ray cluster, which may not be open yet.

    Attributes:
        is_remote: whether RAY_ADDRESS names the cluster; otherwise it is local.
    """

    def __init__(self) -> None:
        self.is_remote = ray.is_remote()
        self._is_connected = False
        self._stack = contextlib.ExitStack()
        self._quiet = self._stack.enter_context(QuietStderr())

    def prepare(self) -> None:
        """Join a remote cluster, or check that a local one can start. Raises like `ray.ray_cluster`."""
        if self.is_remote:
            self.start()
        else:
            require_startable()

    def start(self) -> None:
        """Join or start the cluster, unless it is connected. Raises like `ray.ray_cluster`."""
        if not self._is_connected:
            self._stack.enter_context(ray.ray_cluster(if_lost=_IF_RAY_DIES))
            self._stack.callback(ray.release_nodes)
            self._is_connected = True

    def log_to(self, path: Path) -> None:
        """Redirect standard error to this file, which also receives the earlier output."""
        self._quiet.move_to(path)

    def close(self) -> None:
        """Leave the cluster, stop it if this command started it, and restore standard error."""
        self._stack.close()


@contextlib.contextmanager
def connection() -> Iterator[Connection]:
    """Yield a connection, and close it at the end."""
    with contextlib.closing(Connection()) as connected:
        yield connected
