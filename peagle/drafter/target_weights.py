"""A target's weights, read one at a time from its folder.

Its head starts from them or is measured against them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from peagle.drafter.architecture import Architecture
from peagle.errors import ConfigError

_EMBEDDINGS = "embed_tokens.weight"
_LM_HEAD = "lm_head.weight"


class TargetWeights:
    """A target's safetensors by the names of Llama's checkpoints.

    For example `norm.weight` and `layers.3.mlp.up_proj.weight`.

    What stands before these names differs: `model.`, or `model.language_model.` where there are images as well. It is
    what stands before the embeddings of the target's vocabulary.

    Raises:
        ConfigError: no such embeddings there, or no lm_head where they are not used in its place.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self._folder, self._architecture = folder, architecture
        self._file_of = {name: file for file in sorted(folder.glob("*.safetensors")) for name in _names(file)}
        self._prefix = self._name_of(_EMBEDDINGS).removesuffix(_EMBEDDINGS)
        if not architecture.ties_embeddings:
            self._name_of(_LM_HEAD)

    def names_in_layer(self, index: int) -> set[str]:
        """Names of a layer's weights, without what says which layer it is."""
        prefix = f"{self._prefix}layers.{index}."
        return {name.removeprefix(prefix) for name in self._file_of if name.startswith(prefix)}

    def shape(self, name: str) -> list[int]:
        """Of a weight that is there."""
        return self._shape(self._prefix + name)

    def __getitem__(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        file = self._file_of.get(self._prefix + name)
        if file is None:
            raise ConfigError(f"{self._folder}: no {self._prefix}{name} in its safetensors files")
        with safe_open(file, "pt") as weights:
            tensor: torch.Tensor = weights.get_tensor(self._prefix + name)
        return tensor

    def final_norm(self) -> torch.Tensor:
        """The factors of the final norm, [H]."""
        return self["norm.weight"].float() + self._architecture.norm_offset

    def _name_of(self, ending: str) -> str:
        """Of a matrix with a row for each token."""
        shape = [self._architecture.vocab_size, self._architecture.hidden_size]
        found = [name for name in self._file_of if name.endswith(ending) and self._shape(name) == shape]
        if not found:
            raise ConfigError(
                f"{self._folder}: no {ending} of {shape[0]} x {shape[1]} in its safetensors files",
                hint="give the folder of the whole target, as transformers saves it",
            )
        return min(found, key=len)

    def _shape(self, name: str) -> list[int]:
        from safetensors import safe_open

        with safe_open(self._file_of[name], "pt") as weights:
            shape: list[int] = weights.get_slice(name).get_shape()
        return shape


@torch.no_grad()
def share_output(head: Any, weights: TargetWeights, architecture: Architecture) -> None:
    """Give a head the end of its target: the final norm, and what happens to logits.

    The library reads the norm by its name, as if all were Llama's, and does not know of soft-capped logits.
    """
    head.verifier_norm.weight.copy_(weights.final_norm())
    head.verifier_softcap = architecture.logit_softcap


def _names(file: Path) -> Sequence[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as weights:
        names: Sequence[str] = list(weights.keys())
    return names
