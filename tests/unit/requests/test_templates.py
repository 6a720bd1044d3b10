import datetime
import json

import jinja2
import pytest

from peagle.errors import ConfigError, InputError
from peagle.requests.templates import Template

COLUMNS = ["a", "b", "n", "rec", "items"]  # `c` and `d` are missing
ROW = {"a": "x", "b": None, "n": float("nan"), "rec": {"k": "v", "null": None}, "items": ["p", None]}


def render(text, row=ROW, columns=COLUMNS):
    template = Template(text)
    template.require_columns(columns)
    return template.render(row)


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("{{ c | default('none') }} {{ b | d('none') }} {{ n | default('none') }}", "none none none"),
        ("{% if c is defined %}{{ c }}{% endif %}{{ a }}", "x"),
        ("{% if c %}{{ c }}{% endif %}{{ a }}", "x"),
        ("{{ c if c else a }}{{ c or a }}{{ b or a }}{{ (not c and a) }}", "xxxx"),
        ("{% if false %}{{ c }}{% endif %}", ""),
        ("{% for i in range(2) %}{{ loop.index }}{% else %}{{ c }}{% endfor %}", "12"),
        ("{% set c = a %}{{ c }}{% set ns = namespace(k=1) %}{{ ns.k }}", "x1"),
        ("{% macro m(c) %}[{{ c }}]{% endmacro %}{{ m(a) }}", "[x]"),
        ("{% macro m(c) %}[{{ c or a }}]{% endmacro %}{{ m(d) }}", "[x]"),
        ("{% with c = a %}{{ c }}{% endwith %}{{ c | default('y') }}", "xy"),
        ("{% set d = c %}{{ a }}", "x"),
        ("{{ b is none }} {{ b is defined }} {{ c is defined }} {{ b == none }} {{ none in items }}",
         "True False False True True"),
        ("{{ rec.null | default('y') }}{{ rec.absent | default('y') }}{{ rec.null is none }}", "yyTrue"),
        ("{{ items | select | join(',') }}", "p"),
        ("{{ rec | length }}{{ a ~ 1 }}", "2x1"),
        ("{% filter upper %}{{ a }}{% endfilter %}{{ dict(k=1).k }}", "X1"),
    ],
)  # fmt: skip
def test_template_that_handles_missing_columns_renders(text, rendered):
    assert render(text) == rendered


@pytest.mark.parametrize(
    "text",
    [
        "{{ c }}", "{{ c.k }}", "{{ c[0] }}", "{{ c | upper }}", "{{ c | tojson }}", "{{ c + 1 }}", "{{ c ~ a }}",
        "{% for i in c %}{% endfor %}", "{% if c.k %}{% endif %}", "{% if c.k is defined %}{% endif %}", "{{ c() }}",
        "{{ c.k | default('y') }}", "{% if a and c.k or c.k %}{% endif %}{{ -c }}",
        "{% filter upper %}{{ c }}{% endfilter %}", "{% if c.k == 1 %}{% endif %}", "{{ (c or c.k).x if c.k else a }}",
    ],
)  # fmt: skip
def test_template_that_needs_a_missing_column_is_refused(text):
    with pytest.raises(InputError, match="prompt_template uses 'c', which is not a column"):
        Template(text).require_columns(COLUMNS)


@pytest.mark.parametrize(
    "text",
    [
        "{{ b }}", "{{ n }}", "{{ rec.null }}", "{{ rec.absent }}", "{{ items[1] }}", "{{ items | last }}", "{{ c }}",
        "{{ a ~ b }}", "{{ a ~ n }}", "{{ items | join(',') }}", "{{ '%s' | format(b) }}", "{{ 'x{}'.format(n) }}",
        "{{ '%s' % b }}", "{{ items }}", "{{ rec }}", "{{ [b] }}", "{{ b | string }}", "{{ b | upper }}",
        "{{ b | tojson }}", "{{ b | int }}", "{{ rec.get('absent') }}", "{{ rec.get('null') }}", "{{ b | pprint }}",
        "{% for i in b %}{% endfor %}", "{% for i in items %}{{ i }}{% endfor %}", "{{ n + 1 }}", "{{ none }}",
        "{{ rec | string }}", "{{ rec | urlencode }}", "{{ rec | xmlattr }}{{ items | string }}", "{{ b | e }}",
    ],
)  # fmt: skip
def test_template_that_prints_null_or_nan_fails(text):
    with pytest.raises(jinja2.TemplateError):
        Template(text).render(ROW)


def test_error_has_the_path_of_the_null_value():
    row = {"rec": {"list": [1, {"k": None}]}}
    with pytest.raises(jinja2.UndefinedError, match=r"'rec\.list\[1\]\.k' is null"):
        Template("{{ rec.list[1].k }}").render(row)


def test_tojson_replaces_nan_and_keeps_options():
    row = {"rec": {"q": "a <b> & 'é'", "n": [None, float("nan"), float("inf"), 1.5]}, "at": datetime.date(2026, 1, 2)}
    text = """{"q": "a <b> & 'é'", "n": [null, null, null, 1.5]}"""
    assert Template("{{ rec | tojson }}").render(row) == text
    assert json.loads(Template("{{ rec | tojson(indent=2, sort_keys=true) }}").render(row)) == json.loads(text)
    assert Template("{{ at | tojson }}{{ [1] | tojson }}").render(row) == '"2026-01-02"[1]'
    assert "\\u00e9" in Template("{{ rec | tojson(ensure_ascii=true) }}").render(row)


def test_tojson_does_not_escape_html():
    rec = {"html": "<a href='x'>é</a>" * 3}
    assert Template("{{ rec | tojson }}").render({"rec": rec}) == json.dumps(rec, ensure_ascii=False)


@pytest.mark.parametrize("text", ["{{ a", "{{ a | no_such_filter }}", "{% nonsense %}"])
def test_invalid_template_is_refused(text):
    with pytest.raises(ConfigError, match="prompt_template, line 1"):
        Template(text)
