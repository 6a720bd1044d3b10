import multiprocessing
import multiprocessing.connection
import os
import signal
import time

import psutil
import pytest
import torch

from peagle.engine import vllm_plugin
from peagle.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_request_has_its_value_for_each_of_its_drafts(dtype: torch.dtype) -> None:
    values = torch.tensor([0.75, 0, 3, 0.5]).to(dtype)
    output = torch.full((6,), 99, dtype=dtype)
    vllm_plugin.expand(output, values, torch.tensor([2, 3, 3, 6], dtype=torch.int32), replace_from=0, replace_to=1)
    expected = torch.tensor([0.75, 0.75, 1, 0.5, 0.5, 0.5]) if dtype.is_floating_point else torch.ones(6)
    assert torch.equal(output, expected.to(dtype))


def test_vllms_own_sampler_repeats_values_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    monkeypatch.setattr(cpu_triton_utils, "expand_kernel", cpu_triton_utils.expand_kernel)
    vllm_plugin.register()
    monkeypatch.setattr(rejection_sampler, "expand_kernel", cpu_triton_utils.expand_kernel)  # as the CPU's runner does
    top_p, ends = torch.tensor([0.9, 0.25]), torch.tensor([3, 4], dtype=torch.int32)
    expanded = rejection_sampler.expand_batch_to_tokens(top_p, ends, 4)
    assert torch.equal(expanded, torch.tensor([0.9, 0.9, 0.9, 0.25]))


def test_an_installation_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_plugin.require()
    monkeypatch.setattr(vllm_plugin, "entry_points", lambda group: ())
    with pytest.raises(ConfigError, match="no entry point 'peagle'"):
        vllm_plugin.require()


def _core(mine: multiprocessing.connection.Connection) -> None:
    vllm_plugin.end_with_starter()
    mine.send(os.getpid())
    time.sleep(600)


def _starter(mine: multiprocessing.connection.Connection) -> None:
    multiprocessing.get_context("spawn").Process(target=_core, args=(mine,)).start()
    time.sleep(600)


def test_a_core_ends_when_what_spawned_it_is_killed() -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    starter = spawn.Process(target=_starter, args=(theirs,))
    starter.start()
    assert ours.poll(60)
    core = psutil.Process(ours.recv())
    assert starter.pid is not None
    os.kill(starter.pid, signal.SIGKILL)
    starter.join()
    core.wait(20)
