"""A bulk run by its directory: plan, lease, units, ledger, status, audit.

No Ray.
"""
