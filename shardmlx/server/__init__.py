"""OpenAI's HTTP API and the chat page, over inference."""
