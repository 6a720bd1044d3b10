"""Run vLLM engines one after the other and record their drafts: `recorded_drafts.py JOBS.json OUT.pt`.

A job has `engine` (arguments of `vllm.LLM`), `prompts` (token ids), `max_tokens` and `every_k`. Its result has the
`tokens` of each request, `num_cached_tokens` from the prefix cache, and `contexts`, one per request and call of vLLM's
proposer (`runner.drafter`). A context has the position of the last known token, that token, the target's states one
position earlier, and the `drafts` by K. An engine without a drafter has no contexts.

With `sinks_in_bf16`, vLLM's kernel gets the attention sinks in bf16, the only dtype that it supports on CPUs.
A job with `fails` is expected to raise. Its result is the `error`.

With `every_k`, the real `propose` drafts each context for every K up to the engine's K. Smaller K come first, with a
copy of the metadata that `propose` changes. The engine then continues with its own K. Before each call, the fields of a
parallel drafter that depend on K are set as its constructor sets them.
"""

import copy
import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the proposer must be accessible from this process


class Recorder:
    """Replaces `runner.drafter.propose`, calls the original, and records the drafts of each call."""

    def __init__(self, runner, *, every_k):
        self.contexts = []
        self._runner, self._proposer = runner, runner.drafter
        self._propose, self._every_k = runner.drafter.propose, every_k
        runner.drafter.propose = self

    def __call__(self, *, num_speculative_tokens, common_attn_metadata, **options):
        engine_k = num_speculative_tokens
        drafts = {}
        for k in range(1, engine_k) if self._every_k else ():
            self._set_k(k)
            drafts[k] = self._propose(
                num_speculative_tokens=k, common_attn_metadata=copy.deepcopy(common_attn_metadata), **options
            )
        if drafts:
            self._set_k(engine_k)
        last_indices = options["token_indices_to_sample"]
        if last_indices is None:
            last_indices = common_attn_metadata.query_start_loc[1:] - 1
        # `propose` changes these tensors.
        last_indices, positions = last_indices.clone(), options["target_positions"].clone()
        states = options["target_hidden_states"].clone()
        drafts[engine_k] = self._propose(
            num_speculative_tokens=engine_k, common_attn_metadata=common_attn_metadata, **options
        )
        for row, (name, index) in enumerate(zip(self._runner.input_batch.req_ids, last_indices.tolist(), strict=True)):
            self.contexts.append(
                {
                    "request": name,
                    "known": int(positions[index]) + 1,
                    "token": int(options["next_token_ids"][row]),
                    "states": states[index].clone(),
                    "drafts": {k: tokens[row].tolist() for k, tokens in drafts.items()},
                }
            )
        return drafts[engine_k]

    def _set_k(self, k):
        proposer = self._proposer
        if proposer.parallel_drafting:
            proposer.extra_slots_per_request = k
            proposer.net_num_new_slots_per_request = k - 1
            proposer.needs_extra_input_slots = k > 1


def run(job):
    from vllm import LLM, SamplingParams

    engine = LLM(distributed_executor_backend="uni", **job["engine"])
    runner, contexts = engine.llm_engine.model_executor.driver_worker.worker.model_runner, []
    if job.get("sinks_in_bf16"):
        for layer in runner.compilation_config.static_forward_context.values():
            if getattr(layer, "has_sink", False):
                layer.impl.sinks = layer.impl.sinks.bfloat16()
    if "speculative_config" in job["engine"]:
        contexts = Recorder(runner, every_k=job["every_k"]).contexts
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"])
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    tokens = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    engine.llm_engine.engine_core.shutdown()
    num_cached_tokens = [output.num_cached_tokens for output in outputs]
    return {"tokens": tokens, "num_cached_tokens": num_cached_tokens, "contexts": contexts}


def run_or_fail(job):
    try:
        return run(job)
    except Exception as error:
        if not job.get("fails"):
            raise
        return {"error": str(error)}


def main():
    import torch

    jobs = json.loads(Path(sys.argv[1]).read_text())
    torch.save([run_or_fail(job) for job in jobs], sys.argv[2])


if __name__ == "__main__":
    main()
