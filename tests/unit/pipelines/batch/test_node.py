from moving_hub import FIRST, SECOND

from peagle.engine.spec import EngineSpec
from pipelines.batch.node import local_spec

CONFIG = {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}


def test_a_node_takes_the_commit_of_the_spec_wherever_the_main_branch_is(moving_hub):
    for commit in (FIRST, SECOND):
        moving_hub.push("org/model-of-this-test", commit, CONFIG)
    spec = EngineSpec(model="org/model-of-this-test", revision=FIRST)
    assert local_spec(spec) == spec
    assert moving_hub.asked == [("org/model-of-this-test", FIRST)]
