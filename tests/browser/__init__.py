"""The page of the endpoint in a real browser."""
