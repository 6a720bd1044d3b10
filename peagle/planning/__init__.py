"""Planning: from measured speeds and prices to machines, hours and dollars.

Read in this order: `config` (what can be asked), `sweeps` (what was measured, ours or others'), `machines` (where that
holds, at which price), `estimate` (one fleet in closed form), `options` (which fleets there are), `simulation` (the
same fleet event by event), `simulated` (the chosen one over several seeds), `plan` (all of it).
Neither an engine nor Ray is needed.
"""
