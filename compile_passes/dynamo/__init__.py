"""Makes Dynamo capture loops over experts whole, and explains why it left a graph."""
