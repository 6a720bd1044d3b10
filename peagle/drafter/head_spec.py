"""The shape of a head, and whether a target supports it."""

from dataclasses import dataclass
from pathlib import Path

from peagle.catalog.folders import read_config
from peagle.catalog.head_files import read_head
from peagle.drafter.architecture import Architecture, read_architecture
from peagle.errors import ConfigError

ALGORITHMS = ("peagle", "eagle3")
INITS = ("warm", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """The shape of a head.

    Attributes:
        algorithm: "peagle" drafts all tokens in one pass, "eagle3" one token after another.
        aux_layers: the target's layers whose inputs the head reads.
        num_layers: decoder layers of the head.
        num_key_value_heads: KV heads of the head's attention; None copies the target's number. Attention is the only
            source of context for a mask row, so more KV heads may help; they start as copies of the target's.
        num_depths: K_train, the number of tokens it learns to draft together.
        mask_token_id: the token at depths 1 and higher.
        init: "warm": layers start as the target's last ones, which must be like Llama's, and `fc` passes on the last
            aux state. "random". Or the folder of a saved head to continue, of the same shape or with fewer layers or
            KV heads, which are then repeated. A P-EAGLE head may continue an EAGLE-3 head. New layers start as the
            identity.
        num_frozen_layers: first layers of the saved head that are not trained. Their inputs (`fc`, mask state,
            embeddings) are not trained either.
        train_lm_head: train lm_head instead of keeping the target's rows.
        train_embeddings: train embeddings instead of sharing the target's. They are then saved with the head:
            vocabulary x hidden size, most of its bytes.
    """

    aux_layers: tuple[int, ...]
    algorithm: str = "peagle"
    num_layers: int = 1
    num_key_value_heads: int | None = None
    num_depths: int = 8
    mask_token_id: int = 0
    init: str = "warm"
    num_frozen_layers: int = 0
    train_lm_head: bool = False
    train_embeddings: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_layers <= 8:
            raise ConfigError(f"num_layers must be from 1 to 8, got {self.num_layers}")
        if self.num_depths < 1:
            raise ConfigError(f"num_depths must be at least 1, got {self.num_depths}")
        if self.algorithm not in ALGORITHMS:
            raise ConfigError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {self.algorithm!r}")
        if self.init not in INITS and not Path(self.init).is_dir():
            raise ConfigError(f"init must be one of {', '.join(INITS)} or the folder of a head, got {self.init!r}")
        if not 0 <= self.num_frozen_layers < self.num_layers:
            raise ConfigError(
                f"num_frozen_layers must be from 0 to {self.num_layers - 1}, got {self.num_frozen_layers}",
                hint="at least the last layer must be trained",
            )
        if self.num_frozen_layers and self.init in INITS:
            raise ConfigError(
                f"num_frozen_layers requires a saved head to continue, but init is {self.init!r}",
                hint="set init to the folder of a head",
            )
        if self.num_frozen_layers and self.train_embeddings:
            raise ConfigError(
                "train_embeddings cannot be combined with num_frozen_layers: embeddings are an input of frozen layers",
                hint="set only one of them",
            )


def require_buildable(target: Path, spec: HeadSpec) -> Architecture:
    """Check from the configurations that a head can be built for a target; return the target's architecture."""
    shape = read_architecture(target)
    if spec.init != "random" and spec.num_layers > shape.num_hidden_layers:
        raise ConfigError(
            f"{spec.num_layers} layers cannot start as the last layers of a target that has {shape.num_hidden_layers}",
            hint="decrease --num-layers, or use --init random",
        )
    num_kv_heads, target_kv_heads = spec.num_key_value_heads, shape.num_key_value_heads
    if num_kv_heads is not None and shape.num_attention_heads % num_kv_heads:
        raise ConfigError(f"{num_kv_heads} KV heads do not divide {shape.num_attention_heads} attention heads")
    if num_kv_heads is not None and num_kv_heads % target_kv_heads and spec.init != "random":
        raise ConfigError(
            f"{num_kv_heads} KV heads cannot start as copies of the target's {target_kv_heads}",
            hint="use a multiple of the target's KV heads, or --init random",
        )
    if spec.init not in INITS:
        _require_compatible(Path(spec.init), spec)
    return shape


def _require_compatible(folder: Path, spec: HeadSpec) -> None:
    """Check that a saved head reads the same layers and drafts the same way as the head to train."""
    saved = read_head(read_config(folder, ConfigError))
    if saved.aux_layer_ids and saved.aux_layer_ids != spec.aux_layers:
        raise ConfigError(
            f"{folder}: reads layers {list(saved.aux_layer_ids)}, but the head to train reads {list(spec.aux_layers)}",
            hint="use the --aux-layers of that head, or another --init",
        )
    if saved.method == spec.algorithm == "peagle" and saved.mask_token_id != spec.mask_token_id:
        raise ConfigError(
            f"{folder}: has mask token {saved.mask_token_id}, but the head to train has {spec.mask_token_id}",
            hint="use the --mask-token-id of that head, or another --init",
        )
    if saved.num_layers > spec.num_layers:
        raise ConfigError(
            f"{folder}: has {saved.num_layers} layers, but the head to train has {spec.num_layers}",
            hint=f"increase --num-layers to at least {saved.num_layers}",
        )
    if saved.method == "peagle" != spec.algorithm:
        raise ConfigError(
            f"{folder}: is a P-EAGLE head, but the head to train is {spec.algorithm}", hint="use --algorithm peagle"
        )
    if saved.num_layers < spec.num_frozen_layers:
        raise ConfigError(
            f"{folder}: has {saved.num_layers} layers, fewer than num_frozen_layers={spec.num_frozen_layers}",
            hint=f"decrease --num-frozen-layers to {saved.num_layers} or less",
        )
