"""The endpoint: Ray Serve's OpenAI application with our engines, keys, limits, usage and cost."""
