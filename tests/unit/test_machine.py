"""The machine's instance type, from replaced firmware tables and a local metadata server."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from peagle import machine
from peagle.machine import detect_machine, instance_type

NOWHERE = "http://127.0.0.1:9"  # nothing listens there


@pytest.fixture
def firmware(tmp_path):
    def write(vendor, product):
        folder = tmp_path / "sys/class/dmi/id"
        folder.mkdir(parents=True)
        (folder / "sys_vendor").write_text(f"{vendor}\n")
        (folder / "product_name").write_text(f"{product}\n")
        return tmp_path

    return write


@pytest.fixture
def metadata():
    """Start a metadata server with answers (path -> required header, status, text) that records requests."""
    started = []

    def start(answers):
        requests = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                requests.append(self.path)
                header, status, text = answers.get(self.path, ("Host", 404, ""))
                self.send_response(status if self.headers[header] else 403)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        started.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}", requests

    yield start
    for server, thread in started:
        server.shutdown()
        thread.join()
        server.server_close()


GOOGLE, AZURE = ("Google", "Google Compute Engine"), ("Microsoft Corporation", "Virtual Machine")
GOOGLE_PATH = "/computeMetadata/v1/instance/machine-type"
AZURE_PATH = "/metadata/instance/compute/vmSize?api-version=2021-02-01&format=text"


def test_ec2_instance_type(firmware):
    assert instance_type(root=firmware("Amazon EC2", "p5.48xlarge"), metadata=NOWHERE) == "p5.48xlarge"


@pytest.mark.parametrize(("name", "names"), [("p5.48xlarge", ("p5.48xlarge",)), (None, ())])
def test_detect_machine(monkeypatch, name, names):
    monkeypatch.setattr(machine, "instance_type", lambda: name)
    assert detect_machine().machine_names == names


@pytest.mark.parametrize(
    ("system", "path", "header", "text", "expected"),
    [
        (GOOGLE, GOOGLE_PATH, "Metadata-Flavor", "projects/12/machineTypes/a3-highgpu-8g", "a3-highgpu-8g"),
        (AZURE, AZURE_PATH, "Metadata", "Standard_ND96isr_H100_v5", "Standard_ND96isr_H100_v5"),
    ],
)
def test_metadata_server(monkeypatch, firmware, metadata, system, path, header, text, expected):
    monkeypatch.setenv("http_proxy", NOWHERE)
    url, requests = metadata({path: (header, 200, text)})
    assert instance_type(root=firmware(*system), metadata=url) == expected
    assert requests == [path]


@pytest.mark.parametrize("answer", [(500, "a3-highgpu-8g"), (200, ""), (200, "<html>"), (200, "x" * 200)])
def test_invalid_metadata_response(firmware, metadata, answer):
    url, _ = metadata({GOOGLE_PATH: ("Host", *answer)})
    assert instance_type(root=firmware(*GOOGLE), metadata=url) is None


@pytest.mark.parametrize("system", [("Dell Inc.", "PowerEdge"), ("Xen", "HVM domU"), ("Google", "Pixelbook")])
def test_other_machines_are_not_queried(firmware, metadata, system):
    url, requests = metadata({})
    assert instance_type(root=firmware(*system), metadata=url) is None
    assert requests == []


def test_no_firmware_tables(tmp_path):
    assert instance_type(root=tmp_path, metadata=NOWHERE) is None


def test_metadata_server_timeout(monkeypatch, firmware):
    root = firmware(*AZURE)
    assert instance_type(root=root, metadata=NOWHERE) is None
    monkeypatch.setattr(machine, "_TIMEOUT_S", 0.05)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as silent:  # accepts connections and never answers
        assert instance_type(root=root, metadata=f"http://127.0.0.1:{silent.server_port}") is None
