from pipelines.online.errors import ApiError


def test_no_error_is_longer_than_a_page():
    error = ApiError(400, "x" * 2**20, param="y" * 2**20).body()["error"]
    assert error["message"] == "x" * 2000 + "... (1,048,576 characters)"
    assert len(error["param"]) < 300
