import pytest

from pipelines.online.gateway.outgoing import Load, describe_load
from pipelines.online.ingress import count_states

CARD = {"max_requests_per_replica": 9, "max_replicas": 4}


def replicas(running, starting=0):
    return {"num_running_replicas": running, "num_starting_replicas": starting, "num_stopping_replicas": 0}


def test_a_request_counts_until_it_is_answered_whatever_the_answer():
    load = Load()
    with load.request("m"), load.request("m"):
        assert load.under_way("m") == 2
    with pytest.raises(ValueError, match="boom"), load.request("m"):
        raise ValueError("boom")
    assert load.under_way("m") == load.under_way("other") == 0


@pytest.mark.parametrize(("running", "under_way", "waiting"), [(2, 25, 7), (2, 18, 0), (0, 3, 3), (1, 0, 0)])
def test_what_engines_cannot_take_waits(running, under_way, waiting):
    load = describe_load(CARD, replicas(running, starting=1), under_way)
    assert load["num_requests_waiting"] == waiting
    assert load["num_requests_under_way"] == under_way
    assert (load["num_running_replicas"], load["num_starting_replicas"], load["max_replicas"]) == (running, 1, 4)


def test_serves_states_become_three():
    from ray.serve._private.common import ReplicaState

    states = {ReplicaState.RUNNING: 2, ReplicaState.STARTING: 1, ReplicaState.RECOVERING: 1, ReplicaState.STOPPING: 3}
    assert list(count_states(states).values()) == [2, 2, 3]
    assert list(count_states({}).values()) == [0, 0, 0]
