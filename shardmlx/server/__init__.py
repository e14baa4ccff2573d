"""OpenAI's HTTP API and the chat page, over inference; Tinker's over training."""
