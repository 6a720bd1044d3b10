"""`peagle models`: the catalog as a table, or one model's card."""

import argparse
from typing import TYPE_CHECKING, Any

from jobs.output import console
from peagle.errors import ConfigError

if TYPE_CHECKING:
    from peagle.catalog.cards import HeadCard, Method, ModelCard, PublishedTable

HELP = """\
List the catalog, or show one model's card: licence, context, heads, K by concurrency and published speeds, each with
its source.

  peagle models                    the list
  peagle models gpt-oss-20b        its card
  peagle models --json -           the list as JSON
  peagle models gpt-oss-20b --sagemaker-env > model.env
                                   its drafter preset as variables of a container on SageMaker
  peagle models add DIR            add a drafter head to your catalog (see its --help)

Your own cards are $PEAGLE_HOME/models/NAME.yaml (~/.peagle by default); they replace shipped cards of the same name.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="catalog name or hub id (default: all models)")
    parser.add_argument(
        "--sagemaker-env",
        action="store_true",
        help="print the environment variables for AWS's vLLM container or peagle's",
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from peagle.catalog.cards import load_catalog

    catalog = load_catalog()
    if args.sagemaker_env:
        if not args.name:
            raise ConfigError("--sagemaker-env requires the name of a model", hint="peagle models lists them")
        return 0, {"environment": _print_variables(catalog.get(args.name))}
    if args.name:
        card = catalog.get(args.name)
        _print_card(card)
        return 0, card.model_dump()
    _print_list(list(catalog))
    return 0, {"models": [card.model_dump() for card in catalog]}


def _print_variables(card: "ModelCard") -> dict[str, str]:
    """Print the variables in the format of `docker run --env-file`."""
    from peagle.deploy.sagemaker import preset

    drafter_preset = preset(card)
    print(f"# {card.title}; drafter: {drafter_preset.drafter}")
    for folder, mount_path in drafter_preset.uploads:
        print(f"# upload {folder} to S3, for {mount_path}")
    for name, value in drafter_preset.variables.items():
        print(f"{name}={value}")
    return drafter_preset.variables


def _print_list(cards: "list[ModelCard]") -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("model", "params", "context", "P-EAGLE", "EAGLE-3", "DFlash"):
        table.add_column(heading, no_wrap=True)
    for card in cards:
        table.add_row(
            card.name,
            _parameters(card.architecture.num_parameters),
            _number(card.context_tokens),
            _presence(card.heads.get("peagle")),
            _presence(card.heads.get("eagle3")),
            _presence(card.heads.get("dflash")),
        )
    console().print(table)
    print("\n`peagle models NAME` shows a card; `peagle generate --model NAME` runs a model.")


def _print_card(card: "ModelCard") -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")  # truncated links would not work
    for label, fact, source in card_rows(card):
        grid.add_row(label, Text.assemble(fact, (f"  [{source}]", "dim")) if source else Text(fact))
    print(f"{card.title} ({card.name})\n{card.summary}\n")
    console().print(grid)
    for table in card.published:
        print("\n" + "\n".join(published_lines(table)))


def card_rows(card: "ModelCard") -> list[tuple[str, str, str]]:
    """Return the card as (label, fact, source) rows; null facts are "not confirmed"."""
    precision = card.precision
    native = f"; published in {precision.native_quantization}" if precision.native_quantization else ""
    return [
        ("target", " ".join(filter(None, [card.source.kind, card.source.id, card.source.revision])), ""),
        ("licence", card.licence.name, card.licence.source),
        ("model", _architecture(card), card.architecture.source),
        ("precision", f"{precision.default} of {', '.join(precision.options)}{native}", precision.source),
        ("hardware", card.smallest_hardware.description, card.smallest_hardware.source),
        *[row for method, head in card.heads.items() for row in _head_rows(method, head)],
        *speculation_rows(card),
    ]


def _architecture(card: "ModelCard") -> str:
    facts = card.architecture
    return (
        f"{facts.family}, {_parameters(facts.num_parameters)} parameters, {_number(facts.num_layers)} layers,"
        f" hidden size {_number(facts.hidden_size)}, vocabulary {_number(facts.vocab_size)},"
        f" context {_number(facts.context_tokens)} tokens"
    )


def _head_rows(method: str, head: "HeadCard") -> list[tuple[str, str, str]]:
    if head.published:
        long_context = f"; for long prompts {head.long_context_id}" if head.long_context_id else ""
        fact = f"{head.kind}: {head.id}{long_context}; licence {head.licence or 'not confirmed'}"
    else:
        fact = "not published"
    return [
        (f"{method} head", fact, head.source),
        *([("", head.note, "")] if head.note else []),
        *[
            (
                "",
                f"{deployment.where}, {deployment.instance_type}: K={deployment.num_speculative_tokens}",
                deployment.source,
            )
            for deployment in head.deployments
        ],
    ]


def speculation_rows(card: "ModelCard") -> list[tuple[str, str, str]]:
    """Return the choices of `--drafter auto` as (platform, choice, source) rows."""
    if not card.speculation:
        return [("speculation", "not measured: --drafter auto means no drafter; name a head to use it", "")]
    rows = []
    for row in card.speculation:
        limit = "any number of" if row.max_concurrency is None else f"up to {row.max_concurrency}"
        choice = "no drafter" if row.method == "none" else f"{row.method} at K={row.num_speculative_tokens}"
        rows.append((f"on {row.platform}", f"{limit} requests at once: {choice}", row.source))
    return rows


def published_lines(table: "PublishedTable") -> list[str]:
    """Return a published table as text: a row per method and K, P-EAGLE's gains, and the source."""
    from peagle.profiles.measurements import METHOD_NAMES, method_label
    from peagle.tables import aligned

    rows = [["requests at once", *map(str, table.concurrency)]]
    for row in table.speeds:
        label = method_label(row.method, row.num_speculative_tokens)
        rows.append([label, *(f"{speed:,.0f}" for speed in row.output_tokens_per_s)])
    others: tuple[Method, ...] = ("eagle3", "none")
    for other in others:
        if gains := table.gains("peagle", over=other):
            rows.append([f"best P-EAGLE / {METHOD_NAMES[other]}", *(f"{gain:.2f}" for gain in gains)])
    title = f"{table.dataset}: {table.label}, {table.precision.upper()}, output tokens/s"
    return [title, *(f"  {line}" for line in aligned(rows)), f"  [{table.source}, {table.url}]"]


def _presence(head: "HeadCard | None") -> str:
    if head is None or not head.published:
        return "none"
    return {"shipped": "shipped", "huggingface": "hub", "folder": "yours"}[head.kind]


def _parameters(count: int | None) -> str:
    if count is None:
        return "not confirmed"
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def _number(value: int | None) -> str:
    return "not confirmed" if value is None else f"{value:,}"
