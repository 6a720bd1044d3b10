import contextlib
import copy
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from peagle.drafter.batch import make_batch, sample_blocks, sample_rows
from peagle.drafter.features import Document
from peagle.drafter.forward import batch_loss
from peagle.drafter.head import HeadSpec, build_head
from peagle.drafter.loss import Weighting, fixed_weight
from peagle.drafter.training import (
    Checkpoint,
    EpochOrder,
    HeadOptimizer,
    SingleProcess,
    TrainingConfig,
    load_checkpoint,
    micro_batches,
    partition_rows,
    plan_batches,
    save_checkpoint,
    train,
)
from peagle.errors import CapacityError, ConfigError, DivergedError

CONFIG = TrainingConfig(
    num_steps=9, batch_tokens=40, num_depths=3, learning_rate=3e-3, warmup_steps=2, precision="fp32", seed=5
)


class KilledError(Exception):
    """Simulates kill -9."""


@pytest.fixture
def make_head(target, spec, vocabulary):
    def make(seed=1, **shape):
        return build_head(target, HeadSpec(aux_layers=spec.aux_layers, num_depths=3, **shape), vocabulary, seed=seed)

    return make


@pytest.fixture
def head(make_head):
    return make_head()


def _train(head, store, folder, config=CONFIG, **options):
    return train(head, store, range(len(store)), config, folder, fingerprint={"head": "x"}, **options)


def _curve(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"], line["accuracy"]) for line in map(json.loads, lines)]


@pytest.mark.parametrize(("algorithm", "anchor_share"), [("peagle", None), ("dflash", 1.0)])
def test_training_lowers_the_loss(make_head, store, tmp_path, algorithm, anchor_share):
    config = TrainingConfig(
        num_steps=60, batch_tokens=200, num_depths=3, cod_ratio=1.0, anchor_share=anchor_share, learning_rate=3e-3,
        precision="fp32",
    )  # fmt: skip
    outcome = _train(make_head(algorithm=algorithm), store, tmp_path, config)
    losses = [loss for _, loss, _ in _curve(tmp_path)]
    assert outcome.finished
    assert outcome.step == 60
    assert losses[-1] < 0.7 * losses[0]


def test_workers_start_with_the_first_workers_weights(head, make_head, store, tmp_path):
    class BroadcastWorkers(SingleProcess):
        def broadcast_(self, tensors):
            source = make_head()
            with torch.no_grad():
                for tensor, parameter in zip(tensors, [p for p in source.parameters() if p.requires_grad], strict=True):
                    tensor.copy_(parameter)

    _train(head, store, tmp_path / "first")
    other = make_head(seed=2, init="random")
    _train(other, store, tmp_path / "other", workers=BroadcastWorkers())
    assert _curve(tmp_path / "other") == _curve(tmp_path / "first")


@pytest.mark.parametrize("killed_after_step", [1, 5])
def test_a_killed_training_run_repeats_the_uninterrupted_curve(head, make_head, store, tmp_path, killed_after_step):
    killed, resumed = make_head(), make_head()
    _train(head, store, tmp_path / "whole")
    with_checkpoints = replace(CONFIG, checkpoint_every_s=1e-9)

    def kill(progress):
        if progress.step > killed_after_step:
            raise KilledError

    with pytest.raises(KilledError):
        _train(killed, store, tmp_path / "cut", with_checkpoints, progress=kill)
    assert len(_curve(tmp_path / "cut")) == killed_after_step + 1  # one more than the checkpoint has
    _train(resumed, store, tmp_path / "cut", with_checkpoints)

    assert _curve(tmp_path / "cut") == _curve(tmp_path / "whole")
    for name, parameter in resumed.named_parameters():
        assert torch.equal(parameter, head.get_parameter(name)), name


@pytest.mark.parametrize("algorithm", ["dflash", "dspark"])
def test_training_of_a_block_head_resumes_exactly(make_head, store, tmp_path, algorithm):
    config = replace(CONFIG, anchor_share=0.5, cod_ratio=1.0)
    whole, resumed = make_head(algorithm=algorithm), make_head(algorithm=algorithm)
    _train(whole, store, tmp_path / "whole", config)
    _train(make_head(algorithm=algorithm), store, tmp_path / "cut", config, time_budget_s=1e-9)  # stops after one step
    _train(resumed, store, tmp_path / "cut", config)
    assert _curve(tmp_path / "cut") == _curve(tmp_path / "whole")
    for name, parameter in resumed.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name)), name


