"""The systems that `overhead.py` compares, each in its own process: `overhead_systems.py SYSTEM JOB.json`.

All systems get the same prompts, sampling parameters, engine arguments and environment from the job; only the code that
drives the engine differs. With Ray, only the engine's actor gets the environment, as in peagle. "async-llm" is the
simplest driver of vLLM: it keeps `concurrency` requests in the engine.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Run one system until it has answered all prompts. Answers are dropped; the token clock counts the tokens."""
    system, path = sys.argv[1:]
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    if system in ("async-llm", "run-batch"):
        _require_environment(job["environment"])
    {"async-llm": _async_llm, "ray-data-llm": _ray_data_llm, "run-batch": _run_batch, "peagle": _peagle}[system](job)


def _require_environment(environment: dict[str, str]) -> None:
    """Restart this process with these variables unless they are set: libraries are only preloaded at the start."""
    if any(os.environ.get(name) != value for name, value in environment.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment)


def _async_llm(job: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    async def run() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**job["engine"]))
        sampling = SamplingParams(**job["sampling"], output_kind=RequestOutputKind.FINAL_ONLY)
        slots = asyncio.Semaphore(job["concurrency"] or len(job["rows"]))

        async def answer(row: dict[str, Any]) -> None:
            async with slots:
                async for _ in engine.generate(row["text"], sampling, row["id"]):
                    pass

        await asyncio.gather(*(answer(row) for row in job["rows"]))
        engine.shutdown()

    asyncio.run(run())


def _ray_data_llm(job: dict[str, Any]) -> None:
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    # Each stage reserves a whole logical CPU, so with two CPUs it would wait forever.
    ray.init(address="local", num_cpus=16, include_dashboard=False)
    engine = dict(job["engine"])
    config = vLLMEngineProcessorConfig(
        model_source=engine.pop("model"),
        engine_kwargs=engine,
        batch_size=16,
        concurrency=1,
        placement_group_config={"bundles": [{"CPU": 1}]},
        runtime_env={"env_vars": job["environment"]},
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
    )
    process = build_processor(
        config,
        preprocess=lambda row: {"prompt": row["text"], "sampling_params": dict(job["sampling"])},
        postprocess=lambda row: {"generated_text": row["generated_text"]},
    )
    assert process(ray.data.from_items(job["rows"])).materialize().count() == len(job["rows"])
    ray.shutdown()


def _run_batch(job: dict[str, Any]) -> None:
    from peagle.engine.arguments import command_line

    folder = Path(job["folder"])
    base = {"method": "POST", "url": "/v1/chat/completions"}  # vLLM's batches do not support completions
    body = {"model": job["engine"]["model"], **job["sampling"]}
    requests = [
        {"custom_id": row["id"], **base, "body": body | {"messages": [{"role": "user", "content": row["prompt"]}]}}
        for row in job["rows"]
    ]
    (folder / "batch.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
    flags = ["-i", str(folder / "batch.jsonl"), "-o", str(folder / "answers.jsonl"), *command_line(job["engine"])]
    os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.openai.run_batch", *flags])


def _peagle(job: dict[str, Any]) -> None:
    folder = Path(job["folder"])
    rows = [{"id": row["id"], "prompt": row["prompt"]} for row in job["rows"]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = ["--input", str(folder / "prompts.jsonl"), "--output", str(folder / "run"), *job["peagle"]]
    os.execv(sys.executable, [sys.executable, "-m", "jobs.cli", "generate", *flags])


if __name__ == "__main__":
    main()
