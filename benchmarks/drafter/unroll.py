"""Unroll an EAGLE-3 head into the layers of a P-EAGLE head, from which `peagle train --init` continues.

    python -m benchmarks.drafter.unroll heads/eagle3/head --prompts runs/responses --num-layers 5 \\
        --num-key-value-heads 9 --output heads/unrolled-start

An EAGLE-3 head of one layer drafts token by token: a step reads the state of the previous step and the token drafted
from it. A P-EAGLE head has no loop, but its layers follow each other. So two added layers represent one step:

Here, a row is one position of a document at one depth (see peagle/drafter/batch.py); at depths above 0 its token is
unknown.

- **copy**: each row with an unknown token copies the state of the previous position. Queries and keys are constants
  rotated by the rotary embedding, so that the best match is one position away. Rows with known tokens match themselves
  and are scaled up, so that later layers hardly change them.
- **step**: EAGLE-3's layer. It computes the token's embedding from the state, by linear regression, since the state
  predicts the token. Keys are rotated by one position, since a row's state describes the token of the next position.

So 2n + 1 layers initially draft n + 1 tokens, and those after the first only roughly. The result is a start for
training, not a head to serve. Whether a row's token is known is also a linear function of its state, found by
regression. All regressions use the rows of a batch of training documents.

Shapes: S rows of the batch, H hidden size, D head dimension.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch

from peagle.catalog.drafters import find_head
from peagle.catalog.folders import read_config
from peagle.catalog.head_files import read_head
from peagle.drafter.batch import TrainingBatch
from peagle.drafter.config import TrainConfig
from peagle.drafter.forward import most_likely_drafts, parallel_rows
from peagle.drafter.head import save_head
from peagle.drafter.pipeline import Listener, prepare
from peagle.drafter.training import sampled_batch
from peagle.errors import ConfigError, DrafterError

_PAIRS = 8  # the fastest rotary pairs, which distinguish neighbouring positions
_GAP = 8.0  # difference of attention scores between the copied position and its neighbours
_LARGER = 5.0  # known rows grow by this multiple of their size
_MUTE = 20.0  # reduction of the attention scores of unknown rows in a step
_GATE = 10.0  # gate value of open gates; SiLU multiplies the input by about this value
_TOKENS_PER_DIMENSION = 8  # of documents used for the regressions


def main() -> None:
    """Unroll a head and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", help="an EAGLE-3 head of one layer: folder or catalog name")
    parser.add_argument("--prompts", action="append", required=True, help="documents with responses; may be repeated")
    parser.add_argument("--output", type=Path, required=True, help="folder of the new head")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--num-layers", type=int, default=5, choices=(3, 5, 7))
    parser.add_argument("--num-key-value-heads", type=int, help="must be enough for a whole state")
    parser.add_argument("--cod-ratio", type=float, default=0.8)
    options = parser.parse_args()
    folder = Path(find_head(options.head))
    facts = read_head(read_config(folder, DrafterError))
    if facts.method != "eagle3" or facts.num_layers != 1:
        raise ConfigError(f"{folder}: only an EAGLE-3 head of one layer can be unrolled")
    config = TrainConfig(
        model=options.target,
        prompts=options.prompts,
        responses="given",
        output=options.output,
        on_the_fly=True,
        init=str(folder),
        num_layers=options.num_layers,
        num_key_value_heads=options.num_key_value_heads,
        cod_ratio=options.cod_ratio,
    )
    prepared = prepare(config, Listener(say=print))
    head = prepared.new_head()
    layers = head.config.transformer_layer_config
    if layers.num_key_value_heads * layers.head_dim < layers.hidden_size:
        raise ConfigError(
            f"{layers.num_key_value_heads} KV heads of {layers.head_dim} cannot hold a state of {layers.hidden_size}",
            hint="increase --num-key-value-heads",
        )
    num_tokens = _TOKENS_PER_DIMENSION * prepared.target.hidden_size
    chosen = prepared.sample_documents(prepared.corpus.training_indices, num_tokens)
    unroll(head, sampled_batch(prepared.store, chosen, prepared.recipe, step=0).to(prepared.device))
    model = prepared.target.model
    save_head(head, options.output, verifier=model.upstream_id or model.name)
    print(options.output)  # noqa: T201


