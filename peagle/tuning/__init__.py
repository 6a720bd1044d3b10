"""Tuning: the best method, K, concurrency, batch and precision in a budget.

For a target, its prompts and this hardware.

Read in this order: `config` (what can be asked), `run` (which engines there are, and their passes), `halving` (which is
measured next), `answer` (the profile). It needs vLLM and no Ray.
"""
