"""The cards of the rehearsal, eight on a node, as `nvidia-smi` names and measures them."""

from dataclasses import dataclass

from peagle.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card.

    Attributes:
        memory_mib: as `nvidia-smi --query-gpu=memory.total` says it.
        num_processors: streaming multiprocessors.
    """

    name: str
    capability: tuple[int, int]
    memory_mib: int
    num_processors: int

    @property
    def hardware(self) -> Hardware:
        """A node with eight of them."""
        return Hardware(
            platform="cuda",
            accelerator=self.name,
            num_accelerators=8,
            compute_capability=self.capability,
            memory_gib=self.memory_mib / 1024,
            free_memory_gib=self.memory_mib / 1024,
            num_cpus=64,
        )


CARDS = {
    "L4": Card(name="NVIDIA L4", capability=(8, 9), memory_mib=23034, num_processors=58),
    "A10G": Card(name="NVIDIA A10G", capability=(8, 6), memory_mib=23028, num_processors=80),
    "L40S": Card(name="NVIDIA L40S", capability=(8, 9), memory_mib=46068, num_processors=142),
    "A100-40": Card(name="NVIDIA A100-SXM4-40GB", capability=(8, 0), memory_mib=40960, num_processors=108),
    "A100-80": Card(name="NVIDIA A100-SXM4-80GB", capability=(8, 0), memory_mib=81920, num_processors=108),
    "H100": Card(name="NVIDIA H100 80GB HBM3", capability=(9, 0), memory_mib=81559, num_processors=132),
    "H200": Card(name="NVIDIA H200", capability=(9, 0), memory_mib=143771, num_processors=132),
    "B200": Card(name="NVIDIA B200", capability=(10, 0), memory_mib=183359, num_processors=148),
    "RTX-PRO-6000": Card(
        name="NVIDIA RTX PRO 6000 Blackwell Server Edition", capability=(12, 0), memory_mib=97887, num_processors=188
    ),
}
