"""The cost of generation: prices, usage records, accounts, statements and reports.

Start with `usage` (the work of engines), `prices` (per hour) and `account` (the cost of the work).
"""
