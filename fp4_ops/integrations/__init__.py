"""Integrations into inference engines, one folder for each. The engine imports its folder; nothing else in
this package does.
"""
