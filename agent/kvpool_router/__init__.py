"""kvpool's router: prefix index, scoring and an OpenAI-compatible proxy in front of the engines."""
