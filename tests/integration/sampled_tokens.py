"""Run a vLLM engine and write the tokens that it samples: `sampled_tokens.py JOB.json OUT.json`.

The job has a drafter's `method`, `k`, `lookup` and `verify`; a `prompt` (token ids), `sampling` parameters,
`num_samples`, the number of `tokens` per sample, and texts for `greedy` requests. Half of the samples are drawn without
other requests (`separate`), half while the greedy requests run repeatedly (`concurrent`).

The result has the tokens of both halves, and every answer to the greedy texts, the first without other requests. It
also has the number of accepted draft tokens (null without a drafter), and the number of lookup tokens in samples.
"""

import asyncio
import json
import sys
import uuid
from dataclasses import replace
from pathlib import Path

SAMPLES_PER_REQUEST, NUM_CONCURRENT, NUM_GREEDY_TOKENS = 16, 2, 24
GREEDY_SLOTS = 4  # without their own slots, greedy requests would wait for all samples


def main():
    from peagle import hardware
    from peagle.bench.engine import with_engine
    from peagle.catalog.drafters import resolve_drafter
    from peagle.catalog.targets import resolve_model
    from peagle.engine.spec import EngineSpec
    from peagle.engine.vllm import start_engine

    job = json.loads(Path(sys.argv[1]).read_text())
    model, slots = resolve_model(job["model"]), SAMPLES_PER_REQUEST * NUM_CONCURRENT + GREEDY_SLOTS
    spec = EngineSpec(model=model.path, precision="float32", max_num_seqs=slots, max_model_len=128, enforce_eager=True)
    if job["method"] != "none":
        drafter = resolve_drafter(job["method"], model, 1, num_speculative_tokens=job["k"]).spec
        spec = replace(spec, drafter=replace(drafter, lookup=job["lookup"], verify=job["verify"]))

    async def sample(engine, _):
        return await _sample(engine, job)

    out = Path(sys.argv[2])
    out.write_text(json.dumps(with_engine(spec, hardware.detect(), start_engine, out.with_suffix(".log"), sample)))


async def _sample(engine, job):
    greedy = [await _greedy(engine, job)]
    num_lookup_tokens = []
    separate = await _draw_samples(engine, job, num_lookup_tokens)
    stop = asyncio.Event()
    greedy_task = asyncio.create_task(_repeat_greedy(engine, job, stop))
    concurrent = await _draw_samples(engine, job, num_lookup_tokens)
    stop.set()
    greedy += await greedy_task
    totals = engine.speculation_totals()
    return {
        "separate": separate,
        "concurrent": concurrent,
        "greedy": greedy,
        "num_accepted": totals and totals.num_accepted_tokens,
        "num_looked_up": sum(num_lookup_tokens),
    }


async def _draw_samples(engine, job, num_lookup_tokens):
    # One more token than needed, because the last token of an answer is never drafted.
    params = {**job["sampling"], "n": SAMPLES_PER_REQUEST, "max_tokens": job["tokens"] + 1}
    num_requests = job["num_samples"] // 2 // SAMPLES_PER_REQUEST
    slots = asyncio.Semaphore(NUM_CONCURRENT)

    async def ask():
        async with slots:
            return await _ask(engine, job["prompt"], params, num_lookup_tokens)

    answers = await asyncio.gather(*(ask() for _ in range(num_requests)))
    return [tokens[: job["tokens"]] for answer in answers for tokens in answer]


async def _repeat_greedy(engine, job, stop):
    answers = []
    while not stop.is_set():
        answers.append(await _greedy(engine, job))
    return answers


async def _greedy(engine, job):
    prompts = [engine.checkable.to_token_ids(text) for text in job["greedy"]]
    params = {"temperature": 0.0, "max_tokens": NUM_GREEDY_TOKENS}
    return await asyncio.gather(*(_ask(engine, prompt, params) for prompt in prompts))


async def _ask(engine, prompt, sampling, num_lookup_tokens=None):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from peagle.engine.vllm_internals import drafts_of

    # Not streamed, because a streamed output contains only the samples with new tokens.
    params = SamplingParams(**sampling, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    answers = engine._llm.generate({"prompt_token_ids": prompt}, params, uuid.uuid4().hex)
    (last,) = [answer async for answer in answers]
    if num_lookup_tokens is not None:
        num_lookup_tokens += [drafts.num_lookup_tokens for output in last.outputs if (drafts := drafts_of(output))]
    return [list(completion.token_ids) for completion in last.outputs]


if __name__ == "__main__":
    main()
