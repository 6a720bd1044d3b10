"""`peagle prompts`: write built-in prompts; a target's answers to them become a drafter's training data."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peagle.drafter.prompts import STDLIB
from peagle.errors import ConfigError

HELP = """\
Write prompts for training. Code prompts are built from signatures and docstrings of the Python standard library or of
an installed package. Content prompts are other tasks (summaries, questions, letters, tables, arithmetic) about
descriptions of installed packages, Python's reference and generated tables.

  peagle prompts --output prompts.jsonl --limit 4000
  peagle prompts --source package:networkx --output more.jsonl
  peagle prompts --source content --output content.jsonl
  peagle prompts --source content:held-out --output held-out.jsonl   # tasks and texts that are not in `content`

Nothing is downloaded or imported. Prompts that share 10 consecutive words with a HumanEval problem, or with the set in
--exclude, are dropped and listed. The order depends only on --seed, the interpreter and the installed packages. All
functions or texts are used once before any of them is used a second time.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source",
        default=STDLIB,
        help="stdlib, package:NAME for an installed package, content, or content:held-out (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=".jsonl or .parquet to write")
    parser.add_argument("--limit", type=int, metavar="N", help="number of prompts; default: each function or text once")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed for order and wording (default: 0)")
    parser.add_argument(
        "--exclude",
        action="append",
        metavar="TEXT",
        help="evaluation set to exclude: humaneval, a corpus of prompts, or none; may be repeated (default: humaneval)",
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Write the prompts, and print those that were dropped."""
    from peagle.drafter.decontamination import DEFAULT_SETS, build_index
    from peagle.drafter.prompt_sources import shipped_prompts

    if args.output.suffix.lower() not in (".jsonl", ".parquet"):
        raise ConfigError(f"--output {args.output}: the name must end in .jsonl or .parquet")
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit must be at least 1, got {args.limit}")
    built, checked = shipped_prompts(
        args.source, build_index(args.exclude or DEFAULT_SETS), limit=args.limit, seed=args.seed
    )
    prompts = [asdict(prompt) for prompt in built]
    _write_prompts(prompts, args.output)
    for drop in checked.dropped:
        print(f"dropped {drop.item.module}.{drop.item.name}: shares {drop.overlap!r} with {drop.evaluation_set}")
    print(f"{len(prompts):,} prompts of {len(checked.kept):,} functions or texts: {args.output}")
    dropped = [
        {"module": d.item.module, "name": d.item.name, "overlap": d.overlap, "evaluation_set": d.evaluation_set}
        for d in checked.dropped
    ]
    return 0, {"output": str(args.output), "prompts": len(prompts), "dropped": dropped}


def _write_prompts(prompts: list[dict[str, Any]], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix.lower() == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(prompts), output)
    else:
        lines = (json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts)
        output.write_text("".join(lines), encoding="utf-8")
