import pytest
from config_only import HEAD, TARGET
from moving_hub import FIRST

from peagle.bench.acceptance import evaluate
from peagle.bench.config import BenchConfig, EvaluateConfig
from peagle.bench.engine import MeasurementListener
from peagle.bench.run import bench
from peagle.tuning.config import TuneConfig
from peagle.tuning.run import tune


class Asked(Exception):  # noqa: N818 - no error, but the end of what a test is about
    """Nothing that comes after the tokenizer matters."""


@pytest.mark.parametrize(
    ("measure", "config", "keys"),
    [
        (bench, BenchConfig, {"methods": "none", "usd_per_hour": 1}),
        (tune, TuneConfig, {"methods": "none", "usd_per_hour": 1}),
        (evaluate, EvaluateConfig, {"drafter": ["org/head"]}),
    ],
)
def test_a_measurement_tokenises_with_the_revision_that_its_engines_load(
    moving_hub, write_jsonl, measure, config, keys
):
    moving_hub.push("org/model", FIRST, TARGET)
    moving_hub.push("org/head", FIRST, HEAD | {"speculators_model_type": "peagle"})

    def tokenizer_of(*of):
        raise Asked(of)

    with pytest.raises(Asked) as asked:
        measure(
            config(model="org/model", dataset=str(write_jsonl([{"prompt": "p"}])), **keys),
            MeasurementListener(),
            tokenizer_of=tokenizer_of,
        )
    assert asked.value.args == (("org/model", FIRST),)
