"""The phases of a step: gather, forward, emit, scatter, schedule; and prefill, a forward pass alone."""
