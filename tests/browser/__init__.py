"""Tests of web pages in a real browser."""
