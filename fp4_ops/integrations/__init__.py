"""Integrations into other libraries, one folder for each.

vLLM imports its folder. The folder of transformers is imported by the entries that users call.
"""
