"""Run one vLLM engine and write its greedy tokens: `greedy_tokens.py JOB.json OUT.json`.

The job has `engine` (arguments of `vllm.LLM`), `prompts` (token ids) and `max_tokens`. For each prompt the answer has
the tokens, and how many of them were drafts.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(Path(sys.argv[1]).read_text())
    engine = LLM(**job["engine"])
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"])
    outputs = engine.generate([{"prompt_token_ids": p} for p in job["prompts"]], sampling, use_tqdm=False)
    answers = []
    for output in outputs:
        completion = output.outputs[0]
        drafts = getattr(completion, "spec_decode_metrics", None)
        answers.append(
            {
                "tokens": list(completion.token_ids),
                "num_accepted": sum(j * n for j, n in enumerate(drafts.histogram)) if drafts else None,
            }
        )
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
