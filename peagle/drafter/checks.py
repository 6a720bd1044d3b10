"""What can be refused of a training before anything slow begins: before the target answers, and again before it trains.

It reads configurations and the headers of weights; it loads no weights.
"""

from collections.abc import Callable

import torch

from peagle.drafter.architecture import SERVED
from peagle.drafter.config import TrainConfig
from peagle.drafter.head_spec import HeadSpec, require_buildable
from peagle.drafter.target import Target, load_target
from peagle.drafter.warm_start import init_for
from peagle.errors import ConfigError


def check_training(config: TrainConfig, say: Callable[[str], None]) -> tuple[TrainConfig, Target, torch.device]:
    """Make sure that there can be such a head for the target, and be trained here.

    Args:
        say: told what comes out otherwise than one may think: a head that vLLM is not known to serve, or whose target
            it does not find, other first weights than were asked for.

    Returns:
        The configuration with the first weights that there can be, the target, and the device to train on.

    Raises:
        ConfigError: it cannot be; says what.
    """
    device = _device(config.device)
    target = load_target(config.target, config.aux_layers, say)
    spec = head_spec(config, target)
    architecture = require_buildable(target.folder, spec)
    if architecture.model_type not in SERVED:
        say(
            f"vLLM 0.29 is not known to serve heads for {architecture.model_type!r} targets; it does for"
            f" {', '.join(SERVED)}"
        )
    if config.verifier is None and target.model.upstream_id is None:
        say(
            f"the head will call its target {target.model.name!r}; for `vllm serve HEAD`, which loads the target by that"
            " name, give its hub id as --verifier"
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


def _device(asked: str) -> torch.device:
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here", hint="use --device cpu")
    return torch.device("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")
