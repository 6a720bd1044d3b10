"""Item 1 of the GPU queue: P-EAGLE, EAGLE-3 and no speculation at K=7, on the shape of Qwen3-Coder-30B-A3B in FP8.

    python3 benchmarks/gpu/headline.py

1, 8, 32 and 128 concurrent requests, dummy weights, and drafts accepted at random with the published acceptance
lengths. Three engines, P-EAGLE first. Each takes about 165 s: 130 s to start, a warm-up pass, and 30 s to measure.
`comparison.md` has the speed-ups next to the published ones.
"""

import argparse
import json
from pathlib import Path

from block import CONCURRENCY, Keys, parser_of, run_block, run_script, shape_keys, shapes_folder, write_comparison

K = 7


def benches(shapes: Path, *, tiny: bool) -> list[tuple[str, Keys]]:
    """Return the benchmarks, each with the name of its folder."""
    keys = {"methods": "peagle,eagle3,none", "num_speculative_tokens": [K], "concurrency": CONCURRENCY}
    return [("", shape_keys(shapes, tiny=tiny) | keys)]


def run(args: argparse.Namespace) -> int:
    """Measure, and write the comparison after every pass."""
    report = args.output / "report.json"

    def compare() -> None:
        reports = [json.loads(report.read_bytes())]
        write_comparison(args.output / "comparison.md", reports, lambda method, concurrency: K, tiny=args.tiny)

    return run_block(args, benches(shapes_folder(tiny=args.tiny), tiny=args.tiny), compare)


if __name__ == "__main__":
    run_script(parser_of("headline", __doc__), run)
