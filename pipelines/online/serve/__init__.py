"""Work-arounds for Ray Serve, uvicorn, Starlette and vLLM's API server.

The endpoint uses private names of these packages only here. docs/upstream.md lists each work-around.
"""
