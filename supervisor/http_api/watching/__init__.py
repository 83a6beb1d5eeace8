"""What is told of the service: health, metrics, requests, workers."""
