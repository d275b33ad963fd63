"""The serving engine: continuous batching of requests, scheduled and controlled by entropy."""
