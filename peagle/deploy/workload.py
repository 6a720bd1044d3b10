"""A configuration as other machines see it: which, how many, with which keys."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from peagle.economics.price_options import PriceOptions
from peagle.economics.prices import Offer, PriceTable, choices
from peagle.errors import ConfigError
from peagle.private import user_path

_SIZES = "machines are sized by it, and it is the price"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A bulk run or an endpoint.

    Attributes:
        name: a DNS label.
        keys: the configuration's own keys, as its command's YAML takes them.
        offer: a machine of its engines.
        market: on_demand or spot.
        num_machines: the fewest and the most.
        grace_s: time for its process to end after SIGTERM.
    """

    name: str
    command: Literal["generate", "serve"]
    keys: Mapping[str, Any] = field(hash=False)
    offer: Offer
    market: str
    num_machines: tuple[int, int]
    grace_s: float

    def with_keys(self, **keys: Any) -> str:
        """The configuration's YAML with these keys in the place of its own."""
        return yaml.safe_dump({**self.keys, **keys}, sort_keys=False, allow_unicode=True, width=120)


def offer_of(keys: PriceOptions) -> Offer:
    """The machine that a configuration names.

    Raises:
        ConfigError: it names none, one that is not in the price table, or a table that other machines do not have.
    """
    if keys.prices is not None:
        raise ConfigError(
            f"prices {keys.prices}: a file of this machine is not on others", hint="state usd_per_hour instead"
        )
    table = PriceTable.load()
    if keys.instance_type is None:
        raise ConfigError(
            f"the configuration names no instance_type: {_SIZES}",
            hint="\n    ".join(["name one of", *choices(table.offers, keys.market)]),
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
    """The number of machines that hold so many engines.

    Args:
        parts: accelerators of an engine on one machine, and how many such parts there are. Without accelerators an
            engine has a machine to itself.

    Example: on machines of 8, three engines of 4 and one of 8 take 3: two, one and one.

    Raises:
        ConfigError: an engine has more accelerators than a machine.
    """
    if not offer.num_accelerators:
        return sum(num for _, num in parts)
    free: list[int] = []
    for size, num in sorted(parts, reverse=True):
        if size > offer.num_accelerators:
            raise ConfigError(
                f"an engine takes {size} accelerators of one machine, and {offer.instance_type} has"
                f" {offer.num_accelerators}",
                hint="use a larger instance_type, a smaller tensor_parallel_size, or in bulk more nodes_per_engine",
            )
        for _ in range(num):
            machine = next((index for index, left in enumerate(free) if left >= size), None)
            if machine is None:
                free.append(offer.num_accelerators - size)
            else:
                free[machine] -= size
    return len(free)


def label_of(name: str, *, most: int) -> str:
    """A name as a DNS label.

    >>> label_of("My job_2.yaml", most=20)
    'my-job-2-yaml'

    Raises:
        ConfigError: it does not begin with a letter, or is too long.
    """
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not label or not label[0].isalpha():
        raise ConfigError(f"the name {name} does not begin with a letter", hint="name another: --name")
    if len(label) > most:
        raise ConfigError(
            f"the name {label} has {len(label)} letters, and may have {most}", hint="name another: --name"
        )
    return label


def require_reachable(keys: Mapping[str, Any], names: Sequence[str], folder: str | None) -> None:
    """Refuse paths of this machine, which no other one has.

    Args:
        names: keys that may hold a path.
        folder: one that all machines share; None where they share none.

    Raises:
        ConfigError: one of them is neither in a store, nor in that folder, nor a name.
    """
    for name in names:
        value = str(keys.get(name) or "")
        is_shared = not value or value.startswith(("s3://", f"{folder}/") if folder else "s3://")
        is_path = name not in ("model", "drafter") or user_path(value).exists()
        if is_path and not is_shared:
            raise ConfigError(
                f"{name} {value}: it is a path of this machine, which the others do not have",
                hint="use s3://BUCKET/FOLDER" + (f", or a folder under {folder}, which they share" if folder else ""),
            )


def require_servable(keys: Mapping[str, Any], folder: str) -> None:
    """Refuse an endpoint that Kubernetes cannot run as its configuration says.

    Args:
        folder: as in `require_reachable`.

    Raises:
        ConfigError: it has no file of keys, has a certificate, or names paths of this machine.
    """
    if not keys.get("keys"):
        raise ConfigError(
            "the configuration has no keys, and anyone in the cluster can reach a Service",
            hint="make a file with `peagle serve keys add`, and name it under keys",
        )
    if keys.get("tls_cert"):
        raise ConfigError("tls_cert: on Kubernetes the Ingress has the certificate", hint="leave out tls_cert")
    require_reachable(keys, ("batches",), folder)
    for model in keys.get("models") or [keys]:
        require_reachable(model, ("model", "drafter"), folder)
