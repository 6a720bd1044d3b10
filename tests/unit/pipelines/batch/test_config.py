import json
import os

import pydantic
import pytest

from pipelines.batch.config import GenerateConfig

SCHEMA = {"type": "object", "required": ["a"]}


def config(**options):
    return GenerateConfig(input="i", output="o", **options)


def test_schema_is_read_from_text_or_a_file(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    for value in (str(file), json.dumps(SCHEMA), SCHEMA):
        assert json.loads(config(json_schema=value).sampling()["json_schema"]) == SCHEMA


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": "nowhere.json"}, "the schema cannot be read"),
        ({"json_schema": {"type": "strange"}}, "not a valid JSON schema"),
        ({"json_schema": {"$schema": []}}, "not a valid JSON schema"),
        ({"temperature": -1}, "greater than or equal to 0"),
        ({"temperature": 3}, "less than or equal to 2"),
        ({"n": 0}, "greater than or equal to 1"),
        ({"stop": [""]}, "an empty string cannot be a stop string"),
        ({"draw_on": "runs/serve"}, "draw_on requires tags"),
    ],
)
def test_sampling_options_are_validated(options, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        config(**options)


def test_output_is_a_folder_or_s3(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert GenerateConfig(input="i", output="run").output == tmp_path / "run"
    remote = GenerateConfig(input="i", output="s3://bucket/run")
    assert str(remote.output / "report.html") == "s3://bucket/run/report.html"
    assert remote.model_dump(mode="json")["output"] == "s3://bucket/run"
    for output in ("gs://bucket/run", "s3://bucket"):
        with pytest.raises(pydantic.ValidationError, match="s3://"):
            GenerateConfig(input="i", output=output)


FLOATS = [name for name, field in GenerateConfig.model_fields.items() if "float" in str(field.annotation)]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_non_finite_numbers_are_refused(name, value):
    assert {"budget_usd", "grace_s", "row_timeout_s", "engine_timeout_s", "cluster_wait_s"} < set(FLOATS)
    with pytest.raises(pydantic.ValidationError, match=name):
        config(**{name: value})


@pytest.mark.parametrize(
    "deadline", ["9999999999d", "3000000d", "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+14:00"]
)
def test_unrepresentable_deadline_is_refused(deadline):
    with pytest.raises(pydantic.ValidationError, match="too far in the future"):
        config(deadline=deadline)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes_per_engine": 0}, "greater than or equal to 1"),
        ({"nodes_per_engine": 2}, "nodes_per_engine 2 does not divide the number of ranks"),
        ({"nodes_per_engine": 4, "tensor_parallel_size": 2, "pipeline_parallel_size": 3}, "pipeline_parallel_size = 6"),
        ({"nodes_per_engine": 2, "tensor_parallel_size": 2, "engine": "fake"}, "fake, which has no ranks"),
        ({"nodes_per_engine": 2, "tensor_parallel_size": 2, "engines": "1:2"}, "use a fixed number"),
    ],
)
def test_nodes_per_engine_must_divide_ranks(options, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        config(**options)
    assert config(nodes_per_engine=3, tensor_parallel_size=2, pipeline_parallel_size=3).nodes_per_engine == 3


def test_schema_file_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "schema.json"
    path.write_bytes(b'\xef\xbb\xbf{"type": "object"}')
    assert GenerateConfig(input="x", output="y", json_schema=str(path)).json_schema == '{"type": "object"}'


def test_output_path_must_be_utf_8(tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=r"caf\\xe9.*is not UTF-8"):
        GenerateConfig(input="x", output="run")
