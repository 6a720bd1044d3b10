"""Convert a GGUF file to bf16 safetensors: `python -m peagle.catalog.gguf FILE FOLDER UPSTREAM_ID`.

Imprecise values of the GGUF file are replaced by those of the upstream model: the name, epsilon (stored as float32),
and the tokenizer's maximum length.
"""

import json
import sys
from pathlib import Path
from typing import Any


def convert(gguf: Path, folder: Path, upstream_id: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    source = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise RuntimeError(f"{gguf.name} has no chat template")
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    for role in ("bos", "eos", "pad"):
        token_id = getattr(model.config, f"{role}_token_id", None)
        if token_id is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.save_pretrained(folder)
    _rewrite(folder / "config.json", lambda config: _clean_config(config, upstream_id))
    context_tokens = model.config.max_position_embeddings
    _rewrite(folder / "tokenizer_config.json", lambda config: _clean_tokenizer(config, context_tokens))


def _clean_config(config: dict[str, Any], upstream_id: str) -> dict[str, Any]:
    config = {key: value for key, value in config.items() if key != "_model_name_or_path"}
    # 9.999999747378752e-06 is float32's 1e-05.
    return config | {"_name_or_path": upstream_id, "rms_norm_eps": float(f"{config['rms_norm_eps']:.6g}")}


def _clean_tokenizer(config: dict[str, Any], context_tokens: int) -> dict[str, Any]:
    local_only = ("is_local", "local_files_only")
    config = {key: value for key, value in config.items() if key not in local_only}
    return config | {"model_max_length": context_tokens}


def _rewrite(path: Path, change: Any) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text())), indent=2) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
