import json

import pytest

from peagle import hardware
from peagle.runs.directory import RunDirectory
from peagle.runs.plan import make_plan
from pipelines.batch.config import GenerateConfig
from pipelines.batch.decide import Decided
from pipelines.batch.request import RunRequest
from pipelines.batch.resolve import resolve

HERE = hardware.detect()


@pytest.fixture
def decided(tmp_path):
    """Decides a run of the fake engine over twelve rows, which no driver has begun."""
    corpus = tmp_path / "in.jsonl"
    corpus.write_text("".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in range(12)))

    def make(*, hardware=HERE, served_name=None, **keys):
        keys = {"usd_per_hour": 1, **keys}
        config = GenerateConfig(input=str(corpus), output=tmp_path / "run", engine="fake", **keys)
        plan = make_plan(config)
        return Decided(
            request=RunRequest(config=config, command=["peagle", "generate"], served_name=served_name),
            directory=RunDirectory(config.output),
            plan=plan,
            resolved=resolve(config, hardware, plan.schema.names, announce=print),
        )

    return make
