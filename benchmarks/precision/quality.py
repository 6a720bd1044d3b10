"""Compare a target in two precisions: likelihood of texts, HumanEval, and acceptance.

    python -m benchmarks.precision.quality --drafter eagle3 --drafter peagle --folder /tmp/quality --output result.json

All is measured in vLLM's engine, so the hardware must support both precisions. INT8 needs a CPU with VNNI, or a GPU
from Turing to Hopper.

- Likelihood, given the prompt, of two kinds of texts: responses of the target in bf16
  (`benchmarks/drafter/responses/greedy-2.parquet`), and HumanEval's reference solutions, which are by people. The
  conversion to INT8 used neither, because it needs no calibration data.
- HumanEval: pass@1 of greedy answers without a drafter, by execution (`execution.py`).
- Acceptance of the heads on HumanEval, as counted by the engine.

Responses are a random sample with a fixed seed. The figures of each engine are written as soon as it is done. Running
the same command again continues. `summary.py` summarizes the figures.
"""

import argparse
import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.precision.execution import passes
from benchmarks.precision.summary import summarize
from jobs.output import say
from peagle import hardware
from peagle.bench.engine import with_engine
from peagle.engine.interface import Engine
from peagle.engine.vllm import start_engine
from peagle.engine_options import EngineOptions, ResolvedEngine, resolve_engine
from peagle.files import write_json
from peagle.humaneval import PROMPT_TEMPLATE, read_humaneval
from peagle.plain_json import from_json
from peagle.provenance import git_revision, versions
from peagle.requests.tokenizer import load_tokenizer
from peagle.speculation import SpeculationStats

_RESPONSES = Path(__file__).parents[1] / "drafter" / "responses" / "greedy-2.parquet"
_SEED = 0
_MAX_MODEL_LEN = 2048
_CONCURRENCY = 8

Text = tuple[list[int], list[int]]
"""The token ids of a prompt and of its response."""


async def negative_log_likelihoods(engine: Engine, texts: Mapping[str, Text]) -> dict[str, float]:
    """Return the negative log-likelihood of each response given its prompt: the sum over tokens, in nats."""

    async def of_text(prompt: list[int], response: list[int]) -> float:
        return -sum(token.logprob for token in await engine.checkable.judge([*prompt, *response], len(prompt)))

    return dict(zip(texts, await asyncio.gather(*(of_text(*text) for text in texts.values())), strict=True))


async def greedy_answers(
    engine: Engine, prompts: Mapping[str, list[int]], max_tokens: int
) -> tuple[dict[str, str], SpeculationStats]:
    """Return greedy answers to prompts, and the speculation statistics of all of them."""
    sampling = {"temperature": 0.0, "max_tokens": max_tokens}
    completions = await asyncio.gather(*(engine.generate(name, ids, sampling) for name, ids in prompts.items()))
    statistics = (completion.speculation for completion in completions if completion.speculation is not None)
    answers = {name: completion.text for name, completion in zip(prompts, completions, strict=True)}
    return answers, sum(statistics, SpeculationStats.empty())


def random_rows(rows: Sequence[dict[str, Any]], num: int) -> list[dict[str, Any]]:
    """Return the first `num` rows in a random order that does not depend on `num`."""
    return random.Random(_SEED).sample(rows, len(rows))[:num]


