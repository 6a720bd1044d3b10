"""How many requests an engine should have, how many it may have, how many may wait, and how often it sends: from its
slots and its cores.

Pure arithmetic on an engine's spec. It knows nothing of Ray Serve's names (`deployment.py`) or of measured load.
"""

import math
from dataclasses import dataclass

from peagle.engine.arguments import max_num_batched_tokens, slots_per_request
from peagle.engine.spec import EngineSpec
from peagle.hardware import Hardware
from pipelines.batch.placing import Placement

# A piece of a stream takes about two milliseconds of a core between the engine and the client (`coalesce.py`): 4 % of
# the cores that an engine shares with that on CPUs, most of one core beside an accelerator.
_PIECES_PER_CORE_S, _PIECES_PER_S = 20, 400


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """Requests of one model.

    Attributes:
        target: on each engine on average; above it another one is started.
        admitted: on one engine at most; the others wait at the ingress, where any engine can take them.
        queued: waiting at the ingress at most; the others get 503.
    """

    target: float
    admitted: int
    queued: int


def request_counts(
    spec: EngineSpec,
    hardware: Hardware,
    *,
    max_replicas: int,
    target: float | None = None,
    queued: int | None = None,
) -> RequestCounts:
    """The counts for an engine; `target` and `queued` are a user's own.

    An engine is given somewhat more than it decodes at once (`requests_in_flight`). As many as all engines
    decode at once may wait, so that one who waits has about one request's time before it.
    """
    slots = decode_slots(spec, hardware)
    return RequestCounts(
        target=target or target_ongoing_requests(slots),
        admitted=requests_in_flight(slots),
        queued=slots * max_replicas if queued is None else queued,
    )


def pieces_per_s(placement: Placement) -> float:
    """Pieces of streams that an engine sends in a second at most."""
    return _PIECES_PER_CORE_S * placement.num_devices if placement.device == "vcpu" else _PIECES_PER_S


def requests_in_flight(slots: int) -> int:
    """Requests to give an engine that decodes so many at once: an eighth more, one at least.

    A finished request is then replaced in the next step, without a round trip to whoever holds the others.

    >>> [requests_in_flight(slots) for slots in (1, 8, 256)]
    [2, 9, 288]
    """
    return slots + max(1, slots // 8)


def decode_slots(spec: EngineSpec, hardware: Hardware) -> int:
    """Requests that an engine can decode in one step.

    At most `max_num_seqs`; fewer where the token slots of a step do not reach. A decoding request takes 2K of them with
    P-EAGLE, 1 + K with EAGLE-3 and one without a drafter (`peagle.engine.arguments`), so K decides how many fit. When
    peagle sizes the step itself, all do.

    Example: max_num_seqs 256, K = 7 with P-EAGLE and max_num_batched_tokens 2048: 2048 // 14 = 146 of the 256.
    """
    tokens = spec.max_num_batched_tokens or max_num_batched_tokens(spec, hardware)
    return max(1, min(spec.max_num_seqs, tokens // slots_per_request(spec.drafter)))


def target_ongoing_requests(slots: int) -> float:
    """The mean number of requests under way at which an engine of so many slots is full.

    Requests come at random, so with a mean of t under way their number varies with a standard deviation of sqrt(t)
    (Poisson). The mean may be so high that it and one deviation still find a slot:

        t + sqrt(t) = slots,  so  t = slots + 1/2 - sqrt(slots + 1/4)

    Examples: 8 slots give 8.5 - sqrt(8.25) = 5.63; 256 give 256.5 - sqrt(256.25) = 240.5; one gives 0.38.
    """
    return slots + 0.5 - math.sqrt(slots + 0.25)
