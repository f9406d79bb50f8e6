"""Which query looks at which key: the one entry for self-attention, and everything that decides it."""
