"""A row or a request -> token ids and sampling parameters, and OpenAI's forms of both."""
