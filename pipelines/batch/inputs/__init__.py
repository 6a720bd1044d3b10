"""The formats a corpus may have, one file each; `pipelines/batch/corpus.py` is their only user."""
