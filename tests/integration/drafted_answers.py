"""Start one engine and write its complete answers: `drafted_answers.py JOB.json OUT.json`.

The job has the engine's `spec`, and two dictionaries of requests by name. Requests in `bulk` (token ids and sampling
parameters) are answered as in `peagle generate`. Requests in `online` (API path and body) are answered by vLLM's API
server with the same engine, as in a replica of Ray Serve. A streamed answer is the list of its events.
"""

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

MODEL = "target"


def main():
    from peagle import hardware
    from peagle.bench.engine import with_engine
    from peagle.engine.spec import EngineSpec
    from peagle.engine.vllm import start_engine

    job = json.loads(Path(sys.argv[1]).read_text())
    spec = EngineSpec.from_dict(job["spec"])

    log = Path(sys.argv[2]).with_suffix(".log")

    async def answer_all(engine, _):
        bulk = [_answer_in_bulk(engine, name, *case) for name, case in job["bulk"].items()]
        answers = dict(zip(job["bulk"], await asyncio.gather(*bulk), strict=True))
        async with await _client(engine._llm, spec) as client:
            online = [_answer_online(client, path, body) for path, body in job["online"].values()]
            return answers | dict(zip(job["online"], await asyncio.gather(*online), strict=True))

    Path(sys.argv[2]).write_text(json.dumps(with_engine(spec, hardware.detect(), start_engine, log, answer_all)))


async def _answer_in_bulk(engine, name, prompt, sampling):
    return asdict(await engine.generate(name, prompt, sampling))


async def _client(llm, spec):
    import httpx
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.openai.api_server import build_app, init_app_state
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", spec.model, "--served-model-name", MODEL])
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks)
    await init_app_state(llm, app.state, args, tasks)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine", timeout=600)


async def _answer_online(client, path, body):
    answer = await client.post(path, json={"model": MODEL, **body})
    if not body.get("stream"):
        return answer.json()
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(event) for event in events if event != "[DONE]"]


if __name__ == "__main__":
    main()
