"""Loads and saves 4-bit models through transformers. Nothing here is imported before a user asks for it."""