def test_training_stops_at_its_time_budget_and_the_next_call_resumes(head, store, tmp_path):
    first = _train(head, store, tmp_path, time_budget_s=1e-9)
    assert (first.finished, first.step) == (False, 1)
    second = _train(head, store, tmp_path)
    assert (second.finished, second.step) == (True, CONFIG.num_steps)
    assert [step for step, _, _ in _curve(tmp_path)] == list(range(1, CONFIG.num_steps + 1))


def test_micro_batches_do_not_change_the_losses(head, make_head, store, tmp_path):
    _train(head, store, tmp_path / "whole")
    _train(make_head(), store, tmp_path / "parts", replace(CONFIG, micro_batch_tokens=9))  # splits nearly all documents
    losses = [[loss for _, loss, _ in _curve(tmp_path / name)] for name in ("parts", "whole")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_denormals_are_flushed_only_during_a_step(head, store, tmp_path):
    during_steps, between_steps = [], []

    class RecordingWorkers(SingleProcess):
        def sum_(self, tensors):
            during_steps.append(_keeps_denormals())

    def record_progress(_):
        between_steps.append(_keeps_denormals())

    _train(head, store, tmp_path, workers=RecordingWorkers(), progress=record_progress)
    assert during_steps
    assert not any(during_steps)
    assert between_steps == [True] * CONFIG.num_steps


def _keeps_denormals():
    return bool((torch.full((8,), 1e-40) * torch.ones(8)).any())


def test_resuming_with_another_config_is_refused(head, store, tmp_path):
    _train(head, store, tmp_path, time_budget_s=1e-9)
    other = replace(CONFIG, learning_rate=1e-4)
    with pytest.raises(ConfigError, match="a different learning_rate"):
        _train(head, store, tmp_path, other)


def test_training_stops_at_a_loss_that_is_not_finite_and_keeps_the_checkpoint(head, store, tmp_path):
    _train(head, store, tmp_path, time_budget_s=1e-9)
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    checkpoint["weights"]["norm.weight"].fill_(float("nan"))
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    damaged = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(DivergedError, match=r"step 1: the loss is not finite; documents row \d, row \d"):
        _train(head, store, tmp_path, name_of="row {}".format)
    assert (tmp_path / "checkpoint.pt").read_bytes() == damaged


def test_training_stops_on_a_full_disk_and_keeps_the_checkpoint(head, store, tmp_path, full_disk):
    _train(head, store, tmp_path, time_budget_s=1e-9)
    checkpoint_before = (tmp_path / "checkpoint.pt").read_bytes()
    message = r"cannot be written: .*\n  free some space, then repeat the command to resume"
    with full_disk(), pytest.raises(CapacityError, match=message):
        _train(head, store, tmp_path, time_budget_s=1e-9)
    assert (tmp_path / "checkpoint.pt").read_bytes() == checkpoint_before
    assert _train(head, store, tmp_path).finished
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoint.pt", "metrics.jsonl"]


def test_the_learning_rate_rises_and_falls():
    config = TrainingConfig(num_steps=110, warmup_steps=10, learning_rate=1.0, final_learning_rate=0.1)
    assert config.learning_rate_at(0) == pytest.approx(0.1)
    assert config.learning_rate_at(9) == config.learning_rate_at(10) == pytest.approx(1.0)
    assert config.learning_rate_at(60) == pytest.approx(0.55)
    assert config.learning_rate_at(110) == pytest.approx(0.1)


SHAPES = {
    "layers.0.mlp.up_proj.weight": (24, 16),
    "lm_head.weight": (32, 16),
    "embed_tokens.weight": (32, 16),
    "norm.weight": (16,),
    "mask_hidden": (1, 1, 16),
}
LEARNING_RATE = 1e-3


@pytest.fixture
def parameters():
    torch.manual_seed(0)
    return {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}


def take_step(parameters, optimizer, learning_rate=LEARNING_RATE):
    """Take a step with a random gradient and return how far each parameter moved."""
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.set_learning_rate(learning_rate)
    optimizer.step()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in parameters.values())
    return {name: before[name] - parameter.detach() for name, parameter in parameters.items()}


def make_optimizer(parameters, **changes):
    return HeadOptimizer(parameters, TrainingConfig(num_steps=1, weight_decay=0.0, **changes))


def condition_number(matrix):
    singular_values = torch.linalg.svdvals(matrix)
    return float(singular_values.max() / singular_values.min())


