import os
from types import SimpleNamespace

import pytest

from peagle.engine.spec import EngineSpec
from pipelines.online.replica import server


@pytest.mark.parametrize(("set_by_user", "max_num_seqs", "expected"), [(None, 8, "0"), (None, 7, None), ("1", 8, "1")])
def test_threads_of_large_engines_do_not_yield(monkeypatch, set_by_user, max_num_seqs, expected):
    """A replica with many sequences sets KMP_USE_YIELD=0, unless the user set it, and drops Ray's OMP_NUM_THREADS."""

    class Replica(server.PeagleServer):
        def __init__(self):
            self._account, self._is_fake = SimpleNamespace(), True

        def __del__(self):
            pass

    for name, value in (("KMP_USE_YIELD", set_by_user), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value or "")  # set first, so that monkeypatch also undoes what the replica sets
    if set_by_user is None:
        monkeypatch.delenv("KMP_USE_YIELD")
    monkeypatch.setattr(server, "claim_slot", lambda app_id: 1)
    monkeypatch.setattr(server, "set_environment", lambda *_, **__: None)  # would set this machine's values
    callback = SimpleNamespace(ctx=SimpleNamespace(run_init_node=True))
    monkeypatch.setattr(
        server,
        "make_llm_config",
        lambda *_, **__: SimpleNamespace(variables=dict(os.environ), get_or_create_callback=lambda: callback),
    )
    job = SimpleNamespace(
        spec=EngineSpec(model="m", max_num_seqs=max_num_seqs), app_id="a",
        placement=SimpleNamespace(num_engines_on_node=1),
    )  # fmt: skip
    variables = Replica()._local_config(job).variables
    assert variables.get("KMP_USE_YIELD") == expected
    assert "OMP_NUM_THREADS" not in variables
