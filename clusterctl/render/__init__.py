"""Every byte that a person sees: values in, lines out. Only `console` writes; the rest is pure."""
