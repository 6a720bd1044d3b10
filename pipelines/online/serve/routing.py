"""Route requests to the engine that has cached the beginning of their prompt, unless that engine is too busy.

Ray's `PrefixCacheAffinityRouter` (2.60) loses requests without text (token ids, an empty message) by a division by
zero, and calls an actor several times per request. This router keeps its state in the routing process.
"""

import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from ray.serve.request_router import LocalityMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

_BLOCK_CHARS = 128
_MAX_CHARS = 64 * 1024  # per prompt; later text is ignored
_MIN_SHARE = 0.1  # share of a prompt's blocks that a preferred engine must have cached


class PrefixRouter(LocalityMixin, RequestRouter):  # type: ignore[misc]  # Ray's classes are untyped
    """Route requests with the same prefix to one engine, and others to the less busy of two random engines."""

    def initialize_state(self, *, max_ahead: int, max_blocks: int) -> None:
        """Set the deployment's options. Called by Serve.

        Args:
            max_ahead: how many more requests an engine with the prefix may have than the least busy engine.
            max_blocks: number of prompt blocks to remember per engine.
        """
        self._max_ahead = max_ahead
        self._max_blocks = max_blocks
        self._cached_blocks: dict[ReplicaID, OrderedDict[int, None]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return engines to try, in groups.

        Serve takes the least busy engine of a group if that has room, else tries the next group.
        """
        allowed = self.apply_locality_routing(pending_request)
        candidates = [replica for replica in candidate_replicas if replica.replica_id in allowed]
        if not candidates:
            return []
        any_two = random.sample(candidates, min(2, len(candidates)))
        with_prefix = self._with_prefix(candidates, _blocks_of(pending_request))
        return [with_prefix, any_two] if with_prefix else [any_two]

    def _with_prefix(self, candidates: list[RunningReplica], blocks: list[int]) -> list[RunningReplica]:
        """Return the engines with the longest cached prefix of `blocks`, except busy ones; none if it is too short."""
        matched = [self._num_cached(replica.replica_id, blocks) for replica in candidates]
        longest = max(matched)
        if not blocks or longest < _MIN_SHARE * len(blocks):
            return []
        # An engine's queue length is unknown if it had no request for ten seconds.
        lengths = [self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in candidates]
        ceiling = min(lengths) + self._max_ahead
        return [
            replica
            for replica, num_matched, length in zip(candidates, matched, lengths, strict=True)
            if num_matched == longest and length <= ceiling
        ]

    def _num_cached(self, replica_id: ReplicaID, blocks: list[int]) -> int:
        cached_blocks: Mapping[int, None] = self._cached_blocks.get(replica_id, {})
        return next((number for number, block in enumerate(blocks) if block not in cached_blocks), len(blocks))

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember that this engine has cached the prompt."""
        if replica_id not in self.curr_replicas:
            return
        cached_blocks = self._cached_blocks.setdefault(replica_id, OrderedDict())
        # In reverse, so that a prompt's last blocks are evicted first: they are useless without the earlier ones.
        for block in reversed(_blocks_of(pending_request)):
            cached_blocks[block] = None
            cached_blocks.move_to_end(block)
        while len(cached_blocks) > self._max_blocks:
            cached_blocks.popitem(last=False)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._cached_blocks = {
            replica: blocks for replica, blocks in self._cached_blocks.items() if replica in self.curr_replicas
        }

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._cached_blocks.pop(replica_id, None)


def _blocks_of(request: PendingRequest | None) -> list[int]:
    """Return a hash for each whole block of the prompt, including all blocks before it and the cache salt."""
    prompt, salt = _prompt_of(request)
    pieces, num_chars = [], 0
    for piece in _texts(prompt):  # only up to a maximum length, since all streams wait for this loop
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars >= _MAX_CHARS:
            break
    text = "".join(pieces)[:_MAX_CHARS]
    blocks: list[int] = []
    for start in range(0, len(text) - _BLOCK_CHARS + 1, _BLOCK_CHARS):
        blocks.append(hash((blocks[-1] if blocks else salt, text[start : start + _BLOCK_CHARS])))
    return blocks


def _prompt_of(request: PendingRequest | None) -> tuple[Any, str | None]:
    for argument in request.args if request is not None else ():
        for field in ("messages", "prompt"):
            if (prompt := getattr(argument, field, None)) is not None:
                return prompt, getattr(argument, "cache_salt", None)
    return "", None


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a prompt: strings, token ids, lists of either, or messages with their parts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple) and value and isinstance(value[0], int):
        yield " ".join(map(str, value[: _MAX_CHARS // 2])) + " "
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
