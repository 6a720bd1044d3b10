"""Save a head in the format that vLLM loads, and load it again.

The target's own weights (norm, lm_head, and embeddings unless they are trained) are never saved. With a draft
vocabulary, the rows of lm_head are saved, because vLLM cannot take them from the target.
"""

import json
from pathlib import Path
from typing import Any

import torch

from peagle.drafter.architecture import read_architecture
from peagle.drafter.attention import DOCUMENT_ATTENTION
from peagle.drafter.head_spec import ALGORITHMS
from peagle.drafter.target_weights import TargetWeights, share_output
from peagle.errors import DrafterError
from peagle.files import write_atomic

_OWNED_BY_TARGET = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d")


def save_head(head: Any, folder: Path, *, verifier: str, num_speculative_tokens: int | None = None) -> None:
    """Write `config.json` and `model.safetensors` (bf16) in the format that vLLM loads.

    Args:
        folder: created if missing.
        verifier: the target's public name, which replaces the path it was trained with.
        num_speculative_tokens: the default K for serving the head.
    """
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    config = head.config.to_dict()
    config["dtype"] = "bfloat16"
    config["speculators_config"]["verifier"]["name_or_path"] = verifier
    config["transformer_layer_config"]["_name_or_path"] = verifier
    if num_speculative_tokens is not None:
        for method in config["speculators_config"]["proposal_methods"]:
            method["speculative_tokens"] = num_speculative_tokens
    tensors = {name: _as_saved(tensor) for name, tensor in head.state_dict().items() if is_saved(head, name)}
    # `save_file` would create a file that only its owner can read.
    write_atomic(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_head(folder: Path, target: Path) -> Any:
    """Load a saved head, with the shared weights from the target's folder."""
    from safetensors.torch import load_file

    silence_library()
    raw = json.loads((folder / "config.json").read_text())
    algorithm = raw.get("speculators_model_type")
    if algorithm not in ALGORITHMS:
        raise DrafterError(f"{folder}: not a P-EAGLE or EAGLE-3 head in speculators' format")
    if raw.get("quantization_config"):
        raise DrafterError(
            f"{folder} is quantised", hint="convert it to bf16 with `peagle quantize-drafter --dequantize`"
        )
    model_class = model_class_of(algorithm)
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
    required = [name for name in missing if is_saved(head, name) and name != "lm_head.weight"]
    if required:
        raise DrafterError(f"{folder}: weights are missing: {', '.join(required)}")
    head.load_verifier_weights()
    architecture = read_architecture(target)
    share_output(head, TargetWeights(target, architecture), architecture)
    return head.float()


def model_class_of(algorithm: str) -> Any:
    if algorithm == "peagle":
        from speculators.models.peagle import PEagleDraftModel

        return PEagleDraftModel
    from speculators.models.eagle3 import Eagle3DraftModel

    return Eagle3DraftModel


def silence_library() -> None:
    """Disable the logs of `speculators`, which name every tensor of the target."""
    from loguru import logger

    logger.disable("speculators")


def is_saved(head: Any, name: str) -> bool:
    """Return whether a weight is the head's own, not its target's."""
    if name == "embed_tokens.weight":
        return bool(head.config.embed_requires_grad)
    shared = name == "lm_head.weight" and not head.use_draft_vocab and not head.lm_head.weight.requires_grad
    return name not in _OWNED_BY_TARGET and not shared


def _as_saved(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    return (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
