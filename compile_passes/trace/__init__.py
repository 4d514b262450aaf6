"""Dynamo's graph becomes a functional aten graph."""
