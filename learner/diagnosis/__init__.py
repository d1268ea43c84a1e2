"""`understudy why`: what holds learning back in a run, read from its folder, in sentences with their figures and remedies."""
