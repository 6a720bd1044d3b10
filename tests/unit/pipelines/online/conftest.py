"""An engine's account, and an event loop for each `async` test."""

import asyncio
import inspect

import pytest

from peagle.economics.usage import EngineFacts
from pipelines.online.replica.account import EngineAccount


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def engine_account(tmp_path, clock):
    engine = EngineFacts(model="m", drafter="head", num_devices=2, device="vcpu", usd_per_device_s=0.01)
    account = EngineAccount(tmp_path / "ledger", engine, heartbeat_s=300, monotonic=clock)
    yield account
    account.end()
