"""A command's connection to Ray: joined at once, or started when engines need it.

A cluster that runs has to be looked at before anything is decided; one on this machine costs seconds that a refused or
finished run does not need. Meanwhile standard error is a file, for Ray and vLLM write to it as they like.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from peagle.quiet import QuietStderr
from pipelines.cluster import ray
from pipelines.cluster.startable import require_startable

_IF_LOST = "Units in progress are lost, committed ones are saved. The same command continues, and it is safe to run it"


class Connection:
    """The Ray cluster of one command, there or not yet.

    Attributes:
        is_remote: RAY_ADDRESS names it; else it is one on this machine.
    """

    def __init__(self) -> None:
        self.is_remote = ray.is_remote()
        self._is_up = False
        self._held = contextlib.ExitStack()
        self._quiet = self._held.enter_context(QuietStderr())

    def prepare(self) -> None:
        """Join a remote cluster; require that one can start on this machine otherwise.

        Raises:
            ConfigError, CapacityError: as `ray.ray_cluster`.
        """
        if self.is_remote:
            self.start()
        else:
            require_startable()

    def start(self) -> None:
        """Join or start the cluster, unless that is done.

        Raises:
            ConfigError, CapacityError: as `ray.ray_cluster`.
        """
        if not self._is_up:
            self._held.enter_context(ray.ray_cluster(if_lost=_IF_LOST))
            self._held.callback(ray.release_nodes)
            self._is_up = True

    def log_to(self, path: Path) -> None:
        """Collect in this file what is written to standard error, and what was until now."""
        self._quiet.move_to(path)

    def close(self) -> None:
        """Leave the cluster, or stop it where it was started here.

        Standard error is the terminal's again.
        """
        self._held.close()


@contextlib.contextmanager
def connection() -> Iterator[Connection]:
    """A connection that is closed at the end, if not before."""
    with contextlib.closing(Connection()) as connected:
        yield connected
