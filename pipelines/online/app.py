"""Build the Serve application from a configuration, for `peagle serve` and for `serve run`/`serve deploy`.

Steps: configuration -> hardware -> an engine for each model -> price -> replicas and ingress.
"""

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.catalog.targets import name_of
from peagle.economics.ledger import read_sessions
from peagle.economics.price_options import instance_has_accelerators, require_device, resolve_price
from peagle.economics.prices import Device, Price
from peagle.economics.shared_budgets import BUDGETS_NAME, read_budgets
from peagle.economics.tags import tags_to_text
from peagle.economics.usage import EngineFacts
from peagle.engine_options import ResolvedEngine, compose_fake_engine, resolve_engine
from peagle.errors import CapacityError, ConfigError, PriceError
from peagle.hardware import Hardware
from peagle.runs.scaling import EngineRange
from pipelines.batch.resolve import may_skip_compiling
from pipelines.cluster.inspection import inspect
from pipelines.cluster.placement import Placement, accelerator_placement, place
from pipelines.cluster.ray import num_nodes
from pipelines.cluster.token import require_token
from pipelines.online.batches.settings import batch_engine_range, batch_settings
from pipelines.online.batches.store import BatchStore
from pipelines.online.config import ServeConfig, ServedModelOptions
from pipelines.online.gateway.admission import ServedModel
from pipelines.online.gateway.gate import GateSettings
from pipelines.online.gateway.keys import KeyRecord, keys_from_environment, read_keys
from pipelines.online.serve.deployment import ReplicaJob, request_counts

_MACHINES_WAIT_S = 1200.0  # a machine takes minutes to start, then it downloads the image
_POLL_S = 5.0
_FAKE_CPUS = 0.05  # fake engines use almost no CPU, so many of them fit on a node
_CAPACITY_HINT = (
    "at most {} fit: the sum of --max-replicas of all models and, with --batches, of --batch-engines times "
    "--batches-at-once"
)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class EndpointModel:
    """A model of the endpoint with its resolved engine."""

    options: ServedModelOptions
    engine: ResolvedEngine
    placement: Placement

    def describe(self) -> str:
        drafter = self.engine.spec.drafter
        drafter_text = f"{self.engine.drafter.name}, K={drafter.num_speculative_tokens}" if drafter else "none"
        options = self.options
        return (
            f"{options.served_name}: {self.engine.model.name} in {self.engine.precision.describe()}; "
            f"drafter {drafter_text} ({self.engine.drafter.note}); "
            f"{options.min_replicas} to {options.max_replicas} engine(s)"
        )


def build(arguments: ServeConfig) -> Any:
    """Return the application for Serve's CLI: `import_path: pipelines.online.app:build`."""
    if arguments.tls_cert is not None:
        raise ConfigError(
            "tls_cert: an application cannot configure Serve's proxy",
            hint="set ssl_certfile and ssl_keyfile under http_options, as in deploy/serve.yaml",
        )
    require_token()
    prepare_batches(arguments)
    hardware = _wait_for_hardware(arguments)
    served = resolve(arguments, hardware, num_nodes=num_nodes(hardware), announce=print)
    return bind(arguments, hardware, served)


def _wait_for_hardware(config: ServeConfig) -> Hardware:
    """Return the hardware of a node on which engines can run.

    On Kubernetes, the application is built before machines with accelerators have started. So if the configuration
    names machines with accelerators, wait for them.
    """
    must_wait = "KUBERNETES_SERVICE_HOST" in os.environ and instance_has_accelerators(config)
    deadline = time.monotonic() + (_MACHINES_WAIT_S if must_wait else 0.0)
    while True:
        hardware = inspect()
        has_enough_accelerators = num_nodes(hardware) * hardware.num_accelerators >= num_accelerators(config)
        if has_enough_accelerators or time.monotonic() >= deadline:
            return hardware
        time.sleep(_POLL_S)


def prepare_batches(config: ServeConfig) -> None:
    if config.batches is not None:
        BatchStore(config.batches).prepare()


