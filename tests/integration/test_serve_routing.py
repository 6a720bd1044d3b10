"""Real Ray Serve routes every form of prompt to one of two engines."""

import httpx
import pytest

from tests.faults.endpoint import MODEL, Size, serving

SIZE = Size(queued=2, token_s=0.01, tokens=4)
PROMPTS = ["def add(a, b):\n" * 40, [1, 2, 3], [n % 256 for n in range(900)]]
REFUSED_PROMPTS = [[[1, 2], [3]], ["one", "two"]]  # refused by the fake engine, so they were routed
CONTENTS = ["", [{"type": "text", "text": ""}], [{"type": "text", "text": "add " * 200}]]


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_every_form_of_prompt_is_routed(tmp_path):
    bodies = [("completions", {"prompt": prompt}) for prompt in PROMPTS + REFUSED_PROMPTS]
    bodies += [("chat/completions", {"messages": [{"role": "user", "content": content}]}) for content in CONTENTS]
    with serving(tmp_path, SIZE.flags(), start_s=200) as endpoint:
        assert endpoint.wait_until_complete(SIZE.max_replicas, 200) is not None
        # More requests than the queue holds: it would be full if some were not routed.
        for route, prompt_body in bodies * 2:
            body = {"model": MODEL, "max_tokens": SIZE.tokens, **prompt_body}
            answer = httpx.post(f"{endpoint.url}/v1/{route}", json=body, timeout=20)
            assert answer.status_code == (400 if body.get("prompt") in REFUSED_PROMPTS else 200), (
                body,
                answer.text,
            )
