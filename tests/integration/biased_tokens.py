"""Run one engine with requests that vLLM cannot draft for: `biased_tokens.py JOB.json OUT.json`.

The job has a drafter's `method` ("none" for no drafter), whether it has a prompt `lookup`, `prompts` (texts), and
`sampling`: named parameters. Every prompt runs with each of them, all concurrently. The answer has, by name, each
prompt's text, logprobs and number of drafts.
"""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any


def main() -> None:
    from peagle import hardware
    from peagle.bench.engine import with_engine
    from peagle.catalog.drafters import resolve_drafter
    from peagle.catalog.targets import resolve_model
    from peagle.engine.spec import EngineSpec
    from peagle.engine.vllm import start_engine
    from peagle.requests.tokenizer import load_tokenizer

    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    model = resolve_model("smollm2-135m")
    spec = EngineSpec(model=model.path, precision="float32", max_num_seqs=8, max_model_len=256, enforce_eager=True)
    if job["method"] != "none":
        drafter = resolve_drafter(job["method"], model, 1, num_speculative_tokens=5).spec
        spec = replace(spec, drafter=replace(drafter, lookup=job["lookup"]))
    tokenizer = load_tokenizer(model.path)
    prompts = [tokenizer.encode(text) for text in job["prompts"]]

    async def use(engine: Any, _: float) -> dict[str, Any]:
        async def ask(request_id: str, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
            answer = await engine.generate(request_id, prompt, sampling)
            return {
                "text": answer.text,
                "logprobs": [token.logprob for token in answer.completions[0].logprobs],
                "num_drafts": answer.speculation.num_drafts if answer.speculation else 0,
            }

        names = [(name, number) for number in range(len(prompts)) for name in job["sampling"]]
        answers = await asyncio.gather(
            *(ask(f"{name}-{number}", prompts[number], job["sampling"][name]) for name, number in names)
        )
        results: dict[str, Any] = {name: [] for name in job["sampling"]}
        for (name, _number), answer in zip(names, answers, strict=True):
            results[name].append(answer)
        return results

    out.write_text(json.dumps(with_engine(spec, hardware.detect(), start_engine, out.with_suffix(".log"), use)))


if __name__ == "__main__":
    main()
