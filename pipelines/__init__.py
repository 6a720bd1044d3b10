"""Everything that needs Ray or HTTP, built on `peagle`."""
