"""Drafters: prompts, responses, features, training and saving of P-EAGLE heads.

No Ray, no HTTP.
"""
