"""Work-arounds for Ray Serve and uvicorn: deployment, proxy, routing, slow clients, back-pressure."""
