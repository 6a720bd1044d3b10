"""The Ray cluster: started or joined, its nodes measured, engines placed on them."""
