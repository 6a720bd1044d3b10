import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from jobs import cli
from peagle import hardware
from peagle.engine.fake import ByteTokenizer, FakeEngine
from peagle.engine.interface import CompletionOutput, Generation, TokenLogprob
from peagle.engine_options import FAKE_MODEL
from peagle.errors import ConfigError
from peagle.runs import regeneration
from peagle.runs.audit import audit
from peagle.runs.prepare import plan_retry
from peagle.runs.regeneration import audited_engine, sample_rows
from pipelines.cluster.node import start_only_engine


def audit_run(run, num_rows=16, seed=0):
    return audit(run, num_rows=num_rows, seed=seed, max_tie=None, announce=print, start=start_only_engine)


def outcomes(run, **options):
    return [row.to_dict()["outcome"] for row in audit_run(run, **options).rows]


def change_response(run, unit, text):
    path = run.unit_path(unit)
    table = pq.read_table(path)
    column = table.column_names.index("response")
    pq.write_table(table.set_column(column, "response", [[text] * table.num_rows]), path)


def test_rows_of_the_fake_engine_are_regenerated_without_changing_files(plan_run):
    rows = [{"prompt": f"say {n}", "sampling": {"max_tokens": 1 + n, "n": 1 + n % 2}} for n in range(5)]
    run = plan_run(rows, temperature=0.5, prompt_template="please {{ prompt }}").generate()
    files_before = sorted(run.root.rglob("*"))
    assert outcomes(run) == ["same"] * 5
    assert sorted(run.root.rglob("*")) == files_before


def test_changed_response_is_different(finished_run, capsys):
    change_response(finished_run, 1, "something else")
    assert cli.run(["audit", str(finished_run), "--json", "-"]) == 1
    result = json.loads(capsys.readouterr().out)
    rows = {row["id"]: row for row in result["regenerated"]["rows"]}
    assert result["findings"] == []
    assert {row_id: row["outcome"] for row_id, row in rows.items() if row["outcome"] != "same"} == {
        "000000002": "different", "000000003": "different",
    }  # fmt: skip
    assert rows["000000002"]["position"] == 0
    assert cli.run(["audit", str(finished_run)]) == 1
    output = capsys.readouterr().out
    assert "4 same, 0 tie, 2 different, 0 skipped" in output
    assert "NOT CLEAN" in output


def test_damaged_unit_is_not_sampled(finished_run):
    finished_run.unit_path(1).write_bytes(b"")
    assert [row.id for row in audit_run(finished_run).rows] == ["000000000", "000000001", "000000004", "000000005"]


def test_retried_rows_are_regenerated_from_their_prompts(plan_run):
    fake_run = plan_run()
    run = fake_run.generate(3, 2, 0, 1, refusing={"000000003", "000000004"})
    plan_retry(run, run.plan())
    fake_run.generate(4, 5, 6)
    assert sorted(row.id for row in audit_run(run).rows) == [f"{n:09d}" for n in range(6)]
    assert set(outcomes(run)) == {"same"}


def test_rows_without_their_input_are_skipped(finished_run, tmp_path):
    corpus = tmp_path / "run.jsonl"
    corpus.write_bytes(corpus.read_bytes().replace(b'"say 1"', b'"hey"  ').replace(b'"say 2"', b"1234567"))
    skipped = {row.id: row.skipped for row in audit_run(finished_run).rows if row.skipped}
    assert skipped == dict.fromkeys(["000000001", "000000002"], "the input now yields a different prompt")
    corpus.unlink()
    assert all("cannot be read" in row.skipped for row in audit_run(finished_run).rows)


def test_sample_depends_on_the_seed_and_has_no_row_twice():
    rows_by_unit = {0: 3, 4: 0, 7: 5}
    sample = sample_rows(rows_by_unit, 4, seed=1)
    assert sample == sample_rows(rows_by_unit, 4, seed=1)
    assert sample != sample_rows(rows_by_unit, 4, seed=2)
    assert sum(map(len, sample.values())) == 4
    assert sample_rows(rows_by_unit, 100, seed=1) == {0: [0, 1, 2], 7: [0, 1, 2, 3, 4]}
    assert sample_rows({}, 4, seed=1) == {}


class CoinTossEngine:
    """An engine that answers every prompt with "heads", whose logprob exceeds that of "tails" by `margin`."""

    def __init__(self, spec, margin):
        self.spec, self.margin = spec, margin
        self.checkable = FakeEngine().checkable  # for the self-check
        self.calls = []

    async def generate(self, request_id, prompt_token_ids, sampling):
        self.calls.append(dict(sampling))
        top = (("heads", -0.7), ("tails", -0.7 - self.margin))
        completion = CompletionOutput(
            text="heads", finish_reason="length", num_output_tokens=1,
            logprobs=(TokenLogprob(token="heads", logprob=-0.7, top=top),),
        )  # fmt: skip
        return Generation(
            text="heads", finish_reason="length", num_prompt_tokens=len(prompt_token_ids), num_cached_tokens=0,
            num_output_tokens=1, speculation=None, ttft_s=None, latency_s=None, completions=(completion,),
        )  # fmt: skip

    def shutdown(self):
        self.calls.append("shutdown")


