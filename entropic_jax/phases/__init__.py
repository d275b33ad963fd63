"""The phases of a step: gather, forward, emit, account, scatter; and prefill, a forward pass alone."""
