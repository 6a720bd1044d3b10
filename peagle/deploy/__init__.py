"""Generate files for other machines from a configuration, with a module for each target of `peagle deploy`.

The modules only return the content of files; `jobs/deploy_TARGET.py` writes and applies them.
"""