class Measurement:
    """Measures a target in each precision, and rewrites the output file after each engine.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        engine = self._resolve(options.precisions[0], "none")
        self._tokenizer = load_tokenizer(engine.model.path)
        self._problems = read_humaneval()[: options.problems]
        rows = random_rows(_complete_responses(), options.responses)
        self._texts: dict[str, dict[str, Text]] = {
            "responses": {
                row["id"]: (self._chat_ids(row["prompt"]), self._ids_with_eos(row["response"])) for row in rows
            },
            "solutions": {
                problem["task_id"]: (self._prompt_ids(problem), self._ids_with_eos(_solution(problem)))
                for problem in self._problems
            },
        }
        self.result: dict[str, Any] = {
            "model": engine.model.name,
            "weights": engine.model.fingerprint,
            "settings": {
                name: getattr(options, name) for name in ("precisions", "k", "max_tokens", "problems", "responses")
            },
            "num_tokens": {
                kind: {name: len(response) for name, (_, response) in texts.items()}
                for kind, texts in self._texts.items()
            },
            "engines": {precision: {} for precision in options.precisions},
        }
        if options.output.exists():
            stored = from_json(options.output.read_text())
            fixed = ("model", "weights", "settings")
            if [stored[key] for key in fixed] != [self.result[key] for key in fixed]:
                raise SystemExit(f"{options.output} has another model or other settings: use another file")
            self.result["engines"] = stored["engines"]

    def measure(self) -> None:
        """Measure every engine that is not in the file yet."""
        for precision, done in self.result["engines"].items():
            for drafter in ["none", *self._options.drafter]:
                if drafter not in done:
                    say(f"{precision}, drafter: {drafter}")
                    done[drafter] = self._measure_engine(precision, drafter)
                    self._save()

    def _measure_engine(self, precision: str, drafter: str) -> dict[str, Any]:
        async def use(engine: Engine, start_s: float) -> dict[str, Any]:
            prompts = {problem["task_id"]: self._prompt_ids(problem) for problem in self._problems}
            answers, stats = await greedy_answers(engine, prompts, self._options.max_tokens)
            if drafter != "none":
                return {"answers": answers, "drafts": stats.to_dict()}
            return {"answers": answers} | {
                kind: await negative_log_likelihoods(engine, texts) for kind, texts in self._texts.items()
            }

        log = self._options.folder / f"{precision}-{drafter.replace('/', '-')}.log"
        engine = self._resolve(precision, drafter)
        spec = replace(engine.spec, model=engine.model.path)
        measured = with_engine(spec, hardware.detect(), start_engine, log, use)
        if drafter == "none":
            answers = measured["answers"]
            measured["passed"] = {
                problem["task_id"]: passes(problem, answers[problem["task_id"]]) for problem in self._problems
            }
        return measured

    def _resolve(self, precision: str, drafter: str) -> ResolvedEngine:
        keys = EngineOptions(
            model=self._options.model,
            precision=precision,
            drafter=drafter,
            num_speculative_tokens=None if drafter == "none" else self._options.k,
            max_num_seqs=_CONCURRENCY,
            max_model_len=_MAX_MODEL_LEN,
            enforce_eager=True,
        )
        return resolve_engine(keys, hardware.detect(), num_engines_on_node=1, announce=say)

    def _save(self) -> None:
        state = {
            "hardware": hardware.detect().describe(),
            "versions": versions() | {"git": git_revision()},
            "summary": summarize(self.result),
        }
        write_json(self._options.output, self.result | state)

    def _prompt_ids(self, problem: Mapping[str, Any]) -> list[int]:
        return self._chat_ids(PROMPT_TEMPLATE.replace("{{ prompt }}", problem["prompt"]))

    def _chat_ids(self, content: str) -> list[int]:
        chat = [{"role": "user", "content": content}]
        return self._ids(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _ids_with_eos(self, text: str) -> list[int]:
        return [*self._ids(text), self._tokenizer.eos_token_id]


def _solution(problem: Mapping[str, Any]) -> str:
    return f"```python\n{problem['prompt']}{problem['canonical_solution']}```"


def _complete_responses() -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows = pq.read_table(_RESPONSES, columns=["id", "prompt", "response", "finish_reason"]).to_pylist()
    return [row for row in rows if row["finish_reason"] == "stop"]


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="catalog name or folder of the target")
    parser.add_argument("--precisions", type=lambda text: text.split(","), default=["bf16", "int8"])
    parser.add_argument("--drafter", action="append", default=[], help="head to measure: peagle, eagle3 or a folder")
    parser.add_argument("-k", type=int, default=7, help="draft tokens per step")
    parser.add_argument("--problems", type=int, default=164, help="number of HumanEval problems")
    parser.add_argument("--responses", type=int, default=200, help="number of the target's responses")
    parser.add_argument("--max-tokens", type=int, default=256, help="token limit of an answer")
    parser.add_argument("--folder", type=Path, required=True, help="folder for the engines' logs")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    Measurement(options).measure()


if __name__ == "__main__":
    main()