def test_muon_updates_layer_matrices_and_adamw_other_parameters(parameters):
    deltas = take_step(
        parameters, make_optimizer(parameters, optimizer="muon", learning_rate=1.0, muon_learning_rate=2.0)
    )
    muon_update = deltas.pop("layers.0.mlp.up_proj.weight")
    # Muon makes the singular values of an update nearly equal.
    assert condition_number(muon_update) < 3 < condition_number(torch.randn(24, 16))
    for name, delta in deltas.items():  # the first step of AdamW is the learning rate times the gradient's sign
        torch.testing.assert_close(delta.abs(), torch.full_like(delta, LEARNING_RATE), msg=name)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_optimizer_state_round_trip(parameters, optimizer):
    first = make_optimizer(parameters, optimizer=optimizer)
    take_step(parameters, first)
    copies = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    second = make_optimizer(copies, optimizer=optimizer)
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # a copy, as after saving and loading
    torch.manual_seed(1)
    deltas = take_step(parameters, first)
    torch.manual_seed(1)
    assert all(torch.equal(delta, deltas[name]) for name, delta in take_step(copies, second).items())


def test_checkpoints_of_older_versions_can_be_resumed(tmp_path):
    checkpoint = Checkpoint(
        step=1,
        weights={},
        optimizer={},
        fingerprint={"head": {"num_layers": 3, "further_layers": "unrolled"}, "seed": 0},  # a removed option
        num_tokens=0,
        train_s=0.0,
        metrics_bytes=0,
    )
    save_checkpoint(checkpoint, tmp_path)
    loaded = load_checkpoint(tmp_path, {"head": {"num_layers": 3}, "seed": 0})
    assert loaded is not None
    assert loaded.step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


NUM_DEPTHS = 4
NUM_TOKENS = 230
ONE_STEP = TrainingConfig(num_steps=1, num_depths=NUM_DEPTHS, seed=3)


@pytest.fixture
def document(spec):
    torch.manual_seed(2)
    return Document(
        token_ids_T=torch.randint(96, (NUM_TOKENS,)),
        loss_mask_T=torch.arange(NUM_TOKENS) >= 30,
        aux_TAH=torch.randn(NUM_TOKENS, 3 * spec.hidden_size),
        last_TH=torch.randn(NUM_TOKENS, spec.hidden_size),
    )


@pytest.fixture
def rows(document):
    return sample_rows(document.loss_mask_T[1:], num_depths=NUM_DEPTHS, ratio=0.8)


@pytest.fixture
def blocks(document):
    return sample_blocks(document.loss_mask_T[1:], num_depths=NUM_DEPTHS, share=0.5)


@pytest.fixture
def norms_in_double(monkeypatch):
    """Replace the norms of transformers, which always compute in float32."""

    def forward(self, states):
        scaled = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * scaled  # type: ignore[no-any-return]

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)
    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)


def _gradients(head, batches, *, dpace):
    head.zero_grad()
    weighting = Weighting(depth_decay=0.9, dpace=dpace, cod_ratio=0.8)
    total = torch.stack([fixed_weight(batch, weighting).double().sum() for batch in batches]).sum()
    for batch in batches:
        loss = batch_loss(head, batch, num_depths=NUM_DEPTHS, weighting=weighting, total_weight=total).loss
        loss.backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in head.named_parameters() if parameter.grad is not None}


@pytest.mark.usefixtures("norms_in_double")
@pytest.mark.parametrize("algorithm", ["peagle", "eagle3", "dspark"])
@pytest.mark.parametrize(("num_parts", "dpace"), [(2, False), (8, True)])
def test_gradients_of_parts_add_up(target, spec, vocabulary, document, rows, blocks, algorithm, num_parts, dpace):
    shape = HeadSpec(
        aux_layers=spec.aux_layers, num_layers=2, num_depths=NUM_DEPTHS, algorithm=algorithm, train_lm_head=True
    )
    head = build_head(target, shape, vocabulary).double()
    rows = blocks if algorithm == "dspark" else rows
    whole = _gradients(head, [make_batch([document], [rows])], dpace=dpace)
    parts = partition_rows(rows, num_parts)
    assert len(parts) == num_parts
    summed = _gradients(head, [make_batch([document], [part]) for part in parts], dpace=dpace)
    assert {"fc.weight", "lm_head.weight", "layers.1.mlp.up_proj.weight"} <= whole.keys() == summed.keys()
    for name, gradient in whole.items():
        assert gradient.dtype == torch.float64
        difference = (summed[name] - gradient).abs().max() / gradient.abs().max()
        assert difference < 1e-9, name


