"""Item 5 of the GPU queue: what FP8 and large CUDA graphs are worth to P-EAGLE, on the shape of item 1.

    python3 benchmarks/gpu/variants.py

P-EAGLE at K=7, one engine for each variant, in the order of their worth: the default (FP8 weights and KV cache, graphs
of all steps), bf16 throughout, graphs of vLLM's own 512 tokens at most, a bf16 KV cache, the head in FP8. Three fit a
block; the same command continues with the others.
"""

import argparse
from pathlib import Path

from block import CONCURRENCY, Keys, parser_of, run_block, run_script, shape_keys, shapes_folder

K = 7
VARIANTS: dict[str, Keys] = {
    "fp8": {},
    "bf16": {"precision": "bf16", "kv_cache_precision": "bf16"},
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
        shared["synthetic_acceptance"] = [one for one in shared["synthetic_acceptance"] if one.startswith("peagle")]
    found = {name: shared | own for name, own in VARIANTS.items()}
    found["fp8-head"]["drafter"] = [f"peagle={shapes / 'peagle-fp8'}"]
    # On a CPU only the KV cache can be FP8, and nothing is captured.
    return [(name, keys) for name, keys in found.items() if not tiny or name in ("bf16", "fp8-head")]


def run(args: argparse.Namespace) -> int:
    """Measure."""
    from peagle.drafter.fp8_folder import quantize_head

    shapes = shapes_folder(tiny=args.tiny)
    if not (shapes / "peagle-fp8").exists():
        quantize_head(shapes / "peagle", shapes / "peagle-fp8", keep=[])
    return run_block(args, benches(shapes, tiny=args.tiny))


if __name__ == "__main__":
    run_script(parser_of("variants", __doc__), run)
