"""The placement of a run's ranks and engines on cards, and the memory that they take there, before anything is started."""
