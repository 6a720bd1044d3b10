from pipelines.online.gateway.gate import to_api_request
from pipelines.online.wire import header


def a_scope(attributes=None, path="/invocations", **more):
    headers = [(b"x-amzn-sagemaker-custom-attributes", attributes.encode())] if attributes else []
    return {"type": "http", "method": "POST", "path": path, "headers": headers, **more}


def test_request_without_attributes_is_unchanged():
    for scope in (a_scope(), a_scope("c000b4f9-df62-4c85-a0bf-7c525f9104a4"), a_scope("x=1")):
        assert to_api_request(scope) == scope


def test_attributes_set_route_method_and_key():
    for attributes in ("route=/v1/cost,key=pk-1,method=GET", "key=pk-1 method=GET, route=/v1/cost"):
        scope = to_api_request(a_scope(attributes))
        assert (scope["path"], scope["raw_path"], scope["method"]) == ("/v1/cost", b"/v1/cost", "GET")
        assert header(scope, "authorization") == "Bearer pk-1"


def test_key_attribute_replaces_the_authorization_header():
    scope = a_scope("key=pk-1")
    scope["headers"].append((b"authorization", b"AWS4-HMAC-SHA256 Credential=..."))
    assert header(to_api_request(scope), "authorization") == "Bearer pk-1"
    assert to_api_request(scope)["path"] == "/invocations"


def test_other_routes_are_unchanged():
    for path in ("/v1/cost", "/invocations/", "/x/invocations", "/ping"):
        scope = a_scope("route=/v1/models,key=pk-1", path=path)
        assert to_api_request(scope) is scope


def test_root_path_is_kept():
    scope = to_api_request(a_scope("route=/v1/models", path="/under/invocations", root_path="/under"))
    assert scope["path"] == "/under/v1/models"
