"""What generation costs: prices, usage records, the account made of both, and the report that shows it.

Read in this order: `usage` (what an engine did), `prices` (what an hour of it costs), `cost` (both put
together), `report` (the result, for people and for programs). Nothing here knows engines, clusters or HTTP.
"""
