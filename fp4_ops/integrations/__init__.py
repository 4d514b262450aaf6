"""Other people's engines: a folder each. Nothing else of this package imports them; the engine does."""
