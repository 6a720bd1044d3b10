"""Each file in `examples/` is a valid configuration. `test_skypilot.py` tests the SkyPilot example."""

import argparse
from pathlib import Path

import pytest

from jobs import flags
from jobs.configurations import command_of, model_of, read_configuration
from peagle.catalog.cards import load_catalog
from peagle.economics.prices import PriceTable

EXAMPLES = Path(__file__).parents[3] / "examples"
COMMANDS = {"job.yaml": "generate", "serve.yaml": "serve"}


@pytest.mark.parametrize("name", COMMANDS)
def test_example_is_valid(name):
    command, path = COMMANDS[name], EXAMPLES / name
    assert command_of(path) == command
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, model_of(command), {}, yaml_only=["models"])
    config = flags.load(model_of(command), parser.parse_args(["--config", str(path)]))
    assert config == read_configuration(path)
    assert load_catalog().get(config.model).heads
    assert PriceTable.load().price(config.instance_type, market=config.market)


def test_job_example_uses_all_gpus():
    config = read_configuration(EXAMPLES / "job.yaml")
    price = PriceTable.load().price(config.instance_type, market=config.market)
    assert price.num_devices == int(config.engines) == 8
    assert (config.input[:5], str(config.output)[:5], config.budget_usd) == ("s3://", "s3://", 200)


def test_serve_example_requires_keys():
    config = read_configuration(EXAMPLES / "serve.yaml")
    assert (config.host, str(config.keys)) == ("0.0.0.0", "keys.json")
    assert [model.served_name for model in config.served] == ["coder", "coder-plain"]
