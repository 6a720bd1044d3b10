"""`peagle quantize-drafter`: convert a head to FP8, or an FP8 head to bf16."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.drafter.fp8_folder import Conversion

HELP = """\
Convert a drafter head to FP8 as vLLM loads it: weights in E4M3 with one scale per output channel; the engine quantises
activations per token.

  peagle quantize-drafter heads/mine/head --output heads/mine-fp8
  peagle quantize-drafter heads/mine-fp8 --output heads/mine-fp8-values --dequantize

The projections of decoder layers, fc and the head's own lm_head are converted to FP8; embeddings and norms are not. The
second command writes a bf16 head with the values of the FP8 weights, so that any machine can measure how FP8 weights
change the acceptance length. GPUs older than compute capability 8.9 compute in 16 bits from FP8 weights; if vLLM cannot
load an FP8 lm_head there (vllm-project/vllm pull 52543), use --keep lm_head.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("head", metavar="HEAD_DIR", help="the head's folder, or its name in the catalog")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--dequantize", action="store_true", help="HEAD_DIR is in FP8: write it in bf16")
    parser.add_argument(
        "--keep", action="append", default=[], metavar="fc|lm_head", help="keep this tensor in bf16; may be repeated"
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Convert, and print the errors and sizes."""
    from peagle.catalog.drafters import find_head
    from peagle.catalog.shipped_heads import complete_head
    from peagle.drafter.fp8_folder import dequantize_head, quantize_head
    from peagle.errors import ConfigError

    if args.dequantize and args.keep:
        raise ConfigError("--keep names tensors that are not quantised; it cannot be used with --dequantize")
    head = complete_head(Path(find_head(args.head)))
    if args.dequantize:
        conversion = dequantize_head(head, args.output)
    else:
        conversion = quantize_head(head, args.output, keep=args.keep)
    _print(conversion)
    return 0, conversion.to_dict()


def _print(conversion: "Conversion") -> None:
    from rich.table import Table

    from jobs.output import console

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("weight", "shape", "max", "mean", "rms"):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "weight" else "right")
    for error in conversion.errors:
        shape = " x ".join(map(str, error.shape))
        figures = (f"{value:.3%}" for value in (error.max_relative, error.mean_relative, error.rms_relative))
        table.add_row(error.name, shape, *figures)
    console().print(table)
    print("\nRelative error: max and mean over the elements in FP8's normal range, rms over all elements.")
    for reason in sorted(set(conversion.kept.values())):
        print(f"kept ({reason}): {', '.join(name for name, why in conversion.kept.items() if why == reason)}")
    before, after = conversion.num_bytes_before, conversion.num_bytes_after
    print(f"weights: {after:,} bytes, {before:,} before ({after / before:.0%})")
    print(f"head: {conversion.output}")
