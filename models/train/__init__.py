"""Training of the embedded model and of draft heads."""
