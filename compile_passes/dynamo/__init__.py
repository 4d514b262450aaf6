"""Loops over experts as Dynamo traces them: what makes it capture them whole, and why it left a graph."""
