"""The cost of generation: prices, usage records, accounts of runs, statements of a period, and reports.

Start with `usage` (the work of engines), `prices` (per hour) and `account` (the cost of the work).
"""
