"""Readers of corpora: files found, rows read, columns typed, units cut.

`scan.py` is the way in; no Ray, no engines.
"""
