import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from config_only import HEAD, TARGET
from moving_hub import FIRST_COMMIT

from peagle.bench.acceptance import evaluate
from peagle.bench.config import BenchConfig, EvaluateConfig
from peagle.bench.engine import MeasurementListener
from peagle.bench.prompts import build_dataset, read_dataset
from peagle.bench.run import bench
from peagle.engine.fake import ByteTokenizer
from peagle.errors import InputError
from peagle.tuning.config import TuneConfig
from peagle.tuning.run import tune


def load_dataset(max_model_len=4096, **options):
    config = EvaluateConfig(**options)
    rows = read_dataset(config)
    return build_dataset(config, rows, ByteTokenizer(), max_model_len, category_column=config.category_column)


def test_prompts_of_humaneval_are_chats_with_an_instruction():
    dataset = load_dataset(limit=3)
    text = bytes(dataset.prompts[0].token_ids).decode()
    assert text.startswith("user: Complete the following Python function. Answer with the code only.")
    assert "def has_close_elements" in text
    assert (dataset.name, len(dataset.prompts), dataset.prompts[0].category) == ("humaneval", 3, None)


def test_jsonl_and_parquet_give_the_same_prompts(write_jsonl, tmp_path):
    rows = [{"prompt": "a", "category": "x"}, {"prompt": "b", "category": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    from_jsonl, from_parquet = (
        load_dataset(dataset=str(write_jsonl(rows))),
        load_dataset(dataset=str(tmp_path / "rows.parquet")),
    )
    assert from_jsonl.prompts == from_parquet.prompts
    assert [prompt.category for prompt in from_jsonl.prompts] == ["x", None]
    assert from_jsonl.fingerprint == from_parquet.fingerprint


def test_rejected_rows_are_counted_by_reason(write_jsonl):
    file = write_jsonl([{"prompt": "a"}, {"prompt": None}, {"prompt": "b" * 50}])
    dataset = load_dataset(dataset=str(file), max_model_len=30)
    assert len(dataset.prompts) == 1
    assert dataset.rejected == {"invalid_prompt": 1, "prompt_too_long": 1}


def test_other_rows_or_a_limit_change_the_fingerprint(write_jsonl):
    first, second = [str(write_jsonl([{"prompt": "a"}, {"prompt": p}], f"{p}.jsonl")) for p in "bc"]
    datasets = [load_dataset(dataset=first), load_dataset(dataset=second), load_dataset(dataset=first, limit=1)]
    assert len({dataset.fingerprint for dataset in datasets}) == 3


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the file is empty"),
        ([""], "has no rows"),
        ([{"text": "a"}], "no column 'prompt' or 'messages'"),
        ([{"prompt": 3}], "no row yields a prompt; first error: column 'prompt' must be text, not int"),
        (["{"], "not valid JSON"),
    ],
)
def test_unusable_dataset_is_refused(lines, message, write_jsonl):
    with pytest.raises(InputError, match=message):
        load_dataset(dataset=str(write_jsonl(lines)))


def test_prompts_are_read_from_batches_and_tables(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,category\nab,x\n")
    chat = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": "ab"}]}}  # fmt: skip
    text = {**chat, "custom_id": "b", "url": "/v1/completions", "body": {"prompt": "ab"}}
    unknown = {**chat, "custom_id": "c", "body": {**chat["body"], "tempreature": 1}}
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(request) + "\n" for request in (chat, text, unknown)))
    table, batch = load_dataset(dataset=str(tmp_path / "a.csv")), load_dataset(dataset=str(tmp_path / "b.jsonl"))
    assert batch.prompts[0].token_ids == table.prompts[0].token_ids
    assert bytes(batch.prompts[1].token_ids) == b"ab"
    assert batch.rejected == {"invalid": 1}


class TokenizerLoaded(Exception):  # noqa: N818
    """Ends the test as soon as the tokenizer is loaded."""


@pytest.mark.parametrize(
    ("command", "config", "options"),
    [
        (bench, BenchConfig, {"methods": "none", "usd_per_hour": 1}),
        (tune, TuneConfig, {"methods": "none", "usd_per_hour": 1}),
        (evaluate, EvaluateConfig, {"drafter": ["org/head"]}),
    ],
)
def test_tokenizer_is_loaded_at_the_resolved_revision(moving_hub, write_jsonl, command, config, options):
    moving_hub.push("org/model", FIRST_COMMIT, TARGET)
    moving_hub.push("org/head", FIRST_COMMIT, HEAD | {"speculators_model_type": "peagle"})

    def tokenizer_of(*args):
        raise TokenizerLoaded(args)

    with pytest.raises(TokenizerLoaded) as exception:
        command(
            config(model="org/model", dataset=str(write_jsonl([{"prompt": "p"}])), **options),
            MeasurementListener(),
            tokenizer_of=tokenizer_of,
        )
    assert exception.value.args == (("org/model", FIRST_COMMIT),)
