"""Entry points: the `peagle` command and the scripts for `ray job submit`.

They parse, build, call and report.
"""
