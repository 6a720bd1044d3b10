"""Plans: from measured speeds and prices to machines, hours and dollars.

Read `config` (what can be asked), `sweeps` (measurements), `pricing` (machines and prices), `estimate` (one fleet),
`options` (all fleets), then `plan`.
"""
