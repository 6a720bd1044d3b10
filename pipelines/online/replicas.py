"""How many engines each model has now, as Ray Serve's controller says.

It asks through Serve's public `status()`, which is a call to another process: not for an event loop.
"""

from collections.abc import Mapping
from typing import Any

_STARTING = ("STARTING", "UPDATING", "RECOVERING")
_STOPPING = ("STOPPING", "PENDING_MIGRATION")


def replica_counts(deployments: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """By model, what the replicas of its deployment do.

    Args:
        deployments: models to the names of their deployments, in the application of the replica that asks.
    """
    from ray import serve

    app_name = serve.get_replica_context().app_name
    application = serve.status().applications.get(app_name)
    states = {name: one.replica_states for name, one in application.deployments.items()} if application else {}
    return {model: count_states(states.get(name, {})) for model, name in deployments.items()}


def count_states(states: Mapping[Any, int]) -> dict[str, int]:
    """Serve's states put together into three."""
    numbers = {str(getattr(state, "value", state)): number for state, number in states.items()}
    return {
        "num_running_replicas": numbers.get("RUNNING", 0),
        "num_starting_replicas": sum(numbers.get(state, 0) for state in _STARTING),
        "num_stopping_replicas": sum(numbers.get(state, 0) for state in _STOPPING),
    }
