import multiprocessing
import multiprocessing.connection
import os
import signal
import time

import psutil
import pytest

from peagle.engine import vllm_plugin
from peagle.errors import ConfigError


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