def resolve(
    config: ServeConfig, hardware: Hardware, *, num_nodes: int, announce: Callable[[str], None]
) -> list[EndpointModel]:
    """Resolve all models, and check that their engines fit together."""
    placement_by_name = placements(config, hardware, num_nodes=num_nodes)
    served = []
    for options in config.served:
        placement = placement_by_name[options.served_name]
        if options.engine == "fake":
            engine = compose_fake_engine(options, hardware)
        else:
            num_on_node = placement.num_engines_on_node
            engine = resolve_engine(options, hardware, num_engines_on_node=num_on_node, announce=announce)
            if hardware.platform == "cpu" and may_skip_compiling(options, engine.spec):
                engine = replace(engine, spec=replace(engine.spec, enforce_eager=True))
                announce(f"{options.served_name}: not compiling, to start sooner (--no-enforce-eager decodes faster)")
        # `resolve_engine` leaves these options out, because batches use it, too, and only support text.
        domains = tuple(options.allowed_media_domains)
        spec = replace(engine.spec, limit_mm_per_prompt=options.limit_mm_per_prompt, allowed_media_domains=domains)
        served.append(EndpointModel(options=options, engine=replace(engine, spec=spec), placement=placement))
    return served


def placements(config: ServeConfig, hardware: Hardware, *, num_nodes: int) -> dict[str, Placement]:
    """Return the placement of each model's engines, by model name.

    On CPUs, the cores are divided among the endpoint's engines and the engines of batches. Accelerators are allocated
    on demand, and a batch's engines wait for accelerators, so only the endpoint's engines must fit together.

    Raises:
        CapacityError: on CPUs, the maximum numbers of all engines do not fit together; on accelerators, the endpoint's
            engines do not fit, or those of a single batch do not.
    """
    vllm_models = _vllm_models(config)
    if hardware.platform == "cuda":
        _check_accelerators(config, vllm_models, hardware, num_nodes)
    return {
        options.served_name: _placement(
            config, options, hardware, num_nodes, sum(other.max_replicas for other in vllm_models)
        )
        for options in config.served
    }


def num_accelerators(config: ServeConfig) -> int:
    return sum(options.max_replicas * accelerators_per_engine_of(options) for options in _vllm_models(config))


def _vllm_models(config: ServeConfig) -> list[ServedModelOptions]:
    return [options for options in config.served if options.engine != "fake"]


def _placement(
    config: ServeConfig, options: ServedModelOptions, hardware: Hardware, num_nodes: int, max_replicas_of_all: int
) -> Placement:
    if options.engine == "fake":  # a fake engine is billed for one device
        device: Device = "accelerator" if hardware.platform == "cuda" else "vcpu"
        return Placement(num_cpus=_FAKE_CPUS, num_gpus=0, num_devices=1, device=device, num_engines_on_node=1)
    if hardware.platform == "cuda":
        return accelerator_placement(accelerators_per_engine_of(options))
    min_batch_engines, max_batch_engines = batch_engine_range(config)
    return place(
        hardware,
        num_engines=max_replicas_of_all + min_batch_engines,
        max_engines=max_replicas_of_all + max_batch_engines,
        accelerators_per_engine=accelerators_per_engine_of(options),
        num_nodes=num_nodes,
        fewer_engines_hint=_CAPACITY_HINT,
    )


