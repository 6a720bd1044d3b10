import os
from types import SimpleNamespace

import pytest

from peagle.engine.spec import EngineSpec
from pipelines.cluster.node import start_vllm


@pytest.mark.parametrize(
    ("set_by_user", "max_num_seqs", "expected"), [(None, 8, "0"), (None, 7, None), ("1", 8, "1"), ("0", 1, "0")]
)
def test_openmp_variables_of_an_engine(monkeypatch, target, set_by_user, max_num_seqs, expected):
    monkeypatch.setenv("KMP_USE_YIELD", set_by_user or "")  # so that monkeypatch also undoes what the code sets
    if set_by_user is None:
        monkeypatch.delenv("KMP_USE_YIELD")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray sets it
    environments = []
    monkeypatch.setattr("pipelines.cluster.node.start_engine", lambda *_, **__: environments.append(dict(os.environ)))
    start_vllm(EngineSpec(model=str(target), max_num_seqs=max_num_seqs), engine_index=0, num_engines_on_node=1)
    (variables,) = environments
    assert variables.get("KMP_USE_YIELD") == expected
    assert "OMP_NUM_THREADS" not in variables


def test_ray_sets_omp_num_threads(monkeypatch):
    """If this fails, `set_threads` no longer needs to undo it."""
    from ray._private import utils
    from ray._private.worker import WORKER_MODE

    monkeypatch.setattr(os, "environ", {})
    context = SimpleNamespace(worker=SimpleNamespace(mode=WORKER_MODE), get_assigned_resources=lambda: {"CPU": 2.0})
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    assert utils.set_omp_num_threads_if_unset()
    assert os.environ == {"OMP_NUM_THREADS": "2"}
