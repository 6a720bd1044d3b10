"""The systems in `compare.py` that do not use vLLM, each in its own process: `peers.py SYSTEM JOB.json`.

They write the same lines as vLLM's token clock ("seconds tokens requests"), but one for each answer or batch of
answers. The first line has the time of the first request, and no tokens.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_START_S, _ANSWER_S = 300, 600

Tick = Callable[[int], None]


def main() -> None:
    """Run one system until it has answered all prompts. Answers are dropped; tokens are counted."""
    system, path = sys.argv[1:]
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    with Path(os.environ["TOKEN_CLOCK"]).open("a", buffering=1, encoding="utf-8") as clock:

        def tick(num_tokens: int) -> None:
            clock.write(f"{time.monotonic():.6f} {num_tokens} 0\n")

        (_llama_cpp if system == "llama.cpp" else _transformers)(job, tick)


def _transformers(job: dict[str, Any], tick: Tick) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = job["engine"]["model"]
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    greedy = {"max_new_tokens": job["sampling"]["max_tokens"], "do_sample": False}
    if job["system"] == "transformers-lookup":
        greedy["prompt_lookup_num_tokens"] = 10  # as in the documentation of transformers
    texts = [row["text"] for row in job["rows"]]
    tick(0)
    for start in range(0, len(texts), job["concurrency"]):
        batch = tokenizer(texts[start : start + job["concurrency"]], return_tensors="pt", padding=True)
        answers = model.generate(**batch, **greedy)[:, batch["input_ids"].shape[1] :]
        tick(sum(_num_tokens(answer.tolist(), tokenizer.eos_token_id) for answer in answers))


def _num_tokens(answer: list[int], end: int) -> int:
    """Return the number of tokens up to and including the end token, as vLLM counts; the rest is padding."""
    return answer.index(end) + 1 if end in answer else len(answer)


def _llama_cpp(job: dict[str, Any], tick: Tick) -> None:
    from peagle.catalog.embedded import gguf_path
    from peagle.ports import free_port

    port = free_port()
    context = job["engine"]["max_model_len"] * job["concurrency"]  # llama-server divides the context among its slots
    command = [job["llama_server"], "-m", str(gguf_path(job["model"])), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-np", str(job["concurrency"]), "-c", str(context), "-t", str(os.cpu_count())]
    server = subprocess.Popen(command)
    try:
        _wait_until_up(server, port)

        def answer(row: dict[str, Any]) -> None:
            body = {"messages": [{"role": "user", "content": row["prompt"]}], **job["sampling"]}
            tick(_post(port, body)["usage"]["completion_tokens"])

        tick(0)
        with ThreadPoolExecutor(job["concurrency"]) as threads:
            list(threads.map(answer, job["rows"]))
    finally:
        server.terminate()
        server.wait()


def _wait_until_up(server: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise SystemExit("llama-server did not start")


def _post(port: int, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
        response: dict[str, Any] = json.load(answer)
    return response


if __name__ == "__main__":
    main()
