"""Average the weights of several heads into one that drafts better than each of them.

Each head must have been trained further from the previous one (`--init`). This is a "model soup" (arXiv 2203.05482);
LOG.md has measurements.

    python -m benchmarks.drafter.average heads/first/head heads/second/head --output heads/both

The heads may differ only in their weights. The model card is copied from the last head: correct its statements about
data and acceptance by hand.
"""

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from peagle.catalog.folders import read_config
from peagle.catalog.head_files import read_head
from peagle.errors import DrafterError

_WEIGHTS = "model.safetensors"
_NORMS = ("norm_before_residual", "norm_before_fc")
# Fields that determine what a layer computes. Other fields, such as names, may differ between equivalent heads.
_COMPUTATION = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
)


def main() -> None:
    """Write the average, and print its folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", type=Path, nargs="+", help="folders of heads")
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    options = parser.parse_args()
    average(options.heads, options.output)
    print(options.output)  # noqa: T201


def average(heads: list[Path], output: Path) -> None:
    """Write a head whose weights are the mean of those of `heads`, computed in float32.

    Raises:
        DrafterError: a folder contains no head, the heads have different shapes, or `output` exists.
    """
    if output.exists():
        raise DrafterError(f"{output} already exists", hint="name another folder")
    architecture = _architecture(read_config(heads[-1], DrafterError))
    for head in heads[:-1]:
        if _architecture(read_config(head, DrafterError)) != architecture:
            raise DrafterError(
                f"{head}/config.json differs from that of {heads[-1]}: only equal architectures can be averaged"
            )
    weights = [load_file(head / _WEIGHTS) for head in heads]
    if len({frozenset(tensors) for tensors in weights}) > 1:
        raise DrafterError(f"{', '.join(map(str, heads))} have weights with different names")
    with safe_open(heads[-1] / _WEIGHTS, "pt") as file:
        metadata = file.metadata()
    mean = {name: _mean([tensors[name] for tensors in weights]) for name in weights[-1]}
    output.mkdir(parents=True)
    save_file(mean, output / _WEIGHTS, metadata)
    for name in ("config.json", "README.md"):
        shutil.copyfile(heads[-1] / name, output / name)


def _architecture(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return everything except the weights that determines what a head drafts."""
    layer = config.get("transformer_layer_config") or config
    return (read_head(config), *(config.get(key) for key in _NORMS), *(layer.get(key) for key in _COMPUTATION))


def _mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    if all(torch.equal(tensor, tensors[-1]) for tensor in tensors):
        return tensors[-1]  # bit by bit: a mean would turn -0 into 0
    if not tensors[-1].is_floating_point():
        raise DrafterError("the heads have different draft vocabularies")
    return torch.stack([tensor.float() for tensor in tensors]).mean(0).to(tensors[-1].dtype)


if __name__ == "__main__":
    main()
