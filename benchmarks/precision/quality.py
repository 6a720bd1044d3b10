"""The change that INT8 makes in a target: likelihood, HumanEval, acceptance.

    python -m benchmarks.precision.quality --model smollm2-135m --drafter eagle3 --drafter peagle --output result.json

Computed with transformers on any machine, also on one whose engine has no INT8 (`emulated.py`); vLLM's kernels are not
run. INT8 is the one difference between the two sides.

- Texts: responses that the target gave in bf16 (`benchmarks/drafter/responses/greedy-2.parquet`), after their prompts,
  and HumanEval's reference solutions, which the target did not write, after theirs. The conversion has seen neither: it
  has no calibration.
- HumanEval: pass@1 of greedy answers, by execution (`execution.py`).
- Heads: the acceptance length on the answers of each side, walked from its states (`peagle.drafter.estimate`).

Problems and responses are taken in an order drawn with a seed, so the first ones are a fair sample. What is computed is
in the file at once, and the same command goes on. `summary.py` adds it up.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.precision.emulated import load
from benchmarks.precision.execution import passes
from benchmarks.precision.summary import summarize
from jobs.output import say
from peagle import hardware
from peagle.catalog.drafters import resolve_drafter
from peagle.catalog.int8 import ensure_int8
from peagle.catalog.targets import resolve_model
from peagle.drafter.data import Sample
from peagle.drafter.estimate import estimate_acceptance
from peagle.drafter.features import ComputedFeatures, HiddenStateReader
from peagle.drafter.head_folder import load_head
from peagle.drafter.store import FeatureSpec
from peagle.files import write_json
from peagle.humaneval import PROMPT_TEMPLATE, read_humaneval
from peagle.plain_json import from_json
from peagle.provenance import git_revision, versions

_RESPONSES = Path(__file__).parents[1] / "drafter" / "responses" / "greedy-2.parquet"
_SEED = 0


def negative_log_likelihood(model: Any, prompt: Sequence[int], response: Sequence[int]) -> float:
    """The nats of a response after its prompt, in all."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.inference_mode():
        states = model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
        logprobs = model.lm_head(states).log_softmax(dim=-1)
    return -logprobs.gather(1, torch.tensor(response)[:, None]).sum().item()


