"""One card per model: target, heads, licence, context, precision, hardware, and K by concurrency."""

from peagle.catalog.cards import HeadCard, ModelCard, SpeculationRow
from peagle.catalog.home import peagle_home
from peagle.catalog.loader import Catalog, load_catalog

__all__ = ["Catalog", "HeadCard", "ModelCard", "SpeculationRow", "load_catalog", "peagle_home"]
