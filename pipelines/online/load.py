"""Requests under way, by model: what the endpoint has taken and not yet answered.

A counter that the gate moves and `/v1/live` reads; both are in the one process of the ingress. It knows no HTTP.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Load:
    """The counts now."""

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def request(self, model: str) -> Iterator[None]:
        """A request of this model, until it is answered, whatever the answer."""
        self._under_way[model] += 1
        try:
            yield
        finally:
            self._under_way[model] -= 1

    def under_way(self, model: str) -> int:
        """Requests that wait for an engine or are in one."""
        return self._under_way[model]


def describe_load(card: Mapping[str, Any], replicas: Mapping[str, int], num_under_way: int) -> dict[str, int]:
    """A model's engines and requests, ready for JSON.

    Serve gives an engine so many requests and no more; the others wait at the ingress.

    Args:
        card: what the model's card says of its engines.
        replicas: as `replica_counts` has them.
    """
    in_engines = replicas["num_running_replicas"] * card["max_requests_per_replica"]
    return {
        **replicas,
        "max_replicas": card["max_replicas"],
        "num_requests_under_way": num_under_way,
        "num_requests_waiting": max(0, num_under_way - in_engines),
    }
