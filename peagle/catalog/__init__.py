"""One card per model: target, heads, licence, context, precision, hardware, and K by concurrency."""
