"""The change that INT8 makes in a target: likelihood of texts, and HumanEval.

    python -m benchmarks.precision.quality --model smollm2-135m --output result.json

Computed with transformers on any machine, also on one whose engine has no INT8: the weights are those that
`--precision int8` converts, activations are quantised as vLLM's kernels do it (by token, symmetric), and the integer
products are added exactly. All else is in float32, on both sides, so that INT8 is the one difference.

Texts: the reference solutions of HumanEval after their chat prompt, which the target did not write, and responses that
the target itself gave in bf16 (`benchmarks/drafter/responses/greedy-2.parquet`), after theirs.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.precision.execution import passes
from jobs.output import say
from peagle import hardware
from peagle.catalog.int8 import ensure_int8
from peagle.catalog.int8_weights import weight_files
from peagle.catalog.targets import resolve_model
from peagle.humaneval import PROMPT_TEMPLATE, read_humaneval
from peagle.provenance import git_revision, versions

_RESPONSES = Path(__file__).parents[1] / "drafter" / "responses" / "greedy-2.parquet"
_LEVELS = 127


class Int8Linear(torch.nn.Module):
    """A linear layer as vLLM's kernels compute it in W8A8."""

    def __init__(self, stored_NK: torch.Tensor, scale_N1: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight_KN = stored_NK.float().T.contiguous()
        self.scale_N = scale_N1.float().squeeze(1)
        self.bias = bias

    def forward(self, x_BK: torch.Tensor) -> torch.Tensor:
        """The layer's outputs [..., N] for inputs [..., K]."""
        scale_B1 = x_BK.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / _LEVELS
        # Integers of up to 14 bits, summed in float32, which holds them exactly up to 24 bits and hardly errs above.
        sums_BN = (x_BK / scale_B1).round() @ self.weight_KN
        found_BN = sums_BN * scale_B1 * self.scale_N
        return found_BN if self.bias is None else found_BN + self.bias


def load(folder: Path, int8_folder: Path | None) -> Any:
    """The target in float32, its linear layers in INT8 where a converted folder is given."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if int8_folder is None:
        return model
    stored = {name: tensor for file in weight_files(int8_folder) for name, tensor in load_file(file).items()}
    for name, tensor in stored.items():
        if tensor.dtype == torch.int8:
            path = name.removesuffix(".weight")
            bias = getattr(model.get_submodule(path), "bias", None)
            model.set_submodule(path, Int8Linear(tensor, stored[f"{name}_scale"], bias))
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt and what comes after it, as token ids."""

    prompt: list[int]
    response: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """How likely texts are to a target.

    Attributes:
        num_tokens: of the responses.
        nats_per_token: mean negative log-likelihood.
        perplexity: its exponential.
    """

    num_tokens: int
    nats_per_token: float
    perplexity: float


def likelihood(model: Any, texts: Sequence[Text]) -> Likelihood:
    """The likelihood of the responses after their prompts."""
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([text.prompt + text.response])
        with torch.inference_mode():
            states = model.model(ids).last_hidden_state[0, len(text.prompt) - 1 : -1]
            logprobs = model.lm_head(states).log_softmax(dim=-1)
        total -= logprobs.gather(1, torch.tensor(text.response)[:, None]).sum().item()
        count += len(text.response)
    return Likelihood(num_tokens=count, nats_per_token=total / count, perplexity=math.exp(total / count))


def answers(model: Any, tokenizer: Any, problems: Sequence[dict[str, Any]], max_tokens: int, batch: int) -> list[str]:
    """Greedy answers to the chat prompts of HumanEval, in the order of the problems."""
    found: list[str] = []
    for some in _batches(problems, batch):
        encoded = tokenizer(
            [_chat(tokenizer, one["prompt"]) for one in some],
            return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False,
        )  # fmt: skip
        with torch.inference_mode():
            ids = model.generate(
                **encoded, max_new_tokens=max_tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id
            )
        found += tokenizer.batch_decode(ids[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def _chat(tokenizer: Any, prompt: str) -> str:
    content = PROMPT_TEMPLATE.replace("{{ prompt }}", prompt)
    chat = [{"role": "user", "content": content}]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def _batches(rows: Sequence[dict[str, Any]], size: int) -> Iterator[Sequence[dict[str, Any]]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def texts_of(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Text]:
    """Token ids of chats and their answers."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return [Text(prompt=ids(chat), response=[*ids(answer), tokenizer.eos_token_id]) for chat, answer in pairs]


def main() -> None:
    """Measure both, print a table and write the figures."""
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="catalog name or folder of the target")
    parser.add_argument("--problems", type=int, default=164, help="problems of HumanEval")
    parser.add_argument("--responses", type=int, default=200, help="responses of the target's own")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--batch", type=int, default=41, help="problems that are answered at once")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    model = resolve_model(options.model, announce=say)
    folder = Path(model.path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems = read_humaneval()[: options.problems]
    rows = pq.read_table(_RESPONSES, columns=["prompt", "response", "finish_reason"]).to_pylist()
    own = [row for row in rows if row["finish_reason"] == "stop"][: options.responses]
    texts = {
        "humaneval": texts_of(tokenizer, [(_chat(tokenizer, p["prompt"]), _solution(p)) for p in problems]),
        "own": texts_of(tokenizer, [(_own_chat(tokenizer, row["prompt"]), row["response"]) for row in own]),
    }
    result: dict[str, Any] = {
        "model": model.name,
        "weights": model.fingerprint,
        "hardware": hardware.detect().describe(),
        "versions": versions() | {"git": git_revision()},
        "options": {name: str(value) for name, value in vars(options).items()},
    }
    targets = {"float32": load(folder, None), "int8": load(folder, ensure_int8(model.path, announce=say))}
    for name, loaded in targets.items():
        found = {kind: asdict(likelihood(loaded, some)) for kind, some in texts.items()}
        result[name] = {"likelihood": found}
        say(f"{name}: " + ", ".join(f"{kind} {one['nats_per_token']:.4f} nats a token" for kind, one in found.items()))
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    for name, loaded in targets.items():
        written = answers(loaded, tokenizer, problems, options.max_tokens, options.batch)
        passed = [problem["task_id"] for problem, text in zip(problems, written, strict=True) if passes(problem, text)]
        result[name] |= {"passed": passed, "answers": written}
        say(f"{name}: {len(passed)} of {len(problems)} problems passed")
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def _own_chat(tokenizer: Any, prompt: str) -> str:
    chat = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def _solution(problem: dict[str, Any]) -> str:
    return f"```python\n{problem['prompt']}{problem['canonical_solution']}```"


if __name__ == "__main__":
    main()
