"""Files for other machines, made from one configuration: a module for each target.

`peagle deploy TARGET` is jobs/deploy_TARGET.py. It reads the configuration, calls the target's module here, and with
`--apply` runs the target's client. The modules here write nothing and start nothing.
"""
