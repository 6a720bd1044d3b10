"""Tuning: find the best method, K, concurrency, batch size and precision for a target, its prompts and this hardware.

Read `config` (options), `run` (engines and passes), `search` (what is measured next) and `answer` (the profile).
"""
