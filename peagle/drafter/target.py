"""The target of a training, and early refusals of it.

It reads configuration and tokenizer; it loads no weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.catalog.folders import read_config
from peagle.catalog.targets import ResolvedModel, fetched_model, resolve_model
from peagle.drafter.architecture import read_architecture
from peagle.drafter.data import Sample
from peagle.errors import ConfigError
from peagle.requests.tokenizer import load_tokenizer

_GENERATION = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A target in a local folder.

    Attributes:
        tokenizer: with a chat template.
        aux_layers: indices of the layers whose inputs a head reads, ascending.
        hidden_size: H.
        vocab_size: tokens that it has states for.
    """

    model: ResolvedModel
    tokenizer: Any
    aux_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int

    @property
    def folder(self) -> Path:
        """Where its weights are."""
        return Path(self.model.path)

    def require_tokens(self, samples: Sequence[Sample]) -> None:
        """Make sure that the target has every token of the documents.

        Raises:
            ConfigError: it does not, so the tokenizer is another model's.
        """
        for sample in samples:
            if (largest := max(sample.token_ids)) >= self.vocab_size:
                raise ConfigError(
                    f"{self.folder}: its tokenizer gives token {largest} for row {sample.id}; the target has tokens"
                    f" 0 to {self.vocab_size - 1}",
                    hint="put the target's own tokenizer there",
                )


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Layers 2, L/2 and L-1 (arXiv 2602.01469)."""
    return tuple(sorted({min(2, num_layers - 1), num_layers // 2, num_layers - 1}))


def require_layers(aux_layers: Sequence[int], num_layers: int) -> None:
    """Require the layers to be read, each of them once.

    Raises:
        ConfigError: it is not so.
    """
    if repeated := sorted({layer for layer in aux_layers if list(aux_layers).count(layer) > 1}):
        raise ConfigError(f"aux layers {repeated} are named twice; an engine reads each layer once")
    if beyond := [layer for layer in aux_layers if not 0 <= layer < num_layers]:
        raise ConfigError(f"aux layers {beyond}: the target has layers 0 to {num_layers - 1}")


def end_tokens(*configs: Mapping[str, Any]) -> list[int]:
    """The tokens that end a text by these configurations, ascending.

    Each may state none, one or several.
    """
    stated = [config.get("eos_token_id") for config in configs]
    return sorted({token for ids in stated if ids is not None for token in (ids if isinstance(ids, list) else [ids])})


def load_target(name: str, aux_layers: Sequence[int] | None, announce: Callable[[str], None]) -> Target:
    """The target that `name` stands for.

    Args:
        name: catalog name, folder or `s3://` folder.
        aux_layers: layers to read; None for the default ones.
        announce: told what takes long, such as converting a model.

    Raises:
        ConfigError: no local folder, none that there can be heads for, no such layers, no tokenizer, or none with a
            chat template and the target's end of a text.
    """
    model = fetched_model(resolve_model(name, announce=announce), announce)
    folder = Path(model.path)
    if not folder.is_dir():
        raise ConfigError(f"{model.path}: a head is trained from a local folder", hint="download the target first")
    shape = read_architecture(folder)
    layers = tuple(sorted(aux_layers or default_aux_layers(shape.num_hidden_layers)))
    require_layers(layers, shape.num_hidden_layers)
    return Target(
        model=model,
        tokenizer=_tokenizer(folder, model.config),
        aux_layers=layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
    )


def _tokenizer(folder: Path, config: Mapping[str, Any]) -> Any:
    try:
        tokenizer = load_tokenizer(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder}: no tokenizer there ({_first_line(error)})", hint="put the target's own beside its weights"
        ) from error
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{folder}: its tokenizer has no chat template, so prompts cannot be put to the target",
            hint="add chat_template to tokenizer_config.json: for plain text, the messages' contents side by side",
        )
    _require_end(folder, tokenizer.eos_token_id, config)
    return tokenizer


def _require_end(folder: Path, own: int | None, config: Mapping[str, Any]) -> None:
    """Require that the tokenizer's end of text is one of the target's, if stated.

    Responses are trained with it as their last token, and another model's tokenizer mostly has another.
    """
    configs = [config, config.get("text_config") or {}]
    if (folder / _GENERATION).is_file():
        configs.append(read_config(folder, ConfigError, _GENERATION))
    stated = end_tokens(*configs)
    if own is None or (stated and own not in stated):
        raise ConfigError(
            f"{folder}: a text ends with token {own} by its tokenizer, with {stated or 'one not stated'} by the target",
            hint="put the target's own tokenizer there, with its eos_token",
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]
