"""Engines' own interfaces, translated to the client's. Each module imports its engine; nothing here imports them."""
