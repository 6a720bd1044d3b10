"""Training of heads: prompts, responses, features, training, saving."""
