"""Training of P-EAGLE and EAGLE-3 heads: prompts, responses, features, training, saving."""
