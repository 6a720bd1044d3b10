from dataclasses import replace

import pytest

from peagle.catalog.cards import load_catalog
from peagle.catalog.drafters import ResolvedDrafter
from peagle.catalog.targets import ResolvedModel
from peagle.economics.price_options import PriceOptions, configured_machine
from peagle.engine.precision import Precision
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.engine_options import ResolvedEngine
from peagle.planning.expectation import known_speed

B200 = configured_machine(PriceOptions(instance_type="p6-b200.48xlarge"), None, num_accelerators=1)
H100 = configured_machine(PriceOptions(instance_type="p5.48xlarge"), None, num_accelerators=1)
FP8, BF16 = Precision(dtype="bfloat16", quantization="fp8"), Precision(dtype="bfloat16")


def engine(model="qwen3-coder-30b-a3b-instruct", k=7, precision=FP8, **spec_fields):
    card = load_catalog().get(model)
    drafter = DrafterSpec(method="peagle", model="head", num_speculative_tokens=k) if k else None
    return ResolvedEngine(
        spec=EngineSpec(model=card.source.id, drafter=drafter, precision=precision.name, **spec_fields),
        precision=precision,
        model=ResolvedModel(name=model, path=card.source.id, card=card, fingerprint="x", config={}),
        drafter=ResolvedDrafter(spec=drafter, name="head", note="", fingerprint="x"),
    )


@pytest.mark.parametrize(
    ("k", "concurrency", "tokens_per_s", "published_concurrency"),
    [(7, 64, 10643, 32), (7, 128, 23329, 128), (11, 8, 6252, 8), (0, 4, 889, 4), (7, 3, 1032, 1)],
)
def test_published_speed_of_the_same_engine(k, concurrency, tokens_per_s, published_concurrency):
    speed = known_speed(engine(k=k), B200, concurrency)
    assert (speed.tokens_per_s, speed.concurrency) == (tokens_per_s, published_concurrency)
    assert "published, one B200" in speed.describe()
    assert "AWS machine learning blog" in speed.describe()


@pytest.mark.parametrize(
    ("other", "hardware"),
    [
        (engine(), H100),
        (engine(k=5), B200),
        (engine(precision=BF16), B200),
        (engine(tensor_parallel_size=2), B200),
        (engine("smollm2-135m"), B200),
        (engine(), replace(B200, platform="cpu", accelerator=None)),
    ],
)
def test_published_speeds_of_other_engines_do_not_apply(other, hardware):
    assert known_speed(other, hardware, 64) is None
