"""Work-arounds for Ray Serve, uvicorn, Starlette and vLLM's API server.

The endpoint's only place for them, and for the private names of these packages. docs/upstream.md lists each.
"""
