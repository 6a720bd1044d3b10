"""Tuning: the best method, K, concurrency, batch size and precision for a target, its prompts and this hardware."""
