"""What clients ask: OpenAI's endpoints, each with its input, and its writer where it streams."""
