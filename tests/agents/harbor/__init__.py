"""Rules of agents/harbor: what a scripted `harbor` and the real one are held to alike, and the parts by themselves."""
