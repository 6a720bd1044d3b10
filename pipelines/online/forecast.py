"""The forecast of `peagle serve --dry-run`, which starts and writes nothing and does not use Ray."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peagle.economics.price_options import configured_or_local_machine, resolve_price_defaults
from peagle.economics.prices import Price
from peagle.economics.report.figures import format_price, format_usd
from peagle.engine_options import ResolvedDefaults, resolve_defaults
from peagle.hardware import Hardware
from peagle.planning.expectation import known_speed
from pipelines.batch.forecast import (
    UNKNOWN_SPEED,
    Lines,
    describe_devices,
    describe_engine_memory,
    describe_machine,
    price_warning,
)
from pipelines.online.app import (
    EndpointModel,
    accelerators_per_engine_of,
    endpoint_price,
    gate_settings,
    num_accelerators,
    resolve,
)
from pipelines.online.config import ServeConfig


@dataclass(frozen=True, kw_only=True)
class EndpointForecast:
    """A description of what `peagle serve` would start.

    Attributes:
        is_for_this_machine: whether the engines would run on this machine.
    """

    config: ServeConfig
    hardware: Hardware
    is_for_this_machine: bool
    num_nodes: int
    served: list[EndpointModel]
    price: Price
    requires_key: bool

    def access(self) -> str:
        if self.requires_key:
            return "required"
        if self.config.is_behind_sagemaker:
            return (
                f"none; anyone who can connect to {self.config.host}:{self.config.port} can send requests, "
                "which on SageMaker means everyone whom IAM authorizes"
            )
        return "none; only this machine can connect"

    def usd_per_h(self, *, is_maximum: bool) -> float:
        num_devices = sum(
            model.placement.num_devices * (model.options.max_replicas if is_maximum else model.options.min_replicas)
            for model in self.served
        )
        return self.price.usd_per_device_s * 3600 * num_devices

    def lines(self) -> Lines:
        min_cost, max_cost = (format_usd(self.usd_per_h(is_maximum=is_maximum)) for is_maximum in (False, True))
        models = [line for model in self.served for line in self._model_lines(model)]
        return [
            ("address", self.config.url),
            ("API keys", self.access()),
            *models,
            ("machine", describe_machine(self.hardware, self.is_for_this_machine, self.num_nodes)),
            ("price", format_price(self.price.to_dict())),
            ("engines cost", f"{min_cost} to {max_cost} an hour{price_warning(self.price)}"),
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "url": self.config.url,
            "requires_key": self.requires_key,
            "access": self.access(),
            "models": [dict(self._model_lines(model)) | {"name": model.options.served_name} for model in self.served],
            "hardware": self.hardware.to_dict(),
            "is_here": self.is_for_this_machine,
            "price": self.price.to_dict(),
            "usd_per_h": [self.usd_per_h(is_maximum=is_maximum) for is_maximum in (False, True)],
        }

    def _model_lines(self, model: EndpointModel) -> Lines:
        concurrency = model.engine.spec.max_num_seqs
        speed = known_speed(model.engine, self.hardware, concurrency)
        return [
            ("model", model.describe()),
            ("engine", f"{describe_devices(model.placement)}, {concurrency} concurrent requests"),
            ("memory", describe_engine_memory(model.engine, self.hardware, model.placement)),
            ("expected", speed.describe() if speed else UNKNOWN_SPEED),
        ]


def forecast(config: ServeConfig, announce: Callable[[str], None]) -> EndpointForecast:
    """Resolve an endpoint's configuration without starting it.

    Uses the hardware of the configured machine, or else of this machine.
    """
    hardware, is_for_this_machine = configured_or_local_machine(
        config, None, num_accelerators=max(map(accelerators_per_engine_of, config.served))
    )
    num_nodes = 1 if is_for_this_machine else max(1, -(-num_accelerators(config) // hardware.num_accelerators))
    served = resolve(config, hardware, num_nodes=num_nodes, announce=announce)
    return EndpointForecast(
        config=config,
        hardware=hardware,
        is_for_this_machine=is_for_this_machine,
        num_nodes=num_nodes,
        served=served,
        price=endpoint_price(config, hardware, served),
        requires_key=gate_settings(config, hardware, served).requires_key,
    )


def resolve_unset_options(config: ServeConfig) -> ResolvedDefaults:
    """Return the values of options that the configuration does not set.

    With several models, names are prefixed by the model: "plain.drafter".
    """
    endpoint = forecast(config, print)
    values_by_name: ResolvedDefaults = {}
    for model in endpoint.served:
        prefix = f"{model.options.served_name}." if config.models else ""
        model_defaults = resolve_defaults(
            model.options, model.engine, endpoint.hardware, is_for_this_machine=endpoint.is_for_this_machine
        )
        values_by_name |= {f"{prefix}{name}": value for name, value in model_defaults.items()}
    return values_by_name | resolve_price_defaults(config, endpoint.price)
