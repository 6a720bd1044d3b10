"""Checks of a training's configuration before anything slow starts.

They run before the target generates responses, and again before training.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from peagle.catalog.drafters import find_head
from peagle.catalog.folders import read_config
from peagle.catalog.head_files import check_fit, read_dtypes
from peagle.catalog.shipped_heads import whole_head
from peagle.drafter.architecture import SERVED
from peagle.drafter.config import TrainConfig
from peagle.drafter.head import init_for
from peagle.drafter.head_spec import INITS, HeadSpec, require_buildable
from peagle.drafter.target import Target, load_target
from peagle.errors import ConfigError


def check_training(config: TrainConfig, say: Callable[[str], None]) -> tuple[TrainConfig, Target, torch.device]:
    """Check that the head can be built for the target and trained on this machine.

    Args:
        say: receives warnings: vLLM may not serve the head or find its target, or `init` was changed.

    Returns:
        The configuration with a supported `init`, the target, and the device of this process.
    """
    device = _device(config)
    if config.init not in INITS:
        config = config.model_copy(update={"init": find_head(config.init)})
    target = load_target(config.target, config.aux_layers, say)
    spec = head_spec(config, target)
    architecture = require_buildable(target.folder, spec)
    _require_tokens(config, target.vocab_size)
    if config.init not in INITS:
        _require_fit(Path(config.init), target)
    if architecture.model_type not in SERVED:
        say(
            f"vLLM 0.29 may not serve heads for {architecture.model_type!r} targets; it serves them for"
            f" {', '.join(SERVED)}"
        )
    if config.verifier is None and target.model.upstream_id is None:
        say(
            f"the head will name {target.model.name!r} as its target; `vllm serve HEAD` loads the target by that name,"
            " so pass its hub id as --verifier to use it"
        )
    init = init_for(target.folder, architecture, spec, say)
    return config.model_copy(update={"init": init}), target, device


def head_spec(config: TrainConfig, target: Target) -> HeadSpec:
    return HeadSpec(
        aux_layers=target.aux_layers,
        algorithm=config.algorithm,
        num_layers=config.num_layers,
        num_key_value_heads=config.num_key_value_heads,
        num_depths=config.num_depths,
        mask_token_id=config.mask_token_id,
        init=config.init,
        num_frozen_layers=config.num_frozen_layers,
        train_lm_head=config.train_lm_head,
        train_embeddings=config.train_embeddings,
    )


def _require_tokens(config: TrainConfig, vocab_size: int) -> None:
    if config.mask_token_id >= vocab_size:
        raise ConfigError(f"--mask-token-id {config.mask_token_id}: the target's tokens are 0 to {vocab_size - 1}")
    if config.init in INITS and config.draft_vocab_size > vocab_size:
        raise ConfigError(
            f"--draft-vocab-size {config.draft_vocab_size}: the target has only {vocab_size} tokens",
            hint=f"use --draft-vocab-size {vocab_size} or less",
        )


def _require_fit(init: Path, target: Target) -> None:
    """Check that the head to continue fits this target and can be trained."""
    check_fit(read_config(init, ConfigError), target.model.config)
    quantised = sorted(name for name, dtype in read_dtypes(whole_head(init)).items() if dtype.startswith("F8"))
    if quantised:
        raise ConfigError(
            f"{init}: its {quantised[0]} is in FP8, which cannot be trained",
            hint="convert it to bf16 with `peagle quantize-drafter --dequantize`",
        )


def _device(config: TrainConfig) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and config.workers == 1 and not has_gpu:  # the cluster checks several workers
        raise ConfigError("--device cuda: torch does not find a GPU on this machine", hint="use --device cpu")
    return torch.device("cuda" if config.device != "cpu" and has_gpu else "cpu")
