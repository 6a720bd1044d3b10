"""The cost of generation: prices, usage records, accounts, statements and reports.

Read `usage` (what an engine did), `prices` (what an hour of it costs) and `account` (both together) first.
"""
