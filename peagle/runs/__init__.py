"""A bulk run as its directory has it: plan, lease, units, ledger, limits, status, audit. No Ray, no engine."""
