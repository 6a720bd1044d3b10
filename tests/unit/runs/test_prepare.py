import json

import pyarrow as pa
import pytest
from resolved_runs import resolve_run

from peagle.catalog import local
from peagle.engine.fake import ByteTokenizer
from peagle.requests.builder import RequestBuilder, SamplingSpec
from peagle.requests.prompts import PromptBuilder, resolve_prompts
from peagle.requests.sampling import SamplingLimits
from peagle.runs.plan import make_plan, unit_to_json
from peagle.runs.prepare import sample_corpus
from peagle.runs.rows import PreparedUnit, decode_rows, is_unfinished
from pipelines.batch.config import GenerateConfig
from pipelines.batch.streaming import prepare_units


@pytest.fixture
def planned_batch(tmp_path):
    """Three units of two rows as a batch of Ray Data, with their resolved run and its directory."""
    corpus = tmp_path / "prompts.jsonl"
    corpus.write_text("".join(json.dumps({"prompt": f"line\\n{n}"}) + "\n" for n in range(6)))
    config = GenerateConfig(input=str(corpus), output=tmp_path / "run", engine="fake", usd_per_hour=1, rows_per_unit=2)
    run = resolve_run(config, make_plan(config))
    run.directory.create({}, run.plan)
    return pa.table({"units": ["\n".join(map(unit_to_json, run.plan.units))]}), run.for_stages(), run.directory


def test_each_unit_becomes_one_row(planned_batch):
    batch, resolved, _ = planned_batch
    prepared = list(prepare_units(batch, run=resolved))
    assert [block.num_rows for block in prepared] == [1, 1, 1]
    units = [PreparedUnit(decode_rows(block)) for block in prepared]
    assert [unit.unit.unit for unit in units] == [0, 1, 2]
    assert all(b"line" in bytes(prompt) for unit in units for prompt in unit.prompts)


def test_unit_without_rows_is_prepared_as_empty(planned_batch):
    batch, resolved, directory = planned_batch
    unit = directory.plan().units[1].without({0, 1})
    (prepared,) = map(decode_rows, prepare_units(pa.table({"units": [unit_to_json(unit)]}), run=resolved))
    assert not is_unfinished(prepared)
    empty = PreparedUnit(prepared)
    assert (empty.unit, empty.prompts, empty.dead_letter_records()) == (unit, [], [])
    full = PreparedUnit(decode_rows(next(prepare_units(batch, run=resolved))))
    assert empty.output({}, "m", None).schema == full.output({}, "m", None).schema


def test_no_unit_is_prepared_after_a_stop(planned_batch):
    batch, resolved, directory = planned_batch
    blocks = prepare_units(batch, run=resolved)
    assert not is_unfinished(decode_rows(next(blocks)))
    directory.stop.request(5)
    assert [is_unfinished(decode_rows(block)) for block in blocks] == [True]


def test_tokenizer_is_loaded_with_the_revision(monkeypatch):
    loads = []
    monkeypatch.setattr(local, "local_model_path", lambda model, revision, weights: model)
    monkeypatch.setattr(local, "load_tokenizer", lambda *args: loads.append(args))
    local.tokenizer_of("org/model-of-this-test", "v2")
    local.tokenizer_of("org/model-of-this-test")
    assert loads == [("org/model-of-this-test", "v2"), ("org/model-of-this-test", None)]
    local.tokenizer_of.cache_clear()


@pytest.fixture
def sample_rows(tmp_path):
    """Return a function that samples a corpus of these rows, with these options of the run."""

    def sample(rows, **options):
        path = tmp_path / "in.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = GenerateConfig(input=str(path), output=tmp_path / "run", max_tokens=10, **options)
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
    assert (sample.prompt_tokens, sample.max_output_tokens) == (7 + 5, 10 + 4 * 3)


def test_large_corpus_is_sampled_evenly(sample_rows):
    sample = sample_rows([{"prompt": "x" * (10 if n < 1000 else 30)} for n in range(2000)], rows_per_unit=50)
    assert (sample.num_rows, sample.is_whole) == (2000, False)
    assert 200 <= sample.num_sampled <= 220
    assert sample.prompt_tokens == pytest.approx(2000 * 20, rel=0.1)
    assert sample.max_output_tokens == pytest.approx(2000 * 10)


def test_sampled_dead_letters_are_counted_with_an_example(sample_rows):
    sample = sample_rows([{"prompt": "x"}, {"prompt": "x" * 500}])
    assert (sample.num_failed, sample.prompt_tokens) == (1, 1)
    assert "500" in sample.example