def greedy_answers(model: Any, tokenizer: Any, chats: Sequence[str], max_tokens: int) -> list[list[int]]:
    """The greedy answers to chats, as token ids, with the token that ends one."""
    prompts, end = tokenizer(list(chats), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id
    width = max(map(len, prompts))
    padded = torch.tensor([[end] * (width - len(ids)) + ids for ids in prompts])
    is_prompt = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    with torch.inference_mode():
        ids = model.generate(
            padded, attention_mask=is_prompt, max_new_tokens=max_tokens, do_sample=False, pad_token_id=end
        )
    rows = ids[:, width:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def accepted(model: Any, head: Any, prompt: list[int], answer: list[int], k: int) -> list[int]:
    """How many drafts of a head along an answer had 0, 1, ... K tokens accepted."""
    layers = tuple(head.config.eagle_aux_hidden_state_layer_ids)
    spec = FeatureSpec(target="", aux_layers=layers, hidden_size=model.config.hidden_size, samples="")
    sample = Sample(id="", token_ids=(*prompt, *answer), num_prompt_tokens=len(prompt))
    features = ComputedFeatures([sample], lambda: HiddenStateReader(model, layers), spec)
    stats = estimate_acceptance(head, features, [0], num_speculative_tokens=k)
    at_least = [stats.num_drafts, *stats.accepted_per_position, 0]
    return [more - fewer for more, fewer in pairwise(at_least)]


class Measurement:
    """What is measured of a target, in a file that grows.

    Args:
        options: of the command.
        output: the file; what stands in it is kept.
    """

    def __init__(self, options: argparse.Namespace, output: Path) -> None:
        from transformers import AutoTokenizer

        self._options, self._output = options, output
        self._model = resolve_model(options.model, announce=say)
        folder = Path(self._model.path)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._targets = {
            "float32": load(folder, None),
            "int8": load(folder, ensure_int8(self._model.path, announce=say)),
        }
        self._heads = {name: load_head(self._head_folder(name), folder).eval() for name in options.drafter}
        self.result: dict[str, Any] = {
            "model": self._model.name,
            "weights": self._model.fingerprint,
            "settings": {"drafters": options.drafter, "k": options.k, "max_tokens": options.max_tokens, "seed": _SEED},
            "responses": {},
            "problems": {},
        }
        if output.exists():
            found = from_json(output.read_text())
            fixed = ("model", "weights", "settings")
            if [found[key] for key in fixed] != [self.result[key] for key in fixed]:
                raise SystemExit(f"{output} is of another model or other settings: name another file")
            self.result |= {key: found[key] for key in ("responses", "problems")}

    def responses(self, rows: Sequence[dict[str, Any]]) -> None:
        """The likelihood of the target's own responses."""
        for row in rows:
            if row["id"] not in self.result["responses"]:
                prompt, response = self._ids(self._chat(row["prompt"])), self._ended(row["response"])
                self.result["responses"][row["id"]] = {"num_tokens": len(response)} | {
                    side: {"nats": negative_log_likelihood(target, prompt, response)}
                    for side, target in self._targets.items()
                }
                self._save()

    def problems(self, problems: Sequence[dict[str, Any]]) -> None:
        """HumanEval's problems on both sides, some at a time."""
        missing = [problem for problem in problems if problem["task_id"] not in self.result["problems"]]
        for start in range(0, len(missing), self._options.batch):
            some = missing[start : start + self._options.batch]
            sides = {side: list(self._answered(target, some)) for side, target in self._targets.items()}
            for place, problem in enumerate(some):
                self.result["problems"][problem["task_id"]] = {
                    "num_tokens": len(self._ended(_solution(problem))),
                    **{side: answered[place] for side, answered in sides.items()},
                }
            self._save()

    def _answered(self, target: Any, problems: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        k, max_tokens = self._options.k, self._options.max_tokens
        chats = [self._chat(PROMPT_TEMPLATE.replace("{{ prompt }}", problem["prompt"])) for problem in problems]
        answers = greedy_answers(target, self._tokenizer, chats, max_tokens)
        for problem, chat, answer in zip(problems, chats, answers, strict=True):
            prompt, text = self._ids(chat), self._tokenizer.decode(answer, skip_special_tokens=True)
            yield {
                "answer": text,
                "passed": passes(problem, text),
                "nats": negative_log_likelihood(target, prompt, self._ended(_solution(problem))),
                "accepted": {name: accepted(target, head, prompt, answer, k) for name, head in self._heads.items()},
            }

    def _save(self) -> None:
        state = {
            "hardware": hardware.detect().describe(),
            "versions": versions() | {"git": git_revision()},
            "summary": summarize(self.result),
        }
        write_json(self._output, self.result | state)
        counts = (len(self.result[kind]) for kind in ("responses", "problems"))
        say("{} responses, {} problems".format(*counts))

    def _head_folder(self, name: str) -> Path:
        head = resolve_drafter(name, self._model, 1, num_speculative_tokens=self._options.k).spec
        assert head is not None
        return Path(head.model)

    def _chat(self, content: str) -> str:
        chat = [{"role": "user", "content": content}]
        return str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _ended(self, text: str) -> list[int]:
        return [*self._ids(text), self._tokenizer.eos_token_id]


def _solution(problem: dict[str, Any]) -> str:
    return f"```python\n{problem['prompt']}{problem['canonical_solution']}```"


def drawn(rows: Sequence[dict[str, Any]], num: int) -> list[dict[str, Any]]:
    """The first `num` rows in an order that does not depend on `num`."""
    return random.Random(_SEED).sample(rows, len(rows))[:num]


def main() -> None:
    """Measure, and write the figures."""
    import pyarrow.parquet as pq

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="catalog name or folder of the target")
    parser.add_argument("--drafter", action="append", default=[], help="head to walk: peagle, eagle3 or a folder")
    parser.add_argument("-k", type=int, default=7, help="tokens of a draft")
    parser.add_argument("--problems", type=int, default=164, help="problems of HumanEval")
    parser.add_argument("--responses", type=int, default=200, help="responses of the target's own")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--batch", type=int, default=20, help="problems that are answered at once")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    measurement = Measurement(options, options.output)
    rows = pq.read_table(_RESPONSES, columns=["id", "prompt", "response", "finish_reason"]).to_pylist()
    measurement.responses(drawn([row for row in rows if row["finish_reason"] == "stop"], options.responses))
    measurement.problems(drawn(read_humaneval(), options.problems))


if __name__ == "__main__":
    main()
