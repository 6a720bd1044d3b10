"""The Python API with the fake engine: a bulk run in an existing Ray cluster, its rows and cost, and an endpoint."""

import pytest

import peagle
from peagle.errors import ConfigError

FAKE = {"engine": "fake", "usd_per_hour": 1}


@pytest.mark.usefixtures("ray_cluster")
def test_generate_and_cost(tmp_path, write_jsonl, capsys):
    corpus = write_jsonl([{"prompt": f"Write function number {number}."} for number in range(5)])
    folder = str(tmp_path / "run")
    run = peagle.generate(str(corpus), output=folder, max_tokens=4, tags={"team": "search"}, **FAKE)
    assert "5/5 rows" in capsys.readouterr().out
    frame = run.to_pandas()
    assert list(frame["prompt"]) == [f"Write function number {number}." for number in range(5)]
    assert (frame["num_output_tokens"] <= 4).all()
    assert run.status().state == "finished"
    assert run.report["account"]["num_rows"] == 5
    statement = peagle.cost([folder], by="tag:team")
    assert statement["total"]["usd"]["total"] == pytest.approx(run.status().usd, abs=1e-9)
    assert [row["tag:team"] for row in statement["rows"]] == ["search"]
    second_run = peagle.generate(
        str(corpus), output=folder, max_tokens=4, tags={"team": "search"}, progress=False, **FAKE
    )
    assert capsys.readouterr().out == ""
    assert second_run.report == run.report


def test_invalid_options_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="unknown option 'max_token'") as error:
        peagle.generate("prompts.jsonl", output=str(tmp_path / "run"), max_token=4)
    assert error.value.hint.startswith("did you mean max_tokens")
    with pytest.raises(ConfigError, match="--output is required"):
        peagle.generate("prompts.jsonl")
    with pytest.raises(ConfigError, match=r"temperature: .* not -1"):
        peagle.generate("prompts.jsonl", output=str(tmp_path / "run"), temperature=-1)
    assert not (tmp_path / "run").exists()


def test_endpoint_answers_and_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    with peagle.serve(name="parrot", heartbeat_s=1, drain_s=1, progress=False, **FAKE) as endpoint:
        response = endpoint.client().chat.completions.create(
            model=endpoint.model, messages=[{"role": "user", "content": "?"}], max_tokens=2
        )
        assert (endpoint.model, response.usage.completion_tokens) == ("parrot", 2)
    assert endpoint.status() == "ended"
