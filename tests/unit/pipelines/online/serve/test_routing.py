"""Tests of how the router chooses an engine for a request."""

import inspect
import time
from types import SimpleNamespace

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from pipelines.online.serve.routing import PrefixRouter

DEPLOYMENT = DeploymentID(name="m", app_name="peagle")
LONG_PROMPT = "def add(a, b):\n    return a + b\n" * 20


class RouterWithFakeEngines(PrefixRouter):
    """The router with fake engines, which have a name and a number of queued requests."""

    def __init__(self, max_ahead=2, max_blocks=100):
        super().__init__(
            deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
        )
        self.initialize_state(max_ahead=max_ahead, max_blocks=max_blocks)

    def set_engines(self, **lengths):
        self.update_replicas([replica(name) for name in lengths])
        for name, length in lengths.items():
            self.on_new_queue_len_info(replica_id(name), length)

    async def _probe_queue_lens(self, replicas, backoff_index):
        return []


def replica_id(name):
    return ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)


def replica(name):
    return SimpleNamespace(replica_id=replica_id(name), node_id="n", availability_zone=None, multiplexed_model_ids=())


def request(**body):
    metadata = RequestMetadata(request_id="r", internal_request_id="r")
    return PendingRequest(args=[SimpleNamespace(**body), None], kwargs={}, metadata=metadata)


async def make_router():
    """Return a router with two engines, a and b. It needs a running event loop."""
    router = RouterWithFakeEngines()
    router.set_engines(a=0, b=0)
    return router


async def first_group(router, routed_request):
    groups = await router.choose_replicas(list(router.curr_replicas.values()), routed_request)
    return {group.replica_id.unique_id for group in groups[0]}


@pytest.mark.parametrize(
    ("first_body", "second_body"),
    [
        ({"prompt": LONG_PROMPT}, {"prompt": LONG_PROMPT + "def sub(a, b):"}),
        ({"prompt": list(range(500))}, {"prompt": [*range(500), 7]}),
        ({"prompt": [list(range(500))]}, {"prompt": [list(range(500)), [1]]}),
        (
            {"messages": [{"role": "user", "content": LONG_PROMPT}]},
            {"messages": [{"role": "user", "content": LONG_PROMPT}, {"role": "assistant", "content": "yes"}]},
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG_PROMPT}]}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG_PROMPT + "and"}]}]},
        ),
    ],
)
async def test_same_prefix_goes_to_the_same_engine(first_body, second_body):
    router = await make_router()
    router.on_request_routed(request(**first_body), replica_id("b"), None)
    assert await first_group(router, request(**second_body)) == {"b"}
    assert await first_group(router, request(prompt="x" * 1000)) == {"a", "b"}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [1, 2, 3]},
        {"prompt": None},
        {"messages": []},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": object()}]},
        {},
    ],
)
async def test_unknown_prompt_goes_to_any_engine(body):
    router = await make_router()
    router.on_request_routed(request(**body), replica_id("a"), None)
    assert await first_group(router, request(**body)) == {"a", "b"}


async def test_engine_that_is_too_far_ahead_gets_no_prefix_matches():
    router = await make_router()
    long_request = request(prompt=LONG_PROMPT)
    router.on_request_routed(long_request, replica_id("b"), None)
    router.set_engines(a=1, b=3)
    assert await first_group(router, long_request) == {"b"}
    router.set_engines(a=1, b=4)
    assert await first_group(router, long_request) == {"a", "b"}


async def test_second_choice_is_two_random_engines():
    router = await make_router()
    router.set_engines(a=0, b=0, c=0)
    router.on_request_routed(request(prompt=LONG_PROMPT), replica_id("c"), None)
    matching, others = await router.choose_replicas(list(router.curr_replicas.values()), request(prompt=LONG_PROMPT))
    assert [item.replica_id.unique_id for item in matching] == ["c"]
    assert len(others) == 2


async def test_removed_engines_are_forgotten():
    router = await make_router()
    router.on_request_routed(request(prompt=LONG_PROMPT), replica_id("b"), None)
    router.on_replica_actor_died(replica_id("b"))
    # A request is reported as routed to the crashed engine after the crash.
    router.on_request_routed(request(prompt=LONG_PROMPT), replica_id("b"), None)
    assert await first_group(router, request(prompt=LONG_PROMPT)) == {"a"}
    router.set_engines(a=0, b=0)
    assert await first_group(router, request(prompt=LONG_PROMPT)) == {"a", "b"}
    router.set_engines(c=0)
    assert await first_group(router, request(prompt=LONG_PROMPT)) == {"c"}
    router.set_engines()
    assert await router.choose_replicas([], request(prompt=LONG_PROMPT)) == []


async def test_oldest_blocks_are_evicted_from_the_end_of_a_prompt():
    router = await make_router()
    router.initialize_state(max_ahead=2, max_blocks=4)
    router.on_request_routed(request(prompt=LONG_PROMPT), replica_id("b"), None)  # more than four blocks
    assert await first_group(router, request(prompt=LONG_PROMPT)) == {"b"}
    router.on_request_routed(request(prompt="y" * 600), replica_id("b"), None)
    assert await first_group(router, request(prompt=LONG_PROMPT)) == {"a", "b"}
    assert await first_group(router, request(prompt="y" * 600)) == {"b"}


async def test_prefix_matches_respect_cache_salt():
    """Engines cache prefixes per salt, so a request with another salt gets no cache hits."""
    router = await make_router()
    router.on_request_routed(request(prompt=LONG_PROMPT, cache_salt="alice"), replica_id("b"), None)
    assert await first_group(router, request(prompt=LONG_PROMPT, cache_salt="bob")) == {"a", "b"}
    assert await first_group(router, request(prompt=LONG_PROMPT, cache_salt="alice")) == {"b"}


@pytest.mark.parametrize(
    "prompt", [[1] * 524_000, [[1] * 524_000], ["x"] * 250_000, "x" * 2**20], ids=["ids", "prompts", "texts", "text"]
)
async def test_long_prompt_is_routed_fast(prompt):
    router = await make_router()
    started_at = time.process_time()
    router.on_request_routed(request(prompt=prompt), replica_id("b"), None)
    assert await first_group(router, request(prompt=prompt)) == {"b"}
    assert time.process_time() - started_at < 0.3


def test_rays_router_still_divides_by_zero():
    """If this fails, Ray has fixed issue 64573, and Ray's router might be sufficient."""
    from ray.llm._internal.serve.routing_policies.prefix_aware import prefix_aware_router

    before, division, _ = inspect.getsource(prefix_aware_router).partition("len(matched_text) / len(input_text)")
    assert division
    assert "if not input_text" not in before
