"""Renamed and removed commands, flags, YAML keys and values, with their replacements."""

from typing import Any

RENAMED = {"target": "model", "budget_min": "time_budget_s", "waves": "requests_per_slot"}
"""New names by old name. Old names are still accepted in YAML, flags and the environment."""
FACTORS = {"budget_min": 60.0}
"""For each old name whose unit changed, the factor that converts its value to the new unit."""


def to_new_unit(old: str, value: Any) -> Any:
    """Return the value of a renamed key in the unit of its new name; invalid values are returned unchanged."""
    try:
        return float(value) * FACTORS[old] if old in FACTORS else value
    except (TypeError, ValueError):
        return value


COMMANDS = {
    "deploy skypilot": "edit examples/skypilot.yaml and run `sky jobs launch examples/skypilot.yaml`",
}
KEYS = {
    "seeds": "plans are computed in closed form; leave it out",
    "machines_per_min": "plans assume that all machines arrive together; raise provision_s instead",
    "loss": "heads are trained with KL divergence; leave it out",
    "further_layers": "added layers start as the identity; use `python -m benchmarks.drafter.unroll` to unroll a head",
    "notice_s": "plans count interruptions without notice; leave it out",
    "renew": "run `python benchmarks/prices/renew.py CLONE` here; CLONE is a clone of skypilot-catalog",
}
"""What to do instead of using a removed key, or the removed flag of the same name."""
VALUES = {
    ("format", "md"): "use --format table, html, csv or json",
    ("market", "reserved"): "state the price of a machine with --usd-per-hour, or put it into the column "
    "usd_per_hour_on_demand of a table for --prices",
}
"""What to do instead of setting a key to a removed value."""
