"""Targets and heads that have only a `config.json`, for benchmarks with fake engines."""

import json

TARGET = {
    "hidden_size": 8, "num_hidden_layers": 4, "vocab_size": 300, "max_position_embeddings": 512,
    "num_attention_heads": 2,
}  # fmt: skip
HEAD = {
    "transformer_layer_config": {"hidden_size": 8, "vocab_size": 300},
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "mask_token_id": 0,
}


def write_target(folder):
    """Write a target with a context of 512 tokens."""
    return _write(folder, TARGET)


def write_head(folder, kind="peagle", **changes):
    """Write a head for the target. `changes` are values in its `config.json`."""
    return _write(folder, HEAD | {"speculators_model_type": kind} | changes)


def skip_waiting(monkeypatch):
    """Skip waiting for the engine's counters, and set VLLM_LOGGING_STREAM so that pytest undoes later changes of it."""
    monkeypatch.setattr("peagle.bench.engine._COUNTERS_SETTLE_S", 0.0)
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def _write(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
