"""The cost of separate prefix caches for keys: several keys with a common prompt prefix, with and without sharing.

    python -m benchmarks.online.prefix_sharing --folder /tmp/sharing --output benchmarks/online/RESULT.json

The keys send requests in turns, with a common system prompt and different questions. The results are the cached prompt
tokens, and the times to first token of each key's first request and of its other requests.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from pipelines.online.gateway.keys import new_key, write_keys
from tests.faults.endpoint import serving
from tests.origin import origin

_MODEL = "smollm2-135m"
_SYSTEM = "You answer questions about the rules of this library, which are written down here line by line. " * 20


def main() -> None:
    """Measure without and with sharing, write the output file, and print the results."""
    options = _options()
    results = {name: _measure(options, name, flags) for name, flags in _FLAGS_BY_NAME.items()}
    record = {
        **origin(f"python -m benchmarks.online.prefix_sharing --keys {options.keys} --requests {options.requests}"),
        "results": results,
    }
    options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=2))  # noqa: T201


_FLAGS_BY_NAME = {"apart": [], "shared": ["--share-prefix-cache"]}


def _measure(options: argparse.Namespace, name: str, flags: list[str]) -> dict[str, Any]:
    folder = options.folder / name
    folder.mkdir(parents=True)
    new_keys = [new_key(f"key-{number}") for number in range(options.keys)]
    write_keys(folder / "keys.json", [record for _, record in new_keys])
    engine_flags = ["--model", _MODEL, "--drafter", "none", "--max-model-len", "1024", "--max-num-seqs", "2"]
    endpoint_flags = ["--enforce-eager", "--usd-per-hour", "1", "--keys", str(folder / "keys.json")]
    requests = []
    with serving(folder, [*engine_flags, *endpoint_flags, *flags], start_s=options.start_s) as endpoint:
        for number in range(options.requests):
            requests += [_send_request(endpoint.url, key, number) for key, _ in new_keys]
    first_requests, later_requests = requests[: options.keys], requests[options.keys :]
    return {
        "cached_share": sum(request["cached"] for request in requests) / sum(request["prompt"] for request in requests),
        "first_of_each_key": {
            "cached_share": _share(first_requests),
            "ttft_s": median(request["ttft_s"] for request in first_requests),
        },
        "others": {
            "cached_share": _share(later_requests),
            "ttft_s": median(request["ttft_s"] for request in later_requests),
        },
        "requests": requests,
    }


def _share(requests: list[dict[str, Any]]) -> float:
    return float(sum(request["cached"] for request in requests) / sum(request["prompt"] for request in requests))


def _send_request(url: str, key: str, number: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": f"What says rule {number}?"}]
    body = {"model": _MODEL, "messages": messages, "max_tokens": 1, "temperature": 0}
    started_at = time.perf_counter()
    answer = httpx.post(
        f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=120
    )
    usage = answer.raise_for_status().json()["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {"prompt": usage["prompt_tokens"], "cached": cached, "ttft_s": time.perf_counter() - started_at}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder for keys, ledgers and logs")
    parser.add_argument("--output", type=Path, required=True, help="file for the result")
    parser.add_argument("--keys", type=int, default=4, help="number of API keys")
    parser.add_argument("--requests", type=int, default=4, help="requests of each key")
    parser.add_argument("--start-s", type=float, default=240, help="time for the endpoint to start")
    return parser.parse_args()


if __name__ == "__main__":
    main()
