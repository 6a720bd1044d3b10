"""The endpoint: Ray Serve's OpenAI application with keys, limits and costs."""
