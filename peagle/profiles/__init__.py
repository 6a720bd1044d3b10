"""Profiles: measurements and choices of tunings, which runs and endpoints read."""
