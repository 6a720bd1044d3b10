import re
from pathlib import Path

import pytest

import pipelines.online.gateway
from pipelines.online.errors import ApiError
from pipelines.online.gateway.web_page import HEADERS, get_docs, get_page

FILES = sorted((Path(pipelines.online.gateway.__file__).parent / "page").iterdir())
OTHER_HOST = re.compile(r"""(?:https?:)?//(?!www\.w3\.org/2000/svg)[a-z0-9-]+\.[a-z]{2,}""")


def test_page_has_a_strict_content_security_policy():
    answer = get_page()
    assert answer.media_type == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy.pop("default-src") == "'none'"
    assert set(policy.values()) == {"'self'", "'none'", "'script'"}
    assert {name for name, value in policy.items() if value == "'self'"} == {
        *("script-src", "style-src", "img-src", "connect-src"),
    }
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_have_a_content_type_and_load_nothing_from_other_hosts(path):
    answer = get_page(path.name)
    assert answer.body == path.read_bytes()
    assert answer.headers["content-type"].split(";")[0].split("/")[1] in {"html", "css", "javascript", "svg+xml"}
    assert not OTHER_HOST.search(path.read_text())
    assert HEADERS.items() <= dict(answer.headers).items()


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".js"], ids=lambda path: path.name)
def test_scripts_do_not_create_html_or_code(path):
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", path.read_text())


@pytest.mark.parametrize("name", ["", "..", "../web_page.py", "page.py", "__init__.py", "/etc/passwd", "style.css/"])
def test_other_files_are_404(name):
    with pytest.raises(ApiError) as error:
        get_page(name)
    assert error.value.status == 404


def test_docs_load_only_files_of_the_endpoint():
    page = get_docs()
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "http" not in policy
    for name in ("swagger-ui.css", "swagger-ui-bundle.js"):
        assert f'"docs/{name}"'.encode() in page.body
        assert len(get_docs(name).body) > 100_000


@pytest.mark.parametrize("name", ["", "..", "redoc.standalone.js", "../core.py", "swagger-ui.map"])
def test_docs_have_no_other_files(name):
    with pytest.raises(ApiError) as error:
        get_docs(name)
    assert (error.value.status, error.value.code) == (404, "not_found")
