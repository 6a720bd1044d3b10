"""Item 2 of the GPU queue: each method at the K that is published as its best for the number of requests.

    python3 benchmarks/gpu/best_k.py --headline DIR

In the published table, P-EAGLE is fastest with K=11 up to 32 concurrent requests and with K=7 at 128; EAGLE-3 is
fastest with K=7, except at 32, with K=11. Item 1 measures K=7. This script measures K=11 of both methods, P-EAGLE
first. It also measures no speculation again, because each folder has its own baseline. `comparison.md` uses both
folders.
"""

import argparse
import json
from pathlib import Path

from block import (
    CONCURRENCY,
    Keys,
    parser_of,
    published_k,
    run_block,
    run_script,
    shape_keys,
    shapes_folder,
    write_comparison,
)

K = 11


def benches(shapes: Path, *, tiny: bool) -> list[tuple[str, Keys]]:
    """Return the benchmarks, each with the name of its folder."""
    keys = {"methods": "peagle,eagle3,none", "num_speculative_tokens": [K], "concurrency": CONCURRENCY}
    return [("", shape_keys(shapes, tiny=tiny) | keys)]


def run(args: argparse.Namespace) -> int:
    """Measure, and write the comparison after every pass."""
    folders = [args.output, args.headline]

    def compare() -> None:
        files = [folder / "report.json" for folder in folders if (folder / "report.json").exists()]
        write_comparison(
            args.output / "comparison.md",
            [json.loads(file.read_bytes()) for file in files],
            published_k,
            tiny=args.tiny,
        )

    return run_block(args, benches(shapes_folder(tiny=args.tiny), tiny=args.tiny), compare)


if __name__ == "__main__":
    parser = parser_of("best-k", __doc__)
    parser.add_argument("--headline", type=Path, default=Path("runs/gpu/headline"), help="results of item 1 (K=7)")
    run_script(parser, run)
