"""Parallel drafters for vLLM: train, measure, ship and price them. Imports neither Ray nor an HTTP server."""

__version__ = "0.1.0"
