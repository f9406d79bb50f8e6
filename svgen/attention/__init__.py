"""Which query looks at which key: the one entry for attention, and what decides it."""