def test_parts_contain_each_row_with_a_loss_once(document, rows):
    parts = partition_rows(rows, 4)
    loss_rows: list[tuple[int, int]] = []
    for part in parts:
        has_loss = part.anchor_S >= part.first_anchor
        loss_rows += zip(part.anchor_S[has_loss].tolist(), part.depth_S[has_loss].tolist(), strict=True)
    assert sorted(loss_rows) == sorted(zip(rows.anchor_S.tolist(), rows.depth_S.tolist(), strict=True))
    num_loss_rows = [int((part.anchor_S >= part.first_anchor).sum()) for part in parts]
    assert max(num_loss_rows) - min(num_loss_rows) <= 2 * NUM_DEPTHS
    assert all(len(part) < len(rows) for part in parts)


def test_parts_contain_each_block_once(document, blocks):
    parts = partition_rows(blocks, 4)
    assert len(parts) == 4
    assert torch.equal(torch.cat([part.anchor_S for part in parts]), blocks.anchor_S)
    assert torch.equal(torch.cat([part.depth_S for part in parts]), blocks.depth_S)


def test_micro_batches_are_within_the_limit(store):
    documents = list(range(len(store)))
    whole = list(micro_batches(store, documents, ONE_STEP, step=5))
    assert [batch.num_tokens for batch in whole] == [sum(map(store.num_tokens, documents))]

    limit = 26  # tokens; the longest document has 26
    config = replace(ONE_STEP, micro_batch_tokens=limit)
    micro = list(micro_batches(store, documents, config, step=5))
    assert all(store.num_tokens(index) <= limit for index in documents)  # so no document is split
    assert max(batch.num_tokens for batch in micro) <= limit
    assert sum(batch.num_loss_rows for batch in micro) == whole[0].num_loss_rows


def test_long_documents_are_split(store):
    longest = max(range(len(store)), key=store.num_tokens)
    config = replace(ONE_STEP, micro_batch_tokens=10)
    (whole,) = micro_batches(store, [longest], ONE_STEP, step=1)
    parts = list(micro_batches(store, [longest], config, step=1))
    assert len(parts) == 3
    assert len({batch.aux_TAH.data_ptr() for batch in parts}) == 1  # stored once for all parts
    assert torch.equal(parts[0].aux_TAH, whole.aux_TAH)
    assert sum(batch.num_loss_rows for batch in parts) == whole.num_loss_rows


def test_batches_have_every_document_once():
    lengths = [5, 9, 3, 7, 8, 2, 6]
    batches = plan_batches(lengths, batch_tokens=12, seed=0)
    assert sorted(i for batch in batches for i in batch) == list(range(7))
    assert all(sum(lengths[i] for i in batch) >= 12 for batch in batches[:-1])
    assert batches == plan_batches(lengths, batch_tokens=12, seed=0)
    assert batches != plan_batches(lengths, batch_tokens=12, seed=1)


def test_every_epoch_has_its_own_order():
    lengths = [1] * 7  # an epoch has 4 steps, because a batch has 2 of these documents
    epoch_order = EpochOrder(lengths, batch_tokens=2, seed=4)
    steps = [epoch_order.batch(step) for step in range(8)]
    epochs = [[index for step in steps[start : start + 4] for index in step] for start in (0, 4)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 2
    assert epochs[0] != epochs[1]
    assert EpochOrder(lengths, batch_tokens=2, seed=4).batch(6) == steps[6]


WORKER = """
import json, sys, torch
from peagle.drafter.training import ProcessGroup
rank, rendezvous = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
workers = ProcessGroup()
summed = [torch.tensor([1.0 + rank, 2.0]), torch.tensor([[3 * rank]])]
workers.sum_(summed)
parameters = [torch.nn.Parameter(torch.full((2,), float(rank + 1))), torch.nn.Parameter(torch.full((1, 2), 7.0 * rank))]
workers.broadcast_(parameters)
agreed = workers.agree(rank == 1)
workers.barrier()
print(json.dumps([[t.tolist() for t in summed], [t.tolist() for t in parameters], agreed, workers.rank, workers.size]))
torch.distributed.destroy_process_group()
"""


def test_process_group_sums_and_broadcasts(tmp_path):
    commands = [[sys.executable, "-c", WORKER, str(rank), str(tmp_path / "rendezvous")] for rank in range(2)]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) for command in commands
        ]
        for process in processes:
            stack.callback(process.kill)  # if one fails, the other would wait forever
        for rank, process in enumerate(processes):
            stdout, _ = process.communicate(timeout=120)
            assert process.returncode == 0
            assert json.loads(stdout.splitlines()[-1]) == [
                [[3.0, 4.0], [[3]]],
                [[1.0, 1.0], [[0.0, 0.0]]],
                False,  # the first worker decides
                rank,
                2,
            ]
