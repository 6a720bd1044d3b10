"""A configuration for other machines: their type and number, the settings, and checks that the machines can run it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from peagle.catalog.cards import load_catalog
from peagle.economics.price_options import PriceOptions, hardware_of
from peagle.economics.prices import Offer, PriceTable, price_lines
from peagle.engine.keys import TargetOptions
from peagle.engine.memory import Footprint, check_capacity, checkpoint_bytes
from peagle.engine.spec import EngineSpec
from peagle.errors import CapacityError, ConfigError
from peagle.private import user_path

_GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A bulk run or an endpoint.

    Attributes:
        name: a DNS label.
        settings: the configuration, as in the command's YAML.
        num_machines: minimum and maximum number of machines.
        grace_s: time for the process to exit after SIGTERM.
    """

    name: str
    command: Literal["generate", "serve"]
    settings: Mapping[str, Any] = field(hash=False)
    offer: Offer
    market: str
    num_machines: tuple[int, int]
    grace_s: float


def offer_of(options: PriceOptions) -> Offer:
    """Return the machine that a configuration names. It must be in the packaged price table."""
    if options.prices is not None:
        raise ConfigError(
            f"prices {options.prices}: other machines do not have this file", hint="set usd_per_hour instead"
        )
    table = PriceTable.load()
    if options.instance_type is None:
        raise ConfigError(
            "the configuration has no instance_type, which determines the size and price of the machines",
            hint="\n    ".join(["use one of", *price_lines(table.offers, options.market)]),
        )
    offers = [
        offer
        for offer in table.offers
        if offer.instance_type == options.instance_type
        and options.provider in (None, offer.provider)
        and options.region in (None, offer.region)
    ]
    if options.usd_per_hour is None or not offers:  # raises PriceError if the table has no such price
        table.price(options.instance_type, market=options.market, provider=options.provider, region=options.region)
    return offers[0]


def count_machines(offer: Offer, parts: Sequence[tuple[int, int]]) -> int:
    """Return the number of machines for the parts of engines. Without accelerators, each part has its own machine.

    Example: with 8 accelerators per machine, three engines of 4 and one of 8 take 3 machines.

    Args:
        parts: pairs of the accelerators that a part needs on one machine, and the number of such parts.
    """
    if not offer.num_accelerators:
        return sum(count for _, count in parts)
    free_by_machine: list[int] = []  # accelerators
    for num_needed, count in sorted(parts, reverse=True):
        if num_needed > offer.num_accelerators:
            raise ConfigError(
                f"an engine needs {num_needed} accelerators of one machine, and {offer.instance_type} has"
                f" {offer.num_accelerators}",
                hint="use a larger instance_type, a smaller tensor_parallel_size or more nodes_per_engine",
            )
        for _ in range(count):
            machine = next((index for index, num_free in enumerate(free_by_machine) if num_free >= num_needed), None)
            if machine is None:
                free_by_machine.append(offer.num_accelerators - num_needed)
            else:
                free_by_machine[machine] -= num_needed
    return len(free_by_machine)


def dns_label(name: str, *, max_length: int) -> str:
    """Return a name as a DNS label.

    >>> dns_label("My job_2.yaml", max_length=20)
    'my-job-2-yaml'
    """
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not label or not label[0].isalpha():
        raise ConfigError(f"the name {name} does not start with a letter", hint="choose another name with --name")
    if len(label) > max_length:
        raise ConfigError(
            f"the name {label} has {len(label)} characters; the limit is {max_length}",
            hint="choose another name with --name",
        )
    return label


def require_reachable(settings: Mapping[str, Any], names: Sequence[str], folder: str) -> None:
    """Raise ConfigError if a path is neither on S3 nor in `folder`, which all machines share.

    `names` are the settings that are paths.
    """
    for name in names:
        value = str(settings.get(name) or "")
        is_shared = not value or value.startswith(("s3://", f"{folder}/"))
        is_path = name not in ("model", "drafter") or user_path(value).exists()
        if is_path and not is_shared:
            raise ConfigError(
                f"{name} {value}: a local path, which other machines do not have",
                hint=f"use s3://BUCKET/FOLDER, or a folder in {folder}, which all machines share",
            )


def require_servable(settings: Mapping[str, Any], folder: str) -> None:
    """Raise ConfigError if an endpoint has no API keys, has a certificate, or has paths outside `folder`."""
    if not settings.get("keys"):
        raise ConfigError(
            "the configuration has no keys, but everyone in the cluster can reach a Service",
            hint="create a file with `peagle serve keys add`, and set `keys` to it",
        )
    if settings.get("tls_cert"):
        raise ConfigError("tls_cert: on Kubernetes the Ingress has the certificate", hint="leave tls_cert out")
    require_reachable(settings, ("batches",), folder)
    for model in settings.get("models") or [settings]:
        require_reachable(model, ("model", "drafter"), folder)


def require_room(offer: Offer, options: TargetOptions, *, pipeline_parallel_size: int = 1, num_nodes: int = 1) -> None:
    """Raise CapacityError if a machine clearly cannot hold a catalog model, before anything is downloaded.

    Counts weights, one step and CUDA graphs, but not the KV cache, for which the model's `config.json` is needed.
    Passes if the model has no card, or the machine's accelerator or memory is unknown. `num_nodes` is the number of
    machines per engine.
    """
    card = load_catalog().find(options.model)
    if card is None or card.architecture.num_parameters is None:
        return
    hint = f"name a larger instance type; `peagle models {card.name}` shows its memory"
    native = card.precision.native_quantization
    num_bytes = checkpoint_bytes(card.architecture.num_parameters, native)
    if offer.accelerator is None:
        if offer.memory_gib is not None and num_bytes / _GIB > offer.memory_gib:
            raise CapacityError(
                f"the weights of {card.name} are {num_bytes / _GIB:.1f} GiB, and {offer.instance_type} has "
                f"{offer.memory_gib:g} GiB of memory and no accelerator",
                hint=hint,
            )
        return
    hardware = hardware_of(offer)
    if hardware is None:
        return
    weights = Footprint(
        weights_bytes=num_bytes,
        weight_dtype_bytes=2,
        context_tokens=1,
        num_layers=0,
        num_sliding_layers=0,
        sliding_window_tokens=0,
        kv_elements_per_token=0,
        full_kv_elements=0,
    )
    spec = EngineSpec(
        model=card.name,
        precision=options.precision,
        native_quantization=native,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        num_nodes=num_nodes,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=options.enforce_eager,
    )
    # `count_machines` checks the accelerators per machine. Here, the machine has as many as the engine needs.
    machine = replace(hardware, num_accelerators=max(hardware.num_accelerators, spec.accelerators_per_node))
    try:
        check_capacity(spec, machine, known=weights)
    except CapacityError as error:
        raise CapacityError(f"{offer.instance_type}: {error.message}", hint=f"{error.hint}, or {hint}") from error
