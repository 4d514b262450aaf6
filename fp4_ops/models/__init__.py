"""Packs the weights of a whole model in place, reports what was packed, and takes new values for them."""
