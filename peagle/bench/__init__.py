"""Methods of speculation x K x concurrency on one target, in the real engine: the published table, on this hardware.

Read in this order: `config` (what can be asked), `plan` and `setups` (which engines), `schedule` (in which order),
`record` (one pass), `summary` (the passes of a cell together), `caveats`, `tables` and `plots`. It needs vLLM and no
Ray.
"""
