"""Turns Dynamo's graph into a functional aten graph."""
