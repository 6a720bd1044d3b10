"""Training a drafter on several workers: Ray around peagle.drafter."""
