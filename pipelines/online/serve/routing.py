"""Route requests to the engine that has seen how their prompt begins.

While that is not too busy.

Ray's own `PrefixCacheAffinityRouter` (2.60) loses requests: a prompt without text (token ids, an empty message) divides
by zero in a task that only logs it, and the request is never routed. It also waits for an actor of its own, several
times a request, on the loop that all streams go through. So this keeps what it knows in the process that routes.
"""

import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from ray.serve.request_router import LocalityMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

_BLOCK_CHARS = 128
_MOST_CHARS = 64 * 1024  # of a prompt; what comes behind them decides nothing
_LEAST_SHARE = 0.1  # of a prompt's blocks; of fewer than these any engine is as good


class PrefixRouter(LocalityMixin, RequestRouter):  # type: ignore[misc]  # Ray's classes are untyped
    """Requests that begin alike go to one engine until it is ahead of another.

    The rest go to the idler of any two.
    """

    def initialize_state(self, *, most_ahead: int, max_blocks: int) -> None:
        """Called by Serve with the deployment's options.

        Args:
            most_ahead: requests that an engine may have more than the idlest one and still get those that begin alike.
            max_blocks: of prompts, that are remembered of each engine, the latest ones.
        """
        self._most_ahead = most_ahead
        self._max_blocks = max_blocks
        self._seen: dict[ReplicaID, OrderedDict[int, None]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Engines to try, in groups.

        Serve takes the idlest of a group if it has room, else it tries the next group.
        """
        allowed = self.apply_locality_routing(pending_request)
        candidates = [one for one in candidate_replicas if one.replica_id in allowed]
        if not candidates:
            return []
        any_two = random.sample(candidates, min(2, len(candidates)))
        alike = self._alike(candidates, _blocks_of(pending_request))
        return [alike, any_two] if alike else [any_two]

    def _alike(self, candidates: list[RunningReplica], blocks: list[int]) -> list[RunningReplica]:
        """Engines that have seen most of these blocks, and enough of them.

        They are not too far ahead of the idlest.
        """
        matched = [self._num_seen(one.replica_id, blocks) for one in candidates]
        most = max(matched)
        if not blocks or most < _LEAST_SHARE * len(blocks):
            return []
        # Unknown is what had no request for ten seconds; its next one tells how many it has.
        lengths = [self.replica_queue_len_cache.get(one.replica_id) or 0 for one in candidates]
        ceiling = min(lengths) + self._most_ahead
        paired = zip(candidates, matched, lengths, strict=True)
        return [one for one, number, length in paired if number == most and length <= ceiling]

    def _num_seen(self, replica_id: ReplicaID, blocks: list[int]) -> int:
        seen: Mapping[int, None] = self._seen.get(replica_id, {})
        return next((number for number, block in enumerate(blocks) if block not in seen), len(blocks))

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember whose cache has this prompt now."""
        if replica_id not in self.curr_replicas:
            return
        seen = self._seen.setdefault(replica_id, OrderedDict())
        # From the end, so that a prompt's last blocks are forgotten first: they mean nothing without those before.
        for block in reversed(_blocks_of(pending_request)):
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self._max_blocks:
            seen.popitem(last=False)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget engines that are gone, with their caches."""
        super().update_replicas(replicas)
        self._seen = {one: seen for one, seen in self._seen.items() if one in self.curr_replicas}

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """The same."""
        super().on_replica_actor_died(replica_id)
        self._seen.pop(replica_id, None)


def _blocks_of(request: PendingRequest | None) -> list[int]:
    """A number for each whole block of the request's prompt.

    It stands for the block and all that comes before it, and for the salt of the cache in which an engine keeps them.
    """
    prompt, salt = _prompt_of(request)
    text = _beginning(prompt)
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


def _beginning(prompt: Any) -> str:
    """The beginning of a prompt, which decides.

    All streams wait meanwhile, so no more is looked at.
    """
    pieces, num_chars = [], 0
    for piece in _texts(prompt):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars >= _MOST_CHARS:
            break
    return "".join(pieces)[:_MOST_CHARS]


def _texts(value: Any) -> Iterator[str]:
    """The texts of a prompt in any form.

    Text, token ids, several of either, messages, parts of messages.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple) and value and isinstance(value[0], int):
        yield " ".join(map(str, value[: _MOST_CHARS // 2])) + " "
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
