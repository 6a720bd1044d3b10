"""A target of transformers, read from inside: the states that enter some of its layers and its final norm.

It knows documents and a model in memory; whether the states are stored or used at once is for others to decide.

Shapes: T tokens of a document, H hidden size, A aux layers, B documents of a batch.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from peagle.drafter.architecture import auto_class_of
from peagle.drafter.data import Sample
from peagle.drafter.target import require_layers
from peagle.errors import ConfigError

BATCH_TOKENS = 4096


class HiddenStateReader:
    """A target with hooks on the inputs of its aux layers and of its final norm.

    Raises:
        ConfigError: the target has no such layers.
    """

    def __init__(self, target: Any, aux_layers: Sequence[int]) -> None:
        self._decoder = target.get_decoder()
        layers = getattr(self._decoder, "layers", None)
        if layers is None or getattr(self._decoder, "norm", None) is None:
            raise ConfigError(f"{type(target).__name__}: no decoder with 'layers' and 'norm' to read states from")
        require_layers(aux_layers, len(layers))
        self._modules = [*(layers[layer] for layer in aux_layers), self._decoder.norm]

    @torch.inference_mode()
    def read(self, token_ids_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States of right-padded documents: aux [B, T, A * H] and last [B, T, H].

        Attention is causal, so what stands right of a document does not change it.
        """
        seen: list[torch.Tensor] = []
        hooks = [module.register_forward_pre_hook(_keeper(seen), with_kwargs=True) for module in self._modules]
        try:
            self._decoder(input_ids=token_ids_BT, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat(seen[:-1], dim=-1), seen[-1]


def load_reader(target: Path, aux_layers: Sequence[int], device: torch.device | str) -> HiddenStateReader:
    """The target of a folder in bf16."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # the command has one of its own
    auto_class = auto_class_of(AutoConfig.from_pretrained(target, trust_remote_code=False))
    model = auto_class.from_pretrained(target, dtype=torch.bfloat16, trust_remote_code=False).to(device).eval()
    return HiddenStateReader(model, aux_layers)


def states_of(
    samples: Sequence[Sample],
    reader: HiddenStateReader,
    *,
    device: torch.device | str,
    batch_tokens: int = BATCH_TOKENS,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Aux [T, A * H] and last [T, H] of each sample, in bf16 on the CPU.

    How samples are batched may change the last bit of a state, as it does in every engine.

    Args:
        samples: documents.
        reader: the target on `device`.
        device: of the target.
        batch_tokens: padded tokens the target sees at once; a longer document is seen alone.
    """
    states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for batch in _batches_by_length(samples, batch_tokens):
        width = max(len(samples[i].token_ids) for i in batch)
        padded = [list(samples[i].token_ids) + [0] * (width - len(samples[i].token_ids)) for i in batch]
        aux, last = reader.read(torch.tensor(padded, device=device))
        for row, i in enumerate(batch):
            length = len(samples[i].token_ids)
            states[i] = (_compact(aux[row, :length]), _compact(last[row, :length]))
    return [states[i] for i in range(len(samples))]


def _keeper(seen: list[torch.Tensor]) -> Callable[..., None]:
    def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    return keep


def _compact(states: torch.Tensor) -> torch.Tensor:
    return states.to("cpu", torch.bfloat16, copy=True)


def _batches_by_length(samples: Sequence[Sample], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of documents of like length, so that little is padding."""
    batch: list[int] = []
    for index in sorted(range(len(samples)), key=lambda i: len(samples[i].token_ids)):
        if batch and (len(batch) + 1) * len(samples[index].token_ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
