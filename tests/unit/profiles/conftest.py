from tuned_profiles import cell, cells, profile

__all__ = ["cell", "cells", "profile"]
