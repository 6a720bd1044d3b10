"""Item 5 of the GPU queue: the effect of FP8 and CUDA graphs on P-EAGLE, on the shape of item 1.

    python3 benchmarks/gpu/variants.py

P-EAGLE at K=7, one engine per variant, the most useful results first: the default (FP8 weights and KV cache, CUDA
graphs for all steps), everything in bf16, piecewise graphs (which a step with fewer drafts than K would use), graphs up
to vLLM's default of 512 tokens, a bf16 KV cache, and an FP8 head.
Three engines fit into a block; running the same command again measures the others.
"""

import argparse
from pathlib import Path

from block import CONCURRENCY, Keys, parser_of, run_block, run_script, shape_keys, shapes_folder

K = 7
VARIANTS: dict[str, Keys] = {
    "fp8": {},
    "bf16": {"precision": "bf16", "kv_cache_precision": "bf16"},
    "fp8-piecewise-graphs": {"engine_args": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}},
    "fp8-graphs-of-512": {"max_cudagraph_capture_size": 512},
    "fp8-bf16-kv-cache": {"kv_cache_precision": "bf16"},
    "fp8-head": {},
}


def benches(shapes: Path, *, tiny: bool) -> list[tuple[str, Keys]]:
    """Return the benchmarks, each with the name of its folder."""
    shared = shape_keys(shapes, tiny=tiny) | {
        "methods": "peagle",
        "num_speculative_tokens": [K],
        "concurrency": CONCURRENCY,
        "drafter": [f"peagle={shapes / 'peagle'}"],
    }
    if not tiny:
        shared["synthetic_acceptance"] = [text for text in shared["synthetic_acceptance"] if text.startswith("peagle")]
    variants = {name: shared | keys for name, keys in VARIANTS.items()}
    variants["fp8-head"]["drafter"] = [f"peagle={shapes / 'peagle-fp8'}"]
    # On a CPU, weights cannot be FP8, and there are no CUDA graphs.
    return [(name, keys) for name, keys in variants.items() if not tiny or name in ("bf16", "fp8-head")]


def run(args: argparse.Namespace) -> int:
    """Quantize the head if necessary, and measure all variants."""
    from peagle.drafter.fp8_folder import quantize_head

    shapes = shapes_folder(tiny=args.tiny)
    if not (shapes / "peagle-fp8").exists():
        quantize_head(shapes / "peagle", shapes / "peagle-fp8", keep=[])
    return run_block(args, benches(shapes, tiny=args.tiny))


if __name__ == "__main__":
    run_script(parser_of("variants", __doc__), run)
