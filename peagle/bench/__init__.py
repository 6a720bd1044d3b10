"""Benchmarks: methods of speculation x K x concurrency in the real engine.

They measure one target on this hardware, and write the published table.

Read in this order: `config` (what can be asked), `plan` and `setups` (which engines), `schedule` (in which order),
`record` (one pass), `summary` (the passes of a cell together), `caveats`, `tables` and `plots`. It needs vLLM and no
Ray.
"""