@torch.no_grad()
def unroll(head: Any, batch: TrainingBatch) -> None:
    """Initialise the layers after the first, in place.

    Args:
        head: a PEagleDraftModel of 3, 5 or 7 layers, whose first layer and `fc` are those of an EAGLE-3 head, and whose
            KV heads hold a whole state.
        batch: rows for the regressions, on the head's device: many more than H, at more depths than there are steps.

    Raises:
        ConfigError: there are no rows to fit a step, since the responses are too short.
    """
    rows = _Rows(head, batch)
    deepest, num_steps = int(rows.depth_S.max()), len(head.layers) // 2
    if deepest < num_steps:
        raise ConfigError(
            f"{len(head.layers)} unrolled layers require rows at depth {num_steps}, but the documents only have rows "
            f"up to depth {deepest}: the responses are too short",
            hint="use fewer --num-layers, longer responses, or a --cod-ratio nearer to 1",
        )
    rows.pass_through(head.layers[0])
    first_size = _size(rows.states_SH[rows.depth_S == 0])
    for known_depth, (copy, step) in enumerate(zip(head.layers[1::2], head.layers[2::2], strict=True)):
        _set_copy_weights(head, copy, rows, known_depth=known_depth)
        rows.pass_through(copy)
        _set_step_weights(head, step, rows, known_depth=known_depth, first_size=first_size)
        rows.pass_through(step)


class _Rows:
    """The states of a batch's rows, layer by layer."""

    def __init__(self, head: Any, batch: TrainingBatch) -> None:
        self._rows = parallel_rows(head, batch)
        self._padded = self._rows.states
        self.num = sum(map(len, batch.documents))
        self.depth_S = batch.depth_S[: self.num]
        self.states_SH = self._padded[0, : self.num]

    def through(self, layer: Any) -> torch.Tensor:
        """Return the states after a layer, with padding, [1, S, H]."""
        return self._rows.apply(layer, self._padded)

    def pass_through(self, layer: Any) -> None:
        """Replace the states by those after a layer."""
        self._padded = self.through(layer)
        self.states_SH = self._padded[0, : self.num]


def _set_copy_weights(head: Any, layer: Any, rows: _Rows, *, known_depth: int) -> None:
    """Set the weights of a layer that copies the state of the previous position, for rows deeper than `known_depth`."""
    config = head.config.transformer_layer_config
    head_dim, num_heads, num_kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    attention, hidden = layer.self_attn, config.hidden_size
    layer.input_layernorm.weight.fill_(1)
    states_SH = _normed(rows.states_SH)
    unknown_H = _fit(states_SH, rows.depth_S > known_depth)
    one_H = _fit(states_SH, torch.ones_like(rows.depth_S))

    speeds = head.rotary_emb.inv_freq[:_PAIRS].to(states_SH.dtype)
    sharpness = math.sqrt(_GAP * math.sqrt(head_dim) / float((1 - speeds.cos()).sum()))
    query_DH, key_DH = states_SH.new_zeros(2, head_dim, hidden)
    for pair, speed in enumerate(speeds.tolist()):
        key_DH[pair] = sharpness * one_H
        query_DH[pair] = sharpness * (math.cos(speed) * unknown_H + (one_H - unknown_H))
        query_DH[pair + head_dim // 2] = -sharpness * math.sin(speed) * unknown_H
    attention.q_proj.weight.copy_(query_DH.repeat(num_heads, 1))
    attention.k_proj.weight.copy_(key_DH.repeat(num_kv_heads, 1))

    # The direction that marks a row as unknown is not copied, since later layers need it.
    identity_HH = torch.eye(hidden, device=states_SH.device, dtype=states_SH.dtype)
    copied_HH = identity_HH - torch.outer(unknown_H, unknown_H) / unknown_H.dot(unknown_H)
    size = _size(rows.states_SH[rows.depth_S == known_depth])
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:hidden] = copied_HH
    attention.o_proj.weight.zero_()
    group = num_heads // num_kv_heads
    for kv_head in range(math.ceil(hidden / head_dim)):  # the first query head of each group carries its values
        target_dims = slice(kv_head * head_dim, min((kv_head + 1) * head_dim, hidden))
        start = kv_head * group * head_dim
        columns = slice(start, start + target_dims.stop - target_dims.start)
        attention.o_proj.weight[target_dims, columns] = size * identity_HH[target_dims, target_dims]

    layer.post_attention_layernorm.weight.fill_(1)
    mlp = layer.mlp
    mlp.down_proj.weight.zero_()
    after_SH = _normed(rows.through(layer)[0, : rows.num])
    known_H = _fit(after_SH, rows.depth_S <= known_depth)
    unknown_H = _fit(after_SH, rows.depth_S > known_depth)
    mlp.gate_proj.weight[:hidden] = _GATE * known_H - _GATE / 2 * unknown_H
    mlp.up_proj.weight[:hidden] = identity_HH
    mlp.down_proj.weight[:, :hidden] = _LARGER * size / _GATE * identity_HH


