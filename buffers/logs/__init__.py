"""Sessions that other programs have logged: their forms, and the files that they lie in."""
