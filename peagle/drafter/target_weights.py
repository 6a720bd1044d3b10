"""Read single weights from a target's folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from peagle.drafter.architecture import Architecture
from peagle.errors import ConfigError

_EMBEDDINGS = "embed_tokens.weight"
_LM_HEAD = "lm_head.weight"


class TargetWeights:
    """A target's safetensors by Llama's names, such as `norm.weight` and `layers.3.mlp.up_proj.weight`.

    The prefix of these names differs (`model.`, `model.language_model.` in multimodal models); it is that of the
    embeddings.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self._folder, self._architecture = folder, architecture
        self._file_of = {name: file for file in sorted(folder.glob("*.safetensors")) for name in _names(file)}
        self._prefix = self._name_of(_EMBEDDINGS).removesuffix(_EMBEDDINGS)
        if not architecture.ties_embeddings:
            self._name_of(_LM_HEAD)

    def names_in_layer(self, index: int) -> set[str]:
        """Return the names of a layer's weights, relative to the layer."""
        prefix = f"{self._prefix}layers.{index}."
        return {name.removeprefix(prefix) for name in self._file_of if name.startswith(prefix)}

    def shape(self, name: str) -> list[int]:
        return self._shape(self._prefix + name)

    def __getitem__(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        file = self._file_of.get(self._prefix + name)
        if file is None:
            raise ConfigError(f"{self._folder}: its safetensors files have no {self._prefix}{name}")
        with safe_open(file, "pt") as weights:
            tensor: torch.Tensor = weights.get_tensor(self._prefix + name)
        return tensor

    def final_norm(self) -> torch.Tensor:
        """Return the factors of the final norm, [H]."""
        return self["norm.weight"].float() + self._architecture.norm_offset

    def _name_of(self, ending: str) -> str:
        shape = [self._architecture.vocab_size, self._architecture.hidden_size]
        names = [name for name in self._file_of if name.endswith(ending) and self._shape(name) == shape]
        if not names:
            raise ConfigError(
                f"{self._folder}: its safetensors files have no {ending} of {shape[0]} x {shape[1]}",
                hint="use the folder of a complete target, as saved by transformers",
            )
        return min(names, key=len)

    def _shape(self, name: str) -> list[int]:
        from safetensors import safe_open

        with safe_open(self._file_of[name], "pt") as weights:
            shape: list[int] = weights.get_slice(name).get_shape()
        return shape


@torch.no_grad()
def share_output(head: Any, weights: TargetWeights, architecture: Architecture) -> None:
    """Set a head's copy of the target's final norm and its soft cap of logits.

    The library only supports Llama's name of the norm, and no soft-capped logits.
    """
    head.verifier_norm.weight.copy_(weights.final_norm())
    head.verifier_softcap = architecture.logit_softcap


def _names(file: Path) -> Sequence[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as weights:
        names: Sequence[str] = list(weights.keys())
    return names
