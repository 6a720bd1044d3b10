"""The endpoint's page in a real browser."""
