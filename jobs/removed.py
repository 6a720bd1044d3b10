"""Commands, flags and YAML keys that earlier versions had, and what to use instead."""

COMMANDS = {
    "deploy skypilot": "edit examples/skypilot.yaml and run `sky jobs launch examples/skypilot.yaml`",
}
KEYS = {
    "seeds": "plans are computed in closed form; leave it out",
    "machines_per_min": "plans assume that all machines arrive together; raise provision_s instead",
    "loss": "heads are trained with KL divergence; leave it out",
    "further_layers": "added layers start as the identity; use `python -m benchmarks.drafter.unroll` to unroll a head",
    "notice_s": "plans count interruptions without notice; leave it out",
}
"""By key; the flag has the same name."""
