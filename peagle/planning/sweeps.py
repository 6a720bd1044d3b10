"""Measurements for plans, from report.json of `peagle bench`, a sweep file (docs/planning.md), or a model card."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.catalog.cards import ModelCard, PublishedTable, load_catalog
from peagle.economics.prices import Price
from peagle.errors import ConfigError, PriceError
from peagle.private import user_path
from peagle.profiles.measurements import NONE, Cell, read_cells

SWEEP_KEYS = ("peagle_sweep", "model", "instance_type", "devices_per_engine", "source", "start_s", "cells")
_HINT = "use the report.json of `peagle bench`, or a file as in docs/planning.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The cells that were measured on one machine type.

    Attributes:
        instance_type: the machine type; None if the price was stated or unknown.
        accelerator: the device name; None on CPUs, or if only the instance type is known.
        stated_price: the price, if the user stated it.
        is_published: whether the speeds are published; these apply to any machine with the accelerator.
        labels, caveats: origin and limitations of the measurements, for the user.
        remeasure: the command that measures the same cells on another machine.
    """

    name: str
    model: str
    instance_type: str | None
    devices_per_engine: int
    cells: list[Cell]
    precision: str | None = None
    stated_price: Price | None = None
    accelerator: str | None = None
    labels: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    is_published: bool = False
    remeasure: str = "peagle bench"


def read_sweeps(paths: Sequence[Path]) -> list[Sweep]:
    names = Counter(path.name for path in paths)
    return [read_sweep(path, str(path) if names[path.name] > 1 else path.name) for path in paths]


def read_sweep(path: Path, name: str | None = None) -> Sweep:
    """Read a file, or the published speeds of a model by its catalog name or hub id."""
    name = name or path.name
    if not user_path(path).exists():
        return _published_sweep(path)
    try:
        data = json.loads(user_path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"measured {path}: {error.strerror}", hint=_HINT) from error
    except ValueError as error:
        raise ConfigError(f"measured {path}: not JSON: {error}", hint=_HINT) from error
    if isinstance(data, Mapping) and "peagle_sweep" in data:
        return _external_sweep(path, name, data)
    if isinstance(data, Mapping) and {"cells", "hardware", "engine"} <= set(data):
        return _benchmark_sweep(path, name, data)
    raise ConfigError(f"measured {path}: neither a benchmark report nor a sweep", hint=_HINT)


def _benchmark_sweep(path: Path, name: str, data: Mapping[str, Any]) -> Sweep:
    try:
        price = Price.from_dict(data["price"]) if data["price"] else None
        on_gpu = data["hardware"]["platform"] == "cuda"
        accelerator = str(data["hardware"]["accelerator"]) if on_gpu else None
        devices = data["engine"]["tensor_parallel_size"] if on_gpu else data["hardware"]["num_cpus"]
        model, labels = str(data["model"]), tuple(map(str, data["labels"]))
        caveats = tuple(map(str, data.get("caveats", data.get("notes", ()))))  # older reports only have notes
    except (KeyError, TypeError, PriceError) as error:
        raise ConfigError(f"measured {path}: incomplete benchmark report: {error}", hint=_HINT) from error
    is_stated = price is not None and price.market == "fixed"
    return Sweep(
        name=name,
        model=model,
        instance_type=None if price is None or is_stated else price.instance_type,
        devices_per_engine=_valid_devices(devices, path),
        cells=read_cells(data["cells"], f"measured {path}"),
        precision=str(data["precision"]) if "precision" in data else None,
        stated_price=price if is_stated else None,
        accelerator=accelerator,
        labels=labels,
        caveats=caveats,
    )


def _external_sweep(path: Path, name: str, data: Mapping[str, Any]) -> Sweep:
    if data["peagle_sweep"] != 1:
        raise ConfigError(f"measured {path}: peagle_sweep must be 1, not {data['peagle_sweep']!r}", hint=_HINT)
    if unknown := [key for key in data if key not in SWEEP_KEYS]:
        raise ConfigError(f"measured {path}: unknown key {unknown[0]!r}", hint=f"valid keys: {', '.join(SWEEP_KEYS)}")
    for key, expected_type in (("model", str), ("instance_type", str), ("source", str), ("devices_per_engine", int)):
        if not isinstance(data.get(key), expected_type) or not data[key]:
            raise ConfigError(f"measured {path}: {key} is required", hint=_HINT)
    common = {"start_s": data["start_s"]} if "start_s" in data else {}
    cells = data.get("cells")
    if isinstance(cells, list):
        cells = [common | cell if isinstance(cell, dict) else cell for cell in cells]
    return Sweep(
        name=name,
        model=data["model"],
        instance_type=data["instance_type"],
        devices_per_engine=_valid_devices(data["devices_per_engine"], path),
        cells=read_cells(cells, f"measured {path}"),
        labels=(f"{name}: external measurement ({data['source']})",),
    )


def _published_sweep(path: Path) -> Sweep:
    """Return the sweep of a model's published table with the highest concurrency."""
    catalog = load_catalog()
    card = catalog.find(str(path))
    if card is None or not card.published:
        reason = "no such file or model" if card is None else f"{card.name} has no published speeds"
        published_models = ", ".join(card.name for card in catalog if card.published)
        raise ConfigError(
            f"measured {path}: {reason}",
            hint=f"{_HINT}; or one of these models with published speeds: {published_models}",
        )
    table = max(card.published, key=lambda table: table.concurrency[-1])
    name = f"{card.name} ({table.label})"
    cells = []
    for row in table.speeds:
        common = {"method": row.method, "k": row.num_speculative_tokens}
        for concurrency, speed in zip(table.concurrency, row.output_tokens_per_s, strict=True):
            cells.append(common | {"concurrency": concurrency, "output_tokens_per_s": speed})
    return Sweep(
        name=name,
        model=card.name,
        instance_type=None,
        devices_per_engine=table.num_accelerators,
        cells=read_cells(cells, f"measured {path}"),
        precision=table.precision.upper(),
        accelerator=table.accelerator,
        labels=(f"{name}: {table.dataset}, {table.precision.upper()}; {table.source}, {table.url}",),
        caveats=("no acceptance lengths are published, so the plan cannot show their effect.",),
        is_published=True,
        remeasure=_bench_command(card, table),
    )


def _bench_command(card: ModelCard, table: PublishedTable) -> str:
    """Return the command that measures the cells of a table, without methods for which the card has no head."""
    heads = [method for method, head in card.heads.items() if head.published]
    rows = [row for row in table.speeds if row.method == NONE or row.method in heads]
    methods = ",".join(dict.fromkeys(row.method for row in rows))
    ks = ",".join(map(str, sorted({row.num_speculative_tokens for row in rows} - {0})))
    concurrency = ",".join(map(str, table.concurrency))
    method_flags = f"--methods {methods} -k {ks}" if ks else f"--methods {methods}"
    return f"peagle bench --model {card.name} --precision {table.precision} {method_flags} --concurrency {concurrency}"


def _valid_devices(value: Any, path: Path) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"measured {path}: devices per engine must be an integer of at least 1, got {value!r}", hint=_HINT
        )
    return value
