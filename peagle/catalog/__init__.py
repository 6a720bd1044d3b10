"""The catalog: a card per model with its heads, licence, context, precision, hardware, and K by concurrency."""
