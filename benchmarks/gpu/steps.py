"""Item 6 of the GPU queue: the parts of a decoding step, compared with the time of reading memory.

    python3 benchmarks/gpu/steps.py             # the shape of item 1: P-EAGLE, EAGLE-3, none at K=7
    python3 benchmarks/gpu/steps.py --embedded  # the embedded target with its heads, K=3, 7 and 11

`step_profile.py` measures, and describes what it measures. Finished engines are stored; running the same command again
continues.
"""

import argparse
from pathlib import Path

import step_profile
from block import Keys, parser_of, run_script, shape_keys, shapes_folder

from peagle.bench.config import BenchConfig


def keys_of(shapes: Path | None, *, tiny: bool) -> Keys:
    """Return the benchmark's keys for the shape, or for the embedded target if `shapes` is None."""
    if shapes is None:
        keys: Keys = {"model": "smollm2-135m", "max_model_len": 1024, "num_speculative_tokens": [3, 7, 11]}
        keys |= {"limit": 4, "enforce_eager": True, "precision": "bf16", "num_speculative_tokens": [3]} if tiny else {}
    else:
        keys = shape_keys(shapes, tiny=tiny) | {"num_speculative_tokens": [3 if tiny else 7]}
        del keys["requests_per_slot"]
    length = {"concurrency": [1, 2], "max_tokens": 24} if tiny else {"concurrency": [1, 32, 128], "max_tokens": 256}
    return keys | length | {"methods": "peagle" if tiny else "peagle,eagle3,none"}


def run(args: argparse.Namespace) -> int:
    """Profile the engines and return the exit code."""
    shapes = None if args.embedded else shapes_folder(tiny=args.tiny)
    keys = keys_of(shapes, tiny=args.tiny)
    if args.tiny and shapes:
        keys["drafter"] = [f"peagle={shapes / 'peagle'}"]
    return step_profile.profile(BenchConfig(**keys, output=args.output, time_budget_s=args.time_budget_s))


if __name__ == "__main__":
    parser = parser_of("steps", __doc__)
    parser.add_argument("--embedded", action="store_true", help="the embedded target instead of the shape")
    run_script(parser, run)
