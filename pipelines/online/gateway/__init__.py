"""The gate before the OpenAI routes: routes, keys, limits, admission, answers on their way out."""
