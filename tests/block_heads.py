"""Random DFlash and DSpark heads, in the format that speculators saves."""

import torch

from peagle.drafter.head import silence_speculators
from peagle.drafter.target import read_architecture


def save_block_head(
    folder, target, algorithm="dflash", *, block_size=8, num_layers=2, aux_layers=(2, 15, 29), verifier
):
    """Save a head with random weights for the target in a folder, and return `folder`."""
    from speculators.models.dflash import DFlashDraftModel
    from speculators.models.dspark import DSparkDraftModel

    silence_speculators()
    architecture = read_architecture(target)
    model = DFlashDraftModel if algorithm == "dflash" else DSparkDraftModel
    head = model.from_training_args(
        architecture.layer_config(num_layers=num_layers, num_key_value_heads=None),
        draft_vocab_size=architecture.vocab_size,
        target_layer_ids=list(aux_layers),
        mask_token_id=0,
        block_size=block_size,
        verifier_name_or_path=str(target),
        draft_attn_impl="eager",
    )
    head.config.speculators_config.verifier.name_or_path = verifier
    head.to(torch.bfloat16).save_pretrained(folder)
    return folder
