"""`peagle prompts`: the shipped prompts, to be answered by a target.

Its answers are the training data of a drafter.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peagle.drafter.prompts import STDLIB
from peagle.errors import ConfigError

HELP = """\
Write prompts for a training. Code prompts are made from the signatures and docstrings of the Python standard library
or of an installed package. Content prompts are tasks of other kinds (summaries, questions, letters, tables, sums)
on the descriptions of installed packages, on Python's reference and on generated tables.

  peagle prompts --output prompts.jsonl --limit 4000
  peagle prompts --source package:networkx --output more.jsonl
  peagle prompts --source content --output content.jsonl
  peagle prompts --source content:held-out --output held-out.jsonl   # kinds and texts that `content` has not

Nothing is downloaded or imported. Prompts that share 10 words in a row with a HumanEval problem, or with the set
that --exclude names instead, are left out and listed. The order depends on --seed, the interpreter and the installed
packages alone; every function or text is used once before any is used again.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `peagle prompts`."""
    parser.add_argument(
        "--source",
        default=STDLIB,
        help="stdlib, package:NAME for an installed package, content, or content:held-out (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=".jsonl or .parquet to write")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="number of prompts; default: every function or text once"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of order and wordings (default: 0)")
    parser.add_argument(
        "--exclude",
        action="append",
        metavar="TEXT",
        help="evaluation set to keep out: humaneval, a corpus of prompts, or none; may be repeated"
        " (default: humaneval)",
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Write the prompts, and print what was dropped."""
    from peagle.drafter.decontamination import DEFAULT, index_of
    from peagle.drafter.prompt_sources import shipped_prompts

    if args.output.suffix.lower() not in (".jsonl", ".parquet"):
        raise ConfigError(f"--output {args.output}: the name must end in .jsonl or .parquet")
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {args.limit}")
    made, checked = shipped_prompts(args.source, index_of(args.exclude or DEFAULT), limit=args.limit, seed=args.seed)
    prompts = [asdict(prompt) for prompt in made]
    _write(prompts, args.output)
    for drop in checked.dropped:
        print(f"dropped {drop.item.module}.{drop.item.name}: shares {drop.overlap!r} with {drop.evaluation_set}")
    print(f"{len(prompts):,} prompts of {len(checked.kept):,} functions or texts: {args.output}")
    dropped = [
        {"module": d.item.module, "name": d.item.name, "overlap": d.overlap, "evaluation_set": d.evaluation_set}
        for d in checked.dropped
    ]
    return 0, {"output": str(args.output), "prompts": len(prompts), "dropped": dropped}


def _write(prompts: list[dict[str, Any]], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix.lower() == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(prompts), output)
    else:
        output.write_text(
            "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts), encoding="utf-8"
        )
