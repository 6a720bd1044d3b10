import json

import pytest
from resolved_runs import resolve_run

from peagle import hardware
from peagle.runs.plan import make_plan
from pipelines.batch.config import GenerateConfig
from pipelines.batch.request import RunRequest

HERE = hardware.detect()


@pytest.fixture
def resolved_run(tmp_path):
    """Return a function that resolves a fake-engine run over twelve rows, and returns the request and the run."""
    corpus = tmp_path / "in.jsonl"
    corpus.write_text("".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in range(12)))

    def make(*, hardware=HERE, served_name=None, **options):
        options = {"usd_per_hour": 1, **options}
        config = GenerateConfig(input=str(corpus), output=tmp_path / "run", engine="fake", **options)
        request = RunRequest(config=config, command=["peagle", "generate"], served_name=served_name)
        return request, resolve_run(config, make_plan(config), hardware)

    return make
