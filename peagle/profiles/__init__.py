"""Profiles: what a tuning measured and chose, as data that runs and endpoints read. Measures nothing."""
