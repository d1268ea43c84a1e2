"""Trains on Harbor tasks: a trial of the published `harbor` program for each episode; a provider for machines without docker."""