def _check_accelerators(
    config: ServeConfig, vllm_models: list[ServedModelOptions], hardware: Hardware, num_nodes: int
) -> None:
    available = f"{num_nodes} node(s) have {hardware.num_accelerators} accelerator(s) each"
    needed = num_accelerators(config)
    if needed > num_nodes * hardware.num_accelerators:
        engines_by_model = ", ".join(
            f"{options.served_name}: {options.max_replicas} x {accelerators_per_engine_of(options)}"
            for options in vllm_models
        )
        raise CapacityError(
            f"the models' engines need {needed} accelerators at once ({engines_by_model}); {available}",
            hint="use a smaller --max-replicas, --tensor-parallel-size or --pipeline-parallel-size, or fewer models",
        )
    if config.batches is None or config.uses_idle_slots:
        return
    num_initial_engines = EngineRange.parse(config.batch_engines).smallest
    for options in vllm_models:
        if num_initial_engines > num_nodes * (hardware.num_accelerators // accelerators_per_engine_of(options)):
            raise CapacityError(
                f"batch_engines {config.batch_engines}: a batch of {options.served_name} starts with"
                f" {num_initial_engines} engine(s) of {accelerators_per_engine_of(options)} accelerator(s), which"
                f" do not fit; {available}",
                hint="use a smaller --batch-engines",
            )


def accelerators_per_engine_of(options: ServedModelOptions) -> int:
    return options.tensor_parallel_size * options.pipeline_parallel_size


def endpoint_price(config: ServeConfig, hardware: Hardware, served: list[EndpointModel]) -> Price:
    """Return the price of the endpoint's engines, which must match the engines' devices and the ledger."""
    price = resolve_price(config, hardware)
    for model in served:
        require_device(price, model.placement.device, f"the engines of {model.options.served_name}")
    ledger = _state_folder(config) / "ledger"
    if other_devices := {session.device for session in read_sessions(ledger)} - {price.device}:
        raise PriceError(
            f"{ledger}: this ledger bills engines by the {other_devices.pop()}, but the price of "
            f"{price.instance_type} is per {price.device}",
            hint="use another folder with --state: a ledger supports one kind of device",
        )
    return price


def bind(config: ServeConfig, hardware: Hardware, served: list[EndpointModel]) -> Any:
    """Return the Serve application of resolved models. Requires a running Ray cluster and vLLM."""
    from ray import serve
    from ray.serve.llm import build_llm_deployment

    from pipelines.online.ingress import make_ingress
    from pipelines.online.replica.server import PeagleServer
    from pipelines.online.serve.deployment import make_llm_config

    settings, price = gate_settings(config, hardware, served), endpoint_price(config, hardware, served)
    app_id = uuid.uuid4().hex[:12]
    deployments, model_cards = {}, {}
    for model in served:
        job = replica_job(config, hardware, model, price, app_id)
        deployments[model.options.served_name] = build_llm_deployment(
            make_llm_config(job, job.spec, hardware),
            bind_kwargs={"job": job},
            deployment_cls=PeagleServer,
        )
        model_cards[model.options.served_name] = model_card(model, job.counts.admitted, hardware)
    ingress = serve.deployment(
        make_ingress(settings),
        num_replicas=1,  # because the ingress counts the usage of keys in memory
        max_ongoing_requests=10_000,  # effectively unlimited: requests wait in the ingress for engines
        ray_actor_options={"num_cpus": 0.25},  # must fit next to an engine on two cores
        logging_config={"enable_access_log": False},  # the ledger records answered requests, the gate logs refusals
        graceful_shutdown_timeout_s=max(model.options.drain_s for model in served),
    )
    return ingress.bind(
        llm_deployments=deployments,
        model_cards=model_cards,
        settings=settings,
        price=price,
        batches=batch_settings(
            config,
            settings,
            hardware,
            {model.options.served_name: model.placement for model in served},
            {model.options.served_name: model.engine.spec for model in served},
            app_id,
        ),
    )


def gate_settings(config: ServeConfig, hardware: Hardware, served: list[EndpointModel]) -> GateSettings:
    """Return the settings of the gate. Raises ConfigError if there are no keys and the address is not local."""
    environment_keys = keys_from_environment()
    stored_keys: tuple[KeyRecord, ...] = read_keys(config.keys) if config.keys else ()
    read_budgets(_state_folder(config) / "ledger" / BUDGETS_NAME)  # fail here rather than with each request
    requires_key = config.keys is not None or bool(environment_keys)
    if requires_key and not (stored_keys or environment_keys):
        raise ConfigError(
            f"keys {config.keys}: the file contains no keys, so no client could use the endpoint",
            hint=f"peagle serve keys add NAME --keys {config.keys}",
        )
    if not (requires_key or config.is_behind_sagemaker or config.host in _LOOPBACK):
        raise ConfigError(
            f"host {config.host}: without API keys, anyone who can reach this address could use the endpoint",
            hint="use --keys FILE (`peagle serve keys add` creates one), or omit --host",
        )
    return GateSettings(
        models=tuple(_served_model(config, model, hardware) for model in served),
        ledger=_state_folder(config) / "ledger",
        key_file=config.keys.absolute() if config.keys else None,
        fixed_keys=environment_keys,
        requires_key=requires_key,
        is_behind_sagemaker=config.is_behind_sagemaker,
        max_body_bytes=config.max_body_kib * 1024,
        body_timeout_s=config.body_timeout_s,
        request_timeout_s=config.request_timeout_s,
        max_output_tokens=config.max_output_tokens,
        max_upload_bytes=config.max_file_mib * 1024 * 1024,
        prompts=_state_folder(config) / "prompts" if config.log_prompts else None,
        shares_prefix_cache=config.share_prefix_cache,
        tags=config.tags,
    )


def replica_job(config: ServeConfig, hardware: Hardware, model: EndpointModel, price: Price, app_id: str) -> ReplicaJob:
    options, spec, placement = model.options, model.engine.spec, model.placement
    return ReplicaJob(
        app_id=app_id,
        state=str(_state_folder(config)),
        options=options,
        spec=spec,
        engine=EngineFacts.priced(
            price,
            model=options.served_name,
            drafter=model.engine.drafter.name,
            num_devices=placement.num_devices,
            device=placement.device,
            tags=tags_to_text(config.tags),
            num_speculative_tokens=spec.drafter.num_speculative_tokens if spec.drafter else None,
            baseline=model.engine.baseline(hardware),
            is_stand_in=options.engine == "fake",
        ),
        placement=placement,
        counts=request_counts(options, spec, hardware),
        heartbeat_s=config.heartbeat_s,
        lends=config.uses_idle_slots,
    )


def _served_model(config: ServeConfig, model: EndpointModel, hardware: Hardware) -> ServedModel:
    spec = model.engine.spec
    assert spec.max_model_len is not None, "compose_engine() sets it"
    parsers = {"tool_call_parser", "reasoning_parser"}
    if model.engine.model.config.get("model_type") != "gpt_oss":  # vLLM parses harmony without an option
        parsers = {name for name in parsers if getattr(model.options, name)}
        parsers |= {"reasoning_parser"} if "reasoning_config" in model.options.engine_args else set()
    return ServedModel(
        name=model.options.served_name,
        max_model_len=spec.max_model_len,
        can_seed=hardware.platform != "cpu" or model.options.engine == "fake",
        max_choices=config.max_choices,
        max_answer_bytes=config.max_answer_mib * 2**20,
        media=dict(spec.limit_mm_per_prompt),
        media_domains=frozenset(spec.allowed_media_domains),
        drafter=model.engine.drafter.name,
        num_speculative_tokens=spec.drafter.num_speculative_tokens if spec.drafter else None,
        vocab_size=model.engine.model.vocab_size,
        parsers=frozenset(parsers),
    )


def model_card(model: EndpointModel, max_requests_per_replica: int, hardware: Hardware) -> dict[str, Any]:
    """Return a model's entry in `/v1/models`: OpenAI's fields, and under `peagle` the settings of its engines."""
    spec, options = model.engine.spec, model.options
    drafter = spec.drafter
    peagle_fields = {
        "target": name_of(model.engine.model.name),
        "stand_in": options.engine == "fake",
        "precision": model.engine.precision.describe(),
        "drafter": model.engine.drafter.name,
        "method": drafter.method if drafter else None,
        "num_speculative_tokens": drafter.num_speculative_tokens if drafter else None,
        "draft_lookup": drafter is not None and drafter.lookup,
        "break_even_acceptance_length": model.engine.break_even(hardware),  # by concurrency
        "max_model_len": spec.max_model_len,
        "max_replicas": options.max_replicas,
        "max_requests_per_replica": max_requests_per_replica,
    }
    return {
        "id": options.served_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "peagle",
        "peagle": peagle_fields,
    }


def _state_folder(config: ServeConfig) -> Path:
    return config.state.absolute()
