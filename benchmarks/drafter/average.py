"""Averages the weights of heads that went on from each other: one head that drafts better than each (model soups,
arXiv 2203.05482; measured in LOG.md).

    python -m benchmarks.drafter.average heads/first/head heads/second/head --output heads/both

The heads must draft alike but for their weights. The card is that of the last one: what it says of data and acceptance
is to be mended by hand.
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
# What a layer computes with its weights. Names and tokens that it does not use differ by who wrote the configuration.
_COMPUTATION = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
)


def main() -> None:
    """Write the average, and say where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", type=Path, nargs="+", help="folders of heads")
    parser.add_argument("--output", type=Path, required=True, help="folder that is not there yet")
    options = parser.parse_args()
    average(options.heads, options.output)
    print(options.output)  # noqa: T201


def average(heads: list[Path], output: Path) -> None:
    """Write a head whose weights are the mean of those of `heads`, computed in float32.

    Raises:
        DrafterError: the heads are of different shapes, or not heads; or `output` is there.
    """
    if output.exists():
        raise DrafterError(f"{output} is there already", hint="name another folder")
    drafting = _drafting(read_config(heads[-1], DrafterError))
    for head in heads[:-1]:
        if _drafting(read_config(head, DrafterError)) != drafting:
            raise DrafterError(f"{head}/config.json is not that of {heads[-1]}: only equal heads have an average")
    weights = [load_file(head / _WEIGHTS) for head in heads]
    if len({frozenset(one) for one in weights}) > 1:
        raise DrafterError(f"{', '.join(map(str, heads))} hold weights of different names")
    with safe_open(heads[-1] / _WEIGHTS, "pt") as file:
        metadata = file.metadata()
    mean = {name: _mean([one[name] for one in weights]) for name in weights[-1]}
    output.mkdir(parents=True)
    save_file(mean, output / _WEIGHTS, metadata)
    for name in ("config.json", "README.md"):
        shutil.copyfile(heads[-1] / name, output / name)


def _drafting(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """All that decides what a head drafts, weights aside."""
    layer = config.get("transformer_layer_config") or config
    return (read_head(config), *(config.get(key) for key in _NORMS), *(layer.get(key) for key in _COMPUTATION))


def _mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    if all(torch.equal(tensor, tensors[-1]) for tensor in tensors):
        return tensors[-1]  # to the bit: a sum would make 0 of -0
    if not tensors[-1].is_floating_point():
        raise DrafterError("the heads have different draft vocabularies")
    return torch.stack([tensor.float() for tensor in tensors]).mean(0).to(tensors[-1].dtype)


if __name__ == "__main__":
    main()
