"""Refusals of a training before anything slow begins.

Once before the target answers, and again before it trains.

It reads configurations and the headers of weights. It loads no weights, but has a head of the package made whole.
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
    """Make sure that there can be such a head for the target, and be trained here.

    Args:
        say: told what comes out otherwise than one may think: a head that vLLM is not known to serve, or whose target
            it does not find, other first weights than were asked for.

    Returns:
        The configuration with the first weights that there can be, the target, and the device of this process.

    Raises:
        ConfigError: it cannot be; says what.
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
            f"vLLM 0.29 is not known to serve heads for {architecture.model_type!r} targets; it does for"
            f" {', '.join(SERVED)}"
        )
    if config.verifier is None and target.model.upstream_id is None:
        say(
            f"the head will call its target {target.model.name!r}; for `vllm serve HEAD`, which loads the target by"
            " that name, give its hub id as --verifier"
        )
    init = init_for(target.folder, architecture, spec, say)
    return config.model_copy(update={"init": init}), target, device


def head_spec(config: TrainConfig, target: Target) -> HeadSpec:
    """The shape of the head that a configuration asks for.

    Raises:
        ConfigError: there is no such shape, or no such head to go on from.
    """
    return HeadSpec(
        aux_layers=target.aux_layers,
        algorithm=config.algorithm,
        num_layers=config.num_layers,
        num_key_value_heads=config.num_key_value_heads,
        num_depths=config.num_depths,
        mask_token_id=config.mask_token_id,
        init=config.init,
        further_layers=config.further_layers,
        num_frozen_layers=config.num_frozen_layers,
        train_lm_head=config.train_lm_head,
        train_embeddings=config.train_embeddings,
    )


def _require_tokens(config: TrainConfig, vocab_size: int) -> None:
    """Require the mask token, and as many tokens as a new head is to draft."""
    if config.mask_token_id >= vocab_size:
        raise ConfigError(f"--mask-token-id {config.mask_token_id}: the target has tokens 0 to {vocab_size - 1}")
    if config.init in INITS and config.draft_vocab_size > vocab_size:
        raise ConfigError(
            f"--draft-vocab-size {config.draft_vocab_size}: the target has {vocab_size} tokens",
            hint=f"give at most --draft-vocab-size {vocab_size}",
        )


def _require_fit(init: Path, target: Target) -> None:
    """Require that the head to go on from fits this target and can be trained."""
    check_fit(read_config(init, ConfigError), target.model.config)
    quantised = sorted(name for name, dtype in read_dtypes(whole_head(init)).items() if dtype.startswith("F8"))
    if quantised:
        raise ConfigError(
            f"{init}: its {quantised[0]} is in FP8, which cannot be trained",
            hint="`peagle quantize-drafter --dequantize` makes a bf16 head of it",
        )


def _device(config: TrainConfig) -> torch.device:
    """The device of this process.

    With several workers, the cluster decides whether they can have it.
    """
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and config.workers == 1 and not has_gpu:
        raise ConfigError("--device cuda: torch sees no GPU here", hint="use --device cpu")
    return torch.device("cuda" if config.device != "cpu" and has_gpu else "cpu")
