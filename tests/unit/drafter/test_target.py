import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from peagle.drafter.data import Sample
from peagle.drafter.target import default_aux_layers, load_target
from peagle.errors import ConfigError


def _silent(_: str) -> None:
    pass


def test_default_layers_are_the_papers() -> None:
    assert default_aux_layers(30) == (2, 15, 29)
    assert default_aux_layers(2) == (1,)


def test_a_target_says_what_a_head_reads(speaking_target: Path) -> None:
    target = load_target(str(speaking_target), None, _silent)
    assert (target.folder, target.aux_layers, target.hidden_size, target.vocab_size) == (
        speaking_target,
        (2, 3),
        32,
        96,
    )


def test_a_target_without_the_named_layers_is_refused(speaking_target: Path) -> None:
    with pytest.raises(ConfigError, match=r"aux layers \[4, 9\]: the target has layers 0 to 3"):
        load_target(str(speaking_target), [1, 4, 9], _silent)


def test_layers_are_read_once_each_and_in_order(speaking_target: Path) -> None:
    assert load_target(str(speaking_target), [3, 0], _silent).aux_layers == (0, 3)
    with pytest.raises(ConfigError, match=r"aux layers \[1\] are repeated"):
        load_target(str(speaking_target), [1, 3, 1], _silent)


def test_a_tokenizer_with_tokens_that_the_target_lacks_is_refused(speaking_target: Path) -> None:
    target = load_target(str(speaking_target), None, _silent)
    fitting, foreign = (
        Sample(id=name, token_ids=(5, last), num_prompt_tokens=1) for name, last in [("a", 95), ("b", 96)]
    )
    target.require_tokens([fitting])
    with pytest.raises(ConfigError, match="token 96 for row b, but the target only has tokens 0 to 95"):
        target.require_tokens([fitting, foreign])


def _without_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()


def _without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def _unknown_architecture(folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 9}')


def _state_ends(folder: Path, **ends: object) -> None:
    for name, tokens in ends.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": tokens}))


def _end_elsewhere(folder: Path) -> None:
    _state_ends(folder, config=2, generation_config=[1, 2])


def _without_end(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["eos_token"]
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without_tokenizer, "has no tokenizer"),
        (_without_template, "no chat template"),
        (_unknown_architecture, "transformers cannot read its config.json"),
        (_end_elsewhere, r"end-of-text token is 95, the target's \[1, 2\]"),
        (_without_end, r"end-of-text token is None, the target's \[95\]"),
    ],
)
def test_what_a_target_lacks_is_named(
    speaking_target: Path, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(speaking_target, folder)
    spoil(folder)
    with pytest.raises(ConfigError, match=message):
        load_target(str(folder), None, _silent)


@pytest.mark.parametrize("stated", [[7, 95], None])
def test_one_of_several_ends_is_enough_and_a_target_may_state_none(
    speaking_target: Path, tmp_path: Path, stated: list[int] | None
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(speaking_target, folder)
    _state_ends(folder, config=None, generation_config=stated)
    assert load_target(str(folder), None, _silent).tokenizer.eos_token_id == 95
