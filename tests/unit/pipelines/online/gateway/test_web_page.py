import re
from pathlib import Path

import pytest

import pipelines.online.gateway
from pipelines.online.errors import ApiError
from pipelines.online.gateway.web_page import HEADERS, get_page

FILES = sorted((Path(pipelines.online.gateway.__file__).parent / "page").iterdir())
OTHER_HOST = re.compile(r"""(?:https?:)?//(?!www\.w3\.org/2000/svg)[a-z0-9-]+\.[a-z]{2,}""")


def test_the_page_comes_with_a_policy_that_lets_nothing_else_in():
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
def test_every_file_is_sent_as_what_it_is_and_names_no_other_host(path):
    answer = get_page(path.name)
    assert answer.body == path.read_bytes()
    assert answer.headers["content-type"].split(";")[0].split("/")[1] in {"html", "css", "javascript", "svg+xml"}
    assert not OTHER_HOST.search(path.read_text())
    assert HEADERS.items() <= dict(answer.headers).items()


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".js"], ids=lambda path: path.name)
def test_no_script_makes_html_or_code_from_text(path):
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", path.read_text())


@pytest.mark.parametrize("name", ["", "..", "../web_page.py", "page.py", "__init__.py", "/etc/passwd", "style.css/"])
def test_nothing_else_is_sent(name):
    with pytest.raises(ApiError) as caught:
        get_page(name)
    assert caught.value.status == 404
