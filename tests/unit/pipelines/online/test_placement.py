import pytest

from peagle.errors import CapacityError
from peagle.hardware import Hardware
from pipelines.cluster.placement import on_accelerators
from pipelines.online.app import placements
from pipelines.online.config import ServeConfig


def node(num_accelerators):
    return Hardware(
        platform="cuda", memory_gib=80, free_memory_gib=80, num_cpus=32, accelerator="NVIDIA H100 80GB HBM3",
        num_accelerators=num_accelerators, compute_capability=(9, 0),
    )  # fmt: skip


def placed(num_accelerators, num_nodes=1, **keys):
    return placements(ServeConfig(**keys), node(num_accelerators), num_nodes=num_nodes)


BIG = {"name": "big", "tensor_parallel_size": 4}


def test_batch_may_wait_for_the_only_accelerator(tmp_path):
    result = placed(1, batches=tmp_path, min_replicas=0, name="m")
    assert result == {"m": on_accelerators(1)}


def test_engines_of_several_sizes_share_a_node():
    result = placed(8, models=[BIG, {"name": "small", "max_replicas": 4}])
    assert result == {"big": on_accelerators(4), "small": on_accelerators(1)}


def test_engines_must_fit_together():
    with pytest.raises(
        CapacityError, match=r"need 9 accelerators at once \(big: 1 x 4, small: 5 x 1\); 1 node.* 8 "
    ) as error:
        placed(8, models=[BIG, {"name": "small", "max_replicas": 5}])
    assert "--max-replicas" in error.value.hint
    assert placed(8, num_nodes=2, models=[BIG, {"name": "small", "max_replicas": 5}])


def test_first_engines_of_a_batch_must_fit(tmp_path):
    assert placed(2, batches=tmp_path, batch_engines="2:4")
    with pytest.raises(CapacityError, match=r"batch_engines 3: a batch of m starts with 3 engine.*do not fit"):
        placed(2, batches=tmp_path, batch_engines="3", name="m")
    assert placed(2, batches=tmp_path, batch_engines="endpoint", name="m") == {"m": on_accelerators(1)}
