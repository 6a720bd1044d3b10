"""A catalog model in a container on SageMaker: its drafter, variables and uploads.

The variables are those of AWS's own vLLM container and of peagle's in it (`peagle.engine.sagemaker`), so that either
serves the model. It starts nothing.
"""

from dataclasses import dataclass, field
from pathlib import Path

from peagle.catalog.cards import HeadCard, ModelCard
from peagle.catalog.embedded import EMBEDDED_TARGETS, embedded_name
from peagle.catalog.shipped_heads import HEADS_FOLDER, whole_head
from peagle.engine.sagemaker import MODEL_FOLDER, to_sagemaker_env
from peagle.engine.spec import DrafterSpec, DraftMethod

DATA_SOURCES = Path("/opt/ml/additional-model-data-sources")
"""Where SageMaker puts further data, a folder for each channel."""
HEAD_CHANNEL = "eagle"  # as JumpStart calls it
_OF_SAGEMAKER = "SageMaker"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model's settings in a container.

    Attributes:
        variables: of the container.
        drafter: why this one, in a phrase.
        model_folder, head_folder: folders here that the container needs under `MODEL_FOLDER` and in `HEAD_CHANNEL`;
            None where it loads that from the hub.
    """

    variables: dict[str, str] = field(default_factory=dict)
    drafter: str
    model_folder: Path | None = None
    head_folder: Path | None = None

    @property
    def uploads(self) -> list[tuple[Path, Path]]:
        """Folders here, and where SageMaker has to put their data."""
        places = ((self.model_folder, MODEL_FOLDER), (self.head_folder, DATA_SOURCES / HEAD_CHANNEL))
        return [(folder, place) for folder, place in places if folder is not None]


def preset(
    card: ModelCard,
    *,
    instance_type: str | None = None,
    concurrency: int | None = None,
    has_model_data: bool = False,
    has_head_data: bool = False,
) -> Preset:
    """The settings of a catalog model.

    K is that of another's deployment on SageMaker, for `instance_type` where there is one, and else the card's advice.

    Args:
        concurrency: requests decoded at once: the card's advice for so many, whatever others deploy. None is one.
        has_model_data, has_head_data: SageMaker mounts them, wherever they could be had beside.
    """
    model_folder = Path(card.source.id) if card.source.kind == "folder" else None
    if card.source.kind == "package":
        model = EMBEDDED_TARGETS[embedded_name(card.source.id)].upstream_id
    else:
        model = card.source.id
    if model_folder or has_model_data:
        model = str(MODEL_FOLDER)
    method, k, why = _speculation(card, instance_type, concurrency)
    if method is None:
        return Preset(variables={"SM_VLLM_MODEL": model}, drafter=why, model_folder=model_folder)
    head = card.heads[method]
    head_folder = _local_head(head)
    path = str(DATA_SOURCES / HEAD_CHANNEL) if head_folder or has_head_data else str(head.id)
    spec = DrafterSpec(method=method, model=path, num_speculative_tokens=k)
    return Preset(
        variables={"SM_VLLM_MODEL": model, **to_sagemaker_env(spec)},
        drafter=f"{method}, K={k}: {why}",
        model_folder=model_folder,
        head_folder=head_folder,
    )


def _speculation(
    card: ModelCard, instance_type: str | None, concurrency: int | None
) -> tuple[DraftMethod | None, int, str]:
    """Method, K and where they come from; None where nothing speaks for a drafter."""
    heads = {method: head for method, head in card.heads.items() if head.published}
    if not heads:
        return None, 0, "none, since no head is published for the model"
    deployments = [
        (method, one) for method, head in heads.items() for one in head.deployments if _OF_SAGEMAKER in one.where
    ]
    if deployments and concurrency is None:
        method, one = min(deployments, key=lambda found: found[1].instance_type != instance_type)
        return method, one.num_speculative_tokens, f"{one.where}, {one.instance_type} [{one.source}]"
    row = card.speculation_for(concurrency or 1)
    if row is None:
        most = f" for {concurrency} requests at once" if concurrency else ""
        return None, 0, f"none, since nothing was measured or published{most}"
    if row.method == "none":
        return None, 0, f"none, since one would cost more than it saves [{row.source}]"
    most = "any number of" if row.max_concurrency is None else f"up to {row.max_concurrency}"
    return row.method, row.num_speculative_tokens, f"advice for {most} requests at once [{row.source}]"


def _local_head(head: HeadCard) -> Path | None:
    """The folder of a head that no container finds on the hub."""
    if head.kind == "huggingface":
        return None
    return whole_head(HEADS_FOLDER / str(head.id)) if head.kind == "shipped" else Path(str(head.id))
