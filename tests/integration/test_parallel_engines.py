"""One engine in two ranks on two cores: its layers shared (tensor parallel) or divided (pipeline parallel)."""

import pyarrow.dataset as ds
import pytest

from peagle import hardware

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        hardware.detect().platform != "cpu" or hardware.detect().num_cpus < 2, reason="needs two CPU cores"
    ),
]
PROMPTS = [f"say {n}" for n in range(6)]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def own_answers(speaking_target):
    """What the target answers greedily in transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(speaking_target)
    model = AutoModelForCausalLM.from_pretrained(speaking_target, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        tokens = tokenizer.encode(f"[{prompt}]", add_special_tokens=False)
        num_prompt_tokens = len(tokens)
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokenizer.decode(tokens[num_prompt_tokens:], skip_special_tokens=True))
    return answers


@pytest.mark.parametrize("flags", [("--tensor-parallel-size", 2, "--enforce-eager"), ("--pipeline-parallel-size", 2)])
def test_two_ranks_answer_as_the_target_itself(peagle, speaking_target, write_jsonl, own_answers, tmp_path, flags):
    corpus, output = write_jsonl([{"prompt": prompt} for prompt in PROMPTS]), tmp_path / "run"
    run = peagle(
        "generate", "--model", speaking_target, "--drafter", "none", "--precision", "float32", "--input", corpus,
        "--output", output, "--max-tokens", NUM_TOKENS, "--max-model-len", 64, "--max-num-seqs", 4, "--ignore-eos",
        "--kv-cache-gib", 0.1, "--usd-per-hour", 1, *flags,
    )  # fmt: skip
    said = run.communicate()[0]
    assert run.returncode == 0, said
    rows = ds.dataset(output / "data", format="parquet").to_table().sort_by("id").to_pylist()
    assert {row["num_output_tokens"] for row in rows} == {NUM_TOKENS}
    assert [row["response"].replace(" ", "") for row in rows] == [text.replace(" ", "") for text in own_answers]
