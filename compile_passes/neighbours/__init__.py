"""What stands beside experts in a graph: attention and routers, as torch's kernels take them best."""
