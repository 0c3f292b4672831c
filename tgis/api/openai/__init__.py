"""OpenAI's API: /v1/chat/completions, /v1/responses, /v1/completions and /v1/models."""
