"""Losses and drafts of heads, compared with the forward pass of `speculators`."""

from dataclasses import replace

import pytest
import torch

from peagle.drafter import forward
from peagle.drafter.batch import Rows, make_batch, sample_blocks, sample_rows
from peagle.drafter.forward import batch_loss, count_accepted, drafted_tokens, estimate_acceptance, head_states
from peagle.drafter.head import HeadSpec, build_head
from peagle.drafter.loss import Weighting

NUM_DEPTHS = 4


@pytest.fixture(params=[1, 2], ids=["one layer", "two layers"])
def num_layers(request):
    return int(request.param)


@pytest.fixture
def head(num_layers, target, spec, vocabulary):
    head_spec = HeadSpec(aux_layers=spec.aux_layers, num_layers=num_layers, num_depths=NUM_DEPTHS)
    return build_head(target, head_spec, vocabulary)


@pytest.fixture
def eagle3(num_layers, target, spec, vocabulary):
    head_spec = HeadSpec(aux_layers=spec.aux_layers, num_layers=num_layers, num_depths=NUM_DEPTHS, algorithm="eagle3")
    return build_head(target, head_spec, vocabulary)


@pytest.fixture(params=["dflash", "dspark"])
def block_head(request, num_layers, target, spec, vocabulary):
    options = {"num_layers": num_layers, "num_depths": NUM_DEPTHS, "algorithm": request.param}
    head = build_head(target, HeadSpec(aux_layers=spec.aux_layers, **options), vocabulary)
    with torch.no_grad():
        if head.config.speculators_model_type == "dspark":  # let the previous token change some drafts
            head.markov_head.markov_w1.weight.normal_()
    return head


def _all_rows(mask):
    return sample_rows(mask, num_depths=NUM_DEPTHS, ratio=1.0)


def _batch(documents):
    return make_batch(documents, [_all_rows(document.loss_mask_T[1:]) for document in documents])


