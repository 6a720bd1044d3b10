"""The target of a training, with early checks of its configuration and tokenizer."""

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
        tokenizer: has a chat template.
        aux_layers: indices of the layers whose inputs a head reads, ascending.
    """

    model: ResolvedModel
    tokenizer: Any
    aux_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int

    @property
    def folder(self) -> Path:
        return Path(self.model.path)

    def require_tokens(self, samples: Sequence[Sample]) -> None:
        """Check that the target has every token of the documents."""
        for sample in samples:
            if (largest := max(sample.token_ids)) >= self.vocab_size:
                raise ConfigError(
                    f"{self.folder}: the tokenizer produces token {largest} for row {sample.id}, but the target only"
                    f" has tokens 0 to {self.vocab_size - 1}",
                    hint="replace it by the target's own tokenizer",
                )


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Return layers 2, L/2 and L-1 (arXiv 2602.01469)."""
    return tuple(sorted({min(2, num_layers - 1), num_layers // 2, num_layers - 1}))


def require_layers(aux_layers: Sequence[int], num_layers: int) -> None:
    """Check that the layers exist and occur once."""
    if repeated := sorted({layer for layer in aux_layers if list(aux_layers).count(layer) > 1}):
        raise ConfigError(f"aux layers {repeated} are repeated; an engine reads each layer once")
    if beyond := [layer for layer in aux_layers if not 0 <= layer < num_layers]:
        raise ConfigError(f"aux layers {beyond}: the target has layers 0 to {num_layers - 1}")


def end_tokens(*configs: Mapping[str, Any]) -> list[int]:
    """Return the end-of-text tokens of configurations, ascending."""
    stated = [config.get("eos_token_id") for config in configs]
    return sorted({token for ids in stated if ids is not None for token in (ids if isinstance(ids, list) else [ids])})


def load_target(name: str, aux_layers: Sequence[int] | None, announce: Callable[[str], None]) -> Target:
    """Load a target's configuration and tokenizer.

    Args:
        name: catalog name, folder or `s3://` folder.
        aux_layers: layers to read; None for the default layers.
        announce: receives messages about slow operations, such as converting a model.
    """
    model = fetched_model(resolve_model(name, announce=announce), announce)
    folder = Path(model.path)
    if not folder.is_dir():
        raise ConfigError(f"{model.path}: training requires a local folder", hint="download the target first")
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
            f"{folder}: has no tokenizer ({_first_line(error)})", hint="add the target's own tokenizer"
        ) from error
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{folder}: the tokenizer has no chat template, which is needed to prompt the target",
            hint="add chat_template to tokenizer_config.json; for plain text, join the contents of the messages",
        )
    _require_end(folder, tokenizer.eos_token_id, config)
    return tokenizer


def _require_end(folder: Path, own: int | None, config: Mapping[str, Any]) -> None:
    """Check that the tokenizer's end-of-text token is one of the target's.

    Responses are trained with it as their last token. It usually differs for a tokenizer of another model.
    """
    configs = [config, config.get("text_config") or {}]
    if (folder / _GENERATION).is_file():
        configs.append(read_config(folder, ConfigError, _GENERATION))
    stated = end_tokens(*configs)
    if own is None or (stated and own not in stated):
        raise ConfigError(
            f"{folder}: the tokenizer's end-of-text token is {own}, the target's {stated or 'unknown'}",
            hint="replace it by the target's own tokenizer, with its eos_token",
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]
