"""The gate before the OpenAI routes: keys, limits, admission, answers."""
