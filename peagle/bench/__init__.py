"""Benchmarks: methods of speculation x K x concurrency on a real engine.

Start with `config` (options), `plan` (engines and passes; a pass runs the prompts at one concurrency), `loop` (runs the
engines), `record` (the result of a pass), `run` (a benchmark) and `report`. `acceptance` is `peagle evaluate`, a preset
of a benchmark.
"""
