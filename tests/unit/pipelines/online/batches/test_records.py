import json

import openai.types
import pytest

from pipelines.online.batches.records import FINAL, Batch, BatchProgress, BatchRequest, StoredFile
from pipelines.online.batches.routes import list_object
from pipelines.online.errors import ApiError


def test_batch_object_is_valid_for_openai(make_batch_request):
    request = BatchRequest.from_dict(json.loads(json.dumps(make_batch_request(metadata={"a": "b"}).to_dict())))
    errors = ({"code": "c", "message": "m", "param": None, "line": 1},)
    for status in ("validating", "in_progress", "finalizing", *FINAL):
        progress = BatchProgress(status=status, num_requests=2, in_progress_at=101.5, errors=errors)
        batch = Batch(request=request, progress=BatchProgress.from_dict(json.loads(json.dumps(progress.to_dict()))))
        openai_batch = openai.types.Batch.model_validate(batch.to_api_object(), strict=True)
        assert (openai_batch.status, openai_batch.in_progress_at, openai_batch.errors.data[0].line) == (status, 101, 1)
        assert openai_batch.expires_at - openai_batch.created_at == 86400


def test_only_unfinished_batches_are_shown_as_cancelling(make_batch_request):
    for status in ("validating", "in_progress", "finalizing", *FINAL):
        batch = Batch(request=make_batch_request(), progress=BatchProgress(status=status), cancelling_at=100.0)
        assert batch.to_api_object()["status"] == (status if status in FINAL else "cancelling")


def test_file_object_is_valid_for_openai():
    stored = StoredFile(
        id="file-1", owner="a", filename="x", purpose="batch", num_bytes=3, created_at=1.5, at="files/x", expires_at=9.0
    )
    openai_file = openai.types.FileObject.model_validate(stored.to_api_object(), strict=True)
    assert (openai_file.bytes, openai_file.created_at, openai_file.expires_at) == (3, 1, 9)
    assert stored.owner not in stored.to_api_object().values()


@pytest.fixture
def batches(make_batch_request):
    return [Batch(request=make_batch_request(), progress=BatchProgress()) for _ in range(5)]


def test_pages_cover_the_list(batches):
    result, after = [], None
    while True:
        page = list_object(batches, after=after, limit=2)
        result += [entry["id"] for entry in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert result == [batch.id for batch in batches]
    assert list_object([], after=None, limit=2) == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
    }  # fmt: skip


def test_page_after_an_unknown_id_is_refused(batches):
    with pytest.raises(ApiError) as error:
        list_object(batches, after="batch_0", limit=2)
    assert (error.value.status, error.value.param) == (400, "after")
