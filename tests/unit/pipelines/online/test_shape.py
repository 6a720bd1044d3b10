import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.online.errors import ApiError
from pipelines.online.shape import ORDER, REQUEST, Shape

JSON = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(alphabet='ab,:[]{}"\\\n\u00e9', max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text('a":,[', max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)  # fmt: skip


def refused(shape, body):
    try:
        shape.check(body)
    except ApiError as error:
        return error.code
    return None


def counted(value):
    """Containers, members, and commas: one less than it has values, of each container."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
    own = (1, len(value) if isinstance(value, dict) else 0, max(0, len(value) - 1))
    return tuple(sum(numbers) for numbers in zip(own, *inner, strict=True))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(value=JSON, is_ascii=st.booleans())
def test_what_is_in_a_text_does_not_count(value, is_ascii):
    body, (containers, members, values) = json.dumps(value, ensure_ascii=is_ascii).encode(), counted(value)
    assert refused(Shape(num_containers=containers, num_members=members, num_values=values), body) is None
    for short in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        limits = [most - less for most, less in zip((containers, members, values), short, strict=True)]
        shape = Shape(num_containers=limits[0], num_members=limits[1], num_values=limits[2])
        assert refused(shape, body) == ("too_many_values" if min(limits) < 0 or any(short) else None)


@pytest.mark.parametrize(
    "body",
    [b'"' * 2**20, b'"\\' * 2**19, b'"' + b'\\"' * 2**19, b'"' + b"[" * 2**20, b'{"a": "' + b"{[,:" * 2**18 + b'"}',
     b'"' + b',\\n' * 2**18],
    ids=range(6),
)  # fmt: skip
def test_a_text_of_a_mebibyte_passes_in_no_time(body):
    """Quotes and backslashes in any order: what does not end is looked at once."""
    started = time.perf_counter()
    assert refused(REQUEST, body) is None
    assert time.perf_counter() - started < 1


def test_a_conversation_with_tools_and_a_prompt_of_token_ids_pass():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2]}'}}
    steps = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "x"}] * 1500
    assert refused(REQUEST, json.dumps({"messages": steps}).encode()) is None
    assert refused(REQUEST, json.dumps({"prompt": [32_000] * 149_000}).encode()) is None
    order = {"input_file_id": "f", "endpoint": "e", "completion_window": "24h",
             "metadata": {str(number): "," * 500 for number in range(16)},
             "output_expires_after": {"anchor": "created_at", "seconds": 3600}}  # fmt: skip
    assert refused(ORDER, json.dumps(order).encode()) is None
