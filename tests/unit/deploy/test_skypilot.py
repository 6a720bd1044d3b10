"""Checks that examples/skypilot.yaml matches SkyPilot's schema and the configuration that it runs."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from jobs.deploying import read_workload

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads((Path(__file__).parent / "skypilot_schema.json").read_text())["$defs"]


@pytest.fixture(scope="module")
def task():
    return yaml.safe_load((ROOT / "examples/skypilot.yaml").read_text())


def test_example_matches_skypilot_schema(task):
    jsonschema.validate(task, SCHEMA["task"])
    jsonschema.validate(task["resources"], SCHEMA["resources"])


def test_example_requests_the_machine_of_its_configuration(task):
    command = task["run"].splitlines()[-1]
    assert command == ".venv/bin/peagle generate --config examples/job.yaml"
    workload = read_workload(ROOT / "examples/job.yaml", None, max_name_length=50)
    offer, resources = workload.offer, task["resources"]
    assert workload.num_machines == (1, 1)
    assert task["name"] == workload.name
    assert resources["infra"] == f"{offer.provider}/{workload.settings['region']}"
    assert resources["instance_type"] == offer.instance_type
    assert resources["accelerators"] == {offer.accelerator: offer.num_accelerators}
    assert resources["use_spot"] == (workload.market == "spot")
