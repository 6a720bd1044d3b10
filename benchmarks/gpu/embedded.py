"""Item 3 of the GPU queue: the embedded target and the heads that ship, with real weights, up to 128 requests.

    python3 benchmarks/gpu/embedded.py

HumanEval with greedy decoding and the heads' real acceptance. P-EAGLE first, each method at K=7, 3 and 5. These engines
start in about 60 s, so all seven fit into one block.
"""

import argparse
from pathlib import Path

from block import CONCURRENCY, Keys, parser_of, pass_keys, run_block, run_script

MODEL = "smollm2-135m"


def benches(shapes: Path, *, tiny: bool) -> list[tuple[str, Keys]]:
    """Return the benchmarks, both in one folder: K=7 first. They ignore `shapes`."""
    keys = {"model": MODEL, "max_model_len": 1024, "concurrency": CONCURRENCY, **pass_keys(tiny=tiny)}
    if tiny:
        keys |= {"concurrency": [1, 4], "limit": 4, "enforce_eager": True, "precision": "bf16"}
    ks = [[3]] if tiny else [[7], [3, 5, 7]]
    return [("", keys | {"methods": "peagle,eagle3,none", "num_speculative_tokens": k}) for k in ks]


def run(args: argparse.Namespace) -> int:
    """Run the benchmarks and return the exit code."""
    return run_block(args, benches(Path(), tiny=args.tiny))


if __name__ == "__main__":
    run_script(parser_of("embedded", __doc__), run)
