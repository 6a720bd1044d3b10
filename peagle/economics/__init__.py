"""The cost of generation: prices, usage records, the account, the report.

Read in this order: `usage` (what an engine did), `prices` (what an hour of it costs), `cost` (both put
together), `report` (the result, for people and for programs). Nothing here knows engines, clusters or HTTP.
"""
