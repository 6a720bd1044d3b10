"""Benchmarks: methods of speculation x K x concurrency in the real engine.

They measure one target on this hardware, and write the published table.

Read in this order: `config` (what can be asked), `setups` and `plan` (which engines, in which order), `loop` (engines
one after another), `record` (one pass), `run` (a benchmark), `report` and `tables`. `acceptance` is `peagle evaluate`,
a preset of it. It needs vLLM and no Ray.
"""
