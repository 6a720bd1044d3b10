import json

import pytest

from peagle.engine.fake import ByteTokenizer
from peagle.requests.builder import RequestBuilder, SamplingSpec
from peagle.requests.prompts import PromptBuilder, resolve_prompts
from peagle.requests.sampling import SamplingLimits
from peagle.runs.plan import make_plan
from peagle.runs.prepare import sample_corpus
from pipelines.batch.config import GenerateConfig


@pytest.fixture
def sample_rows(tmp_path):
    def sample(rows, **keys):
        path = tmp_path / "in.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = GenerateConfig(input=str(path), output=tmp_path / "run", max_tokens=10, **keys)
        plan = make_plan(config)
        limits = SamplingLimits(max_model_len=100, has_drafter=False, can_seed=True)
        prompts = resolve_prompts(config, plan.schema.names, False, body_column=None, where="input")
        sampling = SamplingSpec(base=config.sampling(), column="sampling", limits=limits)
        builder = RequestBuilder(PromptBuilder(prompts, ByteTokenizer(), limits.max_model_len), sampling)
        sample = sample_corpus(plan, builder)
        assert not (tmp_path / "run").exists()
        return sample

    return sample


def test_small_corpus_is_counted_completely(sample_rows):
    rows = [{"prompt": "x" * 7}, {"prompt": "x" * 5, "sampling": {"max_tokens": 4, "n": 3, "temperature": 1.0}}]
    sample = sample_rows(rows)
    assert (sample.num_rows, sample.is_whole, sample.num_failed) == (2, True, 0)
    assert (sample.prompt_tokens, sample.most_output_tokens) == (7 + 5, 10 + 4 * 3)


def test_large_corpus_is_sampled_evenly(sample_rows):
    sample = sample_rows([{"prompt": "x" * (10 if n < 1000 else 30)} for n in range(2000)], rows_per_unit=50)
    assert (sample.num_rows, sample.is_whole) == (2000, False)
    assert 200 <= sample.num_sampled <= 220
    assert sample.prompt_tokens == pytest.approx(2000 * 20, rel=0.1)
    assert sample.most_output_tokens == pytest.approx(2000 * 10)


def test_sampled_dead_letters_are_counted_with_an_example(sample_rows):
    sample = sample_rows([{"prompt": "x"}, {"prompt": "x" * 500}])
    assert (sample.num_failed, sample.prompt_tokens) == (1, 1)
    assert "500" in sample.example
