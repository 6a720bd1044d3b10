"""`peagle models add`: add a trained or downloaded head to the user's catalog."""

import argparse
from pathlib import Path
from typing import Any

HELP = """\
Add a drafter head to your catalog, so that `peagle generate --model TARGET` drafts with it.

  peagle models add heads/mine/head
  peagle models add downloads/gpt-oss-20b-p-eagle --model gpt-oss-20b
  peagle models add heads/other --model /models/my-llama --name my-llama --max-concurrency 8

DIR is a folder that `peagle train` wrote, a head in the published layout (config.json with ptd_token_id, weights with
mask_hidden), or an EAGLE-3 head. It is checked against its target and copied to $PEAGLE_HOME/heads. The target's card
in $PEAGLE_HOME/models/NAME.yaml is replaced. If the previous card has a limit of concurrent requests for drafting, the
limit is kept unless --max-concurrency is set.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("head", metavar="DIR", help="the head's folder, or its name in the catalog")
    parser.add_argument("--name", metavar="NAME", help="name of the card (default: the target's)")
    parser.add_argument(
        "--model",
        "--target",
        dest="target",
        metavar="TEXT",
        help="catalog name, folder or hub id (default: from the head)",
    )
    parser.add_argument(
        "--num-speculative-tokens", type=int, metavar="N", help="K (default: from the card, else from the head)"
    )
    parser.add_argument(
        "--max-concurrency", type=int, metavar="N", help="use the drafter up to this many concurrent requests"
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Add the head, and print what `--drafter auto` now does."""
    from jobs.models import speculation_rows
    from peagle.catalog.add_head import add_head
    from peagle.catalog.drafters import find_head
    from peagle.catalog.shipped_heads import complete_head

    added = add_head(
        complete_head(Path(find_head(args.head))),
        target=args.target,
        name=args.name,
        num_speculative_tokens=args.num_speculative_tokens,
        max_concurrency=args.max_concurrency,
        announce=print,
    )
    facts, name = added.facts, added.card.name
    print(f"{name}: {facts.method} head, {added.card.heads[facts.method].note}")
    print(f"head: {added.folder}")
    print(f"card: {added.path}")
    if added.replaced:
        print(f"replaces the head {added.replaced}")
    print(f"\n`peagle generate --model {name}` now uses it:")
    for platform, choice, source in speculation_rows(added.card):
        print(f"  {platform}: {choice}  [{source}]")
    result = {"card": added.card.model_dump(), "path": str(added.path), "folder": str(added.folder)}
    return 0, result | {"replaced": added.replaced}
