"""Rewrites attention, routers and all-reduces in graphs with experts, so that faster kernels run them."""
