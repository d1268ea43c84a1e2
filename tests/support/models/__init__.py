"""Folders and files of models, as others write them."""
