"""A functional aten graph read node by node: what a node is, and which rows each expert's product reads."""
