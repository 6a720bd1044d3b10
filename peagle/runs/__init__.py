"""The run directory of a bulk run: plan, lease, units, ledger, status, audit."""
