"""The GPUs that the rehearsal imitates, eight per node, with the names and memory that `nvidia-smi` prints."""

from dataclasses import dataclass

from peagle.economics import price_options
from peagle.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card.

    Attributes:
        memory_mib: `nvidia-smi --query-gpu=memory.total`.
        num_processors: streaming multiprocessors.
    """

    name: str
    capability: tuple[int, int]
    memory_mib: int
    num_processors: int

    @property
    def hardware(self) -> Hardware:
        """A node with eight of these cards."""
        return Hardware(
            platform="cuda",
            accelerator=self.name,
            num_accelerators=8,
            compute_capability=self.capability,
            memory_gib=self.memory_mib / 1024,
            free_memory_gib=self.memory_mib / 1024,
            num_cpus=64,
        )


_NUM_PROCESSORS = {
    "L4": 58, "A10G": 80, "L40S": 142, "A100-40": 108, "A100-80": 108, "H100": 132, "H200": 132, "B200": 148,
    "RTX-PRO-6000": 188,
}  # fmt: skip
CARDS = {
    key: Card(
        name=f"NVIDIA {card.name}",
        capability=card.capability,
        memory_mib=card.memory_mib,
        num_processors=_NUM_PROCESSORS[key],
    )
    for key, card in price_options.GPUS.items()
}
