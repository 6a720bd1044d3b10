import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from jobs import cli
from jobs.configurations import MODELS, model_of

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def schema_of(capsys):
    def schema_of(command):
        assert cli.run(["config", "schema", command]) == 0
        return json.loads(capsys.readouterr().out)

    return schema_of


@pytest.mark.parametrize("command", MODELS)
def test_schema_describes_all_options(schema_of, command):
    schema = schema_of(command)
    jsonschema.Draft202012Validator.check_schema(schema)
    fields = model_of(command).model_fields
    assert schema["properties"].keys() == fields.keys()
    assert all(schema["properties"][name]["description"] for name in fields)


@pytest.mark.parametrize(("command", "name"), [("generate", "job.yaml"), ("serve", "serve.yaml")])
def test_examples_match_schema(schema_of, command, name):
    schema, values = schema_of(command), yaml.safe_load((EXAMPLES / name).read_text())
    jsonschema.validate(values, schema)
    with pytest.raises(jsonschema.ValidationError, match="temprature"):
        jsonschema.validate(values | {"temprature": 1}, schema)


def test_engines_can_be_a_number_or_a_range(schema_of):
    values = {"input": "i", "output": "o"}
    for engines in (8, "1:8"):
        jsonschema.validate(values | {"engines": engines}, schema_of("generate"))
        assert model_of("generate")(**values, engines=engines).engines == str(engines)