def _speculators_loss(head, document, monkeypatch, **options):
    """Return the loss of `speculators`, with plain SDPA attention."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.data import shift_batch
    from torch.nn.attention.flex_attention import create_mask

    monkeypatch.setattr(head, "_attn_impl", "sdpa")
    monkeypatch.setattr(head, "_create_mask_fn", create_mask)
    monkeypatch.setattr(head.config.transformer_layer_config, "_attn_implementation", "sdpa")
    length = len(document.token_ids_T)
    shifted = shift_batch(
        {
            "input_ids": document.token_ids_T,
            "hidden_states": document.aux_TAH.float(),
            "verifier_last_hidden_states": document.last_TH.float(),
            "loss_mask": document.loss_mask_T.long(),
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }
    )
    batch = {name: tensor[None] for name, tensor in shifted.items() if name != "lengths"}
    _, loss, _ = head(
        **batch,
        document_ids=torch.zeros(1, length - 1, dtype=torch.long),
        loss_config=resolve_loss_config("kl_div", "eager"),
        **options,
    )
    return loss


def test_loss_and_gradients_equal_those_of_speculators(head, store, monkeypatch):
    from speculators.models.peagle import core

    document = store[4]  # it has the longest response
    loss = batch_loss(head, _batch([document]), num_depths=NUM_DEPTHS).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()

    rows = _all_rows(document.loss_mask_T[1:])
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: (rows.anchor_S, rows.depth_S))
    reference = _speculators_loss(head, document, monkeypatch, num_depths=NUM_DEPTHS)
    reference.backward()

    assert loss.item() == pytest.approx(reference.item(), rel=1e-5)
    assert {"mask_hidden", "fc.weight", "layers.0.self_attn.k_proj.weight"} <= gradients.keys()
    for name, parameter in head.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_eagle3_loss_equals_that_of_speculators_at_every_depth(eagle3, store, monkeypatch):
    """`speculators` starts a chain at every token, so the loss mask covers the whole document."""
    document = replace(store[4], loss_mask_T=torch.ones_like(store[4].loss_mask_T))
    result = batch_loss(eagle3, _batch([document]), num_depths=NUM_DEPTHS)
    cumulative_loss_D = (result.divergence_D / result.rows_D).cumsum(0)
    for depth in range(NUM_DEPTHS):
        reference = _speculators_loss(eagle3, document, monkeypatch, ttt_steps=depth + 1, ttt_step_loss_decay=1.0)
        assert cumulative_loss_D[depth].item() == pytest.approx(reference.item(), rel=1e-5), depth


def _block_rows(anchors):
    anchors = torch.tensor(anchors)
    return Rows(anchors.repeat_interleave(NUM_DEPTHS), torch.arange(NUM_DEPTHS).repeat(len(anchors)), is_blocks=True)


def test_block_losses_and_gradients_equal_those_of_speculators(block_head, store, monkeypatch):
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import core
    from torch.nn.attention.flex_attention import create_mask

    document = replace(store[4], loss_mask_T=torch.ones_like(store[4].loss_mask_T))
    length, anchors = len(document.token_ids_T), [2, 5, 6]
    loss = batch_loss(block_head, make_batch([document], [_block_rows(anchors)]), num_depths=NUM_DEPTHS).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in block_head.named_parameters() if p.grad is not None}
    block_head.zero_grad()

    # In `speculators`, an anchor is the first token of a block, which is one after the anchor in `Rows`.
    anchors_and_mask = torch.tensor(anchors) + 1, torch.ones(len(anchors), dtype=torch.bool)
    monkeypatch.setattr(core, "select_anchors", lambda *_: anchors_and_mask)
    monkeypatch.setattr(block_head, "_create_mask_fn", create_mask)
    monkeypatch.setattr(block_head.config.transformer_layer_config, "_attn_implementation", "sdpa")
    eager_tv_loss, _ = resolve_loss_config("tv", "eager")["tv"]
    options = {"tv_loss_fn": eager_tv_loss} if block_head.config.speculators_model_type == "dspark" else {}
    _, reference, _ = block_head(
        hidden_states=document.aux_TAH.float()[None],
        input_ids=document.token_ids_T[None],
        loss_mask=document.loss_mask_T.long()[None],
        verifier_last_hidden_states=document.last_TH.float()[None],
        document_ids=torch.zeros(1, length, dtype=torch.long),
        loss_config=resolve_loss_config("kl_div", "eager"),
        max_anchors=len(anchors),
        gamma=1e12,  # equal weights of all positions
        **options,
    )
    reference.backward()

    assert loss.item() == pytest.approx(reference.item(), rel=1e-5)
    assert {"hidden_norm.weight", "fc.weight", "layers.0.self_attn.k_norm.weight"} <= gradients.keys()
    for name, parameter in block_head.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_packed_blocks_do_not_attend_to_each_other(block_head, store):
    documents = [store[i] for i in (1, 4, 6)]
    rows = [sample_blocks(document.loss_mask_T[1:], num_depths=NUM_DEPTHS, share=0.5) for document in documents]
    packed = batch_loss(block_head, make_batch(documents, rows), num_depths=NUM_DEPTHS)
    separate = [
        batch_loss(block_head, make_batch([document], [document_rows]), num_depths=NUM_DEPTHS)
        for document, document_rows in zip(documents, rows, strict=True)
    ]
    torch.testing.assert_close(packed.divergence_D, torch.stack([loss.divergence_D for loss in separate]).sum(0))
    torch.testing.assert_close(packed.rows_D, torch.stack([loss.rows_D for loss in separate]).sum(0))


def test_eagle3_gradients_reach_earlier_depths(eagle3, store):
    batch = _batch([store[4]])
    states = head_states(eagle3, batch)
    deepest = torch.nonzero(batch.depth_S[batch.row_R] == NUM_DEPTHS - 1).flatten()
    states[deepest].sum().backward()  # type: ignore[no-untyped-call]
    assert eagle3.fc.weight.grad.abs().sum() > 0
    assert eagle3.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0


def test_packed_documents_do_not_attend_to_each_other(head, eagle3, store):
    documents = [store[i] for i in (1, 4, 6)]
    for model in (head, eagle3):
        packed = batch_loss(model, _batch(documents), num_depths=NUM_DEPTHS)
        separate = [batch_loss(model, _batch([d]), num_depths=NUM_DEPTHS) for d in documents]
        torch.testing.assert_close(packed.divergence_D, torch.stack([loss.divergence_D for loss in separate]).sum(0))
        torch.testing.assert_close(packed.rows_D, torch.stack([loss.rows_D for loss in separate]).sum(0))


def test_depth_decay_moves_the_weight_to_the_first_depth(head, store):
    batch = _batch([store[4]])
    without_decay = batch_loss(head, batch, num_depths=NUM_DEPTHS)
    with_decay = batch_loss(head, batch, num_depths=NUM_DEPTHS, weighting=Weighting(depth_decay=1e-6))
    first_depth_loss = without_decay.divergence_D[0] / without_decay.rows_D[0]
    mean_loss = without_decay.divergence_D.sum() / without_decay.rows_D.sum()
    assert with_decay.loss.item() == pytest.approx(first_depth_loss.item(), rel=1e-3)
    assert without_decay.loss.item() == pytest.approx(mean_loss.item(), rel=1e-5)


def test_draft_token_is_accepted_only_if_all_earlier_tokens_of_its_chain_are_correct(head, eagle3, store):
    batch = _batch([store[4], store[6]])
    rows = batch.row_R[: batch.num_loss_rows]
    for model in (head, eagle3):
        torch.manual_seed(1)
        with torch.no_grad():
            # Head and target can only choose one of two tokens, so about half of the drafts are correct.
            for lm_head in (model.lm_head, model.verifier_lm_head):
                weights = torch.randn_like(lm_head.weight[0])
                lm_head.weight.zero_()[:2] = torch.stack([weights, -weights])
            drafts = (head_states(model, batch) @ model.lm_head.weight.T).argmax(-1)[: batch.num_loss_rows]
            target_ids = (model.verifier_norm(batch.last_PH) @ model.verifier_lm_head.weight.T).argmax(-1)
            result = batch_loss(model, batch, num_depths=NUM_DEPTHS)
        is_correct = (drafts == target_ids[batch.position_R[: batch.num_loss_rows]]).tolist()
        positions = zip(batch.anchor_S[rows].tolist(), batch.depth_S[rows].tolist(), strict=True)
        is_correct_at = dict(zip(positions, is_correct, strict=True))
        expected = [
            sum(
                all(is_correct_at[anchor, d] for d in range(depth + 1))
                for anchor, depth in is_correct_at
                if depth == deepest
            )
            for deepest in range(NUM_DEPTHS)
        ]
        assert result.accepted_D.tolist() == expected
        assert 0 < result.accepted_D[1] < result.correct_D[1]


@pytest.fixture
def two_layer_head(target, spec, vocabulary):
    return build_head(target, HeadSpec(aux_layers=spec.aux_layers, num_layers=2), vocabulary).eval()


def _draft_in_one_pass(head, document, num_known, k):
    """Draft in one pass over the tokens up to `num_known` and K-1 mask tokens."""
    tokens = document.token_ids_T[1 : num_known + 1]
    states = head.fc(document.aux_TAH[:num_known].float())
    token_ids = torch.cat([tokens, torch.full((k - 1,), head.mask_token_id)])
    states = torch.cat([states, head.fc(head.mask_hidden[0]).expand(k - 1, -1)])
    row_states = torch.cat([head.embed_tokens(token_ids), states], dim=-1)[None]
    positions = torch.arange(len(token_ids))[None]
    rotary = head.rotary_emb(row_states, positions)
    head.config.transformer_layer_config._attn_implementation = "eager"
    causal = torch.full((1, 1, len(token_ids), len(token_ids)), float("-inf")).triu(1)
    for layer in head.layers:
        row_states = layer(row_states, attention_mask=causal, position_ids=positions, position_embeddings=rotary)
    draft_ids = head.lm_head(head.norm(row_states[0, -k:])).argmax(-1)
    return [int(i + head.d2t[i]) for i in draft_ids]


@torch.no_grad()
def test_peagle_drafts_equal_one_pass_over_mask_tokens(two_layer_head, store):
    document = store[1]
    drafted = drafted_tokens(two_layer_head, document, 4)
    start = int(document.loss_mask_T.int().argmax())
    attention_before = two_layer_head.config.transformer_layer_config._attn_implementation
    for num_known in range(start, len(document.token_ids_T)):
        assert drafted[num_known - 1].tolist() == _draft_in_one_pass(two_layer_head, document, num_known, 4), num_known
    assert attention_before == "peagle_documents"  # `_draft_in_one_pass` replaced it


def _draft_sequentially(head, document, num_known, k):
    """Draft one token after another, as EAGLE-3 does, but without a cache."""
    head.config.transformer_layer_config._attn_implementation = "eager"
    token_ids, drafted = document.token_ids_T[1 : num_known + 1], []
    states = head.fc(document.aux_TAH[:num_known].float())
    for _ in range(k):
        row_states = torch.cat([head.embed_tokens(token_ids), states], dim=-1)[None]
        positions = torch.arange(len(token_ids))[None]
        rotary = head.rotary_emb(row_states, positions)
        causal = torch.full((1, 1, len(token_ids), len(token_ids)), float("-inf")).triu(1)
        for layer in head.layers:
            row_states = layer(row_states, attention_mask=causal, position_ids=positions, position_embeddings=rotary)
        draft_id = head.lm_head(head.norm(row_states[0, -1])).argmax(-1)
        drafted.append(int(draft_id + head.d2t[draft_id]))
        token_ids = torch.cat([token_ids, torch.tensor(drafted[-1:])])
        states = torch.cat([states, row_states[0, -1:]])
    return drafted


@torch.no_grad()
def test_eagle3_drafts_equal_sequential_drafting_without_a_cache(target, spec, vocabulary, store):
    head_spec = HeadSpec(aux_layers=spec.aux_layers, num_layers=2, algorithm="eagle3")
    head, document = build_head(target, head_spec, vocabulary).eval(), store[1]
    drafted = drafted_tokens(head, document, 4)
    start = int(document.loss_mask_T.int().argmax())
    for num_known in range(start, len(document.token_ids_T)):
        assert drafted[num_known - 1].tolist() == _draft_sequentially(head, document, num_known, 4), num_known


def _draft_block(head, document, num_known, k):
    """Draft one block with plain attention: each position attends to the context and to the whole block."""
    head.config.transformer_layer_config._attn_implementation = "eager"
    size = k if head.config.sample_from_anchor else k + 1
    token_ids = torch.tensor([int(document.token_ids_T[num_known]), *[head.mask_token_id] * (size - 1)])
    context = head.hidden_norm(head.fc(document.aux_TAH[:num_known].float()))[None]
    states = head.embed_tokens(token_ids)[None]
    rotary = head.rotary_emb(states, torch.arange(num_known + size)[None])
    for layer in head.layers:
        states = layer(hidden_states=states, target_hidden=context, position_embeddings=rotary)
    drafted, previous = [], token_ids[0]
    for logits in head.lm_head(head.norm(states[0, -k:])):
        if head.config.speculators_model_type == "dspark":
            logits = logits + head.markov_head.markov_w2(head.markov_head.markov_w1(previous))
        draft_id = logits.argmax(-1)
        previous = draft_id + head.d2t[draft_id]
        drafted.append(int(previous))
    return drafted


@torch.no_grad()
@pytest.mark.parametrize("k", [2, NUM_DEPTHS])
def test_block_drafts_equal_one_pass_over_the_block(block_head, store, k):
    document = store[1]
    drafted = drafted_tokens(block_head.eval(), document, k)
    for num_known in range(int(document.loss_mask_T.int().argmax()), len(document.token_ids_T)):
        assert drafted[num_known - 1].tolist() == _draft_block(block_head, document, num_known, k), num_known


@pytest.mark.parametrize("algorithm", ["peagle", "eagle3"])
def test_logits_are_computed_in_chunks(target, spec, vocabulary, store, monkeypatch, algorithm):
    head_spec, chunk_sizes = HeadSpec(aux_layers=spec.aux_layers, algorithm=algorithm), []
    head = build_head(target, head_spec, vocabulary).eval()
    expected = drafted_tokens(head, store[1], 4)
    monkeypatch.setattr(forward, "CHUNK_ROWS", 7)
    head.lm_head.register_forward_hook(lambda _module, _inputs, logits: chunk_sizes.append(len(logits)))
    assert torch.equal(drafted_tokens(head, store[1], 4), expected)
    assert max(chunk_sizes) == 7


def test_docstring_example_of_count_accepted():
    drafted = torch.tensor([[6, 7], [7, 8], [8, 0], [0, 0]])
    assert count_accepted([4, 5, 6, 7, 8], drafted, start=1) == [2]


def test_acceptance_statistics_have_at_most_one_draft_per_response_token(two_layer_head, store):
    stats = estimate_acceptance(two_layer_head, store, range(len(store)), num_speculative_tokens=3)
    num_response_tokens = sum(int(store[i].loss_mask_T.sum()) for i in range(len(store)))
    # The first token of a response is not drafted.
    assert 0 < stats.num_drafts <= num_response_tokens - len(store)
    assert stats.num_draft_tokens == 3 * stats.num_drafts
    assert len(stats.accepted_per_position) == 3
