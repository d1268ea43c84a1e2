"""Programs that the matrix's runs start: agents and an environment as a user writes them, with Python's own library only."""
