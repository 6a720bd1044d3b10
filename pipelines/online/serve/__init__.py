"""Work-arounds for Ray Serve and uvicorn, in the only place for them.

Deployment, proxy, routing, slow clients, back-pressure, certificates.
"""
