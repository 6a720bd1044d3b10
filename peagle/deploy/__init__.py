"""Files for other machines, made from one configuration; a module for each target of `peagle deploy`.

The modules write nothing and start nothing; `jobs/deploy_TARGET.py` does.
"""
