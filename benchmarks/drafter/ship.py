"""Puts a trained head in the place of the one that ships, without the rows of lm_head that are its target's.

    python -m benchmarks.drafter.ship heads/peagle/head --target smollm2-135m
    python -m benchmarks.drafter.ship heads/large/head --fp8

The head is one of `peagle train --no-train-lm-head`. What users get is put together on first use
(peagle/catalog/shipped_heads.py); its card is the trained head's README.md, to which measurements are added by hand.
`--fp8` halves what the repository carries. Users get bf16 all the same, of the values that FP8 holds: so measure the
head that ships, not the one that was trained.
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
    """Write the head, and say where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, help="folder of a trained head")
    parser.add_argument("--target", default="smollm2-135m", help="the embedded target that it is for")
    parser.add_argument("--fp8", action="store_true", help="store its matrices in FP8")
    options = parser.parse_args()
    print(ship(options.head, options.target, Path(resolve_model(options.target).path), fp8=options.fp8))  # noqa: T201


def ship(head: Path, name: str, target: Path, *, fp8: bool = False) -> Path:
    """Write a head into the package as that of its method; the folder.

    Args:
        head: folder of the trained head.
        name: catalog name of its target.
        target: folder of its target.
        fp8: whether its matrices are stored in FP8.

    Raises:
        DrafterError: not a head, one for another target, or its lm_head was trained.
    """
    if (own := target_of(head)) != name:
        raise DrafterError(f"{head}: is for {own}, not for {name}")
    place = HEADS_FOLDER / f"{name}-{read_head(read_config(head, DrafterError)).method}"
    with tempfile.TemporaryDirectory(prefix=".", dir=HEADS_FOLDER) as staging:
        reduced = Path(staging) / place.name
        without_rows(head, target, reduced)
        if fp8:
            quantize_head(reduced, quantised := Path(staging) / "fp8")
            for card in reduced.glob("README.md"):  # it speaks of what is loaded, which is bf16
                shutil.copyfile(card, quantised / card.name)
            reduced = quantised
        if place.exists():
            shutil.rmtree(place)
        reduced.rename(place)
    return place


if __name__ == "__main__":
    main()
