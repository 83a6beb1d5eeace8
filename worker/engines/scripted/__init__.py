"""An engine without a model: says what it is told, at the pace it is told, and fails on request."""
