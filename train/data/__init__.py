"""Texts to learn from: prompts, their files and columns, chat templates, an answering server."""
