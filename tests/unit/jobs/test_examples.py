"""The files in `examples/` are configurations that their commands take."""

import argparse
from pathlib import Path

import pytest

from jobs import flags
from peagle.catalog.cards import load_catalog
from peagle.economics.prices import PriceTable
from pipelines.batch.config import GenerateConfig

EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIGS = {"job.yaml": GenerateConfig}


def test_every_example_is_known_here():
    assert {path.name for path in EXAMPLES.iterdir()} == CONFIGS.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_an_example_is_a_configuration(name):
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, CONFIGS[name], {})
    config = flags.load(CONFIGS[name], parser.parse_args(["--config", str(EXAMPLES / name)]))
    assert load_catalog().get(config.model).heads
    assert PriceTable.load().price(config.instance_type, market=config.market).num_devices == int(config.engines)
