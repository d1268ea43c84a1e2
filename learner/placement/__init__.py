"""Where a run's ranks and engines go, and what memory they take there: planned before anything is started."""
