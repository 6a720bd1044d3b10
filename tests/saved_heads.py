"""Load a saved head into the model class of the speculators library, as training does."""

import json

import torch

from peagle.drafter.attention import DOCUMENT_ATTENTION
from peagle.drafter.head import is_saved, model_class_of, silence_speculators
from peagle.drafter.target import TargetWeights, read_architecture, set_verifier_output


def load_head(folder, target):
    """Return the float32 model of a bf16 head, with the shared weights from the target's folder."""
    from safetensors.torch import load_file

    silence_speculators()
    model_class = model_class_of(json.loads((folder / "config.json").read_text())["speculators_model_type"])
    config = model_class.config_class.from_pretrained(folder)
    config.speculators_config.verifier.name_or_path = str(target)
    layers = config.transformer_layer_config
    config.transformer_layer_config = layers.from_dict(layers.to_dict(), attn_implementation=DOCUMENT_ATTENTION)
    head = model_class(config=config)
    tensors = load_file(folder / "model.safetensors")
    if head.use_draft_vocab:
        target_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        tensors["t2d"] = torch.zeros(head.verifier_vocab_size, dtype=torch.bool).index_fill_(0, target_ids, True)
    missing, _ = head.load_state_dict(tensors, strict=False)
    # The library's default is True, even for heads that share the target's embeddings.
    head.config.embed_requires_grad = "embed_tokens.weight" in tensors
    assert not [name for name in missing if is_saved(head, name) and name != "lm_head.weight"]
    head.load_verifier_weights()
    architecture = read_architecture(target)
    set_verifier_output(head, TargetWeights(target, architecture), architecture)
    return head.float()
