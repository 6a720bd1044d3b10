import json

import openai.types
import pytest

from pipelines.online.batches.records import FINAL, Batch, BatchProgress, BatchRequest, StoredFile
from pipelines.online.batches.routes import list_object
from pipelines.online.errors import ApiError


def test_batch_object_is_valid_for_openai(make_order):
    order = BatchRequest.from_dict(json.loads(json.dumps(make_order(metadata={"a": "b"}).to_dict())))
    errors = ({"code": "c", "message": "m", "param": None, "line": 1},)
    for status in ("validating", "in_progress", "finalizing", *FINAL):
        progress = BatchProgress(status=status, num_requests=2, in_progress_at=101.5, errors=errors)
        batch = Batch(request=order, progress=BatchProgress.from_dict(json.loads(json.dumps(progress.to_dict()))))
        read = openai.types.Batch.model_validate(batch.to_api_object(), strict=True)
        assert (read.status, read.in_progress_at, read.errors.data[0].line) == (status, 101, 1)
        assert read.expires_at - read.created_at == 86400


def test_only_unfinished_batches_are_cancelling(make_order):
    for status in ("validating", "in_progress", "finalizing", *FINAL):
        batch = Batch(request=make_order(), progress=BatchProgress(status=status), cancelling_at=100.0)
        assert batch.to_api_object()["status"] == (status if status in FINAL else "cancelling")


def test_file_object_is_valid_for_openai():
    stored = StoredFile(
        id="file-1", owner="a", filename="x", purpose="batch", num_bytes=3, created_at=1.5, at="files/x", expires_at=9.0
    )
    read = openai.types.FileObject.model_validate(stored.to_api_object(), strict=True)
    assert (read.bytes, read.created_at, read.expires_at) == (3, 1, 9)
    assert "a" not in stored.to_api_object().values()


@pytest.fixture
def items(make_order):
    return [Batch(request=make_order(), progress=BatchProgress()) for _ in range(5)]


def test_pages_cover_the_list(items):
    result, after = [], None
    while True:
        shown = list_object(items, after=after, limit=2)
        result += [entry["id"] for entry in shown["data"]]
        after = shown["last_id"]
        if not shown["has_more"]:
            break
    assert result == [item.id for item in items]
    assert list_object([], after=None, limit=2) == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
    }  # fmt: skip


def test_page_after_an_unknown_id_is_refused(items):
    with pytest.raises(ApiError) as caught:
        list_object(items, after="batch_0", limit=2)
    assert (caught.value.status, caught.value.param) == (400, "after")
