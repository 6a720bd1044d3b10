"""The files for Prometheus and Grafana, and the table in docs/metrics.md, name existing metrics.

If promtool is installed (Debian's package prometheus), it checks each expression and each alert.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from peagle.tables import markdown
from pipelines.cluster.metrics import METRICS, PREFIX

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "peagle.json").read_text())
RULES = [rule for group in yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"] for rule in group["rules"]]
ALERTS = [rule["alert"] for rule in RULES if "alert" in rule]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = {
    **{f"rule {number}": rule["expr"] for number, rule in enumerate(RULES)},
    **{
        f"{panel['title']} {target['refId']}": target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*")
        for panel in PANELS
        for target in panel["targets"]
    },
}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not on the PATH; Debian's package prometheus has it"
)


def series():
    """Return the labels by series name, of exported series and series that rules record."""
    labels_by_series = {}
    for metric in METRICS.values():
        labels = set(metric.labels)
        if metric.kind == "histogram":
            labels_by_series |= {f"{PREFIX}{metric.name}_{end}": labels for end in ("sum", "count")}
            labels_by_series[f"{PREFIX}{metric.name}_bucket"] = labels | {"le"}
        else:
            labels_by_series[PREFIX + metric.name] = labels
    for rule in RULES:
        if "record" in rule:
            labels = labels_by_series.setdefault(rule["record"], set())
            labels |= {"model_name", *rule.get("labels", {})}
    return labels_by_series


def names_in(expression):
    return set(re.findall(r"\b\w*(?:peagle|gen_ai_server|gen_ai_client|llm)_\w+", expression))


def labels_in(expression):
    matched = re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", expression)
    grouped = re.findall(r"\b(?:by|on|group_left)\s*\(([^)]*)\)", expression)
    return {*matched, *(label for group in grouped for label in re.findall(r"\w+", group))}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_use_existing_series_and_labels(name):
    expression, known_series = EXPRESSIONS[name], series()
    names = names_in(expression)
    assert names
    assert names - known_series.keys() == set()
    assert labels_in(expression) - set().union(*(known_series[name] for name in names)) == set()


def test_every_metric_is_used():
    used_series = set().union(*map(names_in, EXPRESSIONS.values()))
    exported = {
        name: {series_name for series_name in used_series if series_name.startswith(PREFIX + name)} for name in METRICS
    }
    assert [name for name, series_names in exported.items() if not series_names] == []


def test_every_alert_has_a_test():
    tests = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == set(ALERTS)


def test_docs_list_every_metric():
    rows = [("metric", "type", "labels", "unit", "what")]
    for metric in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append((f"`{metric.name}`", metric.kind, labels, metric.unit, metric.description))
    table = markdown(rows)
    assert "\n".join(table) in (ROOT / "docs" / "metrics.md").read_text()


@needs_promtool
@pytest.mark.parametrize("arguments", [("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")])
def test_promtool_checks_files_and_alerts(arguments):
    result = subprocess.run(["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
def test_promtool_checks_dashboard(tmp_path):
    rules = [{"record": f"r{number}", "expr": expression} for number, expression in enumerate(EXPRESSIONS.values())]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    result = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
