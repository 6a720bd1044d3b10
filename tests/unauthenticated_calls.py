"""Call Ray's ports without the token, to check whether they require it."""

import http.client
import urllib.error
import urllib.request

import grpc

# A method of each Ray service. A call without the token is refused before its content is parsed.
CALLS = (
    "/ray.rpc.NodeInfoGcsService/CheckAlive",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.ReporterService/HealthCheck",
    "/ray.rpc.RayletDriver/ClusterInfo",
    "/ray.serve.ASGIService/HandleRequest",
)


def grpc_status(address, call):
    """Return the gRPC status of a call without the token."""
    with grpc.insecure_channel(address) as channel:
        method = channel.unary_unary(call, request_serializer=bytes, response_deserializer=bytes)
        try:
            method(b"", timeout=10)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


def http_answer(host, port, path):
    """Return the status and body of an HTTP request. The status is 0 if the port does not use HTTP/1."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read(100_000)
    except urllib.error.HTTPError as error:
        return error.code, b""
    except (OSError, http.client.HTTPException):
        return 0, b""


def port_protection(host, port):
    """Return `token` if the port requires the token, `metrics` if it serves only metrics, or `open` with the status."""
    metrics, api = http_answer(host, port, "/metrics"), http_answer(host, port, "/api/version")
    if b"# HELP" in metrics[1]:
        return "metrics"
    if api[0]:
        return "token" if api[0] == 401 else f"open: {api[0]}"
    answers = {grpc_status(f"{host}:{port}", call) for call in CALLS}
    return "token" if "UNAUTHENTICATED" in answers and "OK" not in answers else f"open: {answers}"