@pytest.fixture
def run_with_vllm_manifest(plan_run, monkeypatch):
    """A run of the fake engine whose manifest names vLLM."""
    rows = [{"prompt": "a"}, {"prompt": "b", "sampling": {"temperature": 0.5}}, {"prompt": "c"}]
    fake_run = plan_run(rows, max_tokens=1, precision="bf16")  # the precision determines the accepted tie
    run = fake_run.generate()
    precision = fake_run.resolved.precision.describe()
    manifest = json.loads((run.root / "run.json").read_text())
    manifest["config"]["engine"] = "vllm"
    manifest["engine"] |= {"tensor_parallel_size": 2, "num_nodes": 2}
    (run.root / "run.json").write_text(json.dumps(manifest))
    assert manifest["fingerprint"]["precision"] == precision
    monkeypatch.setattr(regeneration, "resolve_model", lambda name, commits: replace(FAKE_MODEL, fingerprint="fake"))
    monkeypatch.setattr(regeneration, "tokenizer_of", lambda model, revision: ByteTokenizer())
    return run


@pytest.fixture
def start_coin_toss_engines(monkeypatch):
    """Return a function that makes `start_vllm` start a `CoinTossEngine` with a margin.

    It returns a list to which the started engines are added.
    """
    engines = []

    def with_margin(margin):
        def start(spec, *, engine_index, num_engines_on_node):
            engines.append(CoinTossEngine(spec, margin))
            return engines[-1]

        monkeypatch.setattr("pipelines.cluster.node.start_vllm", start)
        return engines

    return with_margin


@pytest.mark.parametrize(("margin", "outcome", "code"), [(0.125, "tie", 0), (0.9, "different", 1)])
def test_rows_are_regenerated_without_drafter_and_ties_are_accepted(
    run_with_vllm_manifest, start_coin_toss_engines, capsys, margin, outcome, code
):
    engines = start_coin_toss_engines(margin)
    change_response(run_with_vllm_manifest, 0, "tails")
    change_response(run_with_vllm_manifest, 1, "heads")
    assert cli.run(["audit", str(run_with_vllm_manifest)]) == code
    output = capsys.readouterr().out
    (row,) = [line for line in output.splitlines() if line.startswith("  000000000")]
    assert row.split() == ["000000000", outcome, "0", f"{margin:.4f}", "'tails'", "'heads'"]
    assert "skipped 1: sampled (temperature above 0)" in output
    (engine,) = engines
    run_spec = run_with_vllm_manifest.manifest()["engine"]
    assert (engine.spec.tensor_parallel_size, engine.spec.num_nodes) == (2, 1)
    assert (engine.spec.drafter, engine.spec.max_num_seqs) == (None, run_spec["max_num_seqs"])
    assert engine.spec.max_num_batched_tokens > 2048 + engine.spec.max_num_seqs  # includes room for the run's drafter
    assert engine.spec.extra == {"logprobs_mode": "processed_logprobs"}
    assert [sampling["logprobs"] for sampling in engine.calls[:-1]] == [5, 5]
    assert engine.calls[-1] == "shutdown"


def test_max_tie_limits_the_accepted_difference_of_logprobs(run_with_vllm_manifest, start_coin_toss_engines, capsys):
    start_coin_toss_engines(0.125)
    change_response(run_with_vllm_manifest, 0, "tails")
    assert cli.run(["audit", str(run_with_vllm_manifest), "--max-tie", "0.1"]) == 1
    assert "at most 0.1 apart" in capsys.readouterr().out


def test_other_precision_or_model_is_refused(run_with_vllm_manifest, monkeypatch):
    manifest = run_with_vllm_manifest.manifest()
    assert audited_engine(manifest, max_tie=None).max_tie > 0
    monkeypatch.setattr(regeneration, "resolve_model", lambda name, commits: replace(FAKE_MODEL, fingerprint="other"))
    with pytest.raises(ConfigError, match=r"weights of(.|\n)*--no-regenerate"):
        audited_engine(manifest, max_tie=None)
    manifest["fingerprint"]["precision"] = "fp8 weights, fp8 KV cache"
    with pytest.raises(ConfigError, match=r"the run computed in fp8 weights(.|\n)*--no-regenerate"):
        audited_engine(manifest, max_tie=None)


def test_audit_of_a_fake_engine_does_not_detect_hardware(finished_run, monkeypatch):
    monkeypatch.setattr(hardware, "detect", lambda: pytest.fail("not for the fake engine"))
    assert set(outcomes(finished_run)) == {"same"}
