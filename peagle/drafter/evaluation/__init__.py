"""A drafter measured in a real engine: acceptance length by K, by position and by category, and its speed."""
