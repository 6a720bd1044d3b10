"""The catalog: one card per model.

A card has target, heads, licence, context, precision, hardware, and K by concurrency.
"""
