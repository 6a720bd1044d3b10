"""A configuration as other machines need it: machine type, number of machines, keys."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from peagle.economics.price_options import PriceOptions
from peagle.economics.prices import Offer, PriceTable, choices
from peagle.errors import ConfigError
from peagle.private import user_path

_SIZES = "it determines the size and price of the machines"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A bulk run or an endpoint.

    Attributes:
        name: a DNS label.
        keys: the configuration, as YAML of its command.
        offer: a machine for its engines.
        market: on_demand or spot.
        num_machines: the fewest and the most.
        grace_s: time for its process to exit after SIGTERM.
    """

    name: str
    command: Literal["generate", "serve"]
    keys: Mapping[str, Any] = field(hash=False)
    offer: Offer
    market: str
    num_machines: tuple[int, int]
    grace_s: float

    def yaml(self) -> str:
        return yaml.safe_dump(dict(self.keys), sort_keys=False, allow_unicode=True, width=120)


def offer_of(keys: PriceOptions) -> Offer:
    """Return the machine that a configuration names.

    Raises:
        ConfigError: it names none, one that is not in the price table, or a local price table.
    """
    if keys.prices is not None:
        raise ConfigError(
            f"prices {keys.prices}: other machines do not have this file", hint="set usd_per_hour instead"
        )
    table = PriceTable.load()
    if keys.instance_type is None:
        raise ConfigError(
            f"the configuration has no instance_type: {_SIZES}",
            hint="\n    ".join(["use one of", *choices(table.offers, keys.market)]),
        )
    offers = [
        offer
        for offer in table.offers
        if offer.instance_type == keys.instance_type
        and keys.provider in (None, offer.provider)
        and keys.region in (None, offer.region)
    ]
    if keys.usd_per_hour is None or not offers:
        table.price(keys.instance_type, market=keys.market, provider=keys.provider, region=keys.region)
    return offers[0]


def machines_for(offer: Offer, parts: Sequence[tuple[int, int]]) -> int:
    """Return the number of machines that hold these engines.

    Args:
        parts: accelerators that an engine needs on one machine, and the number of such parts. Without accelerators each
            engine has a machine to itself.

    Example: on machines of 8, three engines of 4 and one of 8 take 3 machines.

    Raises:
        ConfigError: an engine needs more accelerators than a machine has.
    """
    if not offer.num_accelerators:
        return sum(count for _, count in parts)
    free: list[int] = []
    for size, count in sorted(parts, reverse=True):
        if size > offer.num_accelerators:
            raise ConfigError(
                f"an engine needs {size} accelerators of one machine, and {offer.instance_type} has"
                f" {offer.num_accelerators}",
                hint="use a larger instance_type, a smaller tensor_parallel_size or more nodes_per_engine",
            )
        for _ in range(count):
            machine = next((index for index, left in enumerate(free) if left >= size), None)
            if machine is None:
                free.append(offer.num_accelerators - size)
            else:
                free[machine] -= size
    return len(free)


def label_of(name: str, *, max_length: int) -> str:
    """Return a name as a DNS label.

    >>> label_of("My job_2.yaml", max_length=20)
    'my-job-2-yaml'

    Raises:
        ConfigError: it does not start with a letter, or is too long.
    """
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not label or not label[0].isalpha():
        raise ConfigError(f"the name {name} does not start with a letter", hint="choose another with --name")
    if len(label) > max_length:
        raise ConfigError(
            f"the name {label} has {len(label)} characters; the limit is {max_length}",
            hint="choose another with --name",
        )
    return label


def require_reachable(keys: Mapping[str, Any], names: Sequence[str], folder: str | None) -> None:
    """Refuse local paths, which other machines do not have.

    Args:
        names: keys that may have a path.
        folder: a folder that all machines share; None if there is none.

    Raises:
        ConfigError: a value is neither in a store, nor in that folder, nor a name.
    """
    for name in names:
        value = str(keys.get(name) or "")
        is_shared = not value or value.startswith(("s3://", f"{folder}/") if folder else "s3://")
        is_path = name not in ("model", "drafter") or user_path(value).exists()
        if is_path and not is_shared:
            raise ConfigError(
                f"{name} {value}: a local path, which other machines do not have",
                hint="use s3://BUCKET/FOLDER" + (f", or a folder in {folder}, which they share" if folder else ""),
            )


def require_servable(keys: Mapping[str, Any], folder: str) -> None:
    """Refuse an endpoint that Kubernetes cannot run as configured.

    Args:
        folder: as in `require_reachable`.

    Raises:
        ConfigError: it has no API keys, has a certificate, or has local paths.
    """
    if not keys.get("keys"):
        raise ConfigError(
            "the configuration has no keys, but everyone in the cluster can reach a Service",
            hint="create a file with `peagle serve keys add`, and set `keys` to it",
        )
    if keys.get("tls_cert"):
        raise ConfigError("tls_cert: on Kubernetes the Ingress has the certificate", hint="leave tls_cert out")
    require_reachable(keys, ("batches",), folder)
    for model in keys.get("models") or [keys]:
        require_reachable(model, ("model", "drafter"), folder)
