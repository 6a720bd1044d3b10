"""`peagle quantize-drafter`: a head in FP8, or an FP8 head in bf16 again."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.drafter.fp8_folder import Conversion

HELP = """\
Write a drafter head in FP8 as vLLM loads it: weights in E4M3 with a scale for each output channel, activations
quantised token by token as the engine runs.

  peagle quantize-drafter heads/mine/head --output heads/mine-fp8
  peagle quantize-drafter heads/mine-fp8 --output heads/mine-fp8-values --dequantize

The decoder layers' projections, fc and the head's own lm_head become FP8; embeddings and norms stay. The second
command writes a bf16 head with the values that FP8 holds: served on any machine, it shows what FP8 weights do to the
acceptance length. GPUs older than compute capability 8.9 compute in 16 bits from FP8 weights; where vLLM cannot load
an FP8 lm_head there (vllm-project/vllm pull 52543), give --keep lm_head.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `peagle quantize-drafter`."""
    parser.add_argument("head", metavar="HEAD_DIR", help="the head's folder, or its name in the catalog")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--dequantize", action="store_true", help="HEAD_DIR is in FP8: write it in bf16")
    parser.add_argument(
        "--keep", action="append", default=[], metavar="fc|lm_head", help="leave it in bf16; may be repeated"
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Convert, and print what it cost."""
    from peagle.catalog.drafters import find_head
    from peagle.catalog.shipped_heads import whole_head
    from peagle.drafter.fp8_folder import dequantize_head, quantize_head
    from peagle.errors import ConfigError

    if args.dequantize and args.keep:
        raise ConfigError("--keep names tensors that are not quantised; it cannot be used with --dequantize")
    convert = dequantize_head if args.dequantize else quantize_head
    conversion = convert(
        whole_head(Path(find_head(args.head))), args.output, **({} if args.dequantize else {"keep": args.keep})
    )
    _print(conversion)
    return 0, conversion.to_dict()


def _print(conversion: "Conversion") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("weight", "shape", "max", "mean", "rms"):
        table.add_column(heading, no_wrap=True, justify="left" if heading == "weight" else "right")
    for error in conversion.errors:
        shape = " x ".join(map(str, error.shape))
        figures = (f"{value:.3%}" for value in (error.max_relative, error.mean_relative, error.rms_relative))
        table.add_row(error.name, shape, *figures)
    Console().print(table)
    print("\nRelative error: largest and mean of the elements in FP8's normal range, norm of all.")
    for why in sorted(set(conversion.kept.values())):
        print(f"as before ({why}): {', '.join(name for name, reason in conversion.kept.items() if reason == why)}")
    before, after = conversion.num_bytes_before, conversion.num_bytes_after
    print(f"weights: {after:,} bytes, {before:,} before ({after / before:.0%})")
    print(f"head: {conversion.output}")
