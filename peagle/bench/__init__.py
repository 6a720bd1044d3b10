"""Benchmarks: methods of speculation x K x concurrency on a real engine.

Start with `config` (options), `plan` (engines and their order), `loop` (runs the engines), `record` (one pass), `run`
(a benchmark) and `report`. `acceptance` is `peagle evaluate`, a preset of a benchmark.
"""