def _set_step_weights(head: Any, layer: Any, rows: _Rows, *, known_depth: int, first_size: torch.Tensor) -> None:
    """Set the weights of a layer that runs EAGLE-3's next step for the rows at depth `known_depth + 1`."""
    config, first = head.config.transformer_layer_config, head.layers[0]
    head_dim, hidden = config.head_dim, config.hidden_size
    states_SH = _normed(rows.states_SH)
    fitted_SH = states_SH[rows.depth_S <= known_depth + 1]
    drafted_SH = first.input_layernorm(head.embed_tokens(most_likely_drafts(head, head.norm(fitted_SH)))).float()
    embedded_HH = _fit(fitted_SH, drafted_SH, ridge=1e-2).T

    def reads_state(projection: Any) -> torch.Tensor:
        of_embedding, of_state = torch.split(projection.weight, hidden, dim=1)
        weight_H: torch.Tensor = first.hidden_norm.weight
        return of_embedding @ embedded_HH + of_state * weight_H

    attention = layer.self_attn
    layer.input_layernorm.weight.fill_(1)
    attention.q_proj.weight.copy_(reads_state(first.self_attn.q_proj))
    attention.k_proj.weight.copy_(_rotated_by_one_position(reads_state(first.self_attn.k_proj), head))
    attention.v_proj.weight.copy_(reads_state(first.self_attn.v_proj))
    unknown_H = math.sqrt(_MUTE * math.sqrt(head_dim)) * _fit(states_SH, rows.depth_S > known_depth)
    slowest = head_dim // 2 - 1  # the slowest rotary pair hardly turns, so its product is the same at all distances
    attention.q_proj.weight.view(-1, head_dim, hidden)[:, slowest] = unknown_H
    attention.k_proj.weight.view(-1, head_dim, hidden)[:, slowest] = -unknown_H

    # EAGLE-3's layer expects a state with the size of the state after its first step.
    scale = _size(rows.states_SH[rows.depth_S == known_depth + 1]) / first_size
    attention.o_proj.weight.copy_(first.self_attn.o_proj.weight * scale)
    layer.post_attention_layernorm.weight.copy_(first.post_attention_layernorm.weight)
    layer.mlp.gate_proj.weight.copy_(first.mlp.gate_proj.weight)
    layer.mlp.up_proj.weight.copy_(first.mlp.up_proj.weight)
    layer.mlp.down_proj.weight.copy_(first.mlp.down_proj.weight * scale)


def _rotated_by_one_position(keys: torch.Tensor, head: Any) -> torch.Tensor:
    """Return a key projection [heads * D, H], rotated by the rotary embedding of one position."""
    speeds = head.rotary_emb.inv_freq.to(keys.dtype)[None, :, None]
    first_half, second_half = keys.view(-1, 2, len(head.rotary_emb.inv_freq), keys.shape[1]).unbind(1)
    rotated = torch.stack(
        [
            first_half * speeds.cos() - second_half * speeds.sin(),
            second_half * speeds.cos() + first_half * speeds.sin(),
        ],
        dim=1,
    )
    return rotated.view_as(keys)


def _normed(states_SH: torch.Tensor) -> torch.Tensor:
    """Return the states after an RMSNorm with weight 1."""
    return states_SH * torch.rsqrt(states_SH.pow(2).mean(-1, keepdim=True) + 1e-5)


def _size(states_SH: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of the states."""
    return states_SH.pow(2).mean().sqrt()


def _fit(states_SH: torch.Tensor, targets: torch.Tensor, *, ridge: float = 1e-3) -> torch.Tensor:
    """Return weights [H] or [H, H] that map the states to `targets`, [S] or [S, H], by ridge regression."""
    products_HH = states_SH.T @ states_SH
    products_HH.diagonal().add_(ridge * products_HH.diagonal().mean())
    weights: torch.Tensor = torch.linalg.solve(products_HH, states_SH.T @ targets.to(states_SH.dtype))
    return weights


if __name__ == "__main__":
    main()
