"""Profiles: the measurements and choice of a tuning, as data. Measures nothing.

Runs and endpoints read them.
"""
