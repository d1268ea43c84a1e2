"""What a run keeps on disk of the learner: a rank's whole state, exported weights, which of them are kept."""
