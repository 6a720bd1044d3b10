"""The EAGLE-3 head that ships, unrolled on real states: a better start than further layers that are the identity."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from peagle.drafter.batch import TrainingBatch
from peagle.drafter.config import TrainConfig
from peagle.drafter.forward import BatchLoss, batch_loss
from peagle.drafter.micro import sampled_batch
from peagle.drafter.pipeline import Listener, Prepared, prepare

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

RESPONSES = Path(__file__).parents[2] / "benchmarks" / "drafter" / "responses" / "greedy.parquet"
NUM_DEPTHS = 4


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, embedded_target, shipped_eagle3):
    folder = tmp_path_factory.mktemp("unrolled")
    pq.write_table(pq.read_table(RESPONSES).slice(0, 30), folder / "responses.parquet")
    config = TrainConfig(
        target=str(embedded_target),
        prompts=[folder / "responses.parquet"],
        responses="given",
        output=folder / "out",
        held_out=0.3,
        num_layers=3,
        num_key_value_heads=9,
        num_depths=NUM_DEPTHS,
        train_lm_head=False,
        init=str(shipped_eagle3),
        further_layers="unrolled",
    )
    return prepare(config, Listener())


def _changed(prepared: Prepared, **changes: Any) -> Prepared:
    """The same documents and states for another head."""
    return replace(prepared, config=prepared.config.model_copy(update=changes))


@torch.no_grad()
def _of(prepared: Prepared, batch: TrainingBatch) -> BatchLoss:
    return batch_loss(prepared.new_head().eval(), batch, num_depths=NUM_DEPTHS)


def test_it_drafts_more_than_layers_that_are_the_identity(prepared) -> None:
    held_out = sampled_batch(prepared.store, sorted(prepared.corpus.held_out), prepared.recipe, step=1)
    unrolled = _of(prepared, held_out)
    identity = _of(_changed(prepared, further_layers="identity"), held_out)

    first, second = (unrolled.correct_D / unrolled.rows_D)[:2].tolist()
    first_before, second_before = (identity.correct_D / identity.rows_D)[:2].tolist()
    assert first > first_before - 0.08
    assert second > second_before + 0.03
    assert unrolled.loss < identity.loss - 1


def test_unrolling_gives_the_same_weights_again(prepared) -> None:
    two_steps = _changed(prepared, num_layers=5)
    one, other = two_steps.new_head(), two_steps.new_head()
    assert all(torch.equal(left, right) for left, right in zip(one.parameters(), other.parameters(), strict=True))
    assert one.layers[2].self_attn.o_proj.weight.any()
    told = two_steps.new_head(is_told=True)
    assert not told.layers[2].self_attn.o_proj.weight.any()  # another worker tells them
