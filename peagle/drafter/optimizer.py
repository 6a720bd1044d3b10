"""The optimizer of a head: Muon for the matrices of its layers, AdamW for everything else.

Muon (Jordan et al. 2024, `torch.optim.Muon`) makes the update of a matrix orthogonal, so that no direction of it lags
behind. Its authors leave embeddings, lm_head and vectors to AdamW. It knows parameters by name and a recipe; it knows
nothing of heads or data.
"""

from collections.abc import Mapping
from typing import Any

import torch

from peagle.drafter.recipe import TrainingConfig

_BETAS = (0.9, 0.95)
_TABLES = ("embed_tokens.weight", "lm_head.weight")


class HeadOptimizer:
    """One optimizer or two, stepped and saved together."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], config: TrainingConfig) -> None:
        is_muon = config.optimizer == "muon"
        matrices = [p for name, p in parameters.items() if p.dim() == 2 and name not in _TABLES]
        tables = [p for name, p in parameters.items() if p.dim() == 2 and name in _TABLES]
        vectors = [p for p in parameters.values() if p.dim() != 2]
        by_adamw = [tables if is_muon else tables + matrices, vectors]
        decays = (config.weight_decay, 0.0)
        groups = [{"params": p, "weight_decay": d} for p, d in zip(by_adamw, decays, strict=True) if p]
        self._optimizers: dict[torch.optim.Optimizer, float] = {}  # each with its learning rate's ratio to AdamW's
        if groups:
            self._optimizers[torch.optim.AdamW(groups, betas=_BETAS)] = 1.0
        if is_muon and matrices:
            muon = torch.optim.Muon(matrices, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
            self._optimizers[muon] = config.muon_learning_rate / config.learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Of AdamW; Muon's keeps its ratio to it."""
        for optimizer, ratio in self._optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * ratio

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Move the parameters."""
        for optimizer in self._optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {type(optimizer).__name__: optimizer.state_dict() for optimizer in self._optimizers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of the same recipe and head."""
        for optimizer in self._optimizers:
            optimizer.load_state_dict(state[type(optimizer).__name__])
