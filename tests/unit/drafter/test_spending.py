import contextlib

import pytest

from peagle.drafter.config import TrainConfig
from peagle.drafter.spending import TrainingSpending, training_spending
from peagle.economics.spending import Days, Spend, charges
from peagle.economics.usage import EngineFacts
from peagle.errors import PriceError
from peagle.hardware import Hardware
from peagle.runs.ledgers import find_ledgers

# $1 per second: two devices at $0.50.
FACTS = EngineFacts(model="m", drafter=None, num_devices=2, device="vcpu", usd_per_device_s=0.5, tags='{"team": "x"}')
CPU = Hardware(platform="cpu", memory_gib=8, free_memory_gib=8, num_cpus=4)


def total_spend(output):
    ledgers = find_ledgers([str(output)]).ledgers
    return sum((charge.spend for ledger in ledgers for charge in charges(ledger, Days())), Spend())


def attempt(output, clock):
    return TrainingSpending(output / "ledger", FACTS, now=clock)


def test_every_second_is_loading_saved_or_lost(tmp_path, clock):
    killed = attempt(tmp_path, clock)
    clock.now += 5
    killed.start()
    clock.now += 100
    killed.record_saved()
    clock.now += 30
    killed.beat()  # the last heartbeat before it is killed
    clock.now += 1000
    with attempt(tmp_path, clock) as second:
        clock.now += 7
        second.start()
        clock.now += 60
        second.record_saved()
    total = total_spend(tmp_path)
    assert (total.attributed_usd, total.loading_usd, total.idle_usd, total.lost_usd) == pytest.approx((160, 12, 0, 30))
    assert total.num_requests == total.num_output_tokens == 0
    assert {charge.tags for charge in charges(find_ledgers([str(tmp_path)]).ledgers[0], Days())} == {'{"team": "x"}'}


def test_unsaved_work_is_lost(tmp_path, clock):
    with contextlib.suppress(KeyboardInterrupt), attempt(tmp_path, clock) as spending:
        spending.start()
        clock.now += 10
        spending.record_lost()
        clock.now += 20
        spending.record_saved()
        clock.now += 40
        raise KeyboardInterrupt
    total = total_spend(tmp_path)
    assert (total.attributed_usd, total.lost_usd) == pytest.approx((20, 50))


def test_shards_are_recorded_when_stored(tmp_path, clock):
    reported: list[tuple[int, int]] = []

    def extract(job, progress):
        for done in (1, 2):
            clock.now += 3
            progress(done, 3)
        clock.now += 3
        raise OSError(job)

    with pytest.raises(OSError, match="the job"), attempt(tmp_path, clock) as spending:
        spending.recording(extract)("the job", lambda done, total: reported.append((done, total)))
    total = total_spend(tmp_path)
    assert (total.attributed_usd, total.lost_usd) == pytest.approx((6, 3))
    assert reported == [(1, 3), (2, 3)]


def test_a_clock_set_back_counts_no_time_twice(tmp_path, clock):
    with attempt(tmp_path, clock) as spending:
        spending.start()
        clock.now += 10
        spending.record_saved()
        clock.now -= 3600
        spending.record_saved()
    assert total_spend(tmp_path).attributed_usd == pytest.approx(10)


def engine_facts(tmp_path, messages, **options):
    config = TrainConfig(prompts=["stdlib"], output=tmp_path, **options)
    return training_spending(config, CPU, messages.append, on_gpu=False, num_devices=4)._facts


def test_price_of_a_training_run_is_stated_assumed_or_unknown(tmp_path):
    messages: list[str] = []
    with_price = engine_facts(tmp_path, messages, usd_per_hour=3.6, tags={"team": "x"})
    assert (with_price.usd_per_device_s, with_price.price_basis, with_price.tags) == (
        0.00025,  # $3.60 per hour, for four vCPUs
        "stated",
        '{"team": "x"}',
    )
    assert engine_facts(tmp_path, messages).price_basis == "assumed"
    assert messages == []
    gpu = Hardware(
        platform="cuda", memory_gib=8, free_memory_gib=8, num_cpus=4, accelerator="Unheard", num_accelerators=1
    )
    config = TrainConfig(prompts=["stdlib"], output=tmp_path)
    without_price = training_spending(config, gpu, messages.append, on_gpu=True, num_devices=1)._facts
    assert (without_price.usd_per_device_s, without_price.price_basis) == (0, "")
    with pytest.raises(PriceError, match=r"p5\.48xlarg"):
        engine_facts(tmp_path, messages, instance_type="p5.48xlarg")
    other_hardware = engine_facts(tmp_path, messages, instance_type="p5.48xlarge")
    assert other_hardware.usd_per_device_s == 0
    assert "unknown" in messages[0]
    assert "per accelerator, not per vcpu" in messages[1]
