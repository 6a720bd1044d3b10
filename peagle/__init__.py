"""Parallel drafters for vLLM: train, measure, ship and price them.

A pure library: no Ray, no HTTP.
"""

__version__ = "0.1.0"
