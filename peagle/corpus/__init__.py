"""Readers of corpora: files, formats, columns, work units. `scan.py` is the entry point."""
