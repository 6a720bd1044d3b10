"""Tuning: the best method, K, concurrency, batch and precision in a budget.

For a target, its prompts and this hardware.

Read in this order: `config` (what can be asked), `space` (which configurations there are), `halving` (which is measured
next), `run` (the engines), `ranges` (how far the answer holds), `profile` (the answer as a file). It needs vLLM and no
Ray.
"""
