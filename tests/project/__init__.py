"""Rules of the project as a whole: its architecture, its documents, whole runs."""
