"""Requests: from a row or OpenAI's form to token ids and sampling parameters."""
