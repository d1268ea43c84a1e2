"""Trains on Harbor tasks: a trial of the published `harbor` program for each episode, and a provider for machines without docker."""
