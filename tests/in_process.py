"""An endpoint in this process: everything except Ray Serve is real, and the engine is the fake engine.

The endpoint requires API keys, so that their limits apply, and measures the lag of its event loop.
"""

import asyncio
import contextlib
import math
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

from peagle import hardware
from peagle.economics.ledger import RequestReader
from peagle.economics.prices import Price
from peagle.economics.usage import EngineFacts
from pipelines.cluster.placement import Neighbours, Placement
from pipelines.online import ingress as ingress_module
from pipelines.online.batches.settings import BatchModel, BatchSettings
from pipelines.online.config import ServedModelOptions
from pipelines.online.gateway.admission import ServedModel
from pipelines.online.gateway.gate import GateSettings
from pipelines.online.gateway.keys import new_key, write_keys
from pipelines.online.replica.account import EngineAccount
from pipelines.online.replica.fake import FakeServeEngine
from pipelines.online.replica.relay import relay
from pipelines.online.wire import Context

CARD = {"id": "m", "object": "model", "peagle": {"max_replicas": 1, "max_requests_per_replica": 8}}
_STATES = ("num_running_replicas", "num_starting_replicas", "num_stopping_replicas")
_TICK_S = 0.002


class FakeDeploymentHandle:
    """A fake of Ray Serve's deployment handle, which calls the engine directly."""

    deployment_name = "m"

    def __init__(self, engine, account):
        self.chat, self.completions = _Method(engine.chat, account), _Method(engine.completions, account)

    def options(self, **_):
        return self


class _Method:
    def __init__(self, answer, account):
        self._answer, self._account = answer, account

    def remote(self, request, info):
        return _Response(self._parts(request, info))

    async def _parts(self, request, info):
        def begin():
            context = Context.of(info.headers)
            return self._account.begin(Context(request_id=context.request_id, key=context.key))

        async for part in relay(
            _in_lists(self._answer(request)), begin, shown_usage=Context.of(info.headers).shown_usage
        ):
            yield part


class _Response:
    """A fake of Ray's streaming response."""

    def __init__(self, parts):
        self._parts = parts

    def __aiter__(self):
        return self._parts

    def cancel(self):
        pass


async def _in_lists(parts):
    """Yield each event wrapped in a list, because Ray yields lists of events."""
    async for part in parts:
        yield [part] if isinstance(part, str) else part


class NeverEndingRunner:
    """A batch runner whose checks never end, so that batches wait forever."""

    def check(self, path, rules):
        return self

    def poll(self):
        return None

    def kill(self):
        pass


class Served:
    """A running endpoint. `keys` has the API keys by name."""

    def __init__(self, url, keys, ledger):
        self.url, self.keys, self._ledger = url, keys, ledger
        self._lag_s = 0.0

    def client(self, name, **options):
        """Return an HTTP client that sends the key with this name."""
        headers = {"authorization": f"Bearer {self.keys[name]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)

    def answered(self):
        """Return the requests that an engine answered since the last call, from the ledger."""
        return RequestReader(self._ledger).new()

    @contextlib.contextmanager
    def lag(self):
        """Measure the longest lag of the event loop. The yielded function returns it in seconds."""
        self._lag_s = 0.0
        yield lambda: self._lag_s

    async def watch(self):
        """Measure the lag forever, in the endpoint's event loop."""
        while True:
            due_at = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._lag_s = max(self._lag_s, time.perf_counter() - due_at)


@contextlib.contextmanager
def serve_in_process(folder, limits, *, max_model_len=256, **settings):
    """Run the endpoint.

    Args:
        limits: limits of each key, by its name.
        settings: fields of `GateSettings`.
    """
    model = ServedModel(name="m", max_model_len=max_model_len)
    secrets = {name: new_key(name, **key_limits) for name, key_limits in limits.items()}
    write_keys(folder / "keys.json", [record for _, record in secrets.values()])
    price = Price.fixed(usd_per_hour=1, device="vcpu", num_devices=2)
    facts = EngineFacts(model="m", drafter=None, num_devices=1, device="vcpu", usd_per_device_s=price.usd_per_device_s)
    account = EngineAccount(folder / "ledger", facts, heartbeat_s=300)
    settings = {"refusals_per_s": math.inf, **settings}
    settings = GateSettings(models=(model,), ledger=folder / "ledger", key_file=folder / "keys.json", **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ingress_module, "Runner", NeverEndingRunner)
        patch.setattr(ingress_module, "replica_counts", lambda _: {"m": dict.fromkeys(_STATES, 1)})
        config = SimpleNamespace(model_id="m", engine_kwargs={"max_model_len": max_model_len})
        engine = FakeServeEngine(ServedModelOptions(engine="fake"), config)
        handles, batches = {"m": FakeDeploymentHandle(engine, account)}, _batches(folder, model)
        ingress = ingress_module.PeagleIngress(handles, {"m": CARD}, settings=settings, price=price, batches=batches)
        app = ingress_module.make_app(settings)
        for name, route in ingress_module._ROUTES.items():
            route(app)(getattr(ingress, name))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
        served = Served(None, {name: key for name, (key, _) in secrets.items()}, folder / "ledger")
        app.router.add_event_handler("startup", engine.start)
        app.router.add_event_handler("startup", lambda: _start_task(server, served.watch()))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        served.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield served
        server.should_exit = True
        thread.join()
        ingress.batches.close()
        account.end()


def _start_task(server, coroutine):
    server.watching = asyncio.ensure_future(coroutine)  # a reference, so that the task is not garbage-collected


def _batches(folder, model):
    placement = Placement(num_cpus=1, num_gpus=0, num_devices=1, device="vcpu", num_engines_on_node=1)
    neighbours = Neighbours(slot_group="test", hardware=hardware.detect(), placement=placement)
    batch_model = BatchModel(model=model, config={}, neighbours=neighbours)
    return BatchSettings(
        folder=str(folder / "batches"), models={"m": batch_model}, max_concurrent=1, max_output_tokens=None,
        ledger=folder / "ledger",
    )  # fmt: skip
