"""Bulk generation: corpus -> work units -> engine actors -> committed units."""
