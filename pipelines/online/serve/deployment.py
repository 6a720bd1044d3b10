"""Ray's `LLMConfig` for an engine, with request limits and autoscaling."""

import math
from dataclasses import dataclass
from typing import Any

from peagle.economics.usage import EngineFacts
from peagle.engine.arguments import engine_args
from peagle.engine.response_parser import check_parsers
from peagle.engine.spec import EngineSpec
from peagle.engine.steps import max_num_batched_tokens, slots_per_request
from peagle.hardware import Hardware
from pipelines.cluster.placement import Placement
from pipelines.online.config import ServedModelOptions

# A piece of a stream takes about two milliseconds of a core between the engine and the client (`relay.py`). At these
# rates, all pieces take 4 % of an engine's cores on CPUs, and most of one core next to an accelerator.
_PIECES_PER_S_PER_VCPU, _PIECES_PER_S_ON_GPU = 20, 400


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """Limits for concurrent requests of one model."""

    target: float  # mean number of requests per engine above which another engine is started
    admitted: int  # maximum per engine; others wait in the ingress, from where any engine can take them
    queued: int  # maximum number of requests waiting in the ingress; others get 503


def request_counts(options: ServedModelOptions, spec: EngineSpec, hardware: Hardware) -> RequestCounts:
    """Return the configured counts for an engine, or the defaults.

    An engine gets slightly more requests than it can decode at the same time (`requests_in_flight`). The queue is as
    long as the number of requests that all engines can decode at the same time, so a request waits for about one
    request's duration.
    """
    slots = decode_slots(spec, hardware)
    return RequestCounts(
        target=options.target_ongoing_requests or target_ongoing_requests(slots),
        admitted=requests_in_flight(slots),
        queued=slots * options.max_replicas if options.max_queued_requests is None else options.max_queued_requests,
    )


def pieces_per_s(placement: Placement) -> float:
    """Return the maximum number of stream pieces that an engine sends per second."""
    return _PIECES_PER_S_PER_VCPU * placement.num_devices if placement.device == "vcpu" else _PIECES_PER_S_ON_GPU


def requests_in_flight(slots: int) -> int:
    """Return the number of requests to send to an engine with this many slots: an eighth more, at least one more.

    So a finished request is replaced in the next step, without a round trip.

    >>> [requests_in_flight(slots) for slots in (1, 8, 256)]
    [2, 9, 288]
    """
    return slots + max(1, slots // 8)


def decode_slots(spec: EngineSpec, hardware: Hardware) -> int:
    """Return the number of requests that an engine can decode in one step.

    At most `max_num_seqs`, and fewer if max_num_batched_tokens is too small. A decoding request takes 2K tokens with
    P-EAGLE, 1 + K with EAGLE-3 and one without a drafter (`peagle.engine.steps`). If peagle chooses
    max_num_batched_tokens itself, all `max_num_seqs` fit.

    Example: max_num_seqs 256, K = 7 with P-EAGLE and max_num_batched_tokens 2048: 2048 // 14 = 146 of the 256.
    """
    num_tokens = spec.max_num_batched_tokens or max_num_batched_tokens(spec, hardware)
    return max(1, min(spec.max_num_seqs, num_tokens // slots_per_request(spec.drafter)))


def target_ongoing_requests(slots: int) -> float:
    """Return the mean number of running requests at which an engine with this many slots is full.

    Requests arrive randomly, so with a mean of t the number varies with a standard deviation of sqrt(t) (Poisson). The
    mean plus one deviation should still fit:

        t + sqrt(t) = slots,  so  t = slots + 1/2 - sqrt(slots + 1/4)

    Examples: 8 slots give 8.5 - sqrt(8.25) = 5.63; 256 give 256.5 - sqrt(256.25) = 240.5; one gives 0.38.
    """
    return slots + 0.5 - math.sqrt(slots + 0.25)


@dataclass(frozen=True, kw_only=True)
class ReplicaJob:
    """Configuration of a model's replicas."""

    app_id: str  # a new id for each start of the endpoint; replicas with the same id share the cores of a node
    state: str  # shared folder of the ledger and the logs
    options: ServedModelOptions
    spec: EngineSpec  # names its models in a way that every node can resolve
    engine: EngineFacts
    placement: Placement
    counts: RequestCounts
    heartbeat_s: float = 5.0
    lends: bool = False  # rows of batches may use idle slots


def make_llm_config(job: ReplicaJob, spec: EngineSpec, hardware: Hardware) -> Any:
    """Return the `LLMConfig` of a replica on this hardware, with the job's spec as this node resolves it."""
    from ray.serve.llm import LLMConfig

    options, placement = job.options, job.placement
    arguments = engine_args(spec, hardware, num_engines_on_node=placement.num_engines_on_node)
    arguments.pop("model")
    check_parsers(options.parser_arguments)
    on_gpu = hardware.platform == "cuda"
    return LLMConfig(
        model_loading_config={"model_id": options.served_name, "model_source": spec.model},
        engine_kwargs={
            **arguments,
            **options.parser_arguments,
            **({"scheduling_policy": "priority"} if job.lends else {}),
            "enable_prompt_tokens_details": True,
            # Otherwise an engine's first constrained request would choose the backend for all others.
            "structured_outputs_config": {"backend": "xgrammar"},
            # Use the same sampling defaults as batches, not the model's generation_config.json.
            # The EOS tokens of that file apply in both cases.
            "generation_config": "vllm",
        },
        placement_group_config=None if on_gpu else {"bundles": [{"CPU": placement.num_cpus}]},
        deployment_config=deployment_config(job, on_gpu=on_gpu),
        experimental_configs={"stream_batching_interval_ms": 0},  # `relay.in_pieces` batches instead
    )


def deployment_config(job: ReplicaJob, *, on_gpu: bool) -> dict[str, Any]:
    counts, options = job.counts, job.options
    config: dict[str, Any] = {
        "max_ongoing_requests": counts.admitted,
        # -1 means unlimited to Serve, and 0 would refuse requests while engines are idle.
        "max_queued_requests": max(1, counts.queued),
        "autoscaling_config": {
            "min_replicas": options.min_replicas,
            "initial_replicas": max(1, options.min_replicas),
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": counts.target,
            "upscale_delay_s": options.upscale_delay_s,
            "downscale_delay_s": options.downscale_delay_s,
        },
        "health_check_period_s": 5.0,
        "health_check_timeout_s": 30.0,  # on a CPU, a step with long prompts can delay the reply for seconds
        "graceful_shutdown_wait_loop_s": 1.0,
        "graceful_shutdown_timeout_s": options.drain_s,
        # Ray adds this to the engine's first bundle.
        "ray_actor_options": {"num_cpus": 1 if on_gpu else 0},
    }
    if options.max_replicas > 1 and job.spec.caches_prefixes:
        config["request_router_config"] = {
            # A name, not a class, since only routing processes need to import Ray Serve.
            "request_router_class": "pipelines.online.serve.routing.PrefixRouter",
            "request_router_kwargs": {"max_ahead": max(1, counts.admitted // 4), "max_blocks": 32_768},
        }
    return config
