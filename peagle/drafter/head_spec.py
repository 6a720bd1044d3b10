"""The shape of a head, and whether there can be such a head for a target.

It builds nothing.
"""

from dataclasses import dataclass
from pathlib import Path

from peagle.catalog.folders import read_config
from peagle.catalog.head_files import read_head
from peagle.drafter.architecture import Architecture, read_architecture
from peagle.errors import ConfigError

ALGORITHMS = ("peagle", "eagle3")
INITS = ("warm", "random")
FURTHER_LAYERS = ("identity", "unrolled")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """The shape of a head.

    Attributes:
        algorithm: "peagle" drafts all tokens in one pass, "eagle3" one after the other.
        aux_layers: the target's layers whose inputs the head reads.
        num_layers: decoder layers of its own.
        num_key_value_heads: of its attention; None for as many as the target has. A mask row knows its context only
            through them, so a head may want more: the target's are then repeated at the start.
        num_depths: K_train, the number of tokens it learns to draft at once.
        mask_token_id: the token that stands at depths 1 and up.
        init: "warm": layers from the target's last ones, which have to be like Llama's (warm_start.py), `fc` passes the
            last aux state on; "random"; or the folder of a saved head to go on from: of the same shape, or with fewer
            layers or KV heads, which are then repeated. A P-EAGLE head may go on from an EAGLE-3 one.
        further_layers: those that the head to go on from has not begin as the "identity", or "unrolled": as steps of
            the EAGLE-3 head that it is (unroll.py).
        num_frozen_layers: first layers of the head to go on from that stay as they are, and with them what feeds them:
            `fc`, the mask state, embeddings.
        train_lm_head: whether lm_head is trained, rather than kept equal to the target's rows.
        train_embeddings: whether embeddings are trained, rather than shared with the target. They are then saved with
            the head: vocabulary x hidden size, most of its bytes.
    """

    aux_layers: tuple[int, ...]
    algorithm: str = "peagle"
    num_layers: int = 1
    num_key_value_heads: int | None = None
    num_depths: int = 8
    mask_token_id: int = 0
    init: str = "warm"
    further_layers: str = "identity"
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
        if self.further_layers not in FURTHER_LAYERS:
            raise ConfigError(f"further_layers must be one of {', '.join(FURTHER_LAYERS)}, got {self.further_layers!r}")
        if self.init not in INITS and not Path(self.init).is_dir():
            raise ConfigError(f"init must be one of {', '.join(INITS)} or the folder of a head, got {self.init!r}")
        if not 0 <= self.num_frozen_layers < self.num_layers:
            raise ConfigError(
                f"num_frozen_layers must be from 0 to {self.num_layers - 1}, got {self.num_frozen_layers}",
                hint="the last layer at least is trained",
            )
        if self.num_frozen_layers and self.init in INITS:
            raise ConfigError(
                f"num_frozen_layers: a head with init {self.init} has no layers that could stay as they are",
                hint="name the folder of a head as init",
            )
        if self.num_frozen_layers and self.train_embeddings:
            raise ConfigError(
                "train_embeddings: they feed the layers that num_frozen_layers keeps as they are",
                hint="give one of the two",
            )


def require_buildable(target: Path, spec: HeadSpec) -> Architecture:
    """Require that a head can be built for a target, by its configuration alone.

    Returns what the configuration says of it.

    Raises:
        ConfigError: there cannot.
    """
    shape = read_architecture(target)
    if spec.init != "random" and spec.num_layers > shape.num_hidden_layers:
        raise ConfigError(
            f"{spec.num_layers} layers cannot start as the last ones of a target that has {shape.num_hidden_layers}",
            hint="give fewer --num-layers, or --init random",
        )
    num_heads, num_kv_heads, own = shape.num_attention_heads, shape.num_key_value_heads, spec.num_key_value_heads
    if own is not None and num_heads % own:
        raise ConfigError(f"{own} KV heads do not divide {num_heads} heads")
    if own is not None and own % num_kv_heads and spec.init != "random":
        raise ConfigError(
            f"{own} KV heads cannot start as copies of the target's {num_kv_heads}",
            hint="give a multiple of them, or --init random",
        )
    if spec.init not in INITS:
        _require_same_reading(Path(spec.init), spec)
    if spec.further_layers == "unrolled":
        _require_unrollable(shape, spec)
    return shape


def _require_unrollable(shape: Architecture, spec: HeadSpec) -> None:
    """Whether the head to go on from can be unrolled into the one to train."""
    saved = None if spec.init in INITS else read_head(read_config(Path(spec.init), ConfigError))
    if saved is None or saved.method != "eagle3" or saved.num_layers != 1 or spec.algorithm != "peagle":
        raise ConfigError(
            "only an EAGLE-3 head of one layer can be unrolled, into a P-EAGLE head",
            hint="give its folder as --init, or leave --further-layers unrolled out",
        )
    if spec.num_layers < 3 or spec.num_layers % 2 == 0:
        raise ConfigError(
            f"unrolled steps are two layers each behind the first: {spec.num_layers} layers cannot hold them",
            hint="give --num-layers 3, 5 or 7",
        )
    if spec.num_depths <= spec.num_layers // 2:
        raise ConfigError(
            f"{spec.num_layers} layers draft {spec.num_layers // 2 + 1} tokens, K_train is {spec.num_depths}",
            hint="give more --num-depths",
        )
    wanted = next(
        (
            number
            for number in range(1, shape.num_attention_heads + 1)
            if shape.num_attention_heads % number == 0
            and number % shape.num_key_value_heads == 0
            and number * shape.head_dim >= shape.hidden_size
        ),
        None,
    )
    if wanted is None:
        raise ConfigError(
            f"{shape.num_attention_heads} heads of {shape.head_dim} cannot bring a state of {shape.hidden_size} "
            "from row to row",
            hint="leave --further-layers unrolled out",
        )
    own = spec.num_key_value_heads or shape.num_key_value_heads
    if own < wanted:
        raise ConfigError(
            f"{own} KV heads of {shape.head_dim} cannot bring a state of {shape.hidden_size} from row to row",
            hint=f"give --num-key-value-heads {wanted}",
        )


def _require_same_reading(folder: Path, spec: HeadSpec) -> None:
    """Require that a saved head reads and drafts like the one to train.

    They need equal numbers of layers too.
    """
    saved = read_head(read_config(folder, ConfigError))
    if saved.aux_layer_ids and saved.aux_layer_ids != spec.aux_layers:
        raise ConfigError(
            f"{folder}: reads layers {list(saved.aux_layer_ids)}, the head to train {list(spec.aux_layers)}",
            hint="give its --aux-layers, or another init",
        )
    if saved.method == spec.algorithm == "peagle" and saved.mask_token_id != spec.mask_token_id:
        raise ConfigError(
            f"{folder}: its mask token is {saved.mask_token_id}, that of the head to train {spec.mask_token_id}",
            hint="give its --mask-token-id, or another init",
        )
    if saved.num_layers > spec.num_layers:
        raise ConfigError(
            f"{folder}: has {saved.num_layers} layers, the head to train {spec.num_layers}",
            hint=f"give --num-layers {saved.num_layers} or more",
        )
    if saved.method == "peagle" != spec.algorithm:
        raise ConfigError(f"{folder}: is a P-EAGLE head, the head to train is not", hint="give --algorithm peagle")
    if saved.num_layers < spec.num_frozen_layers:
        raise ConfigError(
            f"{folder}: has {saved.num_layers} layers, {spec.num_frozen_layers} are to stay as they are",
            hint=f"give --num-frozen-layers {saved.num_layers} or fewer",
        )
