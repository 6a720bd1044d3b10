"""Load a target's tokenizer, if possible without `AutoTokenizer`, which imports torch (five CPU seconds)."""

import json
from pathlib import Path
from typing import Any

# The model_type in config.json and the tokenizer_class in tokenizer_config.json for which AutoTokenizer uses
# PreTrainedTokenizerFast.
_GENERIC = ("llama", "TokenizersBackend")


def load_tokenizer(model: str | Path, revision: str | None = None) -> Any:
    """Load a tokenizer from a folder or a revision of a hub id, like `AutoTokenizer.from_pretrained`."""
    if _class_pair(Path(model)) == _GENERIC:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(model)
    from transformers import AutoTokenizer

    # Without this argument, transformers asks on the terminal whether the folder's code may run.
    return AutoTokenizer.from_pretrained(model, trust_remote_code=False, **({"revision": revision} if revision else {}))


def _class_pair(folder: Path) -> tuple[Any, Any] | None:
    """Return (model_type, tokenizer_class), or None if only AutoTokenizer can choose the class."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        tokenizer = json.loads((folder / "tokenizer_config.json").read_bytes())
        return None if "auto_map" in tokenizer else (config["model_type"], tokenizer["tokenizer_class"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
