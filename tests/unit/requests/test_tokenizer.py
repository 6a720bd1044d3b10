import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from peagle.requests.tokenizer import load_tokenizer

TEXT = "def f(x):\n\treturn x  # \u00e4\U0001f600<|im_end|>\n"


def test_embedded_tokenizer_loads_without_torch(embedded_target):
    program = f"""
import sys
from peagle.requests.tokenizer import load_tokenizer
tokenizer = load_tokenizer({str(embedded_target)!r})
print([type(tokenizer).__name__, tokenizer.encode({TEXT!r}), tokenizer.chat_template, "torch" in sys.modules])
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    reference = AutoTokenizer.from_pretrained(embedded_target)
    assert process.stdout.strip() == str(
        [type(reference).__name__, reference.encode(TEXT), reference.chat_template, False]
    )


def test_other_tokenizer_classes_are_loaded_by_transformers(chat_target, tmp_path):
    for file in chat_target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for name in ("LlamaTokenizer", "PreTrainedTokenizerFast"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": name}))
        assert type(load_tokenizer(tmp_path)) is type(AutoTokenizer.from_pretrained(tmp_path))


@pytest.mark.parametrize("config", [None, "[]", "{", '{"model_type": "llama"}'])
def test_loading_fails_with_the_error_of_transformers(config, tmp_path):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    errors = []
    for load in (load_tokenizer, AutoTokenizer.from_pretrained):
        with pytest.raises((OSError, ValueError, TypeError, AttributeError)) as error:
            load(tmp_path)
        errors.append(repr(error.value))
    assert errors[0] == errors[1]
