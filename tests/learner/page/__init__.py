"""Tests of the page's server side: what it reads of runs, whom it lets in, and what it leaves as it is."""
