"""Google's dialect of the model API (`generateContent`), spoken through the chat route of vLLM's application."""
