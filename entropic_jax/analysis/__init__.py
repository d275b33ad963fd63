"""Looking at the loop from outside: what each scale of control brings, and what it costs."""
