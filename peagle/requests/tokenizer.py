"""A target's tokenizer, without torch where that is possible.

`AutoTokenizer` imports torch to know every architecture: five seconds of a core in each process that only tokenises,
and several of them start beside an engine. The embedded target names a class that needs none of it.
"""

import json
from pathlib import Path
from typing import Any

# (model_type of config.json, tokenizer_class of tokenizer_config.json) for which AutoTokenizer takes that very class.
_GENERIC = ("llama", "TokenizersBackend")


def load_tokenizer(model: str | Path, revision: str | None = None) -> Any:
    """Load the tokenizer of a folder or a hub id's revision.

    It equals that of `AutoTokenizer.from_pretrained`, errors included.
    """
    if _kind(Path(model)) == _GENERIC:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(model)
    from transformers import AutoTokenizer

    # Without the word, transformers asks on the terminal whether code of the folder's own may run.
    return AutoTokenizer.from_pretrained(model, trust_remote_code=False, **({"revision": revision} if revision else {}))


def _kind(folder: Path) -> tuple[Any, Any] | None:
    """The kind of tokenizer; None where the files do not say.

    AutoTokenizer knows more, or has the words for the fault.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
        tokenizer = json.loads((folder / "tokenizer_config.json").read_bytes())
        return None if "auto_map" in tokenizer else (config["model_type"], tokenizer["tokenizer_class"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
