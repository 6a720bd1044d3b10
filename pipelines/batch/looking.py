"""Which hardware a run's engines get, which decides of its precision, its placement and its price.

It knows run directories and what a cluster says of its nodes; what engines take of them is in `placing.py`.
"""

from collections.abc import Callable

from peagle import hardware
from peagle.errors import ConfigError
from peagle.hardware import Hardware
from pipelines.batch import cluster
from pipelines.batch.config import GenerateConfig
from pipelines.batch.placing import on_accelerators
from pipelines.batch.rundir import RunDirectory


def hardware_for(
    run: RunDirectory, config: GenerateConfig, *, check: Callable[[], None], announce: Callable[[str], None]
) -> Hardware:
    """The hardware of a node that will run the engines; of a finished run that which it had, for it needs none.

    Args:
        check, announce: as of `cluster.require_capacity`, for an autoscaled cluster that has no such node yet.

    Raises:
        ConfigError: the run began on other hardware than it asks for now.
        CapacityError: no such node comes.
    """
    return _finished_on(run, config) or _look(config, check=check, announce=announce)


def _finished_on(run: RunDirectory, config: GenerateConfig) -> Hardware | None:
    """The accelerators that a finished run had: it need not wait for others to find that nothing is left to do.

    None where something may be left, or where nobody would wait: then somebody has to look at what is there.

    Raises:
        ConfigError: the run began on CPUs, so accelerators would be waited for in vain.
    """
    if config.accelerator_type is None or not run.exists:
        return None
    before = Hardware.from_dict(run.manifest()["run"]["hardware"])
    if before.platform != "cuda":
        raise ConfigError(
            f"{run} began on {before.describe()}: accelerator_type {config.accelerator_type} cannot continue it",
            hint="leave --accelerator-type out, or begin another run with another --output",
        )
    if run.plan().left(run.committed()):
        return None
    may_retry = config.retry_failed and any(usage.num_failed_rows for usage in run.usages())
    return None if may_retry else before


def _look(config: GenerateConfig, *, check: Callable[[], None], announce: Callable[[str], None]) -> Hardware:
    """The hardware of a node that will run engines: of this one, or of one of the cluster's.

    Where engines need accelerators, an autoscaled cluster is asked for them first: before they are there nothing can be
    said of them, and a run would be one on the CPUs of its head.

    Raises:
        CapacityError: they do not come.
    """
    if not cluster.is_remote():
        return hardware.detect()
    per_engine, num_nodes, kind = config.accelerators_per_engine, config.nodes_per_engine, config.accelerator_type
    if kind is not None:
        cluster.require_capacity(
            on_accelerators(per_engine, nodes_per_engine=num_nodes, accelerator_type=kind),
            config.engine_range.smallest,
            wait_s=config.cluster_wait_s,
            check=check,
            announce=announce,
        )
    return cluster.inspect(accelerators_per_engine=per_engine, nodes_per_engine=num_nodes, accelerator_type=kind)
