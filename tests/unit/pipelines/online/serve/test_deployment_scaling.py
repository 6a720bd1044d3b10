import math

import pytest

from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.hardware import Hardware
from pipelines.cluster.placement import Placement
from pipelines.online.config import ServedModelOptions
from pipelines.online.serve.deployment import decode_slots, pieces_per_s, request_counts, target_ongoing_requests

CPU = Hardware(platform="cpu", memory_gib=16, free_memory_gib=16, num_cpus=2)


def spec(method=None, k=7, **keys):
    drafter = DrafterSpec(method=method, model="head", num_speculative_tokens=k) if method else None
    return EngineSpec(model="m", drafter=drafter, **keys)


@pytest.mark.parametrize("slots", [1, 2, 8, 64, 256])
def test_target_leaves_one_standard_deviation(slots):
    target = target_ongoing_requests(slots)
    assert target + math.sqrt(target) == pytest.approx(slots)


def test_small_step_has_fewer_slots():
    assert decode_slots(spec("peagle", max_num_seqs=256, max_num_batched_tokens=2048), CPU) == 146
    assert decode_slots(spec("eagle3", max_num_seqs=256, max_num_batched_tokens=2048), CPU) == 256
    assert decode_slots(spec("peagle", max_num_seqs=256, max_num_batched_tokens=13), CPU) == 1
    assert decode_slots(spec("peagle", k=3, max_num_seqs=8), CPU) == 8
    assert decode_slots(spec(max_num_seqs=8), CPU) == 8


def test_default_request_counts():
    counts = request_counts(ServedModelOptions(max_replicas=3), spec(max_num_seqs=16), CPU)
    assert (counts.admitted, counts.queued) == (18, 48)
    assert request_counts(ServedModelOptions(), spec(max_num_seqs=1), CPU).admitted == 2


def test_configured_request_counts():
    keys = ServedModelOptions(max_replicas=3, target_ongoing_requests=2.5, max_queued_requests=0)
    counts = request_counts(keys, spec(max_num_seqs=16), CPU)
    assert (counts.target, counts.queued) == (2.5, 0)


def test_pieces_per_s():
    shared = Placement(num_cpus=1, num_gpus=0, num_devices=2, device="vcpu", num_engines_on_node=1)
    single = Placement(num_cpus=1, num_gpus=1, num_devices=1, device="accelerator", num_engines_on_node=1)
    assert (pieces_per_s(shared), pieces_per_s(single)) == (40, 400)
