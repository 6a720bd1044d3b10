"""Replace a head of the package by a trained head, without the rows of lm_head that are equal to its target's.

    python -m benchmarks.drafter.ship heads/peagle/head --target smollm2-135m
    python -m benchmarks.drafter.ship heads/large/head --fp8

The head must come from `peagle train --no-train-lm-head`. The rows are added again on first use
(peagle/catalog/shipped_heads.py). The model card is the trained head's README.md; add measurements to it by hand.
`--fp8` halves the size in the repository. Users still get bf16 weights, but with the precision of FP8, so measure the
shipped head, not the trained one.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from peagle.catalog.folders import read_config
from peagle.catalog.head_files import read_head
from peagle.catalog.shipped_heads import HEADS_FOLDER, target_of, without_rows
from peagle.catalog.targets import resolve_model
from peagle.drafter.fp8_folder import quantize_head
from peagle.errors import DrafterError


def main() -> None:
    """Write the head, and print its folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, help="folder of a trained head")
    parser.add_argument("--target", default="smollm2-135m", help="the embedded target of the head")
    parser.add_argument("--fp8", action="store_true", help="store its matrices in FP8")
    options = parser.parse_args()
    print(ship(options.head, options.target, Path(resolve_model(options.target).path), fp8=options.fp8))  # noqa: T201


def ship(head: Path, name: str, target: Path, *, fp8: bool = False) -> Path:
    """Write a head into the package, as the head of its target and method, and return its folder.

    Args:
        head: folder of the trained head.
        name: catalog name of the target.
        target: folder of the target.
        fp8: whether to store matrices in FP8.

    Raises:
        DrafterError: the folder contains no head, the head is for another target, or its lm_head was trained.
    """
    if (own_target := target_of(head)) != name:
        raise DrafterError(f"{head}: is for {own_target}, not for {name}")
    destination = HEADS_FOLDER / f"{name}-{read_head(read_config(head, DrafterError)).method}"
    with tempfile.TemporaryDirectory(prefix=".", dir=HEADS_FOLDER) as staging:
        reduced = Path(staging) / destination.name
        without_rows(head, target, reduced)
        if fp8:
            quantize_head(reduced, quantised := Path(staging) / "fp8")
            for card in reduced.glob("README.md"):  # the card stays: it describes the loaded weights, which are bf16
                shutil.copyfile(card, quantised / card.name)
            reduced = quantised
        if destination.exists():
            shutil.rmtree(destination)
        reduced.rename(destination)
    return destination


if __name__ == "__main__":
    main()
