"""Plans: from measured speeds and prices to machines, hours and dollars.

Start with `config` (options), `sweeps` (measurements), `options` (fleets and their prices) and `plan`.
"""
