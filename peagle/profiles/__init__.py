"""Profiles: the measurements and choices of `peagle tune`, which runs and endpoints read."""
