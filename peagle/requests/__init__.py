"""Requests: convert rows and OpenAI requests to token ids and sampling parameters."""
