"""The `peagle` command, and modules for `ray job submit -- python -m jobs.COMMAND`."""
