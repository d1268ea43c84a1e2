"""Parts of what the page shows of an episode: its turns, windows of its tokens, why it was not trained."""
